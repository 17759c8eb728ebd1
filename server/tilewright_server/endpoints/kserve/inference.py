"""Requests for inference: from a message to an execution and back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_proto.inference import inference_pb2 as pb
from tilewright_server.clients.client import Priority
from tilewright_server.endpoints.kserve.counters import ModelCounters
from tilewright_server.endpoints.kserve.models import PREFIX, VERSION, Models, check_version
from tilewright_server.endpoints.kserve.owners import LoadedPlan, Owners
from tilewright_server.endpoints.kserve.regions import SharedMemory
from tilewright_server.endpoints.kserve.tensors import (
    DTYPE,
    SHARED,
    attributes_of,
    datatype_of,
    description,
    input_locations,
    parameter,
    selection_of,
    shared_memory,
)
from tilewright_server.engine.call import Call
from tilewright_server.engine.types import Selection
from tilewright_server.service import RunResult, Service
from tilewright_server.session.operands.operand_binding import Location

if TYPE_CHECKING:
    from tilewright_server.engine.engine import Prepared

__all__ = ["Inference"]

FINAL = "triton_final_response"
MAX_TENSORS = 16384
MAX_CONFIG = 1 << 20
PRIORITIES = {0: Priority.INTERACTIVE, 1: Priority.INTERACTIVE, 2: Priority.BATCH}


@dataclass(frozen=True, slots=True)
class _Job:
    """A request, understood: what to run, and for whom to count it."""

    request: OperationRequest
    selection: Selection
    counters: ModelCounters


class Inference:
    """Runs operations and prepared plans for clients of the protocol. Thread-safe."""

    def __init__(self, service: Service, models: Models, owners: Owners, memory: SharedMemory) -> None:
        self._service = service
        self._models = models
        self._owners = owners
        self._memory = memory

    def infer(self, request: pb.ModelInferRequest, call: Call) -> pb.ModelInferResponse:
        """Run a request. Raises what ``Service.run`` does, and what is wrong with the message."""
        started = time.perf_counter_ns()
        plan = self.plan(request.model_name, call) if "@" in request.model_name else None
        counters = plan.counters if plan is not None else self._models.get(request.model_name).counters
        try:
            check_version(request.model_name, request.model_version)
            reply, result = self._run(request, plan, call)
        except BaseException:
            counters.failed(time.perf_counter_ns() - started)
            raise
        counters.succeeded(result, time.perf_counter_ns() - started)
        return reply

    def plan(self, name: str, call: Call) -> LoadedPlan:
        """A prepared plan of the caller. Raises ``NotFoundError``."""
        owner = self._owners.find(call.client)
        found = owner.plans.get(name) if owner is not None else None
        if found is None:
            raise NotFoundError(
                "this client has loaded no plan of that name",
                field="model_name",
                value=name,
                rule="model_name",
                fix="load it over this connection first (RepositoryModelLoad)",
            )
        return found

    def _run(
        self, message: pb.ModelInferRequest, plan: LoadedPlan | None, call: Call
    ) -> tuple[pb.ModelInferResponse, RunResult]:
        if len(message.inputs) > MAX_TENSORS or len(message.outputs) > MAX_TENSORS:
            raise _refuse("there are too many tensors", "inputs", len(message.inputs), "operand_count", "send fewer")
        parameters = message.parameters
        _apply_times(parameters, call)
        client = call.client
        wanted = {item.name: item for item in message.outputs}
        if len(wanted) < len(message.outputs):
            names = [item.name for item in message.outputs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _refuse(f"{twice} is asked for more than once", "outputs", twice, "output_name", "ask for it once")
        owner = self._owners.find(client)
        if plan is not None and owner is not None:
            if parameters or not _is_of(plan, message.inputs):
                _check_plan(plan, _unique(message.inputs, parameters), attributes_of(parameters))
            locations = input_locations(message, plan.request.inputs, partial(self._memory.find, client))
            locations |= self._outputs(wanted, plan.outputs, call)
            result = self._service.run_plan(owner.session, plan.plan, locations, call)
            return _reply(message, wanted, result), result
        descs = _unique(message.inputs, parameters)
        request = OperationRequest(message.model_name.removeprefix(PREFIX), descs, {}, attributes_of(parameters))
        selection = selection_of(parameters)
        locations = input_locations(message, descs, partial(self._memory.find, client))
        token = owner.session.token if owner is not None else b""

        def settle(prepared: Prepared) -> Mapping[str, Location]:
            outputs = [item for item in prepared.operands if item.role is Role.OUTPUT]
            return locations | self._outputs(wanted, outputs, call)

        result = self._service.run(token, request, locations, selection, call, settle)
        return _reply(message, wanted, result), result

    def _outputs(self, wanted: Mapping[str, Any], operands: Iterable[Operand], call: Call) -> dict[str, Location]:
        """Places of outputs in shared memory, and a check that the outputs that are asked for are there."""
        outputs = {item.name: item.desc for item in operands}
        if any(desc.packing for desc in outputs.values()):
            raise UnsupportedError(
                "the result has a packed format, for which this protocol has no words",
                field="model_name",
                rule="packing",
                fix="use the protocol tilewright.v1",
            )
        found: dict[str, Location] = {}
        for name, item in wanted.items():
            if name not in outputs:
                raise _refuse(
                    f"there is no output {name}", "outputs", name, "output_name", f"ask for {', '.join(outputs)}"
                )
            if classes := item.parameters.get("classification"):
                raise _refuse(
                    "results are not classified", f"{name}.classification", parameter(classes), "classification",
                    "leave it out",
                )  # fmt: skip
            if SHARED in item.parameters:
                find = partial(self._memory.find, call.client)
                found[name] = shared_memory(name, item.parameters, outputs[name].nbytes, find, exact=False)
        return found

    # Plans as models

    def load(self, name: str, config: str, call: Call) -> None:
        """Prepare a plan for the problem in ``config``, the JSON form of a ModelConfig, under a name of the caller."""
        operation, _, rest = name.partition("@")
        self._models.get(operation)
        if not rest or not name.isprintable() or len(name) > 256:
            raise _refuse("a plan is called OPERATION@NAME", "model_name", name[:256], "model_name", "name it so")
        request, selection, tensors = _problem(operation.removeprefix(PREFIX), config)
        lease = self._owners.lease(call.client)
        owner = self._owners.owner(call.client, lease)
        number, target = self._service.plan(owner.session.token, request, selection, call)
        outputs = tuple(item for item in target.prepared.operands if item.role is Role.OUTPUT)
        made = LoadedPlan(name, request, selection, outputs, number, lease, tensors)
        with owner.lock:
            old = owner.plans.get(name)
            owner.plans[name] = made
        if old is not None:
            owner.session.release_plan(old.plan)

    def unload(self, name: str, call: Call) -> None:
        """Release a plan of the caller. Raises ``NotFoundError``."""
        plan = self.plan(name, call)
        owner = self._owners.find(call.client)
        if owner is None:
            return
        with owner.lock:
            if owner.plans.get(name) is not plan:
                return
            del owner.plans[name]
        owner.session.release_plan(plan.plan)


def _unique(inputs: Any, parameters: Mapping[str, Any]) -> dict[str, TensorDesc]:
    found: dict[str, TensorDesc] = {}
    for tensor in inputs:
        if tensor.name in found:
            raise _refuse(f"{tensor.name} is given twice", "inputs", tensor.name, "operand_unique", "give it once")
        found[tensor.name] = description(tensor, parameters)
    return found


def _apply_times(parameters: Mapping[str, Any], call: Call) -> None:
    """Deadline and priority that the request's parameters say."""
    if "timeout" in parameters:
        microseconds = parameter(parameters["timeout"])
        if isinstance(microseconds, bool) or not isinstance(microseconds, int) or microseconds < 0:
            raise _refuse("timeout is no count of microseconds", "timeout", microseconds, "timeout", "give an integer")
        if microseconds:
            deadline = time.monotonic() + microseconds / 1e6
            call.deadline = deadline if call.deadline is None else min(deadline, call.deadline)
    if "priority" in parameters:
        level = parameter(parameters["priority"])
        if isinstance(level, bool) or not isinstance(level, int) or level < 0:
            raise _refuse("priority is no level", "priority", level, "priority", "give 1 (first) or more")
        call.client = call.client.at_most(PRIORITIES.get(level, Priority.BACKGROUND))


def _check_plan(plan: LoadedPlan, descs: Mapping[str, TensorDesc], attributes: Mapping[str, Any]) -> None:
    if attributes:
        name = next(iter(attributes))
        raise _refuse(
            f"the plan is prepared: its attributes are settled, {name} too", f"parameters[{name}]", attributes[name],
            "plan_attributes", "leave it out, or load a plan with it",
        )  # fmt: skip
    if descs != plan.request.inputs:
        wanted = {name: (desc.dtype.value, desc.shape) for name, desc in plan.request.inputs.items()}
        raise _refuse(
            "the inputs are not those that the plan is for", "inputs", sorted(descs), "plan_inputs", f"send {wanted}"
        )


def _is_of(plan: LoadedPlan, inputs: Sequence[Any]) -> bool:
    """True if the inputs are those that the plan was loaded for, word for word: they need not be read again."""
    if len(inputs) != len(plan.tensors):
        return False
    return all(
        tensor.name == name and tensor.datatype == datatype and tuple(tensor.shape) == shape
        for tensor, (name, datatype, shape) in zip(inputs, plan.tensors, strict=True)
    )


def _problem(operation: str, config: str) -> tuple[OperationRequest, Selection, tuple[Any, ...]]:
    """The problem in a model's configuration: inputs with whole shapes, attributes as parameters. With the inputs'
    names, datatypes and shapes, if these say all of them."""
    problem = ""
    record: Any = None
    if len(config) > MAX_CONFIG:
        problem = f"it has more than {MAX_CONFIG} characters"
    else:
        try:
            record = json.loads(config)
            message = pb.ModelInferRequest()
            for item in record["input"]:
                tensor = message.inputs.add(name=item["name"], datatype=item["data_type"].removeprefix("TYPE_"))
                tensor.shape.extend(int(size) for size in item["dims"])
                if DTYPE in item:
                    tensor.parameters[DTYPE].string_param = item[DTYPE]
            for name, value in dict(record.get("parameters", {})).items():
                _set(message.parameters[name], value.get("string_value") if isinstance(value, dict) else value)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
    if problem:
        raise _refuse(
            f"the configuration is not that of a plan: {problem}", "parameters[config]", config[:200], "model_config",
            'send {"input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [64, 64]}, ...], "parameters": {...}}',
        )  # fmt: skip
    descs = _unique(message.inputs, message.parameters)
    request = OperationRequest(operation, descs, {}, attributes_of(message.parameters))
    tensors = tuple((tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.inputs)
    plain = all(datatype != "UINT8" for _, datatype, _ in tensors)
    return request, selection_of(message.parameters), tensors if plain else ()


def _set(target: Any, value: object) -> None:
    """A parameter from a value in JSON; texts that are JSON stand for what they say, as configurations hold texts."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            found = value
        value = value if isinstance(found, list) else found
    if isinstance(value, list):
        value = json.dumps(value)
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    elif isinstance(value, str):
        target.string_param = value
    else:
        raise TypeError("a parameter is no number, text or list")


def _reply(message: pb.ModelInferRequest, wanted: Mapping[str, Any], result: RunResult) -> pb.ModelInferResponse:
    reply = pb.ModelInferResponse(model_name=message.model_name, model_version=VERSION, id=message.id)
    if "triton_enable_empty_final_response" in message.parameters:
        reply.parameters[FINAL].bool_param = True
    operands = {item.name: item for item in result.prepared.operands if item.role is Role.OUTPUT}
    values = {item.name: item.data for item in result.outputs}
    for name in wanted or operands:
        _add_output(reply, operands[name], values.get(name, b""))
        if name in wanted and SHARED in wanted[name].parameters:
            for key, value in wanted[name].parameters.items():
                if key.startswith("shared_memory_"):
                    reply.outputs[-1].parameters[key].CopyFrom(value)
    return reply


def _add_output(reply: pb.ModelInferResponse, operand: Operand, data: bytes) -> None:
    datatype, eight_bits = datatype_of(operand.desc.dtype)
    output = reply.outputs.add(name=operand.name, datatype=datatype, shape=operand.desc.shape)
    if eight_bits:
        output.parameters[DTYPE].string_param = eight_bits
    reply.raw_output_contents.append(data)  # empty in shared memory: clients look for it at the output's index


def _refuse(reason: str, field: str, value: object, rule: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)
