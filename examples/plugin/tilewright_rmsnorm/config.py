"""How its kernels vary: the number of partial sums that a row is added up in, and the threads that share the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.kernel_sets.declare import ANY, KernelSet, declare

__all__ = ["KERNEL_SETS", "RmsNormConfig"]


@dataclass(frozen=True)
class RmsNormConfig(KernelConfig):
    operation: ClassVar[str] = "rmsnorm"
    signature_fields: ClassVar[tuple[str, ...]] = ("dtype",)
    plan_fields: ClassVar[tuple[str, ...]] = ("wave",)

    dtype: str = part("fp32")
    lanes: int = part(16)
    """Partial sums of a row; the compiler keeps them in vector registers."""
    wave: tuple[int, int, int] = part((1, 1, 1))
    """Threads that share the rows: (threads, 1, 1)."""
    unroll: int = suffix("unroll", 1)


KERNEL_SETS = {
    "default": KernelSet(
        "default",
        "one vector register of partial sums, on any number of threads",
        (declare(RmsNormConfig, lanes=[32, 16, 8, 4], wave=ANY),),
        choices=lambda field, arch, _partial: [wave for wave in arch.waves if wave[1:] == (1, 1)],
    )
}
