"""How many parts the keys are cut into where queries are too few to keep a device busy."""

from __future__ import annotations

from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.problem import FmhaProblem
from tilewright_fmha.words import Family
from tilewright_kit.cost import ceil_div
from tilewright_kit.device import DeviceInfo

__all__ = ["LEAST_BLOCKS", "choose_splits", "wants_splits", "work_items"]

LEAST_BLOCKS = 4
"""Blocks of keys below which cutting them does not pay."""
_PER_UNIT = 2
"""Pieces for each unit: so many, for lengths differ."""


def work_items(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> int:
    """Pieces of work of an unsplit launch."""
    if device.arch.kind == "cpu" or config.pack_gqa:
        return problem.batch * problem.heads_k * ceil_div(problem.seq_q * problem.group, max(config.m0, 1))
    return problem.batch * problem.heads_q * ceil_div(problem.seq_q, max(config.m0, 1))


def wants_splits(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> bool:
    """Whether cutting the keys could pay: too little work for all units, and keys enough."""
    units = config.team if device.arch.kind == "cpu" else device.units
    return work_items(problem, config, device) < units and problem.seq_k >= LEAST_BLOCKS * config.n0


def choose_splits(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> int:
    """Parts of the keys in a plan of ``config``: what the caller asked for, else what the kernel is declared for, else
    as many as keep all units busy, from capacities alone. 1 for other families.
    """
    if config.family is not Family.SPLITKV:
        return 1
    asked = problem.num_splits or config.num_splits
    if asked:
        return min(asked, config.max_splits)
    cpu = device.arch.kind == "cpu"
    units = config.team if cpu else max(device.units, 1)
    items = max(work_items(problem, config, device), 1)
    blocks = ceil_div(max(problem.seq_k, 1), max(config.n0, 1))
    wanted = ceil_div(units * (1 if cpu and config.team <= items else _PER_UNIT), items)
    return max(min(wanted, blocks, config.max_splits), 1)
