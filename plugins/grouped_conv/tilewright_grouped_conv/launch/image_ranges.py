"""Ranges of images that one launch on a GPU takes, where offsets of 32 bits do not reach all of a tensor.

Kernels that gather pixels find them with 32-bit numbers of elements. On AMD GPUs these become offsets in bytes into a
buffer of 2 GiB: what lies beyond it reads as zero (``gpu/amd/image_loader.hpp``, ``gpu/amd/conv/sources.hpp``,
``load_checked`` of ``gpu/conv/depthwise/tile.hpp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import form_of
from tilewright_grouped_conv.launch.kernel_args import gathered, spatial_sizes
from tilewright_grouped_conv.problem.layout import ImageView
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.contract.plan import Pointer
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["BUFFER_BYTES", "filter_reach", "has_wide_offsets", "image_ranges", "images_at_once", "parts_of"]

_REACH = 2**31
"""Elements that offsets of 32 bits reach."""
BUFFER_BYTES = 2**31
"""Bytes of a buffer of an AMD GPU."""


def has_wide_offsets(config: ConvConfig) -> bool:
    """True if a GPU's kernel has offsets of 64 bits (or a copy engine's): no image is too long for it."""
    return form_of(config.pipeline).wide_offsets or (config.is_matrix and config.kind is Kind.POINTWISE)


def filter_reach(problem: ConvProblem) -> int:
    """Elements from a filter's first tap to its last one, in the gathered image."""
    geometry = problem.geometry
    steps = zip(geometry.filter, geometry.dilation, gathered(problem).spatial, strict=True)
    return sum((taps - 1) * dilation * step for taps, dilation, step in steps)


def images_at_once(problem: ConvProblem, config: ConvConfig, arch: ArchSpec) -> tuple[int, str]:
    """Images that one launch takes at most (0: not even one), and the tensor that decides it; all of them, and no name,
    where nothing does.
    """
    images, name = problem.geometry.n, ""
    if has_wide_offsets(config):
        return images, name
    for view in (problem.image, problem.pixels, *problem.d):
        room = _elements(problem, config, arch, view) - _span(problem, view)
        count = min(room // max(view.n, 1) + 1, images) if room >= 0 else 0
        if count < images:
            images, name = count, view.operand
    return images, name


def _elements(problem: ConvProblem, config: ConvConfig, arch: ArchSpec, view: ImageView) -> int:
    """Elements that a launch's offsets reach: the last one is below it."""
    if arch.kind != "hip" or view is not gathered(problem):
        return _REACH - 1
    # Offsets of whole taps count from as far ahead of the image as a filter reaches, and beyond it as far.
    beside = 2 * filter_reach(problem) if form_of(config.pipeline).whole_steps else 0
    return (BUFFER_BYTES - 1) // problem.dtype_in.bytes - beside


def _span(problem: ConvProblem, view: ImageView) -> int:
    """Elements of one image, from its first to its last."""
    geometry = problem.geometry
    channels = geometry.cg if view is problem.image else geometry.kg
    sizes = (geometry.groups, channels, *spatial_sizes(problem, view))
    return 1 + sum((size - 1) * step for size, step in zip(sizes, (view.g, view.c, *view.spatial), strict=True))


def image_ranges(
    problem: ConvProblem, config: ConvConfig, arch: ArchSpec, acc: Pointer
) -> Iterator[tuple[ConvProblem, Pointer]]:
    """The problem, or with ``split_image`` its parts, of as many images as offsets reach, all about as long. With each
    part comes where its old gradient begins.
    """
    images = problem.geometry.n
    most, _ = images_at_once(problem, config, arch)
    if not config.split_image or not 0 < most < images:
        yield problem, acc
        return
    for first in range(0, images, most):
        part = replace(
            problem,
            geometry=replace(problem.geometry, n=min(most, images - first)),
            image=_from(problem.image, first),
            pixels=_from(problem.pixels, first),
            d=tuple(_from(view, first) for view in problem.d),
        )
        yield part, acc if problem.direction is Direction.BACKWARD_WEIGHT else _moved(problem, acc, first)


def parts_of(problem: ConvProblem, config: ConvConfig, arch: ArchSpec) -> int:
    """Ranges of images that the problem takes, whether the configuration allows several or not."""
    return ceil_div(problem.geometry.n, max(images_at_once(problem, config, arch)[0], 1))


def _moved(problem: ConvProblem, acc: Pointer, first: int) -> Pointer:
    result = problem.image if problem.direction is Direction.BACKWARD_DATA else problem.pixels
    return Pointer(acc.operand, acc.offset + first * result.n * problem.dtype_out.bytes)


def _from(view: ImageView, image: int) -> ImageView:
    return replace(view, offset=view.offset + image * view.n)
