"""Rules on how a kernel computes, for every kind of device. Those on tiles are the kit's, for products only."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import DIRECT_PIPELINE, ConvConfig, Triple
from tilewright_grouped_conv.config.pipelines import form_of, offered_pipelines
from tilewright_grouped_conv.footprint.group_merging import in_lanes, is_merged
from tilewright_grouped_conv.vocabulary import Direction, Kind, Specialization, layout_of
from tilewright_kit.config.rules import KindRule, Violation
from tilewright_kit.requests.products import MAX_SPLIT_K
from tilewright_kit.tiles.rules import resources
from tilewright_kit.tiles.rules import tiling as rules
from tilewright_kit.tiles.rules.tiling import buffering
from tilewright_kit.tiles.tables import preferred_pipeline
from tilewright_kit.types.vocabulary import Epilogue, Reduction, Switch

__all__ = ["CONV_RULES", "TILE_RULES"]

Rule = Callable[[Any, ArchSpec], Iterable[Violation]]

_ONE: Triple = (1, 1, 1)
_NONE: Triple = (0, 0, 0)
MOST_TAPS = 49
"""Most taps of a filter that is compiled in: its loops are unrolled."""
MOST_PIXELS = 64
"""Most pixels of a step without a matrix instruction, which keeps a sum for each in registers."""
MOST_CHANNELS = 256
LONGEST_STEP = 16
"""Strides and dilations that are compiled in."""
_CONSTANTS = ("pixel_tile", "filter", "stride", "dilation")


def of_products(rule: Rule) -> Rule:
    """A rule on tiles, for kernels that have any, and for the same kinds of device."""
    if isinstance(rule, KindRule):
        return KindRule(of_products(rule.rule), tuple(rule.kinds))

    @wraps(rule)
    def judged(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
        if config.is_matrix:
            yield from rule(config, arch)

    return judged


# ---- kernels without a product ----


def direct_order(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Where a group has several channels, loops without a product read them side by side."""
    if arch.kind == "cpu" and config.kind is Kind.DIRECT and config.channels_first:
        reason = "of the kernels without a product only depthwise ones read channels-first images"
        yield Violation("direct_order", "layout", config.layout, reason, {"layout": layout_of(config.ndim)})


def direct_pipeline(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Depthwise and direct kernels have the pipeline ``direct`` (or ``bulk``, of which ``bulk_shape`` says more), and
    neither tiles nor traits; merged groups choose how results are stored.
    """
    if config.is_matrix:
        return
    shuffled = form_of(config.pipeline).shuffled
    shuffles = (in_lanes(config) or shuffled) and arch.kind == "cuda"
    wanted: dict[str, Any] = {
        "pipeline": config.pipeline if shuffled else DIRECT_PIPELINE,
        "scheduler": "default",
        "epilogue": Epilogue.CSHUFFLE if shuffles else Epilogue.DEFAULT,
        "tile": _ONE,
        "warp_tile": _ONE,
        "pad_m": True,
        "pad_n": True,
        "pad_k": True,
        "stages": 0,
        "double_smem_buffer": Switch.AUTO,
        "explicit_gemm": False,
    }
    for name, value in wanted.items():
        have = getattr(config, name)
        if have != value:
            reason = f"a {config.kind} kernel has no matrix instruction, and so no {name} but {_text(value)}"
            yield Violation("direct_pipeline", name, _plain(have), reason, {name: value})


def direct_waves(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Waves without a product lie in one line; a CPU's team is one that the arch lists, a GPU's workgroup has a power
    of two of them, unless they merge groups.
    """
    if config.is_matrix:
        return
    count = min(max(config.wave[0], 1) * max(config.wave[1], 1) * max(config.wave[2], 1), 1 << 16)
    if arch.kind == "cpu":
        counts = [wave[0] for wave in arch.waves if wave[1:] == (1, 1)]
    else:
        most = arch.max_threads_per_workgroup // arch.wave_size
        counts = [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]
        if is_merged(config):  # waves of which share whole blocks of channels, and no pixels
            counts = list(range(1, most + 1))
    close = max((item for item in counts if item <= count), default=1)
    if config.wave != (close, 1, 1):
        listed = ", ".join(map(str, counts))
        reason = f"waves of a {config.kind} kernel lie in one line, and {arch.id} may have {listed} of them"
        yield Violation("direct_waves", "wave", config.wave, reason, {"wave": (close, 1, 1)})


def specialization_fields(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``channel_tile``, ``pixel_tile``, ``filter``, ``stride`` and ``dilation`` are for kernels without a product."""
    if not config.is_matrix:
        return
    for name in _CONSTANTS:
        if getattr(config, name) != _NONE:
            reason = "only depthwise and direct kernels have it; a product learns it at run time"
            yield Violation("specialization_fields", name, getattr(config, name), reason, {name: _NONE})
    if config.channel_tile:
        reason = "only depthwise and direct kernels have it"
        yield Violation("specialization_fields", "channel_tile", config.channel_tile, reason, {"channel_tile": 0})


def depthwise_shape(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Without a product: what is compiled in is given for all axes or for none, is 1 on axes that are absent, and small
    enough to be unrolled.
    """
    if config.is_matrix:
        return
    limits = {"filter": MOST_TAPS, "pixel_tile": MOST_PIXELS}
    absent = 3 - min(max(config.ndim, 1), 3)
    for name in _CONSTANTS:
        sizes: Triple = getattr(config, name)
        if sizes == _NONE or (name == "pixel_tile" and is_merged(config)):
            continue
        limit = limits.get(name, LONGEST_STEP**3)
        if any(not 1 <= size <= LONGEST_STEP for size in sizes) or any(size != 1 for size in sizes[:absent]):
            mended = tuple(1 if axis < absent else min(max(size, 1), LONGEST_STEP) for axis, size in enumerate(sizes))
            fix = {name: mended if math.prod(mended) <= limit else _NONE}
            reason = f"each axis has 1 to {LONGEST_STEP}, absent axes 1; or all have 0, which leaves it to run time"
            yield Violation("depthwise_shape", name, sizes, reason, fix)
        elif math.prod(sizes) > limit:
            reason = f"{math.prod(sizes)} are too many to unroll; {limit} may be"
            yield Violation("depthwise_shape", name, sizes, reason, {name: _NONE})
    tile = config.channel_tile
    if tile and (not 1 <= tile <= MOST_CHANNELS or (tile & (tile - 1) and not is_merged(config))):
        lower = 1 << (min(max(tile, 1), MOST_CHANNELS).bit_length() - 1)
        reason = f"channels of a step are a power of two up to {MOST_CHANNELS}, or 0"
        yield Violation("depthwise_shape", "channel_tile", tile, reason, {"channel_tile": lower})


# ---- products ----


def pipeline_template(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """There are templates that gather an image for some of an arch's pipelines: not for copies past the registers, or
    for weights that were shuffled ahead of time. Those of CPUs pack blocks
    (``compv3``), also of an image that is a matrix: none streams.
    """
    if not config.is_matrix or config.pipeline not in arch.pipelines:
        return
    offered = offered_pipelines(arch)
    if config.pipeline not in offered and offered:
        other = preferred_pipeline(offered)
        listed = ", ".join(offered)
        reason = f"no template of convolution for pipeline {config.pipeline} of {arch.id}; there is {listed}"
        yield Violation("pipeline_template", "pipeline", config.pipeline, reason, {"pipeline": other})


def explicit_gemm_pointwise(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """An image is a matrix only for filters of one tap without padding, and pixels are its rows: sums over pixels of
    several images, channels first, are none.
    """
    if not config.explicit_gemm or not config.is_matrix:
        return
    if not config.unpadded:
        reason = "only filters of one tap without padding read the image as a matrix"
        fix = {"specialization": Specialization.FILTER1X1_STRIDE1_PAD0}
        yield Violation("explicit_gemm_pointwise", "specialization", config.specialization.value, reason, fix)


def double_buffer(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Double buffering of shared memory follows from the pipeline."""
    return buffering("double_smem_buffer", config.double_smem_buffer, config, arch)


def wave_groups(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Wave groups alternate in the pingpong schedule alone (``im2col_consumers``)."""
    if config.num_wave_groups != 1 and not form_of(config.pipeline).wave_groups:
        reason = f"no wave groups of pipeline {config.pipeline} alternate"
        yield Violation("wave_groups", "num_wave_groups", config.num_wave_groups, reason, {"num_wave_groups": 1})


# ---- sharing the reduction ----


def split_k_range(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The reduction is cut into 1 to 255 slices."""
    if not 1 <= config.split_k <= MAX_SPLIT_K:
        fix = {"split_k": min(max(config.split_k, 1), MAX_SPLIT_K)}
        yield Violation("split_k_range", "split_k", config.split_k, f"split_k is from 1 to {MAX_SPLIT_K}", fix)


def split_k_direction(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Backward weight is cut anywhere, the other directions where they are products; the phases of backward data with a
    stride differ in their taps, so that no one cut of a GPU's launch fits all.
    """
    if config.split_k <= 1 or config.direction is Direction.BACKWARD_WEIGHT:
        return
    if not config.is_matrix:
        reason = f"a {config.kind} kernel of this direction has sums too short to cut"
    elif arch.kind != "cpu" and config.mapped_rows and config.direction is Direction.BACKWARD_DATA:
        reason = "the phases of one launch differ in the length of their sums: no one cut fits all"
    else:
        return
    yield Violation("split_k_direction", "split_k", config.split_k, reason, {"split_k": 1})


def two_stage_direction(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Only the gradient of the weights is converted by a second kernel, on GPUs; slices of a CPU are summed by a second
    stage anyway.
    """
    if not config.two_stage:
        return
    if config.direction is not Direction.BACKWARD_WEIGHT:
        reason = "only the gradient of the weights goes through a workspace"
    elif arch.kind == "cpu":
        reason = "slices on a CPU are always summed by a second stage: use split_k"
    elif not config.is_matrix:
        reason = f"partial sums of a {config.kind} kernel always go through the workspace"
    else:
        return
    yield Violation("two_stage_direction", "two_stage", True, reason, {"two_stage": False})


def stream_k_direction(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Stream-K is for the gradient of the weights, and never for warp tiles of 32."""
    if config.streamk is Reduction.NONE:
        return
    if config.direction is not Direction.BACKWARD_WEIGHT:
        reason = "Stream-K is for the gradient of the weights only"
    elif 32 in config.warp_tile[:2]:
        reason = "Stream-K excludes warp tiles of 32 rows or columns"
    else:
        return
    fix: dict[str, object] = {"streamk": Reduction.NONE, "streamk_persistent": False}
    yield Violation("stream_k_direction", "streamk", config.streamk.value, reason, fix)


def stream_k_template(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """No template of convolution distributes work by Stream-K: slices (``split_k``) do that."""
    if config.streamk is not Reduction.NONE:
        reason = f"no template of convolution for {arch.id} has Stream-K; use split_k"
        fix: dict[str, object] = {"streamk": Reduction.NONE, "streamk_persistent": False}
        yield Violation("stream_k_template", "streamk", config.streamk.value, reason, fix)
    elif config.streamk_persistent:
        reason = "there are no persistent workgroups without Stream-K"
        fix = {"streamk_persistent": False}
        yield Violation("stream_k_template", "streamk_persistent", True, reason, fix)


def two_stage_excludes_stream_k(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Stream-K adds partial tiles up itself."""
    if config.two_stage and config.streamk is not Reduction.NONE:
        reason = "Stream-K adds partial tiles itself and excludes a second stage"
        yield Violation("two_stage_excludes_stream_k", "two_stage", True, reason, {"two_stage": False})


# ---- CPUs ----


def cpu_defaults(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A field that says nothing about a CPU's kernel has its default, so that equal kernels have equal names."""
    if arch.kind != "cpu":
        return
    for name in (
        "vector_sizes", "num_groups_to_merge", "double_smem_buffer", "block_per_cu", "split_image", "channel_tile",
        *_CONSTANTS,
    ):  # fmt: skip
        default = config.__dataclass_fields__[name].default
        if getattr(config, name) != default:
            reason = f"a CPU's kernel does not depend on it: it is {_text(default)}"
            yield Violation("cpu_defaults", name, _plain(getattr(config, name)), reason, {name: default})
    for name in ("pad_m", "pad_n", "pad_k"):
        if not getattr(config, name):
            reason = "kernels of CPUs handle every size: there is none without"
            yield Violation("cpu_defaults", name, False, reason, {name: True})


def cpu_specialization(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CPU: products learn the filter at run time, except those that read the image as a matrix."""
    special, matrix = config.specialization, Specialization.FILTER1X1_STRIDE1_PAD0
    if arch.kind != "cpu" or not config.is_matrix:
        return
    wanted = matrix if config.explicit_gemm else Specialization.DEFAULT
    if special is not wanted:
        reason = f"a CPU's {'matrix' if config.explicit_gemm else 'gathering'} kernel is specialised as {wanted} only"
        yield Violation("cpu_specialization", "specialization", special.value, reason, {"specialization": wanted})


def cpu_explicit(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CPU: the gradient of the weights, and what is accumulated, always gather."""
    if arch.kind != "cpu" or not config.explicit_gemm or not config.is_matrix:
        return
    if config.direction is Direction.BACKWARD_WEIGHT:
        reason = "the gradient of the weights reads lines of pixels, whatever the filter"
        fix: dict[str, object] = {"explicit_gemm": False, "specialization": Specialization.DEFAULT}
        yield Violation("cpu_explicit", "explicit_gemm", True, reason, fix)


# ---- words ----


def _plain(value: object) -> object:
    return getattr(value, "value", value)


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(_plain(value))


_OF_TILES: tuple[Rule, ...] = (
    rules.positive_sizes,
    rules.pipeline,
    pipeline_template,
    rules.trait,
    rules.wave_table,
    rules.warp_tile_table,
    rules.workgroup_threads,
    resources.accumulators_fit_registers,
    rules.tile_minimum,
    rules.tile_divisibility,
    resources.staging_budget,
    resources.shared_block,
    double_buffer,
    rules.stage_count,
    rules.always_padded,
    rules.paired_columns,
    resources.shared_memory,
    rules.cpu_waves,
    rules.gpu_waves,
)
TILE_RULES: tuple[Rule, ...] = tuple(map(of_products, _OF_TILES))

CONV_RULES: tuple[Rule, ...] = (
    direct_order,
    direct_pipeline,
    direct_waves,
    specialization_fields,
    depthwise_shape,
    wave_groups,
    split_k_range,
    split_k_direction,
    two_stage_direction,
    stream_k_direction,
    stream_k_template,
    two_stage_excludes_stream_k,
    explicit_gemm_pointwise,
    cpu_defaults,
    cpu_specialization,
    cpu_explicit,
)
