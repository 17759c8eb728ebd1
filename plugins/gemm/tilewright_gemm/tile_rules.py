"""Rules on how a kernel computes: pipeline, waves, warp tile, block tile, and the resources these need."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config import GemmConfig, Triple
from tilewright_gemm.gpu_rules import (
    columns_of,
    nearest,
    register_split,
    swapped_warp_tile,
    usable_warp_tiles,
    wave_groups,
)
from tilewright_gemm.words import Epilogue, Switch
from tilewright_kit.rules import Violation
from tilewright_kit.tiles.footprint import (
    GEMM_MINIMUM,
    PRESHUFFLE_ALIGNMENT,
    PRESHUFFLE_MINIMUM,
    accumulator_limit,
    accumulators_per_thread,
    fits_registers,
    fragment_registers,
    is_specialised,
    lanes,
    least_tile,
    size_of,
    staging_bytes,
    staging_limit,
    step,
    threads_of,
    vectors_needed,
)
from tilewright_kit.tiles.tiled import GROUP_BYTES

__all__ = ["TILE_RULES"]

MAX_EXTENT = 65535
LARGEST_MENDED = 32768
"""Leaves room for rounding up to whole warp tiles."""

VECTOR_LOAD_BYTES = 16


def is_positive(config: GemmConfig) -> bool:
    """Whether all sizes are in range: what the other rules may rely on once ``positive_sizes`` has spoken."""
    return all(0 < size <= MAX_EXTENT for size in (*config.tile, *config.wave, *config.warp_tile))


def positive_sizes(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Sizes are positive and fit 16 bits."""
    for name in ("tile", "wave", "warp_tile"):
        sizes: Triple = getattr(config, name)
        if any(not 0 < size <= MAX_EXTENT for size in sizes):
            mended = tuple(size if 0 < size <= MAX_EXTENT else min(max(size, 1), LARGEST_MENDED) for size in sizes)
            yield Violation("positive_sizes", name, sizes, f"sizes are from 1 to {MAX_EXTENT}", {name: mended})


def pipeline(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The arch has the pipeline, and it reads B in the form in which the kernel gets it."""
    shuffled = arch.preshuffle_pipelines
    plain = [name for name in arch.pipelines if name not in shuffled]
    if config.preshuffle and not shuffled:
        reason = f"{arch.id} has no pipeline for pre-shuffled B"
        yield Violation("pipeline", "preshuffle", True, reason, {"preshuffle": False})
    elif config.preshuffle and config.pipeline not in shuffled:
        reason = f"pre-shuffled B needs pipeline {' or '.join(shuffled)}"
        yield Violation("pipeline", "pipeline", config.pipeline, reason, {"pipeline": shuffled[0]})
    elif not config.preshuffle and config.pipeline in shuffled:
        reason = f"pipeline {config.pipeline} needs pre-shuffled B"
        yield Violation("pipeline", "pipeline", config.pipeline, reason, {"pipeline": _preferred(plain)})
    elif config.pipeline not in arch.pipelines:
        reason = f"{arch.id} has pipelines {', '.join(arch.pipelines)}"
        yield Violation("pipeline", "pipeline", config.pipeline, reason, {"pipeline": _preferred(plain)})


def trait(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The pipeline goes with the epilogue and the scheduler."""
    if config.pipeline not in arch.pipelines:
        return
    reason = arch.trait_refusal(config.pipeline, config.epilogue.value, config.scheduler)
    if reason is None:
        return
    offered = arch.pipeline(config.pipeline)
    for epilogue in (config.epilogue.value, *offered.epilogues):
        for scheduler in (config.scheduler, *offered.schedulers):
            if arch.supports_trait(config.pipeline, epilogue, scheduler):
                fix: dict[str, object] = {}
                if scheduler != config.scheduler:
                    fix["scheduler"] = scheduler
                if epilogue != config.epilogue:
                    fix["epilogue"] = Epilogue(epilogue)
                yield Violation("trait", next(iter(fix)), str(getattr(config, next(iter(fix)))), reason, fix)
                return
    yield Violation("trait", "pipeline", config.pipeline, reason)


def wave_table(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The waves are laid out in one of the ways that the arch lists."""
    if config.wave not in arch.waves:
        close = nearest(config.wave, arch.waves)
        yield Violation("wave_table", "wave", config.wave, f"{arch.id} has no such layout of waves", {"wave": close})


def warp_tile_table(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The warp tile is one that an instruction of the arch computes, for these types and this pipeline."""
    if config.pipeline not in arch.pipelines or arch.acc_dtype(config.a, config.b) is None:
        return
    tiles = arch.warp_tiles_for(config.table_key, config.pipeline)
    if not tiles:
        reason = f"{arch.id} has no warp tile for {config.table_key} in pipeline {config.pipeline}"
        others = [name for name in arch.pipelines if arch.warp_tiles_for(config.table_key, name)]
        fix: dict[str, object] = {}
        if others:
            other = _preferred(others)
            close = nearest(config.warp_tile, arch.warp_tiles_for(config.table_key, other))
            shuffled = other in arch.preshuffle_pipelines
            fix = {"pipeline": other, "preshuffle": shuffled, "warp_tile": close}
        yield Violation("warp_tile_table", "warp_tile", config.warp_tile, reason, fix)
    elif config.warp_tile not in tiles:
        close = nearest(config.warp_tile, tiles)
        reason = f"{arch.id} has no such warp tile for {config.table_key} in pipeline {config.pipeline}"
        yield Violation("warp_tile_table", "warp_tile", config.warp_tile, reason, {"warp_tile": close})


def workgroup_threads(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The workgroup is not larger than the arch's limit, and ``block_size`` is what waves and instruction imply."""
    if config.pipeline not in arch.pipelines:
        return
    threads = threads_of(config, arch)
    limit = arch.max_threads_per_workgroup
    if threads > limit:
        smaller = [wave for wave in arch.waves if threads_of(config.replace(wave=wave), arch) <= limit]
        fix = {"wave": nearest(config.wave, smaller)} if smaller else {}
        reason = f"{threads} threads are more than the {limit} of a workgroup"
        yield Violation("workgroup_threads", "wave", config.wave, reason, fix)
    elif config.block_size not in (0, threads):
        reason = f"these waves make {threads} threads"
        yield Violation("workgroup_threads", "block_size", config.block_size, reason, {"block_size": 0})


def tile_minimum(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU tiles have the operator's minimum and alignment; a CPU's need only fit the register tile, a warp-specialised
    one its instruction.
    """
    if arch.kind == "cpu" or is_specialised(config, arch):
        return
    low, align = (PRESHUFFLE_MINIMUM, PRESHUFFLE_ALIGNMENT) if config.preshuffle else (GEMM_MINIMUM, GEMM_MINIMUM)
    mended = tuple(
        max(-(-size // unit) * unit, least) for size, least, unit in zip(config.tile, low, align, strict=True)
    )
    if mended != config.tile:
        reason = f"a GPU tile is at least {_text(low)} and a multiple of {_text(align)}"
        yield Violation("tile_minimum", "tile", config.tile, reason, {"tile": mended})


def tile_divisibility(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The tile is a whole number of waves times warp tiles in every dimension."""
    unit = step(config)
    if not is_positive(config):
        return
    if any(size % part for size, part in zip(config.tile, unit, strict=True)):
        align = least_tile(config, arch)
        mended = tuple(-(-size // whole) * whole for size, whole in zip(config.tile, align, strict=True))
        if any(size > MAX_EXTENT for size in mended):
            mended = align
        reason = f"wave times warp tile is {_text(unit)}, which does not divide the tile"
        yield Violation("tile_divisibility", "tile", config.tile, reason, {"tile": mended})


def staging_budget(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
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


def shared_block(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CPU: the packed block that the threads share (of the side with the larger tile) fits the last cache."""
    cache = max(arch.caches.l3_bytes, arch.caches.l2_bytes)
    if arch.kind != "cpu" or not cache or not is_positive(config):
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


def accumulators_fit_registers(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The output tile of a thread fits its registers."""
    if not is_positive(config):
        return
    if arch.kind == "cpu":
        needed, limit = vectors_needed(config, arch), arch.vector_registers
        if needed > limit or config.warp_tile[1] % lanes(arch):
            tiles = arch.warp_tiles.get(config.table_key, ())
            wider: dict[str, object] = {"warp_tile": nearest(config.warp_tile, tiles)} if tiles else {}
            reason = f"a register tile of {_text(config.warp_tile)} needs {needed} whole vectors; there are {limit}"
            yield Violation("accumulators_fit_registers", "warp_tile", config.warp_tile, reason, wider)
        return
    if config.pipeline not in arch.pipelines:
        return
    if not fits_registers(config, arch):
        needed, limit = accumulators_per_thread(config, arch), accumulator_limit(config, arch)
        reason = f"a thread would hold {needed} accumulators; it has room for {limit}, fewer if it joins parts of tiles"
        fix = _with_fewer_accumulators(config, arch)
        yield Violation("accumulators_fit_registers", "tile", config.tile, reason, fix)


def preshuffle_layout(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: pre-shuffled B was column-major and A is row-major."""
    packs = config.operation != GemmConfig.operation  # which reads a plain B
    if config.preshuffle and not packs and arch.kind != "cpu" and config.layout != "rcr":
        reason = "the pre-shuffle pipeline reads layout rcr only"
        yield Violation("preshuffle_layout", "layout", config.layout, reason, {"layout": "rcr"})


def preshuffle_loads(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: every thread of the pre-shuffle pipeline loads whole vectors of 16 bytes of A, and the waves' loads tile the
    block.
    """
    if not config.preshuffle or arch.kind == "cpu" or not is_positive(config):
        return
    reason = _load_fault(config, arch, config.tile)
    if reason:
        yield Violation("preshuffle_loads", "tile", config.tile, reason, _loading(config, arch))


def _loading(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
    """Another tile, if need be for fewer waves, which have more registers each."""
    fewer = sorted((wave for wave in arch.waves if math.prod(wave) < config.waves), key=math.prod, reverse=True)
    for wave in (config.wave, *fewer):
        tile = _loadable(config.replace(wave=wave), arch)
        if tile:
            return {"tile": tile} if wave == config.wave else {"wave": wave, "tile": tile}
    return {}


def _loadable(config: GemmConfig, arch: ArchSpec) -> Triple | None:
    """The nearest tile whose loads are whole vectors and that fits; None if there is none within reach."""
    m, n, k = config.tile
    unit, limit = least_tile(config, arch), staging_limit(config, arch)
    shapes = [(rows * unit[0], depth * unit[2]) for rows in range(1, 33) for depth in range(1, 9)]
    shapes.sort(key=lambda shape: (abs(math.log2(shape[0] / m)) + abs(math.log2(shape[1] / k)), shape))
    for columns in dict.fromkeys((n, max(n // 2 // unit[1], 1) * unit[1], unit[1])):
        for rows, depth in shapes:
            tile = (rows, columns, depth)
            if staging_bytes(config, arch, tile) > limit or _load_fault(config, arch, tile):
                continue
            if config.pipeline not in arch.pipelines or fits_registers(config.replace(tile=tile), arch):
                return tile
    return None


def _load_fault(config: GemmConfig, arch: ArchSpec, tile: Triple) -> str:
    element, wave_size = size_of(config.a), arch.wave_size
    repeat = tile[0] // step(config)[0]
    loaded = config.warp_tile[0] * config.warp_tile[2] * element * repeat
    if loaded // wave_size % VECTOR_LOAD_BYTES or loaded % wave_size:
        return f"a thread would load {loaded / wave_size:g} bytes of A, not a multiple of {VECTOR_LOAD_BYTES}"
    vector = VECTOR_LOAD_BYTES // element
    if tile[2] % vector:
        return f"tile_k {tile[2]} is not a multiple of the {vector} elements of a vector load"
    across = tile[2] // vector
    if wave_size % across:
        return f"{across} vector loads along k do not divide a wave of {wave_size}"
    rows = wave_size // across * config.waves
    return f"the waves load {rows} rows at a time, which does not divide tile_m {tile[0]}" if tile[0] % rows else ""


def double_buffer(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Whether LDS is double buffered follows from the pipeline."""
    if config.double_buffer is Switch.AUTO or config.pipeline not in arch.pipelines:
        return
    wanted = Switch.ON if arch.pipeline(config.pipeline).double_buffer else Switch.OFF
    if config.double_buffer is not wanted:
        reason = f"pipeline {config.pipeline} has double buffering {wanted}"
        yield Violation(
            "double_buffer", "double_buffer", config.double_buffer.value, reason, {"double_buffer": Switch.AUTO}
        )


# ---- fixes ----


def _preferred(names: Iterable[str]) -> str:
    """The general-purpose pipeline among ``names``."""
    known = list(names)
    return next((name for name in ("compv3", "mem") if name in known), known[0])


def _shrunk(config: GemmConfig, arch: ArchSpec, limit: int) -> Triple | None:
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


def _with_fewer_accumulators(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
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


def _fewer_waves(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
    """AMD: the most waves whose threads have registers enough for the tile as it is, or else for the least one."""
    fewer = [config.replace(wave=wave) for wave in arch.waves if math.prod(wave) < config.waves]
    for least in (False, True):
        tiled = [other.replace(tile=least_tile(other, arch)) if least else other for other in fewer]
        fits = [other for other in tiled if arch.kind == "hip" and fits_registers(other, arch)]
        if fits:
            best = max(fits, key=lambda other: other.waves)
            return {"wave": best.wave, "tile": best.tile}
    return {}


def _squarer(config: GemmConfig, arch: ArchSpec) -> Triple | None:
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


def _narrower(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
    """Another warp tile, the nearest whose accumulators fit one to each wave; without promotion if none does."""
    axis, rows = columns_of(config), 1 - columns_of(config)
    for promote in dict.fromkeys((config.promote, 0)):
        fits = []
        for warp in usable_warp_tiles(config, arch):
            other = config.replace(warp_tile=warp, tile=_whole(config, warp), promote=promote)
            same = warp[rows] == config.warp_tile[rows] and warp[2] == config.warp_tile[2]
            if same and fits_registers(other, arch):
                fits.append(warp)
        if fits:
            warp = max(fits, key=lambda item: item[axis])
            return {"warp_tile": warp, "tile": _whole(config, warp), "promote": promote}
    return {}


def _whole(config: GemmConfig, warp: Triple) -> Triple:
    wave = config.wave
    return wave[0] * warp[0], wave[1] * warp[1], config.tile[2]


def _text(sizes: Triple) -> str:
    return "x".join(map(str, sizes))


TILE_RULES = (
    positive_sizes,
    pipeline,
    trait,
    wave_table,
    warp_tile_table,
    swapped_warp_tile,
    wave_groups,
    workgroup_threads,
    register_split,
    accumulators_fit_registers,
    tile_minimum,
    tile_divisibility,
    preshuffle_layout,
    preshuffle_loads,
    staging_budget,
    shared_block,
    double_buffer,
)
