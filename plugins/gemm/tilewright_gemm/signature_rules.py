"""Rules on what a kernel computes: element types, layouts, elementwise steps."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config import GemmConfig
from tilewright_gemm.words import (
    LAYOUTS,
    MAX_D,
    Binary,
    ScaleA,
    ScaleB,
    Unary,
    accumulator,
    epilogue_dtypes,
    is_pair,
    output_dtypes,
)
from tilewright_kit.dtypes import DType
from tilewright_kit.rules import Violation

__all__ = ["SIGNATURE_RULES"]


def dtype_pair(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A and B are of types that can be multiplied, and the arch has an instruction for the pair."""
    b = _dtype(config.b)
    if b is None or not is_pair(config.dtype_a, b):
        fix = {"dtype_b": ""} if is_pair(config.dtype_a, config.dtype_a) else {"dtype_a": DType.INT8, "dtype_b": ""}
        yield Violation(
            "dtype_pair",
            "dtype_b",
            config.b,
            f"{config.a} cannot be multiplied with {config.b}: types are equal, or fp8 and bf8",
            fix,
        )
    elif arch.acc_dtype(config.a, config.b) is None:
        yield Violation("dtype_pair", "dtype_a", config.a, f"{arch.id} has no instruction for {config.a} x {config.b}")


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


def elementwise_operands(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The binary step and the number of D operands fit together."""
    count, binary = config.num_d_tensors, config.binary
    if not 0 <= count <= MAX_D:
        yield Violation(
            "elementwise_operands",
            "num_d_tensors",
            count,
            f"there may be 0 to {MAX_D} D operands",
            {"num_d_tensors": min(max(count, 0), MAX_D), "dtype_d": ()},
        )
    elif binary is Binary.PASS and count:
        reason = f"{count} D operands are declared, but no step uses them"
        fix: dict[str, object] = {"binary": Binary.MULTI_D_ADD}
        yield Violation("elementwise_operands", "binary", binary.value, reason, fix)
    elif binary is not Binary.PASS and not count:
        reason = f"{binary} needs D operands"
        yield Violation("elementwise_operands", "num_d_tensors", count, reason, {"num_d_tensors": 1, "dtype_d": ()})
    elif binary in (Binary.ADD, Binary.MULTIPLY) and count != 1:
        reason = f"{binary} takes exactly one D operand"
        fix = {"binary": Binary.MULTI_D_ADD if binary is Binary.ADD else Binary.MULTI_D_MULTIPLY}
        yield Violation("elementwise_operands", "binary", binary.value, reason, fix)
    if config.dtype_d and len(config.dtype_d) != max(count, 0):
        reason = f"{len(config.dtype_d)} types are given for {count} D operands"
        yield Violation("elementwise_operands", "dtype_d", config.dtype_d, reason, {"dtype_d": ()})


def epilogue_operand_dtypes(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Bias and D are of types that the epilogue reads."""
    allowed = [item.value for item in epilogue_dtypes(config.dtype_a)]
    text = f"in a product of {config.a} it may be {', '.join(allowed)}"
    if config.bias and config.bias not in allowed:
        yield Violation("epilogue_operand_dtypes", "bias", config.bias, f"bias: {text}", {"bias": "fp32"})
    if any(item not in allowed for item in config.dtype_d):
        mended = tuple(item if item in allowed else "fp32" for item in config.dtype_d)
        yield Violation("epilogue_operand_dtypes", "dtype_d", config.dtype_d, f"D: {text}", {"dtype_d": mended})


def integer_output(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """An int32 result is exact: it is the accumulator itself, for the epilogue computes in fp32, which would round."""
    if config.c != DType.INT32:
        return
    rounding = [
        name
        for name, rounds in (
            ("unary", config.unary is not Unary.PASS),
            ("scale_a", config.scale_a is not ScaleA.NONE),
            ("scale_b", config.scale_b is not ScaleB.NONE),
            ("bias", config.bias != ""),
            ("binary", config.binary is not Binary.PASS),
        )
        if rounds
    ]
    if rounding:
        reason = f"an int32 result is exact and cannot take {', '.join(rounding)}"
        yield Violation("integer_output", rounding[0], str(getattr(config, rounding[0])), reason, {"dtype_c": "fp32"})


def structured_sparsity(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """No template multiplies 2:4 sparse operands."""
    if config.structured_sparsity:
        reason = f"no template for {arch.id} multiplies 2:4 sparse operands"
        fix = {"structured_sparsity": False}
        yield Violation("structured_sparsity", "structured_sparsity", True, reason, fix)


def _dtype(name: str) -> DType | None:
    return DType(name) if name in DType._value2member_map_ else None


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
