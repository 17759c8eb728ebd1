"""Rules on what a kernel computes: element types, layouts, elementwise steps."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import (
    LAYOUTS,
    Binary,
    ScaleA,
    ScaleB,
    Unary,
    accumulator,
    output_dtypes,
)
from tilewright_kit.config.rules import Violation
from tilewright_kit.tiles.rules.epilogue import elementwise_operands, epilogue_operand_dtypes
from tilewright_kit.tiles.rules.signature import exact_integers, multiplied_dtypes

__all__ = ["SIGNATURE_RULES"]


def dtype_pair(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A and B are of types that can be multiplied, and the arch has an instruction for the pair."""
    yield from multiplied_dtypes(config, arch, config.dtype_a, config.b, ("dtype_a", "dtype_b"))


def accumulator_dtype(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Products are summed in the type that the arch's instruction sums in."""
    wanted = arch.acc_dtype(config.a, config.b) or accumulator(config.dtype_a).value
    if config.acc != wanted:
        reason = f"{config.a} x {config.b} is accumulated in {wanted}"
        yield Violation("accumulator_dtype", "dtype_acc", config.acc, reason, {"dtype_acc": ""})


def output_dtype(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """C is fp32, fp16 or bf16; int32 only for int8."""
    allowed = [item.value for item in output_dtypes(config.dtype_a)]
    if config.c not in allowed:
        reason = f"a product of {config.a} is written as {', '.join(allowed)}"
        yield Violation("output_dtype", "dtype_c", config.c, reason, {"dtype_c": ""})


def layout(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The layout is one of the four with C row-major."""
    if config.layout not in LAYOUTS:
        nearest = config.layout[:2] + "r"
        fix = {"layout": nearest if nearest in LAYOUTS else "rcr"}
        yield Violation("layout", "layout", config.layout, f"layouts are {', '.join(LAYOUTS)}", fix)


def integer_output(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """An int32 result is exact: it is the accumulator itself, for the epilogue computes in fp32, which would round."""
    steps = (
        ("unary", config.unary is not Unary.NONE),
        ("scale_a", config.scale_a is not ScaleA.NONE),
        ("scale_b", config.scale_b is not ScaleB.NONE),
        ("bias", config.bias != ""),
        ("binary", config.binary is not Binary.NONE),
    )
    yield from exact_integers(config, "dtype_c", steps)


def structured_sparsity(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """No template multiplies 2:4 sparse operands."""
    if config.structured_sparsity:
        reason = f"no template for {arch.id} multiplies 2:4 sparse operands"
        fix = {"structured_sparsity": False}
        yield Violation("structured_sparsity", "structured_sparsity", True, reason, fix)


SIGNATURE_RULES = (
    dtype_pair,
    accumulator_dtype,
    output_dtype,
    layout,
    elementwise_operands,
    epilogue_operand_dtypes,
    integer_output,
    structured_sparsity,
)
