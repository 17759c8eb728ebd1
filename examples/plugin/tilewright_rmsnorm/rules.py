"""Rules on configurations. A rule is one named function; its fix is applied by auto-correction."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_rmsnorm.config import RmsNormConfig

__all__ = ["RULES"]

FP32_BYTES = 4


def dtype_is_fp32(config: RmsNormConfig, arch: ArchSpec) -> Iterable[Violation]:
    if config.dtype != "fp32":
        yield Violation("dtype_is_fp32", "dtype", config.dtype, "rmsnorm computes in fp32", {"dtype": "fp32"})


def lanes_fit_registers(config: RmsNormConfig, arch: ArchSpec) -> Iterable[Violation]:
    most = max(arch.vector_bytes // FP32_BYTES, 1) * 2
    if not (1 <= config.lanes <= most and config.lanes & (config.lanes - 1) == 0):
        reason = f"partial sums fill at most two registers of {arch.id}: a power of two up to {most}"
        yield Violation("lanes_fit_registers", "lanes", config.lanes, reason, {"lanes": most})


def wave_divides_rows_only(config: RmsNormConfig, arch: ArchSpec) -> Iterable[Violation]:
    if config.wave not in arch.waves or config.wave[1:] != (1, 1):
        reason = f"threads share rows: (threads, 1, 1), one of those that {arch.id} lists"
        yield Violation("wave_divides_rows_only", "wave", config.wave, reason, {"wave": (1, 1, 1)})


def unroll_is_small(config: RmsNormConfig, arch: ArchSpec) -> Iterable[Violation]:
    if not 1 <= config.unroll <= 8:
        yield Violation("unroll_is_small", "unroll", config.unroll, "unrolling pays from 1 to 8", {"unroll": 1})


RULES: RuleBook[RmsNormConfig] = RuleBook([dtype_is_fp32, lanes_fit_registers, wave_divides_rows_only, unroll_is_small])
