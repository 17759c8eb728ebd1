"""Rules on kernels whose steps along k keep within a tap (AMD GPUs' pipeline ``taps``), and on their problems.

All lanes of a workgroup then read the same tap, which scalar instructions find; so channels fill whole steps, and
accesses whole vectors of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig, Triple
from tilewright_grouped_conv.config.pipelines import form_of
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.config.rules import Violation, rule_of
from tilewright_kit.types.vocabulary import size_of

__all__ = ["TAPS_RULES", "taps_mismatches"]

VECTOR_BYTES = 16
MOST_TAPS = 32
"""Bits of a word, which say of a pixel which taps meet the image."""
_AXIS_TAPS = {1: 32, 2: 16, 3: 10}
"""Bits of ``TapBits`` (``gpu/conv/image.hpp``) for the taps of an axis, by the number of axes."""
_REACH = 2**31
"""Bytes that offsets into a buffer reach."""


@rule_of("hip")
def taps_product(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """``taps``: forward, or the image's gradient, of a gathered image."""
    if not form_of(config.pipeline).whole_steps:
        return
    if config.direction is Direction.BACKWARD_WEIGHT:
        reason = "of the weights' gradient k runs over pixels, not taps"
    elif config.is_matrix and config.kind is not Kind.IMPLICIT:
        reason = "an image that is read as a matrix has no taps"
    else:
        return
    yield Violation("taps_product", "pipeline", config.pipeline, reason, {"pipeline": "compv3"})


@rule_of("hip")
def taps_vectors(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """``taps``: operands are read 16 bytes at a time."""
    if not form_of(config.pipeline).whole_steps or not config.is_matrix:
        return
    wanted: Triple = (VECTOR_BYTES // size_of(config.a), VECTOR_BYTES // size_of(config.b), config.vector_sizes[2])
    if wanted != config.vector_sizes:
        reason = f"pipeline {config.pipeline} reads A and B {VECTOR_BYTES} bytes at a time"
        yield Violation("taps_vectors", "vector_sizes", config.vector_sizes, reason, {"vector_sizes": wanted})


def taps_mismatches(problem: ConvProblem, config: ConvConfig) -> Iterator[Violation]:
    """Why channels do not fill whole steps, or bits and offsets do not reach all taps."""
    for reason in _reasons(problem, config):
        yield Violation("whole_taps", "pipeline", config.pipeline, reason)
        return


def _reasons(problem: ConvProblem, config: ConvConfig) -> Iterator[str]:
    geometry, depth = problem.geometry, config.tile[2]
    forward = problem.direction is Direction.FORWARD
    channels = geometry.cg if forward else geometry.kg
    if channels % depth:
        yield f"{channels} channels of a group do not fill steps of {depth}"
    if geometry.taps > MOST_TAPS:
        yield f"a filter has up to {MOST_TAPS} taps, not {geometry.taps}"
    if max(geometry.filter) > (most := _AXIS_TAPS[problem.ndim]):
        yield f"with {problem.ndim} axes a filter has up to {most} taps along each"
    view = problem.image if forward else problem.pixels  # how much of it offsets reach: launch.image_ranges
    if min(view.n, *view.spatial) < 0:
        yield f"pixels of {view.operand} follow each other backwards"
    # Lines of forward that a step reads; of the gradient all that a group has.
    weights, steps = problem.filter, (problem.filter.k, *problem.filter.spatial)
    if min(steps) < 0:
        yield f"taps of {weights.operand} follow each other backwards"
    lines = config.tile[1] if forward else geometry.kg
    within = sum((taps - 1) * step for taps, step in zip(geometry.filter, weights.spatial, strict=True)) + geometry.cg
    if (lines * weights.k + within) * size_of(config.b) >= _REACH:
        yield f"offsets do not reach all lines of {weights.operand} that a step reads"


TAPS_RULES = (taps_product, taps_vectors)
