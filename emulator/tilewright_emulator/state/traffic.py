"""Counting what accesses cost: LDS bank conflicts and lines of global memory."""

from __future__ import annotations

import numpy as np

from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

LINE = 128

# Lanes of a wave's first half that are served together when each reads 16 bytes; the second half likewise. By banks.
READ_GROUPS: dict[int, tuple[tuple[int, ...], ...]] = {
    32: tuple((*range(a, a + 4), *range(b, b + 4)) for a, b in ((0, 20), (4, 16), (8, 28), (12, 24))),
    64: (
        (*range(4), *range(12, 16), *range(20, 28)),
        (*range(4, 12), *range(16, 20), *range(28, 32)),
    ),
}


def served_together(arch: Arch, size: int, reads: bool) -> list[Array]:
    """The groups of lanes of one LDS access of ``size`` bytes a lane: a group's accesses fill all banks once."""
    if size == 16 and reads and arch.is_cdna:
        halves = range(0, arch.lanes, 32)
        return [np.array(group) + half for half in halves for group in READ_GROUPS[arch.banks]]
    lanes = max(arch.banks // max(size // 4, 1), 1)
    return [np.arange(start, min(start + lanes, arch.lanes)) for start in range(0, arch.lanes, lanes)]


def count_lds(w: Waves, addresses: Array, size: int, reads: bool) -> None:
    """A bank that a group of lanes asks for several words of takes a pass for each: all but the first are conflicts.

    ``addresses``: int64 of active lanes.
    """
    arch, words = w.run.arch, max(size // 4, 1)
    everywhere = np.full(w.exec.shape, -1, np.int64)
    everywhere[w.exec] = addresses >> 2
    for row in everywhere:
        w.run.traffic.lds_accesses += 1
        for lanes in served_together(arch, size, reads):
            group = row[lanes]
            group = np.unique(group[group >= 0])
            if group.size == 0:
                continue
            touched = np.unique((group[:, None] + np.arange(words)).reshape(-1))
            passes = int(np.bincount(touched % arch.banks, minlength=arch.banks).max())
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
