"""The vocabulary that operations share: elementwise steps, epilogues, switches, and which element types go together.

These are facts of the operations, the same on every arch. An arch's abilities are in its ``ArchSpec``.
"""

from __future__ import annotations

from enum import Enum

from tilewright_kit.types.dtypes import DType

__all__ = [
    "MAX_D",
    "SLOPES",
    "UNARY_ALIASES",
    "Binary",
    "Epilogue",
    "Reduction",
    "Switch",
    "Unary",
    "Word",
    "accumulator",
    "default_output",
    "epilogue_dtypes",
    "is_pair",
    "output_dtypes",
    "size_of",
]

MAX_D = 255
"""D operands of one kernel: as many as a byte counts. Each count is a kernel of its own."""


class Word(str, Enum):
    """A name out of a fixed list; its text is its value."""

    def __str__(self) -> str:
        return str(self.value)


class Binary(Word):
    """Steps that bring D operands in: x = op(...op(x, D0)..., Dn).

    ``Add`` and ``Multiply`` take exactly one D, the ``MultiD`` forms one or more.
    """

    NONE = "PassThrough"
    ADD = "Add"
    MULTIPLY = "Multiply"
    MULTI_D_ADD = "MultiDAdd"
    MULTI_D_MULTIPLY = "MultiDMultiply"


class Unary(Word):
    """Steps on one value, after the binary step. ``Gelu`` is exact (erf), ``FastGelu`` its tanh approximation.
    ``LeakyRelu`` and ``Elu`` have a factor below zero (attribute ``slope``).
    """

    NONE = "PassThrough"
    RELU = "Relu"
    GELU = "Gelu"
    FAST_GELU = "FastGelu"
    SILU = "Silu"
    SIGMOID = "Sigmoid"
    TANH = "Tanh"
    HARD_SWISH = "HardSwish"
    CLAMP = "Clamp"
    LEAKY_RELU = "LeakyRelu"
    ELU = "Elu"
    SOFTPLUS = "Softplus"
    MISH = "Mish"


UNARY_ALIASES = {"Swish": "Silu", "SoftRelu": "Softplus"}

SLOPES = {Unary.LEAKY_RELU: 0.01, Unary.ELU: 1.0}
"""Steps with a factor below zero, and its default."""


class Epilogue(Word):
    """The way of results to memory. The last three name a fused step; ours are fused in every epilogue."""

    NONE = "none"
    DEFAULT = "default"
    CSHUFFLE = "cshuffle"
    BIAS = "bias"
    ACTIVATION = "activation"
    BIAS_ACTIVATION = "bias_activation"


class Reduction(Word):
    """Stream-K's order of adding partial tiles; ``none`` is a kernel without Stream-K."""

    NONE = "none"
    ATOMIC = "atomic"
    LINEAR = "linear"
    TREE = "tree"


class Switch(Word):
    """A property that normally follows from the pipeline."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_EIGHT_BIT = (DType.FP8, DType.BF8)


def is_pair(a: DType, b: DType) -> bool:
    """True if operands of types ``a`` and ``b`` may be multiplied: equal types, or fp8 and bf8 in either order."""
    if a == b:
        return a != DType.INT32
    return a in _EIGHT_BIT and b in _EIGHT_BIT


def accumulator(a: DType) -> DType:
    """The type in which products are summed: int32 for int8, else fp32."""
    return DType.FP32 if a.is_float else DType.INT32


def default_output(a: DType) -> DType:
    """The type of C where none is given: the input's, fp16 for 8-bit floats, int32 for int8."""
    if a in _EIGHT_BIT:
        return DType.FP16
    return a if a.is_float else DType.INT32


def output_dtypes(a: DType, scaled: bool = False) -> tuple[DType, ...]:
    """Types that C may have: fp32, fp16, bf16; for int8 int32 too, and int8 where an operation scales it back."""
    if accumulator(a) != DType.INT32:
        return _FLOATS
    return (DType.INT32, *_FLOATS, DType.INT8) if scaled else (DType.INT32, *_FLOATS)


def epilogue_dtypes(a: DType) -> tuple[DType, ...]:
    """Types that bias and D operands may have."""
    return (*_FLOATS, DType.INT32) if accumulator(a) == DType.INT32 else _FLOATS


_SIZES = {str(dtype.value): dtype.bytes for dtype in DType}


def size_of(name: str) -> int:
    """Bytes of an element type by name; unknown ones count as four."""
    return _SIZES.get(name, 4)
