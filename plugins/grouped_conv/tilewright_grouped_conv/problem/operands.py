"""The tensors of a request: which there are, their ranks, and the outputs that a caller did not describe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.declaration import OperandSpec
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.requests.attributes import check_tensor, refuse
from tilewright_kit.requests.operands import check_output, in_order
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc, contiguous_strides
from tilewright_kit.types.vocabulary import MAX_D, epilogue_dtypes, is_pair, output_dtypes

__all__ = ["NAMES", "OPERANDS", "Names", "Tensors", "describe_output", "order_like", "read_tensors", "strides_in"]


_RANKS = (3, 5)
_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_TYPES = tuple(dtype for dtype in DType if is_pair(dtype, dtype))
_STEPS = tuple(dict.fromkeys(dtype for a in _TYPES for dtype in epilogue_dtypes(a)))
_SHAPES = {
    "x": ("the image", "[N, C, *spatial]"),
    "w": ("the weights", "[K, C/groups, *filter]"),
    "dy": ("the gradient of the result", "[N, K, *out]"),
    "y": ("the result", "[N, K, *out]"),
    "dx": ("the gradient of the image", "[N, C, *spatial]"),
    "dw": ("the gradient of the weights", "[K, C/groups, *filter]"),
}
_ANY_STRIDES = "Any strides. Channels-last is read as it lies; others may be copied first, as the report says."


def _tensor(name: str, role: Role, dtypes: tuple[DType, ...], constraint: str = _ANY_STRIDES) -> OperandSpec:
    what, shape = _SHAPES[name]
    return OperandSpec(name, role, what[0].upper() + what[1:] + ".", (shape,), _RANKS, dtypes, constraint=constraint)


def _bias(channels: str) -> OperandSpec:
    return OperandSpec(
        "bias", Role.INPUT, "Added to each channel of the result.", (f"[{channels}]",), (1, 1), _STEPS, True,
        constraint="int32 beside int8 operands only.",
    )  # fmt: skip


def _added(output: str) -> OperandSpec:
    return OperandSpec(
        "acc", Role.INPUT, "Tensor that the gradient is added to, with `accumulate`.", (_SHAPES[output][1],), _RANKS,
        _FLOATS, True, constraint=f"The type and strides of `{output}`, whose very memory it may be.",
    )  # fmt: skip


_SECOND = "The type of `x`, or fp8 and bf8 in either order. " + _ANY_STRIDES
_GRADIENT = "Of the type of the inputs, or fp32; by default the first."
OPERANDS = {
    Direction.FORWARD: (
        _tensor("x", Role.INPUT, _TYPES),
        _tensor("w", Role.INPUT, _TYPES, _SECOND),
        _bias("K"),
        OperandSpec(
            "d", Role.INPUT, "Operands of the binary step.", ("[N, K, *out]",), _RANKS, _STEPS, True, True,
            constraint=f"The shape of `y`; strides of 0 repeat. int32 beside int8 operands only. At most {MAX_D}.",
        ),
        OperandSpec(
            "scale", Role.INPUT, "Factor of the sums: one number, or one for each channel.", ("[]", "[1]", "[K]"),
            (0, 1), (DType.FP32,), True,
        ),
        _tensor(
            "y", Role.OUTPUT, tuple(dict.fromkeys(out for a in _TYPES for out in output_dtypes(a, scaled=True))),
            "If it is not described: the type of `x`, fp16 for 8-bit floats, int32 for int8. int8 (of int8, with "
            "`scale`) is rounded and saturated.",
        ),
    ),
    Direction.BACKWARD_DATA: (
        _tensor("dy", Role.INPUT, _FLOATS),
        _tensor("w", Role.INPUT, _FLOATS),
        _bias("C"),
        _added("dx"),
        _tensor("dx", Role.OUTPUT, _FLOATS, _GRADIENT),
    ),
    Direction.BACKWARD_WEIGHT: (
        _tensor("x", Role.INPUT, _FLOATS),
        _tensor("dy", Role.INPUT, _FLOATS),
        _added("dw"),
        _tensor("dw", Role.OUTPUT, _FLOATS, _GRADIENT),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a direction's tensors."""

    first: str
    second: str
    output: str
    optional: tuple[str, ...]


def _names(operands: Sequence[OperandSpec]) -> Names:
    first, second = (item.name for item in operands if item.role is Role.INPUT and not item.optional)
    output = next(item.name for item in operands if item.role is Role.OUTPUT)
    optional = ("d[0], d[1], ..." if item.is_list else item.name for item in operands if item.optional)
    return Names(first, second, output, tuple(optional))


NAMES = {direction: _names(operands) for direction, operands in OPERANDS.items()}
_D = re.compile(r"d\[(0|[1-9][0-9]{0,5})\]")


@dataclass(slots=True)
class Tensors:
    """All tensors by name; ``d`` in order."""

    names: Names
    inputs: dict[str, TensorDesc]
    output: TensorDesc | None
    ndim: int
    d: list[TensorDesc] = field(default_factory=list)


def read_tensors(request: OperationRequest, direction: Direction) -> Tensors:
    """The request's tensors, their names and ranks checked. Raises ``InvalidArgumentError``."""
    names = NAMES[direction]
    for name, desc in (*request.inputs.items(), *request.outputs.items()):
        check_tensor(name, desc)
        if desc.packing:
            raise refuse(
                f"{name} is packed, which no convolution reads",
                f"{name}.packing",
                desc.packing,
                "packed_operand",
                "pass a plain tensor",
            )
    numbered: dict[int, TensorDesc] = {}
    plain: dict[str, TensorDesc] = {}
    for name, desc in request.inputs.items():
        match = _D.fullmatch(name) if isinstance(name, str) else None
        if match and direction is Direction.FORWARD:
            numbered[int(match[1])] = desc
        elif name in (names.first, names.second, *names.optional):
            plain[name] = desc
        else:
            raise _unknown(name, names)
    for name in request.outputs:
        if name != names.output:
            raise refuse(
                f"there is no output {name!r} here",
                str(name),
                name,
                "operand_known",
                f"the output is named {names.output}",
            )
    for name in (names.first, names.second):
        if name not in plain:
            raise refuse(f"the input {name} is missing", name, "", "operand_missing", f"give {' '.join(_SHAPES[name])}")
    ndim = _rank(names.first, plain[names.first])
    output = request.outputs.get(names.output)
    for name, other in ((names.second, plain[names.second]), (names.output, output)):
        if other is not None and _rank(name, other) != ndim:
            raise refuse(
                f"{name} has {len(other.shape)} dimensions, but {names.first} has {ndim + 2}",
                f"{name}.shape",
                other.shape,
                "ranks_agree",
                f"give both {ndim} spatial axes (of size 1 where there is nothing along an axis)",
            )
    return Tensors(names, plain, output, ndim, in_order(numbered))


def _unknown(name: object, names: Names) -> Exception:
    inputs = ", ".join((names.first, names.second, *names.optional))
    return refuse(f"there is no input {name!r} here", str(name), name, "operand_known", f"the inputs are {inputs}")


def _rank(name: str, desc: TensorDesc) -> int:
    if not _RANKS[0] <= len(desc.shape) <= _RANKS[1]:
        raise refuse(
            f"{name} has {len(desc.shape)} dimensions",
            f"{name}.shape",
            desc.shape,
            "tensor_rank_3_to_5",
            "give images or samples, channels, and one to three spatial axes",
        )
    return len(desc.shape) - 2


def order_like(desc: TensorDesc) -> Order:
    """The order of an output that shall lie as ``desc`` does; what sizes of one leave open is told by the strides that
    are given for them.
    """
    if desc.strides[1] == 1:
        return Order.LAST
    return Order.FIRST if 1 in desc.strides[2:] else Order.LAST


def strides_in(order: Order, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for a shape [N, C, *spatial] in the given order."""
    if order is Order.FIRST:
        return contiguous_strides(tuple(shape))
    lead, *spatial, channels = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (lead, channels, *spatial)


def describe_output(
    tensors: Tensors, shape: tuple[int, ...], dtype: DType, order: Order, like: TensorDesc | None = None
) -> TensorDesc:
    """The output as the caller described it, or else of ``dtype`` in the given order (or with the strides of ``like``).

    Raises ``InvalidArgumentError`` if its shape is wrong or its elements overlap.
    """
    name, given = tensors.names.output, tensors.output
    if given is None:
        return TensorDesc.of(dtype, shape, like.strides if like is not None else strides_in(order, shape))
    check_output(name, given, shape)
    return given
