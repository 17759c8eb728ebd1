"""The tensors of a request: which there are, how each is indexed, and the outputs that a caller did not describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright_fmha.problem.declared.operands import OPERANDS, form_of
from tilewright_fmha.problem.problem import Strides
from tilewright_kit.contract.declaration import OperandSpec
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.requests.attributes import check_tensor, refuse
from tilewright_kit.requests.operands import check_output
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc, contiguous_strides

__all__ = ["NAMES", "Names", "Tensors", "check_index", "ordered_like", "place_of", "read_tensors"]


@dataclass(frozen=True, slots=True)
class Names:
    """Names of an operation's tensors, in binding order."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    outputs: tuple[str, ...]


def _names(operands: Sequence[OperandSpec]) -> Names:
    inputs = [item for item in operands if item.role is Role.INPUT]
    return Names(
        tuple(item.name for item in inputs if not item.optional),
        tuple(item.name for item in inputs if item.optional),
        tuple(item.name for item in operands if item.role is Role.OUTPUT),
    )


NAMES: Mapping[str, Names] = {operation: _names(operands) for operation, operands in OPERANDS.items()}


@dataclass(slots=True)
class Tensors:
    """All tensors of a request by name, and the operands that are made of them."""

    operation: str
    inputs: dict[str, TensorDesc]
    given: dict[str, TensorDesc]
    """Outputs that the caller described."""
    outputs: dict[str, TensorDesc] = field(default_factory=dict)
    v_in_k: bool = False
    """``v`` is a part of ``k``, and no tensor of its own."""
    places: dict[str, Strides] = field(default_factory=dict)

    def desc(self, name: str) -> TensorDesc | None:
        return self.inputs.get(name)

    def place(self, name: str, varlen: bool, axes: str = "") -> None:
        """Note where the elements of a tensor lie. ``axes`` (default: by rank) names its dimensions by the letters of
        batch item or page, head, row, column and chunk, ``x`` being the elements of a chunk.
        """
        desc = self.inputs.get(name) or self.outputs[name]
        self.places[name] = place_of(name, desc, axes or ("rhc" if varlen else "bhrc"))

    def output(self, name: str, shape: tuple[int, ...], dtype: DType, like: TensorDesc | None = None) -> TensorDesc:
        """An output as the caller described it, or else without gaps, its axes in the order of those of ``like``."""
        desc = self.given.get(name)
        if desc is None:
            strides = contiguous_strides(shape) if like is None else ordered_like(like, shape)
            desc = TensorDesc(dtype, shape, strides)
            desc.check(name)
        check_output(name, desc, shape)
        if desc.dtype != dtype:
            raise refuse(
                f"{name} is {desc.dtype}, but {dtype} is what is computed here",
                f"{name}.dtype",
                desc.dtype.value,
                "output_dtype",
                f"give {name} as {dtype}",
            )
        self.outputs[name] = desc
        return desc

    def plain_output(self, name: str, shape: tuple[int, ...], dtype: DType) -> None:
        """An output that kernels write as a plain array."""
        desc = self.output(name, shape, dtype)
        if not desc.is_contiguous:
            raise refuse(
                f"{name} has gaps", f"{name}.strides", desc.strides, "index_strides", "give an array without gaps"
            )

    def operands(self) -> tuple[Operand, ...]:
        """In binding order."""
        names = NAMES[self.operation]
        ordered = [name for name in (*names.required, *names.optional) if not (name == "v" and self.v_in_k)]
        found = [Operand(name, self.inputs[name], Role.INPUT) for name in ordered if name in self.inputs]
        found += [Operand(name, self.outputs[name], Role.OUTPUT) for name in names.outputs if name in self.outputs]
        return tuple(found)


def read_tensors(request: OperationRequest) -> Tensors:
    """The request's tensors, their names checked. Raises ``InvalidArgumentError``."""
    names = NAMES[request.operation]
    inputs = (*names.required, *names.optional)
    for side, known, tensors in (("input", inputs, request.inputs), ("output", names.outputs, request.outputs)):
        for name, desc in tensors.items():
            if name not in known:
                raise refuse(
                    f"there is no {side} {name!r} here",
                    str(name),
                    name,
                    "operand_known",
                    f"the {side}s are {', '.join(known)}",
                )
            check_tensor(name, desc)
            if desc.packing:
                raise refuse(
                    f"{name} is packed, which no attention reads",
                    f"{name}.packing",
                    desc.packing,
                    "packed_operand",
                    "pass a plain tensor",
                )
    for name in names.required:
        if name == "lse" and name not in request.inputs:
            raise refuse(
                "the gradients need the log-sum-exp of the forward pass",
                "lse",
                "",
                "lse_required",
                "call the forward pass with return_lse=True and pass what it returned",
            )
        if name not in request.inputs:
            raise refuse(
                f"the input {name} is missing", name, "", "operand_missing", f"give {form_of(request.operation, name)}"
            )
    return Tensors(request.operation, dict(request.inputs), dict(request.outputs))


def place_of(name: str, desc: TensorDesc, axes: str) -> Strides:
    """Strides of a tensor whose dimensions ``axes`` names; 0 along those of one element: there it broadcasts."""
    steps = {"b": 0, "h": 0, "r": 0, "c": 0 if "c" in axes else 1, "k": 0}
    named = zip(axes, desc.shape, desc.strides, strict=True)
    steps |= {axis: stride for axis, size, stride in named if axis != "x" and size > 1}
    return Strides(name, steps["b"], steps["h"], steps["r"], steps["c"], steps["k"])


def ordered_like(like: TensorDesc, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for ``shape`` with its axes in memory in the order of those of ``like``, whose rank it has.

    Columns are always neighbours.
    """
    *lead, last = range(len(shape))
    order = sorted(lead, key=lambda axis: (-like.strides[axis], axis))
    strides, step = [1] * len(shape), max(shape[last], 1)
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def check_index(tensors: Tensors, name: str, shape: tuple[int, ...], rule: str, fix: str) -> None:
    """An input of int32 numbers without gaps: what kernels read as a plain array."""
    desc = tensors.inputs[name]
    if desc.dtype != DType.INT32:
        raise refuse(f"{name} is {desc.dtype}", f"{name}.dtype", desc.dtype.value, "index_dtype", "give int32 numbers")
    if desc.shape != shape:
        raise refuse(f"{name} has shape {list(desc.shape)}, not {list(shape)}", f"{name}.shape", desc.shape, rule, fix)
    if not desc.is_contiguous:
        raise refuse(
            f"{name} has gaps",
            f"{name}.strides",
            desc.strides,
            "index_strides",
            "copy it to an array without gaps: it is small",
        )
