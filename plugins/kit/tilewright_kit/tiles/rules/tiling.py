"""Rules on how a tiled product is computed: pipeline, waves, warp tile and block tile. Rules on
registers and memory are in ``resources``.

Every rule knows fields that all operations share; it never corrects one that a configuration does not have.
"""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import Violation, rule_of
from tilewright_kit.tiles.footprint.workgroup import (
    GEMM_MINIMUM,
    PRESHUFFLE_ALIGNMENT,
    PRESHUFFLE_MINIMUM,
    is_specialised,
    least_tile,
    size_of,
    step,
    threads_of,
)
from tilewright_kit.tiles.tables import nearest, preferred_pipeline, text_of, with_extent
from tilewright_kit.tiles.tiled import Tiled, Triple
from tilewright_kit.types.vocabulary import Epilogue, Switch

__all__ = [
    "MAX_EXTENT",
    "always_padded",
    "buffering",
    "cpu_waves",
    "gpu_waves",
    "is_positive",
    "paired_columns",
    "pipeline",
    "positive_sizes",
    "stage_count",
    "tile_divisibility",
    "tile_minimum",
    "trait",
    "warp_tile_table",
    "wave_table",
    "workgroup_threads",
]

MAX_EXTENT = 65535
LARGEST_MENDED = 32768
"""Leaves room for rounding up to whole warp tiles."""


_NO_GAP = "the static bound of compv4's loop is the matrix unit, so there is no wait left that it could hide"
_ONE_STEP = "compv3 has one tile in LDS as well, and a step under way"
_LEFT_OUT = {
    "compv1": _ONE_STEP,
    "compv2": _ONE_STEP,
    "basicv1": _ONE_STEP,
    "basicasyncv1": "comp_async loads straight to LDS as well, and has two tiles there",
    "compv5": f"waves of two kinds: {_NO_GAP}",
    "wavelet": f"waves of two kinds: {_NO_GAP}",
    "compv6": f"another order of the same loop: {_NO_GAP}",
    "preshufflev1": "preshufflev2 has a step of B under way",
    "comptdm": "it needs the tensor mover of gfx1250",
    "comptdmv2": "it needs the tensor mover of gfx1250",
}
"""Pipelines of AMD GPUs that Composable Kernel names, and why they are left out (docs/kernels-amd.md)."""


def is_positive(config: Tiled) -> bool:
    """True if all sizes are in range: what the other rules may rely on once ``positive_sizes`` has spoken."""
    return all(0 < size <= MAX_EXTENT for size in (*config.tile, *config.wave, *config.warp_tile))


def positive_sizes(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """Sizes are positive and fit 16 bits."""
    for name in ("tile", "wave", "warp_tile"):
        sizes: Triple = getattr(config, name)
        if any(not 0 < size <= MAX_EXTENT for size in sizes):
            mended = tuple(size if 0 < size <= MAX_EXTENT else min(max(size, 1), LARGEST_MENDED) for size in sizes)
            yield Violation("positive_sizes", name, sizes, f"sizes are from 1 to {MAX_EXTENT}", {name: mended})


def pipeline(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
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
        yield Violation("pipeline", "pipeline", config.pipeline, reason, {"pipeline": preferred_pipeline(plain)})
    elif config.pipeline not in arch.pipelines:
        why = _LEFT_OUT.get(config.pipeline.replace("_", "")) if arch.kind == "hip" else None
        reason = f"{arch.id} has pipelines {', '.join(arch.pipelines)}" + (f"; {why}" if why else "")
        yield Violation("pipeline", "pipeline", config.pipeline, reason, {"pipeline": preferred_pipeline(plain)})


def trait(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
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


def wave_table(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """The waves are laid out in one of the ways that the arch lists."""
    if config.wave not in (*arch.waves, *config.own_waves):
        close = nearest(config.wave, arch.waves)
        yield Violation("wave_table", "wave", config.wave, f"{arch.id} has no such layout of waves", {"wave": close})


def warp_tile_table(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """The warp tile is one that an instruction of the arch computes, for these types and this pipeline."""
    if config.pipeline not in arch.pipelines or arch.acc_dtype(config.a, config.b) is None:
        return
    tiles = arch.warp_tiles_for(config.table_key, config.pipeline)
    if not tiles:
        reason = f"{arch.id} has no warp tile for {config.table_key} in pipeline {config.pipeline}"
        others = [name for name in arch.pipelines if arch.warp_tiles_for(config.table_key, name)]
        if "preshuffle" not in config.field_names():
            others = [name for name in others if name not in arch.preshuffle_pipelines]
        fix: dict[str, object] = {}
        if others:
            other = preferred_pipeline(others)
            close = nearest(config.warp_tile, arch.warp_tiles_for(config.table_key, other))
            fix = {"pipeline": other, "warp_tile": close}
            shuffled = other in arch.preshuffle_pipelines
            if shuffled != config.preshuffle:
                fix["preshuffle"] = shuffled
        yield Violation("warp_tile_table", "warp_tile", config.warp_tile, reason, fix)
    elif config.warp_tile not in tiles:
        close = nearest(config.warp_tile, tiles)
        reason = f"{arch.id} has no such warp tile for {config.table_key} in pipeline {config.pipeline}"
        yield Violation("warp_tile_table", "warp_tile", config.warp_tile, reason, {"warp_tile": close})


def workgroup_threads(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
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


@rule_of("cuda", "hip")
def tile_minimum(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """GPU tiles have the operator's minimum and alignment; a CPU's need only fit the register tile, a warp-specialised
    one its instruction.
    """
    if is_specialised(config, arch):
        return
    low, align = (PRESHUFFLE_MINIMUM, PRESHUFFLE_ALIGNMENT) if config.preshuffle else (GEMM_MINIMUM, GEMM_MINIMUM)
    mended = tuple(
        max(-(-size // unit) * unit, least) for size, least, unit in zip(config.tile, low, align, strict=True)
    )
    if mended != config.tile:
        reason = f"a GPU tile is at least {text_of(low)} and a multiple of {text_of(align)}"
        yield Violation("tile_minimum", "tile", config.tile, reason, {"tile": mended})


def tile_divisibility(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """The tile is a whole number of waves times warp tiles in every dimension."""
    unit = step(config)
    if not is_positive(config):
        return
    if any(size % part for size, part in zip(config.tile, unit, strict=True)):
        align = least_tile(config, arch)
        mended = tuple(-(-size // whole) * whole for size, whole in zip(config.tile, align, strict=True))
        if any(size > MAX_EXTENT for size in mended):
            mended = align
        reason = f"wave times warp tile is {text_of(unit)}, which does not divide the tile"
        yield Violation("tile_divisibility", "tile", config.tile, reason, {"tile": mended})


def stage_count(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """``stages`` is 0, or a number that the pipeline can be given."""
    if config.stages == 0 or config.pipeline not in arch.pipelines:
        return
    offer = arch.pipeline(config.pipeline)
    if offer.min_stages == offer.max_stages:
        reason = f"pipeline {config.pipeline} always has {offer.min_stages} stage(s)"
        yield Violation("stage_count", "stages", config.stages, reason, {"stages": 0})
    elif not offer.min_stages <= config.stages <= offer.max_stages:
        reason = f"pipeline {config.pipeline} has {offer.min_stages} to {offer.max_stages} stages"
        mended = min(max(config.stages, offer.min_stages), offer.max_stages)
        yield Violation("stage_count", "stages", config.stages, reason, {"stages": mended})


@rule_of("cuda")
def always_padded(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """CUDA: kernels handle every size anyway, so that the flags would name the same code twice."""
    for name in ("pad_m", "pad_n", "pad_k"):
        if not getattr(config, name):
            reason = "kernels of this kind handle every size: there is none without"
            yield Violation("always_padded", name, False, reason, {name: True})


@rule_of("cuda")
def paired_columns(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """CUDA, without producers: 8-bit B whose columns lie together is read two instructions at a time."""
    apart = config.pipeline not in arch.pipelines or is_specialised(config, arch)
    if apart or size_of(config.a) != 1 or config.letters[1:2] != "r" or min(config.wave) <= 0:
        return
    unit = 2 * config.warp_tile[1] * config.wave[1]
    if unit > 0 and config.tile[1] % unit:
        reason = f"a wave's part of a row-major 8-bit B is a multiple of {2 * config.warp_tile[1]} columns"
        fix = {"tile": with_extent(config.tile, 1, -(-config.tile[1] // unit) * unit)}
        yield Violation("paired_columns", "tile", config.tile, reason, fix)


@rule_of("cpu")
def cpu_waves(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """Threads of a CPU share rows and columns; K is shared by ``split_k`` only."""
    if config.wave[2] != 1:
        reason = "threads share rows and columns; use split_k to share K"
        yield Violation("cpu_waves", "wave", config.wave, reason, {"wave": (*config.wave[:2], 1)})


@rule_of("cuda", "hip")
def gpu_waves(config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """Waves of a GPU's workgroup share rows and columns likewise: no template adds up what waves have summed of K."""
    if config.wave[2] != 1:
        reason = "no template has waves that share K; use split_k, or as many more along m or n"
        m, n, k = config.wave
        wider = [wave for wave in ((m, n * k, 1), (m * k, n, 1), (m, n, 1)) if wave in arch.waves]
        fix: dict[str, object] = {"wave": wider[0]} if wider else {}
        yield Violation("gpu_waves", "wave", config.wave, reason, fix)


def buffering(field: str, value: Switch, config: Tiled, arch: ArchSpec) -> Iterator[Violation]:
    """Double buffering of shared memory follows from the pipeline; ``field`` holds a configuration's own word on it."""
    if value is Switch.AUTO or config.pipeline not in arch.pipelines:
        return
    wanted = Switch.ON if arch.pipeline(config.pipeline).double_buffer else Switch.OFF
    if value is not wanted:
        reason = f"pipeline {config.pipeline} has double buffering {wanted}"
        yield Violation("double_buffer", field, value.value, reason, {field: Switch.AUTO})
