"""Scratch memory of CPU launches: the Python mirror of ``FmhaBlocking::layout`` of ``tilewright/cpu/fmha/block.hpp``
and of ``GradBlocking`` of ``tilewright/cpu/fmha/backward/block.hpp``.

Every kernel exports its own figure (role ``workspace``); a test compares the two over many configurations and problems.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_kit.types.arithmetic import ceil_div, padded

__all__ = ["ALIGNMENT", "MOST_ROWS", "backward_bytes", "forward_bytes", "lanes_of"]

ALIGNMENT = 64
MOST_ROWS = 384
"""Rows of an item of the forward kernels, before they are rounded up to whole blocks."""


def lanes_of(arch: ArchSpec) -> int:
    """fp32 values of a vector."""
    return arch.vector_bytes // 4


def forward_bytes(problem: FmhaProblem, config: FmhaConfig, lanes: int) -> int:
    """Workspace of all members of a forward kernel's team."""
    return config.team * _member_bytes(problem, config, lanes)


def _member_bytes(problem: FmhaProblem, config: FmhaConfig, lanes: int) -> int:
    mr, _, depth = config.warp_tile[:3]
    m0, n0 = padded(config.m0, mr), config.n0
    hdim_q, hdim_v = config.hdim
    hdim_v = padded(hdim_v, lanes)
    words = ceil_div(config.hdim[0], depth)
    most = padded(MOST_ROWS, m0)
    rows = min(padded(max(problem.seq_q * problem.group, 1), m0), most)
    lines = 4 * padded(m0, 64)
    return sum(
        (
            padded(rows * words * 4, 64),
            padded(rows * hdim_v * 4, 64),
            padded(m0, lanes) * n0 * 4,
            padded(n0 * words * 4, 64),
            padded(n0 // depth * hdim_v * 4, 64),
            padded(n0 * max(hdim_q, config.hdim[1]) * config.kv.bytes, 64),
            3 * padded(rows, 64) * 4,
            lines,
            2 * padded(n0, 64) * 4,
            padded(n0, 64) + 64,
            padded(n0, 64),
        )
    )


def backward_bytes(config: FmhaConfig, lanes: int) -> int:
    """Workspace of all members of a team that computes gradients: blocks of a size that the configuration fixes."""
    mr, _, depth = config.warp_tile[:3]
    m0, n0 = padded(config.m0, mr * depth), config.n0
    q, v = (padded(size, lanes) for size in config.hdim)
    words_q, words_v = (ceil_div(size, depth) for size in config.hdim)
    scores = padded(m0 * n0 * 4, 64) + 256
    parts = (
        n0 * words_q * 4,
        n0 * words_v * 4,
        n0 // depth * q * 4,
        m0 * words_q * 4,
        m0 * words_v * 4,
        m0 // depth * q * 4,
        m0 // depth * v * 4,
        scores,
        scores,
        m0 * n0 // 2 * 4 if depth == 2 else 0,
        padded(n0, mr) * q * 4,
        padded(n0, mr) * v * 4,
        mr * q * 4,
        2 * padded(m0, 64) * 4,
        2 * (padded(n0, 64) + 64),
        max(m0, n0) * max(config.hdim) * max(config.q.bytes, config.kv.bytes),
    )
    return config.team * sum(padded(size, 64) for size in parts)
