"""Requirements of GPU kernels on tensors: vectors that fit channels and strides, weights in one run, offsets of 32
bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig, Triple
from tilewright_grouped_conv.config.pipelines import form_of
from tilewright_grouped_conv.footprint.group_merging import MERGED_PRODUCT, stages_weights
from tilewright_grouped_conv.launch.image_ranges import BUFFER_BYTES, images_at_once, parts_of
from tilewright_grouped_conv.problem.layout import FilterOrder, FilterView, ImageView, Order, collapses
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.strided_copy.copies import Transform, transform_of
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.config.rules import Violation

__all__ = [
    "channel_vectors",
    "gpu_mismatches",
    "gpu_transforms",
    "padded_channels",
    "range_mismatches",
    "strict_vectors",
]

VECTOR_BYTES = 16
_MOST_ROWS = 2**31
"""Rows that 32 bits count."""


# ---- vectors ----


def channel_vectors(problem: ConvProblem) -> Triple:
    """The longest accesses to A, B and C that the numbers of channels allow, wherever tensors lie."""
    geometry = problem.geometry
    width, out = VECTOR_BYTES // problem.dtype_in.bytes, VECTOR_BYTES // problem.dtype_out.bytes
    if problem.direction is Direction.FORWARD:
        run = geometry.taps * geometry.cg
        return _part(width, geometry.cg), _part(width, run), _part(out, geometry.kg)
    if problem.direction is Direction.BACKWARD_DATA:
        return _part(width, geometry.kg), _part(width, geometry.cg), _part(out, geometry.cg)
    return _part(width, geometry.kg), _part(width, geometry.cg), _part(out, geometry.taps * geometry.cg)


def strict_vectors(problem: ConvProblem) -> Triple:
    """The longest that need no copy: those that strides and the promised alignment allow too."""
    a, b, c = channel_vectors(problem)
    size = problem.dtype_in.bytes
    first, second = _operands(problem)
    return (
        _part(min(a, max(problem.alignment // size, 1)), *_strides(first)),
        _part(min(b, max(problem.alignment // size, 1)), *_strides(second)),
        c,
    )


def padded_channels(problem: ConvProblem, config: ConvConfig) -> int:
    """Channels of a group of the image and the weights, filled up to whole vectors; 0: as they are."""
    geometry, vector = problem.geometry, config.vector_sizes[0]
    if problem.direction is not Direction.FORWARD or not config.is_matrix or config.channels_first:
        return 0
    return -(-geometry.cg // vector) * vector if geometry.cg % vector else 0


def _operands(problem: ConvProblem) -> tuple[ImageView | FilterView, ImageView | FilterView]:
    """A and B of the product."""
    if problem.direction is Direction.FORWARD:
        return problem.image, problem.filter
    if problem.direction is Direction.BACKWARD_DATA:
        return problem.pixels, problem.filter
    return problem.pixels, problem.image


def _part(most: int, *numbers: int) -> int:
    """The largest power of two up to ``most`` that divides all numbers."""
    common = math.gcd(most, *numbers)
    return common & -common


def _strides(view: ImageView | FilterView) -> tuple[int, ...]:
    first = view.k if isinstance(view, FilterView) else view.n
    return (first, view.g, *view.spatial, view.offset)


# ---- how tensors must lie ----


def gpu_transforms(problem: ConvProblem, config: ConvConfig) -> Iterator[Transform]:
    """The copies without which the kernel cannot compute the problem."""
    channels = padded_channels(problem, config)
    for operand, reason in _wrong(problem, config):
        is_filter = operand == problem.filter.operand
        order = FilterOrder.GKYXC.value if is_filter else (Order.FIRST if config.channels_first else Order.LAST).value
        wide = channels if operand in ("x", "w") else 0
        how = f"with {wide} channels" if wide else order.replace("_", "-")
        yield transform_of(problem, operand, order, f"{operand} is copied, {how}: {reason}", wide)


def _wrong(problem: ConvProblem, config: ConvConfig) -> Iterator[tuple[str, str]]:
    if not config.is_matrix:
        yield from _wrong_of_loops(problem, config)
        return
    geometry = problem.geometry
    filled = padded_channels(problem, config) > 0
    first, second = _operands(problem)
    vectors = {first.operand: config.vector_sizes[0], second.operand: config.vector_sizes[1]}
    for view, per_group, sizes in (
        (problem.image, geometry.cg, geometry.input),
        (problem.pixels, geometry.kg, geometry.output),
    ):
        vector = vectors.get(view.operand, 1)
        if filled and view.operand == "x":
            yield "x", f"its {per_group} channels are filled up to whole vectors"
        elif per_group > 1 and view.c != 1:
            yield view.operand, "the channels of a pixel do not lie side by side"
        elif not _aligned(problem, view, vector):
            yield view.operand, f"pixels do not begin at whole vectors of {vector}"
        elif (
            problem.direction is Direction.BACKWARD_WEIGHT
            and view is problem.pixels
            and collapses(view, sizes, geometry.n) is None
        ):
            yield view.operand, "its pixels do not lie at one distance"
    if filled:
        yield "w", "its channels are filled up as the image's are"
    elif reason := _wrong_filter(problem, config, vectors.get(problem.filter.operand, 1)):
        yield problem.filter.operand, reason
    for item in problem.d:
        if collapses(item, geometry.output, geometry.n) is None:
            yield item.operand, "its pixels do not lie at one distance"


def _wrong_filter(problem: ConvProblem, config: ConvConfig, vector: int) -> str:
    """Why weights cannot be read (or their gradient written) where they lie; empty if they can."""
    geometry, view = problem.geometry, problem.filter
    if geometry.cg > 1 and view.c != 1:
        return "its channels do not lie side by side"
    flat = problem.direction is not Direction.BACKWARD_DATA or form_of(config.pipeline).flat_filter
    if flat and not _is_flat(view, geometry.filter, geometry.cg):
        return "taps and channels do not lie in one run"
    if not _aligned(problem, view, vector):
        return f"taps do not begin at whole vectors of {vector}"
    return ""


def _in_vectors(problem: ConvProblem, config: ConvConfig) -> bool:
    """True if merged groups can read the weights of neighbouring channels at a time: forward two, and whole vectors
    where these pass through shared memory.
    """
    view, count = problem.filter, 8 if stages_weights(config) else 2
    if problem.geometry.cg == 1 or (count == 2 and problem.direction is not Direction.FORWARD):
        return True
    return view.c == 1 and not any(step % count for step in (view.k, *_strides(view)))


def _is_flat(view: FilterView, taps: Triple, channels: int) -> bool:
    step = channels
    for size, stride in zip(taps[::-1], view.spatial[::-1], strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _is_packed(problem: ConvProblem) -> bool:
    """True if weights lie one after the other, all taps of a channel of the result, all channels of a tap."""
    geometry, view = problem.geometry, problem.filter
    channel = geometry.taps * geometry.cg
    steps = ((geometry.cg, view.c, 1), (geometry.kg, view.k, channel), (geometry.groups, view.g, geometry.kg * channel))
    packed = all(have == wanted for count, have, wanted in steps if count > 1)
    return packed and _is_flat(view, geometry.filter, geometry.cg)


def _aligned(problem: ConvProblem, view: ImageView | FilterView, vector: int) -> bool:
    enough = vector * problem.dtype_in.bytes <= max(problem.alignment, problem.dtype_in.bytes)
    return vector == 1 or (enough and all(stride % vector == 0 for stride in _strides(view)))


def _wrong_of_loops(problem: ConvProblem, config: ConvConfig) -> Iterator[tuple[str, str]]:
    """Without a product: operands have any strides where they are read one element at a time, else vectors of channels
    lie side by side. Results are written as rows of channels, or channels-first one by one.
    """
    geometry, vector = problem.geometry, config.vector_sizes[0]
    result = {Direction.FORWARD: "y", Direction.BACKWARD_DATA: "dx"}.get(problem.direction, "")
    merged, one_product = config.num_groups_to_merge > 1, len(problem.phases(config.channels_first)) == 1
    for view, per_group, sizes in (
        (problem.image, geometry.cg, geometry.input),
        (problem.pixels, geometry.kg, geometry.output),
    ):
        written = view.operand == result
        if config.channels_first or (vector == 1 and not written):
            continue
        step = view.c if per_group > 1 else view.g
        beside = per_group == 1 or geometry.groups == 1 or view.g == per_group
        if (step != 1 and per_group * geometry.groups > 1) or ((merged or written) and not beside):
            yield view.operand, "the channels of a pixel do not lie side by side"
        elif any(stride % vector for stride in (view.n, *view.spatial, view.offset)):
            yield view.operand, f"pixels do not begin at whole vectors of {vector}"
        elif written and one_product and collapses(view, sizes, geometry.n) is None:
            yield view.operand, "its pixels do not lie at one distance"
    if not result and (reason := _wrong_filter(problem, config, 1)):
        yield problem.filter.operand, reason
    if merged and result and not _in_vectors(problem, config):
        yield problem.filter.operand, "the weights of a tap do not lie side by side, in pairs or vectors"
    elif form_of(config.pipeline).packed_filter and not _is_packed(problem):
        yield problem.filter.operand, "there are gaps between the weights"
    for item in problem.d:
        if collapses(item, geometry.output, geometry.n) is None:
            yield item.operand, "its pixels do not lie at one distance"


# ---- mismatches that copies do not remove ----


def gpu_mismatches(problem: ConvProblem, config: ConvConfig) -> Iterator[Violation]:
    """Why a GPU's kernel cannot compute the problem, even with copies."""
    geometry = problem.geometry
    if not config.is_matrix:
        vector = config.vector_sizes[0]
        merged = config.num_groups_to_merge > 1
        counts = (geometry.c, geometry.k) if merged or config.kind is Kind.DEPTHWISE else (geometry.cg, geometry.kg)
        if any(count % vector for count in counts):
            reason = f"{min(counts)} channels are no whole vectors of {vector}"
            yield Violation("vectors", "vector_sizes", config.vector_sizes, reason)
        if merged and not geometry.cg == geometry.kg == MERGED_PRODUCT // config.num_groups_to_merge:
            reason = f"groups of {geometry.cg} and {geometry.kg} channels do not fill blocks of this kernel"
            yield Violation("groups", "num_groups_to_merge", config.num_groups_to_merge, reason)
        if problem.alignment < vector * problem.dtype_in.bytes:
            reason = f"addresses are multiples of {problem.alignment} bytes only"
            yield Violation("vectors", "vector_sizes", config.vector_sizes, reason)
    else:
        # Forward kernels have the channels of the image and the weights filled up.
        limits = channel_vectors(problem)
        filled = padded_channels(problem, config) > 0
        for axis, operand in enumerate("AB"):
            if config.vector_sizes[axis] > limits[axis] and not filled:
                reason = f"channels are no whole vectors of {config.vector_sizes[axis]} in {operand}"
                fix = {"vector_sizes": (*limits[:2], config.vector_sizes[2])}
                yield Violation("vectors", "vector_sizes", config.vector_sizes, reason, fix)
    if config.channels_first and config.kind is not Kind.DEPTHWISE:
        reason = "only depthwise kernels of GPUs read channels-first images"
        yield Violation("layout", "layout", config.layout, reason)


def range_mismatches(problem: ConvProblem, config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Tensors that are too long for a GPU's kernel."""
    geometry = problem.geometry
    most, operand = images_at_once(problem, config, arch)
    if operand and (found := _split_mismatch(problem, config, arch, most, operand)):
        yield found
        return
    if arch.kind == "hip" and config.is_matrix and (name := _far_lines(problem, config)):
        reason = f"offsets of 32 bits do not reach all lines of {name} that a step reads"
        yield Violation("range", "tile", config.tile, reason)
    if geometry.n * max(geometry.in_pixels, geometry.out_pixels) >= _MOST_ROWS:
        yield Violation("range", "split_image", config.split_image, "there are more than 2**31 pixels")


def _split_mismatch(
    problem: ConvProblem, config: ConvConfig, arch: ArchSpec, most: int, operand: str
) -> Violation | None:
    """Why ranges of ``most`` images do not help a launch that does not reach all of ``operand``."""
    reason = f"offsets of 32 bits do not reach all of {operand}"
    if not most:
        return Violation("range", "split_image", config.split_image, f"{reason}, not even one image")
    parts = parts_of(problem, config, arch)
    weight = problem.direction is Direction.BACKWARD_WEIGHT
    wanted: dict[str, object] = {"split_image": True}
    if weight:  # whose launches leave slices behind, which a last one adds
        wanted |= {"two_stage": config.is_matrix, "split_k": max(config.split_k, parts)}
    if all(getattr(config, name) == value for name, value in wanted.items()):
        return None
    return Violation("range", "split_image", config.split_image, f"{reason}, only {most} images at a time", wanted)


def _far_lines(problem: ConvProblem, config: ConvConfig) -> str:
    """An operand whose lines (weights, or pixels at one distance) are so far apart that an AMD GPU's buffer does not
    reach all those of a tile; empty if there is none.
    """
    geometry, tile, weights = problem.geometry, config.tile, problem.filter
    forward, of_weights = (problem.direction is item for item in (Direction.FORWARD, Direction.BACKWARD_WEIGHT))
    lines = [] if of_weights else [(weights.operand, tile[1] if forward else tile[2], weights.k)]
    matrices = {problem.pixels} if of_weights else set()
    if config.kind is Kind.POINTWISE:
        matrices.add(problem.pixels if problem.direction is Direction.BACKWARD_DATA else problem.image)
    for view in matrices:
        step = collapses(view, geometry.input if view is problem.image else geometry.output, geometry.n) or 0
        lines.append((view.operand, tile[2] if of_weights else tile[0], step))
    size = max(problem.dtype_in.bytes, problem.dtype_wei.bytes)
    return next((name for name, count, step in lines if (count * step + max(tile)) * size >= BUFFER_BYTES), "")
