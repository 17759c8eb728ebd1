"""Rules on what a tiled product needs: registers, caches, shared memory; and the nearest tile that needs less."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import Violation, rule_of
from tilewright_kit.tiles.footprint.workgroup import (
    accumulator_limit,
    accumulators_per_thread,
    fits_registers,
    fragment_registers,
    lanes,
    least_tile,
    shared_bytes,
    stages_of,
    staging_bytes,
    staging_limit,
    step,
    vectors_needed,
)
from tilewright_kit.tiles.rules.tiling import is_positive
from tilewright_kit.tiles.tables import columns_of, nearest, rows_of, text_of, usable_warp_tiles, with_extent
from tilewright_kit.tiles.tiled import GROUP_BYTES, Tiled, Triple
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["accumulators_fit_registers", "shared_block", "shared_memory", "staging_budget"]


def staging_budget(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """One stage of A and B fits the arch's budget: LDS on a GPU, the cache share of packed blocks on a CPU. On CUDA
    devices ``shared_memory`` counts more exactly.
    """
    limit = staging_limit(config, arch) if arch.kind != "cuda" else 0
    needed = staging_bytes(config, arch) if is_positive(config) else 0
    if limit and needed > limit and is_positive(config):
        where = "L2" if arch.kind == "cpu" else "LDS"
        reason = f"A and B need {needed} bytes of {where}; pipeline {config.pipeline} has {limit}"
        tile = _shrunk(config, arch, limit)
        yield Violation("staging_budget", "tile", config.tile, reason, {"tile": tile} if tile else {})


@rule_of("cpu")
def shared_block(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """CPU: the packed block that the threads share (of the side with the larger tile) fits the last cache."""
    cache = max(arch.caches.l3_bytes, arch.caches.l2_bytes)
    if not cache or not is_positive(config):
        return
    m, n, k = config.tile
    row = -(-k // config.warp_tile[2]) * GROUP_BYTES
    if max(m, n) * row > cache:
        axis = 1 if n >= m else 0
        unit = step(config)[axis]
        fitting = cache // row // unit * unit
        if not fitting:
            fitting = unit
            k = max(cache // (unit * GROUP_BYTES), 1) * config.warp_tile[2]
        reason = f"the shared packed block needs {max(m, n) * row} bytes; the last cache has {cache}"
        fix = {"tile": (m, fitting, k) if axis else (fitting, n, k)}
        yield Violation("shared_block", "tile", config.tile, reason, fix)


def accumulators_fit_registers(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """The output tile of a thread fits its registers."""
    if not is_positive(config):
        return
    if arch.kind == "cpu":
        needed, limit = vectors_needed(config, arch), arch.vector_registers
        if needed > limit or config.warp_tile[1] % lanes(arch):
            tiles = arch.warp_tiles.get(config.table_key, ())
            wider: dict[str, object] = {"warp_tile": nearest(config.warp_tile, tiles)} if tiles else {}
            reason = f"a register tile of {text_of(config.warp_tile)} needs {needed} whole vectors; there are {limit}"
            yield Violation("accumulators_fit_registers", "warp_tile", config.warp_tile, reason, wider)
        return
    if config.pipeline not in arch.pipelines:
        return
    if not fits_registers(config, arch):
        needed, limit = accumulators_per_thread(config, arch), accumulator_limit(config, arch)
        reason = f"a thread would hold {needed} accumulators; it has room for {limit}, fewer if it joins parts of tiles"
        fix = _with_fewer_accumulators(config, arch)
        yield Violation("accumulators_fit_registers", "tile", config.tile, reason, fix)


@rule_of("cuda", "hip")
def shared_memory(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: the stages, barriers and staged results of a workgroup fit into shared memory."""
    if (
        config.pipeline not in arch.pipelines
        or min(*config.tile, *config.wave, *config.warp_tile) <= 0
        # Each thread of an AMD GPU has a place in its tiles: with more of them than can be, no tile would do.
        or (arch.kind == "hip" and config.waves * arch.wave_size > arch.max_threads_per_workgroup)
    ):
        return
    needed = shared_bytes(config, arch)
    if needed > arch.lds_bytes:
        stages = stages_of(config, arch)
        reason = f"{stages} stages and the epilogue need {needed} bytes of shared memory; there are {arch.lds_bytes}"
        name = "stages" if config.stages else "tile"
        yield Violation("shared_memory", name, getattr(config, name), reason, _fitting(config, arch))


# ---- fixes ----


def _shrunk(config: Tiled, arch: ArchSpec, limit: int) -> Triple | None:
    """The tile made smaller until it fits: k first, then the longer of m and n; None if even the least does not fit."""
    least = least_tile(config, arch)
    tile = [-(-size // part) * part for size, part in zip(config.tile, least, strict=True)]
    while staging_bytes(config, arch, (tile[0], tile[1], tile[2])) > limit:
        shared = -1 if arch.kind != "cpu" else 1 if tile[1] >= tile[0] else 0  # does not count on a CPU
        axes = [axis for axis in (2, 0, 1) if tile[axis] > least[axis] and axis != shared]
        if not axes:
            return None
        longest = max(axes, key=lambda axis: (tile[axis] / least[axis], axis == 2))
        tile[longest] = max(tile[longest] // 2 // least[longest], 1) * least[longest]
    return tile[0], tile[1], tile[2]


def _with_fewer_accumulators(config: Tiled, arch: ArchSpec) -> dict[str, object]:
    """The tile with its longer side halved until a thread's registers hold its part; where even the least does not fit,
    a narrower warp tile.
    """
    squarer = _squarer(config, arch)
    if squarer:
        return {"warp_tile": squarer}
    least = least_tile(config, arch)
    m, n, k = config.tile
    if arch.kind == "hip" and config.stages and fits_registers(config.replace(stages=0), arch):
        return {"stages": 0}
    while not fits_registers(config.replace(tile=(m, n, k)), arch):
        other = config.replace(tile=(m, n, k))
        crowded = fragment_registers(other, arch) >= accumulators_per_thread(other, arch)
        if arch.kind == "hip" and k > least[2] and crowded:
            k = max(k // 2 // least[2], 1) * least[2]
        elif m > least[0] and (m >= n or n <= least[1]):
            m = max(m // 2 // least[0], 1) * least[0]
        elif n > least[1]:
            n = max(n // 2 // least[1], 1) * least[1]
        else:
            return _narrower(config.replace(tile=(m, n, k)), arch) or _fewer_waves(config, arch)
    return {"tile": (m, n, k)}


def _fewer_waves(config: Tiled, arch: ArchSpec) -> dict[str, object]:
    """AMD: the most waves whose threads have registers enough for the tile as it is, or else for the least one."""
    fewer = [config.replace(wave=wave) for wave in arch.waves if math.prod(wave) < config.waves]
    for least in (False, True):
        tiled = [other.replace(tile=least_tile(other, arch)) if least else other for other in fewer]
        fits = [other for other in tiled if arch.kind == "hip" and fits_registers(other, arch)]
        if fits:
            best = max(fits, key=lambda other: other.waves)
            return {"wave": best.wave, "tile": best.tile}
    return {}


def _squarer(config: Tiled, arch: ArchSpec) -> Triple | None:
    """AMD: the nearest warp tile whose operands take so few registers that the tile fits as it is."""
    if arch.kind != "hip":
        return None
    fits = []
    for warp in usable_warp_tiles(config, arch):
        other = config.replace(warp_tile=warp)
        whole = not any(size % part for size, part in zip(config.tile, step(other), strict=True))
        if whole and warp != config.warp_tile and fits_registers(other, arch):
            fits.append(warp)
    return nearest(config.warp_tile, fits) if fits else None


def _narrower(config: Tiled, arch: ArchSpec) -> dict[str, object]:
    """Another warp tile, the nearest whose accumulators fit one to each wave; without promotion if none does."""
    axis, rows = columns_of(config), 1 - columns_of(config)
    for promote in dict.fromkeys((config.promote, 0)):
        # Not every operation promotes, and those that do not have no such field.
        own = config if promote == config.promote else config.replace(promote=promote)
        fits = []
        for warp in usable_warp_tiles(config, arch):
            other = own.replace(warp_tile=warp, tile=_whole(config, warp))
            same = warp[rows] == config.warp_tile[rows] and warp[2] == config.warp_tile[2]
            if same and fits_registers(other, arch):
                fits.append(warp)
        if fits:
            warp = max(fits, key=lambda item: item[axis])
            fix: dict[str, object] = {"warp_tile": warp, "tile": _whole(config, warp)}
            return fix if promote == config.promote else {**fix, "promote": promote}
    return {}


def _whole(config: Tiled, warp: Triple) -> Triple:
    wave = config.wave
    return wave[0] * warp[0], wave[1] * warp[1], config.tile[2]


def _fitting(config: Tiled, arch: ArchSpec) -> dict[str, object]:
    """The first change that makes shared memory suffice: sums through the workspace, fewer stages, a shorter k, a
    smaller tile, the default epilogue.
    """
    if config.cluster[2] > 1:
        return {"cluster": (*config.cluster[:2], 1)}
    if config.stages:
        fix: dict[str, object] = {"stages": 0}
        if shared_bytes(config.replace(stages=0), arch) <= arch.lds_bytes:
            return fix
        config = config.replace(stages=0)
    else:
        fix = {}
    unit = least_tile(config, arch)
    for axis in (2, rows_of(config), columns_of(config)):
        while config.tile[axis] > unit[axis] and shared_bytes(config, arch) > arch.lds_bytes:
            half = max(config.tile[axis] // 2 // unit[axis], 1) * unit[axis]
            config = config.replace(tile=with_extent(config.tile, axis, half))
    if shared_bytes(config, arch) > arch.lds_bytes:
        return {**fix, "tile": config.tile, "epilogue": Epilogue.DEFAULT}
    return {**fix, "tile": config.tile}
