"""Counting what accesses cost: LDS bank conflicts and lines of global memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .state import Array

if TYPE_CHECKING:
    from .state import Waves

LINE = 128


def count_lds(w: Waves, addresses: Array, size: int) -> None:
    """Lanes are served in groups whose accesses fill all banks once; a bank asked for several words takes a pass each.

    ``addresses``: int64 of active lanes.
    """
    banks = w.run.arch.banks
    words = max(size // 4, 1)
    per_pass = max(banks // words, 1)
    everywhere = np.full(w.exec.shape, -1, np.int64)
    everywhere[w.exec] = addresses >> 2
    for row in everywhere:
        w.run.traffic.lds_accesses += 1
        for start in range(0, w.lanes, per_pass):
            group = row[start : start + per_pass]
            group = np.unique(group[group >= 0])
            if group.size == 0:
                continue
            touched = np.unique((group[:, None] + np.arange(words)).reshape(-1))
            passes = int(np.bincount(touched % banks, minlength=banks).max())
            w.run.traffic.lds_conflicts += passes - 1


def count_global(w: Waves, addresses: Array, size: int) -> None:
    """Lines that each wave's access touches. ``addresses``: uint64 of active lanes (those inside their buffer)."""
    w.run.traffic.global_accesses += w.count
    if addresses.size == int(w.exec.sum()):
        wave = np.nonzero(w.exec)[0].astype(np.uint64)
    else:
        wave = np.zeros(addresses.size, np.uint64)
    first, last = addresses // np.uint64(LINE), (addresses + np.uint64(size - 1)) // np.uint64(LINE)
    lines = np.concatenate([first, last]) + (np.concatenate([wave, wave]) << np.uint64(58))
    w.run.traffic.lines += int(np.unique(lines).size)
