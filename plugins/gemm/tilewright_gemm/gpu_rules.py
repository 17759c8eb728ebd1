"""Rules on what GPUs add: clusters, stages in shared memory, and the warp-specialised pipeline of Hopper.

A workgroup of the ``ws`` pipeline copies boxes of A and B with the bulk copy engine and multiplies them with
instructions of 64 rows and a flexible number of columns; ``transpose_c`` swaps the two.
"""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from tilewright_arch import ArchSpec, BulkCopy
from tilewright_gemm.config import GemmConfig, Triple
from tilewright_gemm.words import Epilogue, Reduction
from tilewright_kit.rules import Violation
from tilewright_kit.tiles.footprint import consumers, is_specialised, least_tile, shared_bytes, size_of, stages_of

__all__ = ["GPU_RULES", "columns_of", "nearest", "rows_of", "usable_warp_tiles"]

SIDE = 64
"""The fixed side of a warpgroup's matrix instruction."""
PINGPONG_GROUPS = 2


def nearest(wanted: Triple, table: Iterable[Triple]) -> Triple:
    """The entry of most nearly the same area, then the same shape; the earlier one of equals."""

    def distance(entry: Triple) -> tuple[float, float]:
        logs = [math.log2(max(have, 1) / max(want, 1)) for have, want in zip(entry, wanted, strict=True)]
        return round(abs(sum(logs)), 6), round(sum(log * log for log in logs), 6)

    return min(table, key=distance)


def rows_of(config: GemmConfig) -> int:
    """The axis of the tile along which the instruction's fixed side lies: 0 for m, 1 for n."""
    return 1 if config.transpose_c else 0


def columns_of(config: GemmConfig) -> int:
    """The axis along which its flexible side lies."""
    return 1 - rows_of(config)


def usable_warp_tiles(config: GemmConfig, arch: ArchSpec) -> list[Triple]:
    """Warp tiles of the arch for this pipeline; if it is specialised, those in this orientation that suit the layout:
    an operand that does not lie along k is read in panels as wide as the swizzle.
    """
    tiles = arch.warp_tiles_for(config.table_key, config.pipeline)
    if not is_specialised(config, arch) or arch.bulk_copy is None:
        return list(tiles)
    axis = columns_of(config)
    along_k = config.layout[axis : axis + 1] == "rc"[axis] or size_of(config.a) == 1
    unit = 1 if along_k else arch.bulk_copy.swizzle_bytes // size_of(config.a)
    return [tile for tile in tiles if tile[1 - axis] == SIDE and tile[axis] % unit == 0]


def _copies(config: GemmConfig, arch: ArchSpec) -> BulkCopy | None:
    """The bulk copy engine if this kernel uses it, with sizes that can be looked at."""
    sizes = (*config.tile, *config.wave, *config.warp_tile, *config.cluster)
    return arch.bulk_copy if is_specialised(config, arch) and min(sizes) > 0 else None


def cluster(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The pipeline can be launched in such clusters of workgroups."""
    if config.pipeline not in arch.pipelines:
        return
    table = arch.pipeline(config.pipeline).clusters
    if config.cluster not in table:
        listed = ", ".join("x".join(map(str, entry)) for entry in table)
        reason = f"pipeline {config.pipeline} of {arch.id} has clusters {listed}"
        # Slices of K are not what was asked for.
        along = [entry for entry in table if entry[2] == 1]
        yield Violation("cluster", "cluster", config.cluster, reason, {"cluster": nearest(config.cluster, along)})


def slices_in_cluster(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A cluster along k holds all slices of a tile, and its workgroups end with that tile."""
    if config.cluster[2] == 1 or config.pipeline not in arch.pipelines:
        return
    if config.scheduler == "pingpong" or config.reduction is not Reduction.NONE or config.grouped:
        reason = "workgroups that stay, and groups of products, do not share K within a cluster"
        yield Violation("slices_in_cluster", "cluster", config.cluster, reason, {"cluster": (*config.cluster[:2], 1)})
    elif config.split_k != config.cluster[2]:
        reason = f"the {config.cluster[2]} workgroups of a cluster along k are the slices of a tile"
        fix = {"split_k": config.cluster[2]}
        yield Violation("slices_in_cluster", "split_k", config.split_k, reason, fix)
    elif config.persistent:
        reason = "a cluster along k ends with its tile"
        yield Violation("slices_in_cluster", "persistent", True, reason, {"persistent": False})


def stage_count(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
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


def promotion(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Only sums of 8-bit floats in the warp-specialised pipeline are promoted; all others are full fp32 anyway."""
    if config.promote == 0:
        return
    if config.a not in ("fp8", "bf8") or not is_specialised(config, arch):
        reason = f"sums of {config.a} in pipeline {config.pipeline} have all bits already"
        yield Violation("promotion", "promote", config.promote, reason, {"promote": 0})
        return
    # Instructions per stage: sums are promoted between stages.
    unit = max(config.tile[2] // max(config.warp_tile[2], 1), 1)
    if config.promote < 1 or config.promote % unit:
        reason = f"sums are promoted after whole stages of {unit} instructions"
        mended = max(-(-config.promote // unit), 1) * unit
        yield Violation("promotion", "promote", config.promote, reason, {"promote": mended})


def swapped_warp_tile(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: the fixed side of the warp tile lies along m, with ``transpose_c`` along n."""
    if not is_specialised(config, arch) or config.warp_tile[rows_of(config)] == SIDE:
        return
    fits = usable_warp_tiles(config, arch)
    if fits:
        m, n, k = config.warp_tile
        fix = {"warp_tile": nearest((n, m, k), fits)}
        reason = f"the instruction has {SIDE} {'columns' if config.transpose_c else 'rows'} in this orientation"
        yield Violation("swapped_warp_tile", "warp_tile", config.warp_tile, reason, fix)


def register_split(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: the register file is divided for that many consumers, and with ``transpose_c`` they lie along n."""
    if not is_specialised(config, arch):
        return
    offer, wave, pingpong = arch.pipeline(config.pipeline), config.wave, config.scheduler == "pingpong"
    known = offer.register_split(consumers(config)) is not None
    if known and (wave == (1, 1, 1) if pingpong else wave[2] == 1 and (wave[0] == 1 or not config.transpose_c)):
        return
    if pingpong:
        allowed, reason = [(1, 1, 1)], "in the pingpong schedule each wave group is one wave"
    else:
        counts = [split.consumers for split in offer.register_splits]
        allowed = [
            item for item in arch.waves if math.prod(item) in counts and (item[0] == 1 or not config.transpose_c)
        ]
        reason = f"registers are divided for {', '.join(map(str, counts))} consumers"
        reason += ", along n" if config.transpose_c else ""
    if wave not in allowed and allowed:
        fix: dict[str, object] = {"wave": nearest(wave, allowed)}
        yield Violation("register_split", "wave", wave, reason, fix)


def wave_groups(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Only pipelines whose wave groups alternate have more than one: exactly two in the pingpong schedule."""
    groups = config.num_wave_groups
    if config.scheduler == "pingpong":
        if groups != PINGPONG_GROUPS:
            reason = f"{PINGPONG_GROUPS} wave groups alternate in the pingpong schedule"
            yield Violation("wave_groups", "num_wave_groups", groups, reason, {"num_wave_groups": PINGPONG_GROUPS})
    elif groups != 1:
        reason = "only the wave groups of the pingpong schedule alternate"
        yield Violation("wave_groups", "num_wave_groups", groups, reason, {"num_wave_groups": 1})


def one_instruction_wide(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: along the flexible side a wave's part of the tile is one instruction wide."""
    if _copies(config, arch) is None:
        return
    axis = columns_of(config)
    wanted = config.wave[axis] * config.warp_tile[axis]
    if config.tile[axis] != wanted:
        reason = f"along {'mn'[axis]} each wave has one warp tile, so the tile has {wanted}"
        yield Violation("one_instruction_wide", "tile", config.tile, reason, {"tile": _with(config.tile, axis, wanted)})


def swizzled_rows(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: a tile's rows along k fill whole rows of the swizzle pattern."""
    copies = _copies(config, arch)
    if copies is None:
        return
    unit = copies.swizzle_bytes // size_of(config.a)
    if config.tile[2] % unit or config.tile[2] > copies.max_box:
        fitting = min(-(-config.tile[2] // unit) * unit, copies.max_box // unit * unit)
        reason = f"tile_k is a multiple of {unit} up to {copies.max_box}: whole rows of {copies.swizzle_bytes} bytes"
        yield Violation("swizzled_rows", "tile", config.tile, reason, {"tile": _with(config.tile, 2, fitting)})


def mn_major(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: 8-bit operands lie along k; others may lie along m or n, then in panels as wide as the swizzle."""
    copies = _copies(config, arch)
    if copies is None or len(config.layout) != 3:
        return
    along = [axis for axis, letter in ((0, config.layout[0] == "c"), (1, config.layout[1] == "r")) if letter]
    if along and size_of(config.a) == 1:
        reason = "the matrix instruction reads 8-bit operands along k only: layout rcr"
        fix = _portable(arch)
        yield Violation("mn_major", "layout", config.layout, reason, fix)
        return
    panel = copies.swizzle_bytes // size_of(config.a)
    for axis in along:
        unit = panel * config.cluster[1 - axis]
        # A wave's own columns begin where a panel begins.
        own = config.warp_tile[axis] % panel and axis == columns_of(config)
        if own:
            fits = usable_warp_tiles(config, arch)
            reason = f"{'AB'[axis]} lies along {'mn'[axis]}: a warp tile is a multiple of {panel} there"
            fix = {"warp_tile": nearest(config.warp_tile, fits)} if fits else {}
            yield Violation("mn_major", "warp_tile", config.warp_tile, reason, fix)
        elif config.tile[axis] % unit:
            reason = f"{'AB'[axis]} lies along {'mn'[axis]}: its tile is cut into panels of {panel} for the cluster"
            yield Violation("mn_major", "cluster", config.cluster, reason, {"cluster": (1, 1, config.cluster[2])})


def copy_box(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: what a workgroup loads of A and B for its cluster is a box that the copy engine takes."""
    copies = _copies(config, arch)
    if copies is None:
        return
    unit, limit = copies.swizzle_rows, copies.max_box
    if any(size > limit or size % unit for size in config.tile[:2]):
        reason = f"A and B are loaded in boxes of up to {limit} rows, multiples of {unit}"
        yield Violation("copy_box", "tile", config.tile, reason, _boxed(config, arch, copies))
        return
    for axis in (0, 1):
        share = config.cluster[1 - axis]
        if config.tile[axis] % (share * unit):
            reason = f"{'AB'[axis]} is loaded in {share} parts, each a multiple of {unit} rows"
            yield Violation("copy_box", "cluster", config.cluster, reason, {"cluster": (1, 1, config.cluster[2])})
            return


def stored_lines(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: with the cshuffle epilogue the copy engine stores whole lines of C."""
    copies = _copies(config, arch)
    if copies is None or config.epilogue is not Epilogue.CSHUFFLE or config.transpose_c:
        return
    line = copies.swizzle_bytes // size_of(config.c)
    if config.warp_tile[1] % line:
        reason = f"a wave stores lines of {line} elements of C, which do not divide its {config.warp_tile[1]} columns"
        fix = {"epilogue": Epilogue.DEFAULT}
        yield Violation("stored_lines", "epilogue", config.epilogue.value, reason, fix)


def always_persistent(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CUDA: consumers that alternate tiles, and Stream-K, are for workgroups that stay."""
    stays = config.scheduler == "pingpong" or config.reduction is not Reduction.NONE
    if arch.kind == "cuda" and stays and not config.persistent:
        reason = "workgroups stay in the pingpong schedule and with Stream-K"
        yield Violation("always_persistent", "persistent", False, reason, {"persistent": True})


def always_padded(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CUDA: kernels handle every size anyway, so that the flags would name the same code twice."""
    if arch.kind == "cuda":
        for name in ("pad_m", "pad_n", "pad_k"):
            if not getattr(config, name):
                reason = "kernels of this kind handle every size: there is none without"
                yield Violation("always_padded", name, False, reason, {name: True})


def paired_columns(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CUDA, without producers: 8-bit B whose columns lie together is read two instructions at a time."""
    apart = arch.kind != "cuda" or config.pipeline not in arch.pipelines or is_specialised(config, arch)
    if apart or size_of(config.a) != 1 or config.layout[1:2] != "r" or min(config.wave) <= 0:
        return
    unit = 2 * config.warp_tile[1] * config.wave[1]
    if unit > 0 and config.tile[1] % unit:
        reason = f"a wave's part of a row-major 8-bit B is a multiple of {2 * config.warp_tile[1]} columns"
        fix = {"tile": _with(config.tile, 1, -(-config.tile[1] // unit) * unit)}
        yield Violation("paired_columns", "tile", config.tile, reason, fix)


def shared_memory(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: the stages, barriers and staged results of a workgroup fit into shared memory."""
    if (
        arch.kind == "cpu"
        or config.pipeline not in arch.pipelines
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


def transposed_fragments(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Where nothing is gained by it, the warp tile is not transposed."""
    if not config.transpose_c:
        return
    if arch.kind == "cpu":
        reason = "a CPU's register tile already lies as C does"
        yield Violation("transposed_fragments", "transpose_c", True, reason, {"transpose_c": False})
    elif config.pipeline in arch.pipelines and not is_specialised(config, arch):
        reason = f"pipeline {config.pipeline} holds neighbours along n anyway"
        yield Violation("transposed_fragments", "transpose_c", True, reason, {"transpose_c": False})


# ---- fixes ----


def _with(tile: Triple, axis: int, value: int) -> Triple:
    sizes = list(tile)
    sizes[axis] = value
    return sizes[0], sizes[1], sizes[2]


def _portable(arch: ArchSpec) -> dict[str, object]:
    """A pipeline without producers, with a scheduler that it has."""
    name = next((name for name, offer in arch.pipelines.items() if not offer.register_splits), "")
    return {"pipeline": name, "scheduler": arch.pipeline(name).schedulers[0]} if name else {}


def _boxed(config: GemmConfig, arch: ArchSpec, copies: BulkCopy) -> dict[str, object]:
    """The tile with both sides in whole boxes; fewer waves where one warp tile each is more than a box."""
    for axis in (0, 1):
        unit = config.wave[axis] * config.warp_tile[axis]
        if unit > copies.max_box:
            waves = [wave for wave in arch.waves if wave[axis] * config.warp_tile[axis] <= copies.max_box]
            config = config.replace(wave=nearest(config.wave, waves) if waves else (1, 1, 1))
            unit = min(config.wave[axis] * config.warp_tile[axis], copies.max_box)
        size = min(config.tile[axis], copies.max_box // unit * unit)
        rows = -(-size // copies.swizzle_rows) * copies.swizzle_rows
        config = config.replace(tile=_with(config.tile, axis, rows))
    return {"wave": config.wave, "tile": config.tile}


def _fitting(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
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
            config = config.replace(tile=_with(config.tile, axis, half))
    if shared_bytes(config, arch) > arch.lds_bytes:
        return {**fix, "tile": config.tile, "epilogue": Epilogue.DEFAULT}
    return {**fix, "tile": config.tile}


GPU_RULES = (
    cluster,
    slices_in_cluster,
    stage_count,
    promotion,
    one_instruction_wide,
    swizzled_rows,
    mn_major,
    copy_box,
    stored_lines,
    always_persistent,
    always_padded,
    paired_columns,
    shared_memory,
    transposed_fragments,
)
