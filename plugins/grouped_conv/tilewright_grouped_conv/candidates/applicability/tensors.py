"""Requirements of a kernel on a problem: layouts of tensors, copies that provide them, and limits."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_grouped_conv.candidates.applicability.gpu import gpu_mismatches, gpu_transforms
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.problem.layout import ImageView, Order, collapses
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.strided_copy.copies import Transform, transform_of
from tilewright_grouped_conv.vocabulary import Direction, Kind, layout_of
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.applicability import (
    canonical,
    other_signature,
    slices_asked,
    team_too_large,
    unpadded_sizes,
)

__all__ = [
    "common_mismatches",
    "needed_transforms",
    "needs_mapped_rows",
    "signature_mismatches",
    "with_signature",
]


# ---- how tensors must lie ----


def needed_transforms(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> tuple[Transform, ...]:
    """The copies without which the kernel cannot compute the problem, in the order in which a plan makes them."""
    if device.arch.kind != "cpu":
        return tuple(gpu_transforms(problem, config))
    wanted = Order.FIRST if config.channels_first else Order.LAST
    found = []
    for operand, reason in _wrong_images(problem, config):
        text = f"{operand} is copied to {wanted.value.replace('_', '-')}: {reason}"
        found.append(transform_of(problem, operand, wanted.value, text))
    return tuple(found)


def _wrong_images(problem: ConvProblem, config: ConvConfig) -> Iterator[tuple[str, str]]:
    """Images that do not lie as the kernel wants them, and why."""
    geometry = problem.geometry
    first = config.channels_first
    result = _result(problem)
    if config.is_matrix:
        for view, per_group in ((problem.image, geometry.cg), (problem.pixels, geometry.kg)):
            if first and view is not result:
                continue  # pixels are looked up one by one, and channels lie at any distance
            if first:
                if collapses(view, _sizes(problem, view), 1) not in (0, 1):
                    yield view.operand, "its pixels do not lie side by side"
            elif per_group > 1 and view.c != 1:
                yield view.operand, "the channels of a pixel do not lie side by side"
    else:
        wanted = Order.FIRST if first else Order.LAST
        what = "pixels of a line" if first else "channels of a pixel"
        for view, orders in ((problem.image, problem.image_orders), (problem.pixels, problem.own_pixel_orders)):
            if wanted not in orders:
                yield view.operand, f"the {what} do not lie side by side"
    for view in problem.d:
        # Rows of a product have one distance in D, and so have its items.
        if collapses(view, geometry.output, 1 if first else geometry.n) is None:
            yield view.operand, "its pixels do not lie at one distance"
        elif first and geometry.n > 1 and geometry.groups > 1 and view.n != view.g * geometry.groups:
            yield view.operand, "its images and groups do not lie at one distance"


def needs_mapped_rows(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> bool:
    """True if rows of the result lie at several distances, once the needed copies are made."""
    view = _result(problem)
    if not config.is_matrix:
        # Pixels are looked up one by one. On a GPU the flag says that the kernel gets a table of products.
        return view is problem.image and device.arch.kind != "cpu" and len(problem.phases(False)) > 1
    if view is None or config.channels_first:
        return False
    if len(problem.phases(False)) > 1:
        return True
    if any(item.operand == view.operand for item in needed_transforms(problem, config, device)):
        return False
    return collapses(view, _sizes(problem, view), problem.geometry.n) is None


def _result(problem: ConvProblem) -> ImageView | None:
    """The image that is written; None if that is a filter."""
    if problem.direction is Direction.FORWARD:
        return problem.pixels
    return problem.image if problem.direction is Direction.BACKWARD_DATA else None


def _sizes(problem: ConvProblem, view: ImageView) -> tuple[int, int, int]:
    return problem.geometry.input if view is problem.image else problem.geometry.output


# ---- what is computed ----


def with_signature(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> ConvConfig:
    """``config``'s algorithm for what ``problem`` asks. Where channels lie and slices of the reduction are the
    algorithm's, unless the caller asked.
    """
    fitted = config.replace(
        dtype_in=problem.dtype_in,
        dtype_wei=problem.dtype_wei.value,
        dtype_out=problem.dtype_out.value,
        layout=layout_of(problem.ndim, config.channels_first),
        ndim=problem.ndim,
        binary=problem.binary,
        unary=problem.unary,
        num_d_tensors=problem.num_d,
        dtype_d=tuple(dtype.value for dtype in problem.dtype_d),
        bias=problem.dtype_bias.value if problem.dtype_bias else "",
        scale=problem.scale,
        accumulate=problem.accumulate,
        split_k=problem.split_k or config.split_k,
    )
    mapped = needs_mapped_rows(problem, fitted, device)
    return fitted if mapped == fitted.mapped_rows else fitted.replace(mapped_rows=mapped)


def common_mismatches(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> Iterator[Violation]:
    """Why a kernel of any pipeline, for a problem's number of axes, cannot compute it on this device, even with
    copies."""
    mapped = needs_mapped_rows(problem, config, device)
    if mapped and not config.mapped_rows:
        reason = "pixels of the result lie at several distances"
        yield Violation("rows", "mapped_rows", False, reason, {"mapped_rows": True})
    yield from slices_asked(problem.split_k, config.split_k, "the reduction")
    yield from _shape(problem, config)
    if config.is_matrix:
        yield from unpadded_sizes(config, problem.phases(config.channels_first))
    yield from team_too_large(config, device)
    if device.arch.kind != "cpu":
        yield from gpu_mismatches(problem, config)


def signature_mismatches(problem: ConvProblem, config: ConvConfig) -> Iterator[Violation]:
    """Fields of a kernel that say other than the problem what is computed."""
    wanted: dict[str, tuple[object, object]] = {
        "dtype_in": (config.dtype_in, problem.dtype_in),
        "dtype_wei": (config.other_dtype, problem.dtype_wei.value),
        "dtype_out": (config.c, problem.dtype_out.value),
        "ndim": (config.ndim, problem.ndim),
        "binary": (canonical(config.binary), canonical(problem.binary)),
        "dtype_d": (config.d, tuple(dtype.value for dtype in problem.dtype_d)),
        "unary": (config.unary, problem.unary),
        "bias": (config.bias, problem.dtype_bias.value if problem.dtype_bias else ""),
        "scale": (config.scale, problem.scale),
        "accumulate": (config.accumulate, problem.accumulate),
    }
    yield from other_signature(wanted, unmendable=("dtype_d", "ndim"))


def _shape(problem: ConvProblem, config: ConvConfig) -> Iterator[Violation]:
    """Assumptions of a kernel: sizes that are compiled in, one channel per group, an image that is a matrix."""
    geometry = problem.geometry
    for field, have, want in (
        ("filter", config.fixed_filter, geometry.filter),
        ("stride", config.fixed_stride, geometry.stride),
        ("dilation", config.dilation, geometry.dilation),
    ):
        if any(mine and mine != asked for mine, asked in zip(have, want, strict=True)):
            yield Violation("constants", field, have, f"the problem's {field} is {want}, the kernel's {have}")
    if config.unpadded and any((*geometry.pad_begin, *geometry.pad_end)):
        yield Violation("constants", "specialization", config.specialization.value, "the image is padded")
    if config.kind is Kind.DEPTHWISE and (geometry.cg != 1 or geometry.kg != 1):
        reason = f"groups have {geometry.cg} input and {geometry.kg} output channels, not one of each"
        yield Violation("groups", "specialization", config.specialization.value, reason)
    if config.explicit_gemm:
        if not geometry.is_dense_pointwise:
            reason = "a filter of several taps, a stride or padding makes the image no matrix"
            yield Violation("matrix", "explicit_gemm", True, reason, {"explicit_gemm": False})
        elif any(
            collapses(view, geometry.output, 1 if config.channels_first else geometry.n) is None
            for view in (problem.image, problem.pixels)
        ):
            reason = "pixels do not lie at one distance"
            yield Violation("matrix", "explicit_gemm", True, reason, {"explicit_gemm": False})
