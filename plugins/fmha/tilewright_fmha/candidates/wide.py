"""The wide space of attention kernels on archs with the warp-specialised pipeline: every block, ring and number of
consumers that may be valid, beside the portable cuts. Rules say which are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decode_heads, few_rows_cut
from tilewright_fmha.config.gradients import gradient_algorithm, gradient_heads
from tilewright_fmha.config.pipelines import SPECIALISED
from tilewright_fmha.config.warp_specialised import specialised_heads
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family, Scheduling

__all__ = ["MOST_SPLITS_LOG2", "wide_algorithms"]

MOST_SPLITS_LOG2 = 7
_CONSUMERS = (1, 2, 3)
_COLUMNS = tuple(range(48, 256 + 1, 16))
_RINGS = (0, 3, 4)
"""Tiles of keys and values on their way; 0: two."""
_ROWS, _KEYS = (8, 16, 32), (64, 128, 192, 256)
_SLOTS = (0, 2, 4, 8)
"""Slots of rings of kernels for few rows; 0: as many as were fastest on an H200."""


def wide_algorithms(problem: FmhaProblem, plain: FmhaConfig) -> Iterator[FmhaConfig]:
    """Specialised kernels of the family of ``plain``, valid or not, in a fixed order."""
    if plain.family is Family.DQ_DK_DV:
        hdim = gradient_heads(problem.hdim_q, problem.hdim_v)
        if hdim is not None:
            yield from (
                plain.replace(hdim=hdim, **gradient_algorithm(hdim), deterministic=fixed) for fixed in (False, True)
            )
    elif plain.family is Family.SPLITKV:
        hdim = decode_heads(problem.dtype, problem.hdim_q, problem.hdim_v)
        if hdim is not None:
            for rows, keys, slots in itertools.product(_ROWS, _KEYS, _SLOTS):
                yield plain.replace(
                    hdim=hdim, **few_rows_cut(hdim, rows, keys), stages=slots, max_splits_log2=MOST_SPLITS_LOG2
                )
    elif (hdim := specialised_heads(problem.hdim_q, problem.hdim_v)) is not None:
        for consumers, columns, stages in itertools.product(_CONSUMERS, _COLUMNS, _RINGS):
            for scheduler in (Scheduling.DEFAULT, Scheduling.PINGPONG):
                yield plain.replace(
                    hdim=hdim, pipeline=SPECIALISED, tile=(64 * consumers, columns, *hdim, columns, hdim[0]),
                    wave=(consumers, 1, 1, consumers, 1, 1, 1, 1, 1),
                    warp_tile=(64, columns, 16, 64, hdim[1], 16, 16, 16, 16),
                    persistent=True, stages=stages, scheduler=scheduler,
                )  # fmt: skip
