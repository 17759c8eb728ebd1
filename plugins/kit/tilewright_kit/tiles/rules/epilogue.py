"""Rules on the elementwise steps after a product."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import MAX_D, Binary, epilogue_dtypes

__all__ = ["Steps", "elementwise_operands", "epilogue_operand_dtypes"]


class Steps(Protocol):
    """The part of a configuration that the rules read: the fields of these names, and the element type of A."""

    @property
    def a(self) -> str: ...
    @property
    def binary(self) -> Binary: ...
    @property
    def num_d_tensors(self) -> int: ...
    @property
    def dtype_d(self) -> tuple[str, ...]: ...
    @property
    def bias(self) -> str: ...


def elementwise_operands(config: Steps, arch: ArchSpec) -> Iterator[Violation]:
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
    elif binary is Binary.NONE and count:
        reason = f"{count} D operands are declared, but no step uses them"
        fix: dict[str, object] = {"binary": Binary.MULTI_D_ADD}
        yield Violation("elementwise_operands", "binary", binary.value, reason, fix)
    elif binary is not Binary.NONE and not count:
        reason = f"{binary} needs D operands"
        yield Violation("elementwise_operands", "num_d_tensors", count, reason, {"num_d_tensors": 1, "dtype_d": ()})
    elif binary in (Binary.ADD, Binary.MULTIPLY) and count != 1:
        reason = f"{binary} takes exactly one D operand"
        fix = {"binary": Binary.MULTI_D_ADD if binary is Binary.ADD else Binary.MULTI_D_MULTIPLY}
        yield Violation("elementwise_operands", "binary", binary.value, reason, fix)
    if config.dtype_d and len(config.dtype_d) != max(count, 0):
        reason = f"{len(config.dtype_d)} types are given for {count} D operands"
        yield Violation("elementwise_operands", "dtype_d", config.dtype_d, reason, {"dtype_d": ()})


def epilogue_operand_dtypes(config: Steps, arch: ArchSpec) -> Iterator[Violation]:
    """Bias and D are of types that the epilogue reads."""
    if config.a not in DType._value2member_map_:
        return
    allowed = [item.value for item in epilogue_dtypes(DType(config.a))]
    text = f"in a product of {config.a} it may be {', '.join(allowed)}"
    if config.bias and config.bias not in allowed:
        yield Violation("epilogue_operand_dtypes", "bias", config.bias, f"bias: {text}", {"bias": "fp32"})
    if any(item not in allowed for item in config.dtype_d):
        mended = tuple(item if item in allowed else "fp32" for item in config.dtype_d)
        yield Violation("epilogue_operand_dtypes", "dtype_d", config.dtype_d, f"D: {text}", {"dtype_d": mended})
