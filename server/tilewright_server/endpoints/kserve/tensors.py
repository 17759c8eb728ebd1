"""Tensors, their contents and request parameters of the Open Inference Protocol, in the core's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright_kit.contract.problem import Attribute
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import MAX_RANK, TensorDesc, contiguous_strides
from tilewright_proto.inference import inference_pb2 as pb
from tilewright_server.engine.types import Selection
from tilewright_server.protocol.json_text import parsed
from tilewright_server.session.operands.operand_binding import Location, Place

__all__ = [
    "DTYPE",
    "SHARED",
    "attributes_of",
    "datatype_of",
    "description",
    "input_locations",
    "parameter",
    "selection_of",
    "shared_memory",
]

MAX_TENSORS = 16384
MAX_NAME = 256
DTYPE = "dtype"
"""Parameter that names the type of elements that travel as UINT8. Of the request: with a dot and the tensor's name."""
OWN = "tilewright_"
"""Prefix of parameters that choose how a kernel is found."""
IGNORED = frozenset({"sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response"})
"""Parameters of clients that mean nothing to models without state."""
TIMES = frozenset({"priority", "timeout"})
SHARED = "shared_memory_region"
DATATYPES = {
    "FP32": DType.FP32,
    "FP16": DType.FP16,
    "BF16": DType.BF16,
    "INT8": DType.INT8,
    "INT32": DType.INT32,
}
EIGHT_BITS = {DType.FP8.value: DType.FP8, DType.BF8.value: DType.BF8}
CONTENTS = {DType.FP32: "fp32_contents", DType.INT32: "int_contents", DType.INT8: "int_contents"}
"""Fields of typed contents; the other types travel as raw bytes."""
Find = Callable[[str], Any]


def datatype_of(dtype: DType) -> tuple[str, str]:
    """Name of an element type in the protocol, and the parameter ``dtype`` that goes with it or nothing."""
    if dtype.value in EIGHT_BITS:
        return "UINT8", dtype.value
    return next(name for name, known in DATATYPES.items() if known is dtype), ""


def parameter(message: Any) -> bool | int | float | str | None:
    """The value of a parameter; None if it has none."""
    kind = message.WhichOneof("parameter_choice")
    return None if kind is None else getattr(message, kind)


def description(tensor: Any, parameters: Mapping[str, Any]) -> TensorDesc:
    """Checked description of an input: dense, in row-major order. ``parameters`` are the request's."""
    name = tensor.name
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise _refuse("the name of a tensor is empty, too long or not printable", "inputs.name", name, "name")
    dtype = DATATYPES.get(tensor.datatype)
    if tensor.datatype == "UINT8":
        given = tensor.parameters.get(DTYPE) or parameters.get(f"{DTYPE}.{name}")
        dtype = EIGHT_BITS.get(str(parameter(given))) if given is not None else None
        if dtype is None:
            raise _refuse(
                f"{name} is UINT8, which stands for elements of 8 bits that the protocol has no name for",
                f"{name}.datatype",
                tensor.datatype,
                "datatype",
                f"give the request's parameter {DTYPE}.{name}: {' or '.join(EIGHT_BITS)}",
            )
    if dtype is None:
        raise _refuse(
            f"{name} has a datatype that no operation takes",
            f"{name}.datatype",
            tensor.datatype,
            "datatype",
            f"use one of {', '.join(DATATYPES)}, or UINT8 with the parameter {DTYPE}",
        )
    if len(tensor.shape) > MAX_RANK:
        raise _refuse(
            f"{name} has {len(tensor.shape)} dimensions", f"{name}.shape", len(tensor.shape), "tensor_rank",
            f"use at most {MAX_RANK}",
        )  # fmt: skip
    shape = tuple(tensor.shape)
    desc = TensorDesc(dtype, shape, contiguous_strides(shape))
    desc.check(name)
    return desc


def input_locations(request: pb.ModelInferRequest, descs: Mapping[str, TensorDesc], find: Find) -> dict[str, Location]:
    """Where the inputs lie. ``find`` returns a region of the caller by name. Raw contents belong to the inputs that
    are not in shared memory, in their order."""
    found: dict[str, Location] = {}
    raw = request.raw_input_contents
    used = 0
    for tensor in request.inputs:
        name, desc = tensor.name, descs[tensor.name]
        if tensor.parameters and SHARED in tensor.parameters:
            found[name] = shared_memory(name, tensor.parameters, desc.nbytes, find, exact=True)
        elif raw:
            if used == len(raw):
                raise _contents(name, len(raw))
            data = raw[used]
            used += 1
            if len(data) != desc.nbytes:
                raise _refuse(
                    f"{name} has {desc.nbytes} bytes, but its raw contents have {len(data)}",
                    f"{name}.raw_input_contents",
                    len(data),
                    "contents_size",
                    "send all elements in row-major order, without gaps",
                )
            found[name] = Location(Place.INLINE, data=data)
        else:
            found[name] = Location(Place.INLINE, data=_typed(name, tensor, desc))
    if used != len(raw):
        raise _contents("the request", len(raw))
    return found


def _typed(name: str, tensor: Any, desc: TensorDesc) -> bytes:
    where = CONTENTS.get(desc.dtype)
    values = getattr(tensor.contents, where) if where else ()
    if len(values) != desc.size:
        raise _refuse(
            f"{name} has {desc.size} elements, but its contents have {len(values)}",
            f"{name}.contents",
            len(values),
            "contents_size",
            f"fill {where} or send raw contents" if where else "send raw contents: the protocol has no other for it",
        )
    import numpy as np  # takes a tenth of a second: a server is ready without it

    made = np.asarray(values, np.float32 if where == "fp32_contents" else np.int64)
    if where == "int_contents":
        bounds = np.iinfo(desc.dtype.numpy)
        if made.size and (made.min() < bounds.min or made.max() > bounds.max):
            raise _refuse(
                f"an element of {name} does not fit {tensor.datatype}", f"{name}.contents", "", "contents_range",
                f"use {bounds.min} to {bounds.max}",
            )  # fmt: skip
    return made.astype(desc.dtype.numpy).tobytes()


def shared_memory(name: str, parameters: Mapping[str, Any], nbytes: int, find: Find, *, exact: bool) -> Location:
    """The part of a region that a tensor's parameters name. An input fills it exactly, an output at the most."""
    region_name = parameter(parameters[SHARED])
    if not isinstance(region_name, str):
        raise _refuse(f"the region of {name} is no name", f"{name}.{SHARED}", region_name, "shared_memory")
    size = _count(name, parameters, "shared_memory_byte_size", None)
    offset = _count(name, parameters, "shared_memory_offset", 0)
    region = find(region_name)
    if offset + size > region.byte_size:
        raise _refuse(
            f"{name} reaches past the end of its region: {size} bytes from {offset} of {region.byte_size}",
            f"{name}.shared_memory_offset",
            offset,
            "shared_memory_bounds",
            "stay within the bytes that were registered",
        )
    if size < nbytes or (exact and size != nbytes):
        raise _refuse(
            f"{name} has {nbytes} bytes, but shared_memory_byte_size says {size}",
            f"{name}.shared_memory_byte_size",
            size,
            "shared_memory_size",
            "let it be the size of the tensor",
        )
    return Location(Place.REGION, region.region, region.offset + offset)


def _count(name: str, parameters: Mapping[str, Any], key: str, default: int | None) -> int:
    value = parameter(parameters[key]) if key in parameters else default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _refuse(f"{key} of {name} is no count of bytes", f"{name}.{key}", value, "shared_memory")
    return value


def attributes_of(parameters: Mapping[str, Any]) -> dict[str, Attribute]:
    """Attributes of the operation among a request's parameters. A text that begins with ``[`` is a list in JSON."""
    if len(parameters) > MAX_TENSORS:
        raise _refuse("there are too many parameters", "parameters", len(parameters), "parameter_count")
    found: dict[str, Attribute] = {}
    for name, message in parameters.items():
        if name in IGNORED or name in TIMES or name.startswith((f"{DTYPE}.", OWN)):
            continue
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise _refuse("the name of a parameter is empty, too long or not printable", "parameters", name, "name")
        value = parameter(message)
        if value is None:
            raise _refuse(f"the parameter {name} has no value", f"parameters[{name}]", "", "parameter_value")
        found[name] = _list(name, value) if isinstance(value, str) and value.startswith("[") else value
    return found


def _list(name: str, text: str) -> Attribute:
    try:
        values = parsed(text)
    except (ValueError, RecursionError):
        values = [None]
    for kinds in ((int,), (int, float), (str,)):
        if all(isinstance(item, kinds) and not isinstance(item, bool) for item in values):
            return tuple(values)
    raise _refuse(
        f"the parameter {name} is no list of numbers or texts in JSON", f"parameters[{name}]", text, "parameter_list",
        "write it as [1, 2]",
    )  # fmt: skip


def selection_of(parameters: Mapping[str, Any]) -> Selection:
    """How a kernel is to be found, by parameters that begin with ``tilewright_``."""
    given: dict[str, str] = {}
    for name, message in parameters.items():
        if not name.startswith(OWN):
            continue
        field = name.removeprefix(OWN)
        value = parameter(message)
        if field not in ("strategy", "kernel", "device") or not isinstance(value, str) or len(value) > 4 * MAX_NAME:
            raise _refuse(
                f"there is no parameter {name} of that kind", f"parameters[{name}]", value, "selection",
                "give tilewright_strategy, tilewright_kernel or tilewright_device as texts",
            )  # fmt: skip
        given[field] = value
    return Selection(given.get("strategy", ""), given.get("kernel", ""), "wait", given.get("device", ""))


def _contents(name: str, count: int) -> InvalidArgumentError:
    return _refuse(
        f"{count} raw contents are not one for each input that is not in shared memory: {name} has none or too many",
        "raw_input_contents",
        count,
        "contents_count",
        "send raw contents for all inputs or for none; inputs in shared memory have none",
    )


def _refuse(
    reason: str, field: str, value: object, rule: str, fix: str = "see the protocol's specification"
) -> InvalidArgumentError:
    return InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)
