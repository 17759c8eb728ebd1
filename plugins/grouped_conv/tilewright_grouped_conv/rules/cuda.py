"""Rules on how a kernel of a GPU computes: accesses to memory, merged groups, workgroups of a unit.

Rules on pipelines hold for AMD GPUs; rules on accesses concern kernels that gather vectors,
for single elements are gathered by loops of their own.
"""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig, Triple
from tilewright_grouped_conv.config.pipelines import form_of
from tilewright_grouped_conv.footprint.group_merging import is_merged, merged_shape
from tilewright_grouped_conv.footprint.tma_groups import bulk_shape
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.config.rules import Violation
from tilewright_kit.tiles.footprint.workgroup import registers_of, shared_bytes, threads_of
from tilewright_kit.tiles.rules.tiling import is_positive
from tilewright_kit.tiles.tables import nearest
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, size_of

__all__ = ["GPU_CONV_RULES", "blocks_that_fit", "deduced_blocks"]

VECTOR_BYTES = 16
MOST_BLOCKS = 8
_ONE_LINE: Triple = (1, 1, 4)
MOST_SUMS, MOST_UNROLLED = 64, 100
"""Limits of a thread without a product, before ptxas runs out of registers: sums of its pixels, and elements of the
filter."""
MOST_WITH_TAPS, WIDE_VECTOR = 132, 8
"""Sums of pixels and of taps together; channels of a vector that leave little room beside them."""
MOST_READ = 112
"""Elements of a line of the image that it holds besides: 136 were too many."""
_BESIDE_WEIGHTS = 72
"""AMD: registers of a thread for pixels, sums and addresses beside the weights of all taps, which clang reads ahead
once for each row of pixels (measured: what is above the arch's registers by this spills).
"""
_BESIDE_LINES = 20
"""AMD: registers for sums and addresses beside the weights and the lines of the image that several rows of pixels meet,
which clang then holds all at once (measured with clang 22, filters of 3, 5 and 7 in fp32 and bf16: within 20 of it).
"""
_HIP_BACKWARD = ("compv3", "mem")
_INTERWAVE = ("mem", "basic_v1")
_ALWAYS_DOUBLE = ("compv4", "comp_async")


def _sizes_known(config: ConvConfig, arch: ArchSpec) -> bool:
    """True if this is a product of a GPU whose sizes can be looked at."""
    return arch.kind != "cpu" and config.is_matrix and config.pipeline in arch.pipelines and is_positive(config)


def backward_pipeline(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """AMD: gradients are computed by ``compv3`` or ``mem``, the image's by ``taps`` too."""
    if arch.kind != "hip" or config.direction is Direction.FORWARD or not config.is_matrix:
        return
    taps = config.direction is Direction.BACKWARD_DATA and form_of(config.pipeline).whole_steps
    if config.pipeline in arch.pipelines and config.pipeline not in _HIP_BACKWARD and not taps:
        reason = f"gradients take pipeline {' or '.join(_HIP_BACKWARD)}"
        yield Violation("backward_pipeline", "pipeline", config.pipeline, reason, {"pipeline": "compv3"})


def backward_not_compv5(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The gradients' loops do not fit ``compv5``, whichever arch has it."""
    if config.pipeline == "compv5" and config.direction is not Direction.FORWARD:
        reason = "pipeline compv5 has no loop for gradients"
        yield Violation("backward_not_compv5", "pipeline", config.pipeline, reason, {"pipeline": "compv3"})


def vector_sizes(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """An access to A, B or C is one element or a power of two of them, up to 16 bytes."""
    if arch.kind == "cpu":
        return
    limits = [VECTOR_BYTES // size_of(name) for name in (config.a, config.b, config.c)]
    lower = [_power_below(min(have, limit)) for have, limit in zip(config.vector_sizes, limits, strict=True)]
    mended: Triple = (lower[0], lower[1], lower[2])
    if mended != config.vector_sizes:
        reason = f"an access is 1 or a power of two of elements, up to {VECTOR_BYTES} bytes: {_text(mended)}"
        yield Violation("vector_sizes", "vector_sizes", config.vector_sizes, reason, {"vector_sizes": mended})


def line_chunks(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Lines of the gathered tile (along k; of the weights' gradient along n) are cut into chunks of 16 bytes, of which
    a thread keeps to one place: their number is a power of two that divides the threads.
    """
    if config.kind is not Kind.IMPLICIT or not form_of(config.pipeline).line_chunks or not _sizes_known(config, arch):
        return
    axes = (2,) if config.direction is not Direction.BACKWARD_WEIGHT else (1, 2)
    threads, size = threads_of(config, arch), size_of(config.b if config.image_is_b else config.a)
    tile = config.tile
    if 1 in axes and config.wave[1] & (config.wave[1] - 1):
        even = [wave for wave in arch.waves if not wave[1] & (wave[1] - 1)]
        fix = {"wave": nearest(config.wave, even)} if even else {}
        reason = f"{config.wave[1]} waves along n have no power of two of columns together"
        yield Violation("line_chunks", "wave", config.wave, reason, fix)
        return
    for axis in axes:
        length = _power_below(tile[axis])
        while length > 1 and threads % max(length * size // VECTOR_BYTES, 1):
            length //= 2
        tile = _with(tile, axis, length)
    if tile != config.tile:
        reason = f"lines of the gathered tile are not a power of two of chunks that divides {threads} threads"
        yield Violation("line_chunks", "tile", config.tile, reason, {"tile": tile})


def direct_vectors(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU, without a product: one number of channels is read, computed and written at a time, a single one where
    channels come first; weights and results have as many in a vector as 16 bytes hold of them.
    """
    if config.is_matrix or arch.kind == "cpu":
        return
    limits = [VECTOR_BYTES // size_of(name) for name in (config.a, config.b, config.c)]
    width = 1 if config.channels_first else min(_power_below(config.vector_sizes[0]), limits[0])
    wanted: Triple = (width, min(width, limits[1]), min(width, limits[2]))
    if wanted != config.vector_sizes:
        reason = f"a {config.kind} kernel has one vector for all: {_text(wanted)}"
        yield Violation("direct_vectors", "vector_sizes", config.vector_sizes, reason, {"vector_sizes": wanted})


def direct_tile(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU, without a product: channels of a step are whole vectors, among which the threads divide evenly, and its sums
    fit their registers. Filter, stride and dilation are compiled in together, for one problem, not for
    phases.
    """
    if config.is_matrix or arch.kind == "cpu" or is_merged(config):
        return
    vector = 1 if config.channels_first else _power_below(config.vector_sizes[0])
    tile, most = config.channel_tile, vector * (1 if config.channels_first else max(config.waves, 1) * arch.wave_size)
    if tile and not vector <= tile <= most:
        mended = min(max(tile, vector), most)
        reason = f"{tile} channels of a step are not 1 to {most // vector} vectors of {vector}"
        yield Violation("direct_tile", "channel_tile", tile, reason, {"channel_tile": mended})
    width, taps = max(config.vector_sizes[0], 1), config.filter[1] * config.filter[2]
    if _crowded(config):
        reason = f"a thread has no registers for {width} channels of so many pixels, and what they meet of the image"
        line = config.replace(pixel_tile=_ONE_LINE)
        fix_step: dict[str, object] = {"pixel_tile": _ONE_LINE}
        fix_step |= dict.fromkeys(("filter", "stride", "dilation"), (0, 0, 0)) if _crowded(line) else {}
        yield Violation("direct_tile", "pixel_tile", config.pixel_tile, reason, fix_step)
    if arch.kind == "hip" and (need := _with_weights(config)) > arch.registers_per_thread(_threads(config, arch)):
        reason = f"a thread would need about {need} registers, of which the weights of {taps} taps are most"
        line, none = config.replace(pixel_tile=_ONE_LINE), dict.fromkeys(("filter", "stride", "dilation"), (0, 0, 0))
        fits = _with_weights(line) <= arch.registers_per_thread(_threads(config, arch))
        fix_line: dict[str, object] = {"pixel_tile": _ONE_LINE} if fits else dict(none)
        yield Violation("direct_tile", "pixel_tile", config.pixel_tile, reason, fix_line)
    if width * taps > MOST_UNROLLED:
        reason = f"{taps} taps of {width} channels are too many to unroll; there are registers for {MOST_UNROLLED}"
        fix_taps: dict[str, object] = dict.fromkeys(("filter", "stride", "dilation"), (0, 0, 0))
        yield Violation("direct_tile", "filter", config.filter, reason, fix_taps)
    given = [name for name in ("filter", "stride", "dilation") if getattr(config, name) != (0, 0, 0)]
    if given and (len(given) < 3 or config.mapped_rows):
        reason = "phases come as a table, of any filter" if config.mapped_rows else "all three are compiled in, or none"
        fix = dict.fromkeys(given, (0, 0, 0))
        yield Violation("direct_tile", given[0], getattr(config, given[0]), reason, fix)
    if config.channels_first and config.num_d_tensors:
        reason = "no template without a product reads D operands of channels-first images"
        fix_d: dict[str, object] = {"binary": Binary.NONE, "num_d_tensors": 0, "dtype_d": ()}
        yield Violation("direct_tile", "num_d_tensors", config.num_d_tensors, reason, fix_d)


def _with_weights(config: ConvConfig) -> int:
    """Registers of a thread that computes pixels of small groups with a filter that is compiled in, about; 0 for
    kernels that read weights when they are due.
    """
    width, taps = max(config.vector_sizes[0], 1), config.filter[1] * config.filter[2]
    if config.kind is not Kind.DIRECT or config.direction is Direction.BACKWARD_WEIGHT or not taps:
        return 0
    rows = config.pixel_tile[1] or 2
    beside = max(_BESIDE_WEIGHTS, _lines(config, rows) + _BESIDE_LINES) if rows > 1 else _BESIDE_WEIGHTS
    return rows * width * width * taps + beside


def _lines(config: ConvConfig, rows: int) -> int:
    """Registers for all that so many rows of pixels meet of the image, where the filter is compiled in."""
    step = 1 if config.direction is Direction.BACKWARD_DATA else config.stride[1]
    lines = (rows - 1) * step + (config.filter[1] - 1) * config.dilation[1] + 1
    return ceil_div(lines * _columns(config) * config.vector_sizes[0] * size_of(config.a), 4)


def _threads(config: ConvConfig, arch: ArchSpec) -> int:
    return max(config.waves, 1) * arch.wave_size


def _crowded(config: ConvConfig) -> bool:
    """True if a step spills: by its sums; by the line of the image that they meet; for the gradient of the weights by
    the sums of all taps beside them; and with a stride, where rows of pixels share no row of the image.
    """
    width, weights = max(config.vector_sizes[0], 1), config.direction is Direction.BACKWARD_WEIGHT
    taps = config.filter[1] * config.filter[2]
    # Where the configuration leaves it open, as the template has it.
    rows, run = config.pixel_tile[1] or (1 if weights or not taps else 2), config.pixel_tile[2] or 4
    if width * rows * run > MOST_SUMS or width * _columns(config) > MOST_READ:
        return True
    if weights:
        return taps > 0 and width * (rows * run + taps) > MOST_WITH_TAPS
    apart = config.direction is Direction.FORWARD and rows > 1 and max(config.stride[1:]) > 1
    return apart and width >= WIDE_VECTOR and width * rows * run > MOST_SUMS // 2


def _columns(config: ConvConfig) -> int:
    """Neighbouring pixels of the image that a thread's pixels meet, where the filter is compiled in."""
    if not min(config.filter[2], config.stride[2], config.dilation[2]):
        return 0
    step = 1 if config.direction is Direction.BACKWARD_DATA else config.stride[2]
    return ((config.pixel_tile[2] or 4) - 1) * step + (config.filter[2] - 1) * config.dilation[2] + 1


def direct_sums(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU, without a product: sums are in fp32, which an int32 result is not."""
    if not config.is_matrix and arch.kind != "cpu" and config.c == DType.INT32.value:
        reason = f"a {config.kind} kernel of a GPU sums in fp32"
        yield Violation("direct_sums", "dtype_out", config.dtype_out, reason, {"dtype_out": DType.FP32.value})


def warp_coverage(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """AMD: the vectors of one wave reach over the tile's rows (of the gradient that is gathered for backward data: over
    its k) and over its columns.
    """
    if arch.kind != "hip" or not _sizes_known(config, arch):
        return
    along = (config.tile[2 if config.direction is Direction.BACKWARD_DATA else 0], config.tile[1])
    sizes = config.vector_sizes
    most = [VECTOR_BYTES // size_of(config.a), VECTOR_BYTES // size_of(config.b)]
    if config.direction is Direction.BACKWARD_DATA:  # which has another bound: see below
        whole = _vectors_of_threads(config.replace(vector_sizes=(*most, 1)), arch)
        most = [min(one, other) for one, other in zip(most, whole, strict=False)]
    for axis, size in enumerate(along):
        if sizes[axis] > 1 and size > arch.wave_size * sizes[axis]:
            wanted = _power_above(-(-size // arch.wave_size))
            sizes = _with(sizes, axis, wanted if wanted <= most[axis] else 1)
    if sizes != config.vector_sizes:
        reason = f"a wave of {arch.wave_size} reads less of A or B at a time than the tile's {along[0]} and {along[1]}"
        yield Violation("warp_coverage", "vector_sizes", config.vector_sizes, reason, {"vector_sizes": sizes})


def _vectors_of_threads(config: ConvConfig, arch: ArchSpec) -> Triple:
    """The widest vectors up to the configuration's of which every thread has a whole one of the tiles of A and B."""
    threads, (m, n, k) = max(config.waves * arch.wave_size, 1), config.tile
    sizes = config.vector_sizes
    for axis, size in enumerate((m * k, n * k)):
        if sizes[axis] > max(size // threads, 1):
            sizes = _with(sizes, axis, _power_below(size // threads))
    return sizes


def backward_data_vectors(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """AMD, backward data: every thread has a whole vector of both tiles; on CUDA threads may be idle."""
    if config.direction is not Direction.BACKWARD_DATA or arch.kind != "hip" or not _sizes_known(config, arch):
        return
    fitting = _vectors_of_threads(config, arch)
    if fitting != config.vector_sizes:
        reason = f"{config.waves} waves share the tiles: vectors are up to {_text(fitting)}"
        yield Violation("backward_data_vectors", "vector_sizes", config.vector_sizes, reason, {"vector_sizes": fitting})


def compv6_vectors(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``compv6`` gives every thread a whole vector of both tiles: with fewer it would divide by zero."""
    if config.pipeline != "compv6" or arch.kind == "cpu" or not config.is_matrix or not is_positive(config):
        return
    fitting = _vectors_of_threads(config, arch)
    if fitting != config.vector_sizes:
        reason = f"{config.waves} waves share the tiles: vectors are up to {_text(fitting)}"
        yield Violation("compv6_vectors", "vector_sizes", config.vector_sizes, reason, {"vector_sizes": fitting})


def interwave_pipeline(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: only ``mem`` and ``basic_v1`` take turns between waves."""
    if arch.kind != "cpu" and config.scheduler == "interwave" and config.pipeline not in _INTERWAVE:
        reason = f"scheduler interwave goes with pipeline {' and '.join(_INTERWAVE)} only"
        yield Violation("interwave_pipeline", "scheduler", config.scheduler, reason, {"scheduler": "intrawave"})


def wave32_tiles(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """AMD GPUs with waves of 32: no warp tile has 32 rows, waves along k fit the tile, and types of less than 32 bits
    use warp tiles of 32 along k where the arch has such.
    """
    if arch.kind != "hip" or arch.wave_size != 32 or not _sizes_known(config, arch):
        return
    tiles = [tile for tile in arch.warp_tiles_for(config.table_key, config.pipeline) if tile[0] != 32]
    deep = [tile for tile in tiles if tile[2] >= 32]
    wanted = deep if deep and size_of(config.a) < 4 else tiles
    if config.warp_tile[0] == 32 or (wanted is deep and config.warp_tile[2] < 32):
        reason = f"waves of 32 have warp tiles {', '.join(map(_text, wanted)) or 'of other sizes'}"
        fix = {"warp_tile": nearest(config.warp_tile, wanted)} if wanted else {}
        yield Violation("wave32_tiles", "warp_tile", config.warp_tile, reason, fix)
    elif config.wave[2] * config.warp_tile[2] > config.tile[2]:
        k = config.wave[2] * config.warp_tile[2]
        reason = f"waves along k have {k} together, the tile {config.tile[2]}"
        yield Violation("wave32_tiles", "tile", config.tile, reason, {"tile": _with(config.tile, 2, k)})


def merge_groups(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: groups are merged by kernels without a product (``merged_shape`` says how): no template of a product leaves
    out what lies between groups.
    """
    merged = config.num_groups_to_merge
    if merged == 1 or arch.kind == "cpu" or is_merged(config):
        return
    if config.is_matrix:
        reason = "no template of a product merges groups; depthwise and direct kernels do"
    else:
        reason = f"{merged} groups cannot be merged"
    yield Violation("merge_groups", "num_groups_to_merge", merged, reason, {"num_groups_to_merge": 1})


def block_per_cu(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Workgroups that a unit holds at once are 0 (the template's choice), or on CUDA another number that its registers
    and shared memory have room for. Kernels of AMD GPUs are not compiled for a number.
    """
    count = config.block_per_cu
    if arch.kind == "cpu" or count == 0:
        return
    if not config.is_matrix:
        reason = f"workgroups of a {config.kind} kernel are as many as fit"
    elif arch.kind != "cuda":
        reason = f"kernels of {arch.id} are not compiled for a number of workgroups"
    elif not 1 <= count <= MOST_BLOCKS:
        reason = f"a unit holds 1 to {MOST_BLOCKS} workgroups"
    elif not _sizes_known(config, arch):
        return
    elif count > blocks_that_fit(config, arch):
        reason = f"a unit has registers and shared memory for {blocks_that_fit(config, arch)} such workgroups"
    else:
        return
    yield Violation("block_per_cu", "block_per_cu", count, reason, {"block_per_cu": 0})


def deduced_blocks(config: ConvConfig) -> int:
    """Workgroups that 0 stands for: one where shared memory is double buffered, else two."""
    double = config.pipeline in _ALWAYS_DOUBLE or config.double_smem_buffer.value == "on"
    return 1 if double else 2


def blocks_that_fit(config: ConvConfig, arch: ArchSpec) -> int:
    """Workgroups that a unit has registers and shared memory for."""
    threads = max(threads_of(config, arch), 1)
    registers, shared = max(registers_of(config, arch), 1), max(shared_bytes(config, arch), 1)
    fitting = 0
    while fitting < MOST_BLOCKS and arch.registers_per_thread(threads * (fitting + 1)) >= registers:
        fitting += 1
    return min(fitting, arch.lds_bytes // shared)


def split_image_gpu(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Launches over ranges of images are for kernels whose offsets have 32 bits: those that gather."""
    if config.split_image and arch.kind != "cpu" and config.kind is Kind.POINTWISE:
        reason = "matrices have offsets of 64 bits"
        yield Violation("split_image_gpu", "split_image", True, reason, {"split_image": False})


# ---- fixes ----


def _power_below(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


def _power_above(value: int) -> int:
    return 1 << (max(value, 1) - 1).bit_length()


def _with(sizes: Triple, axis: int, value: int) -> Triple:
    changed = list(sizes)
    changed[axis] = value
    return changed[0], changed[1], changed[2]


def _text(sizes: Triple) -> str:
    return "x".join(map(str, sizes))


GPU_CONV_RULES = (
    backward_pipeline,
    backward_not_compv5,
    vector_sizes,
    direct_vectors,
    direct_tile,
    direct_sums,
    line_chunks,
    warp_coverage,
    backward_data_vectors,
    compv6_vectors,
    interwave_pipeline,
    wave32_tiles,
    merge_groups,
    merged_shape,
    bulk_shape,
    block_per_cu,
    split_image_gpu,
)
