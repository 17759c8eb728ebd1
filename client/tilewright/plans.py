"""Prepared plans: everything that can be done before arrays have addresses is done once. No I/O; see ``steps``."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tilewright import steps, wire
from tilewright.core import Core, Session, check_timeout
from tilewright.dispatch import BuildPolicy, held, plan_request, selection, spec_of
from tilewright.errors import InvalidArgumentError, TilewrightError, from_detail
from tilewright.layout import Array, Spec, contiguous_strides, same_places, span_bytes
from tilewright.operands import Cargo, address_of, attributes_to_wire, collect, place_input, place_output, region_of
from tilewright.report import Report, Timing
from tilewright.resident import ResidentTensor
from tilewright.steps import Flow, Rpc
from tilewright_proto.v1 import dispatch_pb2, tensor_pb2

__all__ = ["BoundState", "Loaded", "PlanState", "finish", "prepare"]


class Slot(NamedTuple):
    """One operand of a plan."""

    name: str
    spec: Spec
    byte_strides: tuple[int, ...]

    @classmethod
    def of(cls, operand: tensor_pb2.Operand) -> Slot:
        spec = Spec.of_wire(operand.spec)
        strides = spec.strides if spec.strides is not None else contiguous_strides(spec.shape)
        return cls(operand.name, spec, tuple(stride * spec.dtype.itemsize for stride in strides))

    def check(self, array: Array) -> bool:
        """Whether the array lies as planned; False if a copy of it would. Raises ``InvalidArgumentError`` if nothing
        would.
        """
        spec = self.spec
        if array.shape != spec.shape or array.dtype != spec.dtype or spec.packing:
            wanted = (
                f"a tensor packed as {spec.packing}" if spec.packing else f"{spec.dtype.name} of shape {spec.shape}"
            )
            raise InvalidArgumentError(
                f"the plan was made for {self.name} as {wanted}, not {array.dtype.name} of shape {array.shape}",
                field=self.name,
                value=array.shape,
                rule="plan_operand",
                fix="pass an array as planned, or make a plan for this one",
            )
        return array.strides == self.byte_strides or same_places(array, spec.strides)


class Loaded:
    """One execution, ready to be sent: its serialised part, and what to do when its result is there."""

    __slots__ = ("cargo", "chunk", "result", "session")

    def __init__(self, session: Session, chunk: bytes, cargo: Cargo, result: dict[str, Any]) -> None:
        self.session = session
        self.chunk = chunk
        self.cargo = cargo
        self.result = result


class PlanState:
    """A plan of one session. If the session was replaced (after a fork, or ``reconnect``) the plan is made again on
    its next use.
    """

    def __init__(self, core: Core, request: dispatch_pb2.PlanRequest, timeout: float | None) -> None:
        self.core = core
        self.request = request
        self.timeout = timeout
        self.closed = False
        self.session: Session | None = None
        self.plan = 0
        self.prefix = b""
        self.inputs: tuple[Slot, ...] = ()
        self.outputs: tuple[Slot, ...] = ()
        self.report = Report()
        self.flops = 0
        self.workspace_bytes = 0
        self.json = ""
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def adopt(self, session: Session, reply: dispatch_pb2.PlanReply) -> None:
        self.inputs = tuple(Slot.of(operand) for operand in reply.inputs)
        self.outputs = tuple(Slot.of(operand) for operand in reply.outputs)
        self.report = Report.of_wire(reply.report)
        self.flops = reply.flops
        self.workspace_bytes = reply.workspace_bytes
        self.json = reply.json
        self.plan = reply.plan
        self.prefix = wire.session_field(session.token)
        self._finalizer = weakref.finalize(self, self.core.release_plan, session, reply.plan)
        self._finalizer.atexit = False
        self.session = session

    @property
    def description(self) -> dict[str, Any]:
        """Stages, kernels and geometry, as the server tells them."""
        found: dict[str, Any] = json.loads(self.json) if self.json else {}
        return found

    def close(self) -> None:
        """Release the plan with the next call to the server. Also happens when the last reference goes. Idempotent."""
        self.closed = True
        if self._finalizer is not None:
            self._finalizer()

    def live(self) -> Flow[Session]:
        """The session in which the plan is valid, preparing it there if need be."""
        if self.closed:
            raise InvalidArgumentError("the plan is closed", field="plan", rule="plan_open", fix="make another")
        session = self.core.require()
        if session is not self.session:
            self.request.session = session.token
            reply = yield Rpc(steps.PLAN, self.request, self.timeout)
            if self._finalizer is not None:
                self._finalizer.detach()
            self.adopt(session, reply)
        return session

    # ---- executions ----

    def load(self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any], repeat: int = 1) -> Flow[Loaded]:
        """Find where the operands are. Nothing but a first registration of new memory talks to the server."""
        session = yield from self.live()
        cargo = Cargo(session)
        chunks: list[bytes] = []
        for slot, value in zip(self.inputs, self._arguments(inputs, named), strict=True):
            chunk = self._known(session, slot, value)
            if chunk is None:
                chunk = yield from self._place_input(session, cargo, slot, value)
            else:
                cargo.keep.append(value)
            chunks.append(chunk)
        result: dict[str, Any] = {}
        for slot, value in zip(self.outputs, self._targets(out, named), strict=True):
            target = slot.spec if value is None else value
            chunk = (
                self._known(session, slot, target)
                if isinstance(target, np.ndarray) and target.flags.writeable
                else None
            )
            if chunk is None:
                chunk = yield from self._place_output(session, cargo, slot, target, result)
            else:
                cargo.keep.append(target)
                result[slot.name] = target
            chunks.append(chunk)
        return Loaded(session, wire.execution(self.plan, chunks, repeat), cargo, result)

    def _arguments(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        names = [slot.name for slot in self.inputs]
        if len(inputs) > len(names):
            raise self._operands(f"{len(inputs)} inputs were given")
        given = dict(zip(names, inputs, strict=False))
        outputs = {slot.name for slot in self.outputs}
        for name, value in named.items():
            if name in given or (name not in names and name not in outputs):
                raise self._operands(f"{name} was given " + ("twice" if name in given else "besides"))
            given[name] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise self._operands(f"{', '.join(missing)} was not given")
        return [given[name] for name in names]

    def _operands(self, what: str) -> InvalidArgumentError:
        names = ", ".join(slot.name for slot in self.inputs)
        return InvalidArgumentError(
            f"the plan takes {names}, but {what}",
            field="inputs",
            rule="plan_operands",
            fix=f"pass {names}, in this order or by name",
        )

    def _targets(self, out: Any, named: Mapping[str, Any]) -> list[Any]:
        if isinstance(out, Mapping):
            return [out.get(slot.name) for slot in self.outputs]
        if out is not None and len(self.outputs) != 1:
            raise InvalidArgumentError(
                "the plan has several outputs",
                field="out",
                rule="plan_operands",
                fix="pass out as a dict of " + ", ".join(slot.name for slot in self.outputs),
            )
        return [named.get(slot.name) if out is None else out for slot in self.outputs]

    def _known(self, session: Session, slot: Slot, value: Any) -> bytes | None:
        entry = self.core.chunks.get(id(value))
        if entry is None or entry.session is not session or entry.alive() is not value or not slot.check(value):
            return None
        return entry.data

    def _place_input(self, session: Session, cargo: Cargo, slot: Slot, value: Any) -> Flow[bytes]:
        if isinstance(value, ResidentTensor):
            if value.spec != slot.spec:
                raise InvalidArgumentError(
                    f"the plan was made for another {slot.name}: {slot.spec}, not {value.spec}",
                    field=slot.name,
                    rule="plan_operand",
                    fix="make a plan with this tensor",
                )
            cargo.keep.append(value)
            return wire.location_field(value.location().SerializeToString())
        array = np.asarray(value)
        if not slot.check(array):
            array = self._arranged(cargo, slot, array)
        elif (known := (yield from self._by_reference(session, array))) is not None:
            cargo.keep.append(array)
            return known
        spec, location = yield from place_input(self.core, session, cargo, array, slot.name)
        if (spec.strides or None) != slot.spec.strides and array.size > 1 and not same_places(array, slot.spec.strides):
            array = self._arranged(cargo, slot, array)
            _, location = yield from place_input(self.core, session, cargo, array, slot.name)
        return wire.location_field(location.SerializeToString())

    def _by_reference(self, session: Session, array: Array) -> Flow[bytes | None]:
        """The location of an array in shared memory, remembered for as long as it lives."""
        if array.size == 0 or (array.ndim and min(array.strides) < 0):
            return None
        place = self.core.pool.find(address_of(array), span_bytes(array))
        if place is None:
            return None
        region = yield from region_of(self.core, session, place[0])
        location = tensor_pb2.Location(region=tensor_pb2.RegionSlice(region=region, offset=place[1]))
        data = wire.location_field(location.SerializeToString())
        chunks, key = self.core.chunks, id(array)
        self.core.add_chunk(key, weakref.ref(array, lambda _: chunks.pop(key, None)), session, data)
        return data

    def _arranged(self, cargo: Cargo, slot: Slot, array: Array) -> Array:
        """A copy that lies as planned, in shared memory if there is any."""
        count = slot.spec.nbytes // slot.spec.dtype.itemsize
        shared = cargo.keep is not None and self.core.require().shared_memory
        flat = self.core.pool.empty((count,), slot.spec.dtype) if shared else np.empty((count,), slot.spec.dtype)
        view = np.lib.stride_tricks.as_strided(flat, slot.spec.shape, slot.byte_strides)
        # Broadcast dimensions are written once per element that shares a place, always with the same value.
        view[...] = array
        cargo.keep.append(flat)
        cargo.staged_bytes += flat.nbytes
        return view

    def _place_output(
        self, session: Session, cargo: Cargo, slot: Slot, target: Any, result: dict[str, Any]
    ) -> Flow[bytes]:
        if isinstance(target, np.ndarray):
            if not slot.check(target):
                temporary = self._arranged(cargo, slot, np.zeros((), target.dtype))
                cargo.copies.append((temporary, target))
                result[slot.name] = target
                target = temporary
            elif target.flags.writeable and (known := (yield from self._by_reference(session, target))) is not None:
                cargo.keep.append(target)
                result[slot.name] = target
                return known
        elif not isinstance(target, Spec) and (not isinstance(target, ResidentTensor) or target.spec != slot.spec):
            raise InvalidArgumentError(
                f"{slot.name} does not fit the plan",
                field=slot.name,
                value=type(target).__name__,
                rule="plan_operand",
                fix="pass an array as planned, or leave it out",
            )
        _, location, found = yield from place_output(self.core, session, cargo, slot.name, target)
        if found is not None:
            result.setdefault(slot.name, found)
        return wire.location_field(location.SerializeToString())

    def execute(
        self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any], repeat: int, timeout: float | None
    ) -> Flow[Any]:
        loaded = yield from self.load(inputs, out, named, repeat)
        results = yield from self.send([loaded], timeout)
        return _unless_error(results[0])

    def execute_many(self, calls: Sequence[Any], timeout: float | None) -> Flow[list[Any]]:
        loads: list[Loaded] = []
        for call in calls:
            if isinstance(call, BoundState):
                loads.append((yield from call.loaded()))
            elif isinstance(call, Mapping):
                loads.append((yield from self.load((), None, call)))
            else:
                arrays = tuple(call)
                count = len(self.inputs)
                outs = {slot.name: array for slot, array in zip(self.outputs, arrays[count:], strict=False)}
                if len(arrays) > count + len(self.outputs):
                    raise self._operands(f"{len(arrays)} operands were given")
                loads.append((yield from self.load(arrays[:count], outs, {})))
        results = yield from self.send(loads, timeout)
        return [_unless_error(result) for result in results]

    def send(self, loads: Sequence[Loaded], timeout: float | None) -> Flow[list[Any]]:
        """Run loaded executions in one message. An execution that failed has its exception in the list."""
        if not loads:
            return []
        core, session = self.core, loads[0].session
        request = wire.execute_request(wire.session_field(session.token), [load.chunk for load in loads])
        joint = Cargo(session)
        for load in loads:
            joint.keep.append((load.cargo.keep, load.cargo.copies))
        call = Rpc(steps.EXECUTE, request, check_timeout(timeout) or core.timeout)
        reply = yield from held(core, joint, call)
        results: list[Any] = []
        for load, message in zip(loads, reply.results, strict=True):
            if message.HasField("error"):
                results.append(from_detail(message.error))
                continue
            if load.cargo.replies or load.cargo.copies:
                load.result.update((yield from collect(core, session, load.cargo, message.outputs)))
            results.append(single(load.result))
        core.report = report_of(self, reply, sum(load.cargo.staged_bytes for load in loads))
        return results


class BoundState:
    """A plan bound to arrays: its request is serialised once."""

    def __init__(self, plan: PlanState, inputs: Sequence[Any], out: Any, named: Mapping[str, Any]) -> None:
        self.plan = plan
        self.inputs = tuple(inputs)
        self.out = out
        self.named = dict(named)
        self.load: Loaded | None = None
        self.request = b""
        self.result: Any = None

    def bind(self) -> Flow[BoundState]:
        yield from self.loaded()
        return self

    def loaded(self) -> Flow[Loaded]:
        """The execution, serialised (again, if the session is a new one). Raises ``InvalidArgumentError`` if its
        arrays would have to be copied.
        """
        plan = self.plan
        if self.load is not None and self.load.session is plan.core.session and not plan.closed:
            plan.core.require()
            return self.load
        load = yield from plan.load(self.inputs, self.out, self.named)
        if load.cargo.staged_bytes or load.cargo.replies:
            raise InvalidArgumentError(
                "an array would have to be copied for every call, which a bound plan does not do",
                field="inputs",
                rule="bound_shared",
                fix="use arrays from empty(), zeros() or asarray() in the plan's layout, or call the plan itself",
            )
        self.result = single(load.result)
        self.request = wire.execute_request(plan.prefix, [load.chunk])
        self.load = load
        return load

    def execute(self, timeout: float | None = None) -> Flow[Any]:
        yield from self.loaded()
        plan = self.plan
        cargo = self.load.cargo if self.load is not None else None
        assert cargo is not None
        reply = yield from held(plan.core, cargo, Rpc(steps.EXECUTE, self.request, timeout or plan.core.timeout))
        finish(reply.results[0])
        plan.core.report = report_of(plan, reply, 0)
        return self.result


def finish(message: dispatch_pb2.ExecutionResult) -> None:
    """Raise what an execution failed with."""
    if message.HasField("error"):
        raise from_detail(message.error)


def single(result: dict[str, Any]) -> Any:
    """The one output itself, or all by name."""
    return next(iter(result.values())) if len(result) == 1 else result


def report_of(plan: PlanState, reply: dispatch_pb2.ExecuteReply, staged: int) -> Report:
    return Report(
        kernels=plan.report.kernels,
        device=plan.report.device,
        timing=Timing(queue_ns=reply.queue_ns, device_ns=sum(item.device_ns for item in reply.results)),
        bytes_copied=sum(item.bytes_copied for item in reply.results),
        staged_bytes=staged,
        plan_cached=True,
    )


def _unless_error(result: Any) -> Any:
    if isinstance(result, TilewrightError):
        raise result
    return result


def prepare(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    *,
    kernel: str | None = None,
    strategy: str | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> Flow[PlanState]:
    """Prepare a plan for any operation, from arrays or descriptions (``Spec``, or ``(shape, dtype)``) of its
    operands.

    Calling the plan does no planning. It is made for the layouts that it was given: arrays of other strides are
    copied, of other shapes or dtypes refused. Arguments and errors are those of ``run``.

        >>> plan = client.plan("gemm", {"a": ((64, 64), "fp32"), "b": ((64, 64), "fp32")})  # doctest: +SKIP
        >>> c = plan(a, b)  # doctest: +SKIP
    """
    limit = check_timeout(timeout) or core.timeout
    session = core.require()
    request = plan_request(
        session,
        operation,
        {name: spec_of(value, name) for name, value in inputs.items()},
        {name: spec_of(value, name) for name, value in (outputs or {}).items() if value is not None},
        attributes_to_wire(attributes or {}),
        selection(kernel, strategy, build, device),
    )
    state = PlanState(core, request, limit)
    yield from state.live()
    return state
