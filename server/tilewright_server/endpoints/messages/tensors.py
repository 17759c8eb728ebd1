"""Between the protocol and the core's own types.

The only module that reads fields of request messages of tensors and attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.contract.problem import Attribute, Operand, OperationRequest
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import MAX_RANK, TensorDesc, contiguous_strides
from tilewright_proto.v1 import dispatch_pb2, tensor_pb2
from tilewright_server.engine.call import Call
from tilewright_server.engine.types import Selection
from tilewright_server.service import RunResult
from tilewright_server.session.operands.operand_binding import Location, Place
from tilewright_server.session.operands.staged_operands import OutputValue

if TYPE_CHECKING:
    from tilewright_server.engine.engine import Prepared

__all__ = [
    "execution",
    "location",
    "locations",
    "operands",
    "operation_request",
    "output",
    "plan_report",
    "report",
    "selection",
    "spec",
]

MAX_OPERANDS = 16384
MAX_NAME = 256
MAX_CONFIG_BYTES = 64 * 1024
MAX_PACKED_BYTES = 2**50

DTYPES: dict[int, DType] = {
    tensor_pb2.FP32: DType.FP32,
    tensor_pb2.FP16: DType.FP16,
    tensor_pb2.BF16: DType.BF16,
    tensor_pb2.FP8: DType.FP8,
    tensor_pb2.BF8: DType.BF8,
    tensor_pb2.INT8: DType.INT8,
    tensor_pb2.INT32: DType.INT32,
}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
_RETURN = Location(Place.RETURN)
_ALLOCATE = Location(Place.ALLOCATE)
_NONE = Location()


def operation_request(message: Any, *, outputs_required: bool = False) -> OperationRequest:
    """The request of a ``RunRequest``, ``PlanRequest`` or ``ExplainRequest``.

    Outputs without a spec are left to the operation to infer.
    """
    _check_name("operation", message.operation)
    attributes: dict[str, Attribute] = {}
    if len(message.attributes) > MAX_OPERANDS:
        raise _too_many("attributes", len(message.attributes))
    for name, value in message.attributes.items():
        _check_name("attributes", name)
        attributes[name] = attribute(name, value)
    return OperationRequest(
        operation=message.operation,
        inputs=_descriptions("inputs", message.inputs, required=True),
        outputs=_descriptions("outputs", message.outputs, required=outputs_required),
        attributes=attributes,
    )


def locations(message: Any) -> dict[str, Location]:
    """Where each named operand of a ``RunRequest`` is."""
    return {operand.name: location(operand.location) for part in (message.inputs, message.outputs) for operand in part}


def location(message: tensor_pb2.Location) -> Location:
    place = message.WhichOneof("place")
    if place == "region":
        slice_ = message.region
        return Location(Place.REGION, slice_.region, slice_.offset)
    if place == "buffer":
        part = message.buffer
        return Location(Place.BUFFER, part.buffer, part.offset)
    if place == "inline":
        return Location(Place.INLINE, data=message.inline)
    if place is None:
        return _NONE
    return _RETURN if place == "return_inline" else _ALLOCATE


def execution(message: dispatch_pb2.Execution) -> tuple[int, list[Location], int] | int:
    """Plan id, locations and repeat; or the id of a binding."""
    if not message.binding:
        return message.plan, [location(place) for place in message.locations], message.repeat
    if message.plan or message.locations or message.repeat:
        raise InvalidArgumentError(
            "an execution of a binding has no plan, locations or repeat: the binding has them",
            field="execution",
            value=message.binding,
            rule="execution",
            fix="set binding, or the other fields",
        )
    return message.binding


def selection(message: dispatch_pb2.Selection) -> Selection:
    """Names are looked up by the engine; a policy that this server does not know is refused here."""
    for field in ("strategy", "kernel", "device"):
        if len(getattr(message, field)) > MAX_NAME * 4:
            raise _name_too_long(f"selection.{field}")
    if len(message.config_json) > MAX_CONFIG_BYTES:
        raise InvalidArgumentError(
            "the configuration is too long",
            field="selection.config_json",
            rule="config_json",
            fix=f"send at most {MAX_CONFIG_BYTES} bytes",
        )
    if message.build not in (dispatch_pb2.BUILD_WAIT, dispatch_pb2.BUILD_FALLBACK):
        raise InvalidArgumentError(
            "there is no such build policy",
            field="selection.build",
            value=message.build,
            rule="enum",
            fix="use BUILD_WAIT or BUILD_FALLBACK",
        )
    policy: Any = "fallback" if message.build == dispatch_pb2.BUILD_FALLBACK else "wait"
    return Selection(message.strategy, message.kernel, policy, message.device, message.config_json)


def attribute(name: str, message: tensor_pb2.Attribute) -> Attribute:
    kind = message.WhichOneof("value")
    if kind is None:
        raise InvalidArgumentError(
            f"the attribute {name} has no value", field=f"attributes[{name}]", rule="attribute_value", fix="set one"
        )
    value = getattr(message, kind)
    if kind in ("flag", "integer", "number", "text"):
        return value  # type: ignore[no-any-return]
    return tuple(value.values)


def describe(field: str, message: tensor_pb2.TensorSpec) -> TensorDesc:
    """A checked tensor description. Raises ``InvalidArgumentError`` naming ``field``."""
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidArgumentError(
            f"{field} has no element type that this server knows",
            field=f"{field}.dtype",
            value=message.dtype,
            rule="dtype",
            fix="use one of " + ", ".join(item.value for item in DTYPES.values()),
        )
    rank = len(message.shape)
    if rank > MAX_RANK or len(message.strides) > MAX_RANK:
        raise InvalidArgumentError(
            f"{field} has {max(rank, len(message.strides))} dimensions; at most {MAX_RANK} are supported",
            field=f"{field}.shape",
            value=rank,
            rule="tensor_rank",
            fix="reshape it to fewer dimensions",
        )
    shape = tuple(message.shape)
    strides = tuple(message.strides) if message.strides else contiguous_strides(shape)
    if len(message.packing) > MAX_NAME:
        raise _name_too_long(f"{field}.packing")
    packed = message.packed_bytes if message.packing else 0
    if not 0 <= packed <= MAX_PACKED_BYTES:
        raise InvalidArgumentError(
            f"{field} has an impossible size of storage",
            field=f"{field}.packed_bytes",
            value=packed,
            rule="packed_bytes",
            fix="use the size that the packing operation reported",
        )
    desc = TensorDesc(dtype, shape, strides, message.packing, packed)
    desc.check(field)
    return desc


def spec(desc: TensorDesc) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(
        dtype=DTYPE_NUMBERS[desc.dtype],  # type: ignore[arg-type]
        shape=desc.shape,
        strides=desc.strides,
        packing=desc.packing,
        packed_bytes=desc.packed_bytes,
    )


def operands(items: Iterable[Operand]) -> list[tensor_pb2.Operand]:
    return [tensor_pb2.Operand(name=item.name, spec=spec(item.desc)) for item in items]


def output(value: OutputValue) -> dispatch_pb2.OutputTensor:
    return dispatch_pb2.OutputTensor(name=value.name, spec=spec(value.desc), inline=value.data, buffer=value.buffer)


def report(result: RunResult, call: Call) -> dispatch_pb2.Report:
    """Where the time of a ``Run`` went."""
    message = plan_report(result.prepared, call)
    message.bytes_copied = result.bytes_copied
    timing = message.timing
    timing.queue_ns = result.outcome.queue_ns
    timing.copy_in_ns = result.copy_in_ns
    timing.device_ns = result.outcome.device_ns
    timing.copy_out_ns = result.copy_out_ns
    timing.total_ns = result.total_ns
    return message


def plan_report(prepared: Prepared, call: Call) -> dispatch_pb2.Report:
    """Report of planning: times and decision."""
    return dispatch_pb2.Report(
        kernels=prepared.kernels,
        timing=dispatch_pb2.Timing(plan_ns=call.plan_ns, build_ns=call.build_ns),
        plan_cached=call.plan_cached,
        notes=prepared.notes,
        device=prepared.device.id,
    )


def _descriptions(part: str, messages: Sequence[tensor_pb2.Operand], *, required: bool) -> dict[str, TensorDesc]:
    if len(messages) > MAX_OPERANDS:
        raise _too_many(part, len(messages))
    found: dict[str, TensorDesc] = {}
    seen: set[str] = set()
    for message in messages:
        name = message.name
        _check_name(part, name)
        if name in seen:
            raise InvalidArgumentError(
                f"{name} is given twice", field=part, value=name, rule="operand_unique", fix="give every operand once"
            )
        seen.add(name)
        if message.HasField("spec"):
            found[name] = describe(name, message.spec)
        elif required:
            raise InvalidArgumentError(
                f"{name} has no description",
                field=f"{name}.spec",
                rule="operand_spec",
                fix="give its dtype and shape",
            )
    return found


def _check_name(field: str, name: str) -> None:
    if len(name) > MAX_NAME:
        raise _name_too_long(field)
    if not name or not name.isprintable():
        raise InvalidArgumentError(
            f"a name in {field} is empty or has unprintable characters",
            field=field,
            value=name,
            rule="name",
            fix="give it a name of printable characters",
        )


def _name_too_long(field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"a name in {field} is too long", field=field, rule="name", fix=f"use at most {MAX_NAME} characters"
    )


def _too_many(part: str, count: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"there are {count} {part}; at most {MAX_OPERANDS} are taken",
        field=part,
        value=count,
        rule="operand_count",
        fix="split the request",
    )
