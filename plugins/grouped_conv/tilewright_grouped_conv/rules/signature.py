"""Rules on what a kernel computes: dimensions, layouts, element types, elementwise steps."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.vocabulary import LAYOUTS, Direction, Kind, Scale, layout_of, ndim_of, same_order
from tilewright_kit.config.rules import Violation
from tilewright_kit.tiles.rules.epilogue import elementwise_operands, epilogue_operand_dtypes
from tilewright_kit.tiles.rules.signature import exact_integers, multiplied_dtypes
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Unary, output_dtypes

__all__ = ["SIGNATURE_RULES"]

MOST_AXES = 3
_ANY_DIRECTION = (DType.FP32, DType.FP16, DType.BF16)


def ndim_range(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """There are one to three spatial axes."""
    if not 1 <= config.ndim <= MOST_AXES:
        yield Violation("ndim_range", "ndim", config.ndim, f"there are 1 to {MOST_AXES} spatial axes", {"ndim": 2})


def layout_matches_ndim(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The layout is a known one, and has as many axes as the kernel."""
    if 1 <= config.ndim <= MOST_AXES and ndim_of(config.layout) != config.ndim:
        wanted = same_order(config.layout, config.ndim)
        known = f"{config.ndim} axes have layouts {layout_of(config.ndim)} and {layout_of(config.ndim, True)}"
        reason = known if config.layout in LAYOUTS else f"there is no layout {config.layout!r}; {known}"
        yield Violation("layout_matches_ndim", "layout", config.layout, reason, {"layout": wanted})


def layout_arch(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Kernels read channels-first images where a template does: on CPUs except for matrix kernels that sum over pixels
    or write pixels apart, on GPUs without a matrix instruction. Elsewhere a plan copies the image first.
    """
    if not config.channels_first or not config.is_matrix:
        return
    if arch.kind != "cpu":
        reason = f"no template for {arch.kind} devices multiplies channels-first images"
    elif config.direction is Direction.BACKWARD_WEIGHT:
        reason = "no template sums over pixels of channels-first images"
    elif config.mapped_rows:
        reason = "pixels of a channels-first result are columns, which lie side by side"
        yield Violation("layout_arch", "mapped_rows", True, reason, {"mapped_rows": False})
        return
    else:
        return
    yield Violation("layout_arch", "layout", config.layout, reason, {"layout": layout_of(max(config.ndim, 1))})


def dtype_pair(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Image and weights are of types that can be multiplied, and the arch has an instruction for the pair."""
    yield from multiplied_dtypes(config, arch, config.dtype_in, config.other_dtype, ("dtype_in", "dtype_wei"))


def dtype_direction(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Gradients are of fp32, fp16 or bf16."""
    if config.direction is not Direction.FORWARD and config.dtype_in not in _ANY_DIRECTION:
        reason = f"there are no gradients of {config.dtype_in}"
        yield Violation("dtype_direction", "dtype_in", config.dtype_in.value, reason)


def output_dtype(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The result is fp32, fp16 or bf16; int32 or, scaled, int8 only for int8."""
    allowed = [item.value for item in output_dtypes(config.dtype_in, True)]
    if config.c not in allowed:
        reason = f"a convolution of {config.dtype_in} is written as {', '.join(allowed)}"
        yield Violation("output_dtype", "dtype_out", config.c, reason, {"dtype_out": ""})


def int8_output_scaled(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Sums of int8 are written as int8 only if a scale brings them back into its range."""
    if config.c == DType.INT8.value and config.scale is Scale.NONE:
        reason = "sums of int8 have 32 bits: without a scale they do not fit int8"
        yield Violation("int8_output_scaled", "dtype_out", config.c, reason, {"scale": Scale.TENSOR})


def epilogue_direction(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """D operands and scales go with forward, bias and unary steps with the image's gradient too."""
    if config.direction is Direction.FORWARD:
        return
    if config.scale is not Scale.NONE:
        reason = "only forward scales its sums"
        yield Violation("epilogue_direction", "scale", config.scale.value, reason, {"scale": Scale.NONE})
    if config.binary is not Binary.NONE or config.num_d_tensors:
        fix: dict[str, object] = {"binary": Binary.NONE, "num_d_tensors": 0, "dtype_d": ()}
        yield Violation("epilogue_direction", "binary", config.binary.value, "only forward has D operands", fix)
    if config.direction is Direction.BACKWARD_WEIGHT:
        if config.bias:
            yield Violation("epilogue_direction", "bias", config.bias, "weights have no bias", {"bias": ""})
        if config.unary is not Unary.NONE:
            reason = "the gradient of the weights has no unary step"
            yield Violation("epilogue_direction", "unary", config.unary.value, reason, {"unary": Unary.NONE})


def accumulate_direction(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Only gradients are added to what is there, and no step follows."""
    if not config.accumulate:
        return
    if config.direction is Direction.FORWARD:
        reason = "a result is not accumulated; add it as a D operand"
        yield Violation("accumulate_direction", "accumulate", True, reason, {"accumulate": False})
    elif config.unary is not Unary.NONE:
        reason = "what is added to a gradient comes last: no unary step follows"
        yield Violation("accumulate_direction", "unary", config.unary.value, reason, {"unary": Unary.NONE})


def integer_output(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """An int32 result is exact: it is the accumulator itself, for the epilogue computes in fp32, which would round."""
    steps = (
        ("unary", config.unary is not Unary.NONE),
        ("scale", config.scale is not Scale.NONE),
        ("bias", config.bias != ""),
        ("binary", config.binary is not Binary.NONE),
    )
    yield from exact_integers(config, "dtype_out", steps)


def mapped_rows(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Rows are mapped where a product writes an image: weights have one distance, plain matrices too. Kernels without a
    product know of no rows; on GPUs the mark says that phases of backward data come as a table.
    """
    if not config.mapped_rows:
        return
    if config.direction is Direction.BACKWARD_WEIGHT:
        reason = "rows of the weights' gradient lie at one distance"
    elif config.kind is Kind.POINTWISE:
        reason = "rows of a matrix lie at one distance"
    elif not config.is_matrix and (arch.kind == "cpu" or config.direction is Direction.FORWARD):
        reason = f"a {config.kind} kernel has no rows to look up"
    else:
        return
    yield Violation("mapped_rows", "mapped_rows", True, reason, {"mapped_rows": False})


SIGNATURE_RULES = (
    ndim_range,
    layout_matches_ndim,
    layout_arch,
    dtype_pair,
    dtype_direction,
    output_dtype,
    int8_output_scaled,
    epilogue_direction,
    accumulate_direction,
    elementwise_operands,
    epilogue_operand_dtypes,
    integer_output,
    mapped_rows,
)
