"""Rules on what a product computes, to be called by an operation's rules, which know the names of its fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import is_pair

__all__ = ["exact_integers", "multiplied_dtypes"]


class _Product(Protocol):
    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...
    @property
    def c(self) -> str: ...


def multiplied_dtypes(
    config: _Product, arch: ArchSpec, first: DType, second: str, fields: tuple[str, str]
) -> Iterator[Violation]:
    """Operands are of types that can be multiplied, and the arch has an instruction for the pair. ``fields`` are those
    that hold the types; the second is empty where both are equal.
    """
    other = DType(second) if second in DType._value2member_map_ else None
    if other is None or not is_pair(first, other):
        fix: dict[str, object] = {fields[1]: ""}
        if not is_pair(first, first):
            fix[fields[0]] = DType.INT8
        reason = f"{first} cannot be multiplied with {second}: types are equal, or fp8 and bf8"
        yield Violation("dtype_pair", fields[1], second, reason, fix)
    elif arch.acc_dtype(config.a, config.b) is None:
        reason = f"{arch.id} has no instruction for {config.a} x {config.b}"
        yield Violation("dtype_pair", fields[0], first.value, reason)


def exact_integers(config: _Product, output: str, steps: Iterable[tuple[str, bool]]) -> Iterator[Violation]:
    """An int32 result is exact: it is the accumulator itself, for the epilogue computes in fp32, which would round.

    ``output`` is the field that holds C's type, ``steps`` are fields and whether they have the epilogue do something.
    """
    rounding = [name for name, rounds in steps if rounds] if config.c == DType.INT32.value else []
    if rounding:
        reason = f"an int32 result is exact and cannot take {', '.join(rounding)}"
        value: Any = str(getattr(config, rounding[0]))
        yield Violation("integer_output", rounding[0], value, reason, {output: "fp32"})
