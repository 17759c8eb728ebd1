"""Which kernels could compute a problem, and why another cannot."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.cost import predict_fmha
from tilewright_fmha.defaults import cpu_algorithm, cpu_register_tiles
from tilewright_fmha.fit import fmha_mismatches, with_signature
from tilewright_fmha.problem import FmhaProblem
from tilewright_fmha.rules import RULES
from tilewright_kit.candidates import Verdicts, shortlist, teams_for
from tilewright_kit.device import DeviceInfo

__all__ = ["MOST_CPU", "MOST_GPU", "fmha_candidates", "fmha_mismatches", "with_signature"]

MOST_CPU, MOST_GPU = 12, 32

_verdicts = Verdicts(RULES)


def fmha_candidates(problem: FmhaProblem, device: DeviceInfo) -> tuple[FmhaConfig, ...]:
    """Valid kernels for the problem, the preferred first, the most general last."""
    found = dict.fromkeys(_cpu_algorithms(problem, device))
    kept = [
        config for config in found if _verdicts.allows(config, device) and not fmha_mismatches(problem, config, device)
    ]
    most = MOST_CPU if device.arch.kind == "cpu" else MOST_GPU
    return tuple(shortlist(kept, most, lambda config: predict_fmha(problem, config, device).seconds))


def _cpu_algorithms(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    plain = with_signature(problem, problem.family, device)
    for team in reversed(teams_for(problem, device)):
        for register_tile in cpu_register_tiles(device.arch)[:2]:
            yield plain.replace(**cpu_algorithm(plain, device.arch, team, register_tile))
