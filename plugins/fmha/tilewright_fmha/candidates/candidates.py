"""Which kernels could compute a problem, and why another cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_fmha.candidates.applicability import families_of, fmha_mismatches, with_signature
from tilewright_fmha.candidates.gpu import gpu_algorithms_for
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.defaults import cpu_algorithm, cpu_register_tiles
from tilewright_fmha.config.tile_order import tile_order
from tilewright_fmha.cost.cost import predict_fmha
from tilewright_fmha.launch.splits import wants_splits
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.rules.rulebook import RULES
from tilewright_fmha.vocabulary import KV_APPEND, Family
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates
from tilewright_kit.selection.candidates import Verdicts, shortlist, teams_for

__all__ = ["MOST_CPU", "MOST_GPU", "fmha_candidates", "fmha_mismatches", "fmha_refusal", "with_signature"]

MOST_CPU, MOST_GPU = 12, 32
_COLUMNS = (256, 128)
"""Sizes of a CPU's blocks."""
_SPLITS_LOG2 = 5
"""A CPU cuts keys into up to 32 parts, more only for who asks for them."""

_verdicts = Verdicts(RULES)


def fmha_candidates(problem: FmhaProblem, device: DeviceInfo) -> Candidates[FmhaConfig]:
    """Valid kernels for the problem: ``tile_order`` among those of a family, split ones first where cutting
    keys could pay, and the most general last.
    """
    cpu = device.arch.kind == "cpu"
    found = list(dict.fromkeys(_cpu_algorithms(problem, device) if cpu else gpu_algorithms_for(problem, device)))
    kept = [
        config for config in found if _verdicts.allows(config, device) and not fmha_mismatches(problem, config, device)
    ]
    if len(kept) > 1:
        kept = [*tile_order(kept[:-1], problem.seq_q), kept[-1]]
        # Sorts are stable: all threads before one, and split kernels before others.
        kept.sort(key=lambda config: (config.family is not Family.SPLITKV, -config.team if cpu else 0))
    return shortlist(kept, MOST_CPU if cpu else MOST_GPU, lambda config: predict_fmha(problem, config, device))


def fmha_refusal(problem: FmhaProblem, device: DeviceInfo) -> Violation | None:
    """Why there is no kernel for the problem, and which is the nearest; None if there are some."""
    split = problem.num_splits > 1 and Family.SPLITKV in families_of(problem)
    config = with_signature(problem, Family.SPLITKV if split else problem.family, device)
    violations = (*RULES.check(config, device.arch), *fmha_mismatches(problem, config, device))
    return violations[0] if violations else None


def _cpu_algorithms(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    plain = with_signature(problem, problem.family, device)
    teams = tuple(reversed(teams_for(problem, device)))
    if problem.family in (Family.FWD, Family.PAGEDKV, Family.BATCH_PREFILL):
        split = with_signature(problem, Family.SPLITKV, device).replace(max_splits_log2=_SPLITS_LOG2)
        for team in teams:
            config = split.replace(**_cut(split, device, team))
            if problem.num_splits or wants_splits(problem, config, device):
                asked = max(problem.num_splits - 1, 0).bit_length()
                yield config.replace(max_splits_log2=max(_SPLITS_LOG2, asked))
    if problem.operation == KV_APPEND:
        yield from (plain.replace(**cpu_algorithm(plain, device.arch, team)) for team in teams)
        return
    columns = _COLUMNS if problem.seq_k > _COLUMNS[-1] and problem.family is not Family.DQ_DK_DV else _COLUMNS[-1:]
    for team in teams:
        for register_tile in cpu_register_tiles(device.arch)[:2]:
            for count in columns:
                yield plain.replace(**_cut(plain, device, team, register_tile, count))


def _cut(
    config: FmhaConfig,
    device: DeviceInfo,
    team: int,
    register_tile: tuple[int, int] | None = None,
    columns: int = 0,
) -> Mapping[str, Any]:
    return cpu_algorithm(config, device.arch, team, register_tile, columns=columns)
