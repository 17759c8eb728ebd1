"""Sizes, paddings and strides of convolutions as people write them, and those of transposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright.types.spec import Spec

__all__ = ["Padding", "Sizes", "as_numbers", "room_behind", "transposed_padding", "transposed_size"]

Sizes = int | Sequence[int]
"""One number for all spatial axes, or one for each."""
Padding = int | Sequence[int] | str
"""One number; one for each spatial axis; all that come before and then all that come behind; or a word."""
_HALVES = ("same", "same_upper", "same_lower", "valid")


def as_numbers(value: Any) -> Any:
    """Numbers as the protocol has them; what are none is the server's to refuse."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [item.item() if isinstance(item, np.generic) else item for item in value]
    return value.item() if isinstance(value, np.generic) else value


def transposed_size(
    x: Spec, w: Spec, stride: Any, padding: Any, output_padding: Any, dilation: Any
) -> list[int] | None:
    """The spatial sizes of a transposed convolution; ``None`` where the server will refuse the operands anyhow."""
    count = len(x.shape) - 2
    if not 1 <= count <= 3 or len(w.shape) != len(x.shape):
        return None
    steps, gaps = _each("stride", stride, count), _each("dilation", dilation, count)
    extra = _each("output_padding", output_padding, count)
    for step, gap, more in zip(steps, gaps, extra, strict=True):
        if not 0 <= more < max(step, gap, 1):
            raise InvalidArgumentError(
                f"output_padding {more} does not go with stride {step} and dilation {gap}",
                field="output_padding",
                value=output_padding,
                rule="output_padding",
                fix="give zero or more, and less than the stride or the dilation",
            )
    before, behind = _both("padding", padding, count)
    return [
        whole - begin - end for whole, begin, end in zip(_whole(x, w, steps, gaps, extra), before, behind, strict=True)
    ]


def transposed_padding(
    x: Spec, w: Spec, stride: Any, padding: Any, output_padding: Any, dilation: Any, output_size: Any
) -> tuple[Any, Any]:
    """``padding`` and ``output_padding`` as numbers: with words, and with the size of the result in their place."""
    count = len(x.shape) - 2
    if not 1 <= count <= 3 or len(w.shape) != len(x.shape) or (output_size is None and not isinstance(padding, str)):
        return padding, output_padding
    if output_size is not None and any(_each("output_padding", output_padding, count)):
        raise InvalidArgumentError(
            "output_size and output_padding both say how large the result is",
            field="output_padding",
            value=output_padding,
            rule="output_size",
            fix="leave one of the two out",
        )
    steps, gaps = _each("stride", stride, count), _each("dilation", dilation, count)
    extra = _each("output_padding", output_padding, count)
    whole = _whole(x, w, steps, gaps, extra)
    padding = padding.lower() if isinstance(padding, str) else padding
    if isinstance(padding, str) and padding not in _HALVES:
        raise InvalidArgumentError(
            f"padding {padding!r} is not known",
            field="padding",
            value=padding,
            rule="attribute_choice",
            fix=f"give numbers, or one of {', '.join(_HALVES)}",
        )
    if not isinstance(padding, str) or padding == "valid":
        pads = [0] * count if isinstance(padding, str) else padding
        if output_size is None:
            return pads, output_padding
        before, behind = _both("padding", pads, count)
        wanted = _each("output_size", output_size, count)
        least = [full - begin - end for full, begin, end in zip(whole, before, behind, strict=True)]
        extra = [size - low for size, low in zip(wanted, least, strict=True)]
        limits = [max(step, gap, 1) - 1 for step, gap in zip(steps, gaps, strict=True)]
        if any(not 0 <= more <= most for more, most in zip(extra, limits, strict=True)):
            most = [low + limit for low, limit in zip(least, limits, strict=True)]
            raise InvalidArgumentError(
                f"the result has from {least} to {most} elements along its axes, not {wanted}",
                field="output_size",
                value=output_size,
                rule="output_size",
                fix="give sizes between these, or another padding",
            )
        return pads, extra
    same = [size * step for size, step in zip(x.shape[2:], steps, strict=True)]
    wanted = same if output_size is None else _each("output_size", output_size, count)
    surplus = [full - size for full, size in zip(whole, wanted, strict=True)]
    extra = [more + max(-much, 0) for more, much in zip(extra, surplus, strict=True)]
    taken = [max(much, 0) for much in surplus]
    less = [much // 2 for much in taken]
    more = [much - half for much, half in zip(taken, less, strict=True)]
    return ([*more, *less] if padding == "same_lower" else [*less, *more]), extra


def _whole(x: Spec, w: Spec, steps: Sequence[int], gaps: Sequence[int], extra: Sequence[int]) -> list[int]:
    """Spatial sizes of the result without padding."""
    sizes = zip(x.shape[2:], steps, gaps, w.shape[2:], extra, strict=True)
    return [(size - 1) * step + gap * (taps - 1) + more + 1 for size, step, gap, taps, more in sizes]


def _both(field: str, padding: Any, count: int) -> tuple[list[int], list[int]]:
    """Padding before each axis, and padding behind."""
    padding = as_numbers(padding)
    if isinstance(padding, list) and len(padding) == 2 * count:
        pads = _each(field, padding, 2 * count)
        return pads[:count], pads[count:]
    return (pads := _each(field, padding, count)), list(pads)


def room_behind(x: Any, size: Sequence[int], stride: Any, padding: Any, output_padding: Any) -> tuple[Any, Any]:
    """Operands of the same transposed convolution whose ``output_padding`` is less than its stride, as that of a
    gradient is: what is more takes away padding behind the result, and then adds zeros behind ``x``.
    """
    count = len(size)
    steps, extra = _each("stride", stride, count), _each("output_padding", output_padding, count)
    if all(more < max(step, 1) for step, more in zip(steps, extra, strict=True)):
        return x, padding
    before, behind = _both("padding", padding, count)
    zeros = [0] * count
    for axis, (step, more) in enumerate(zip(steps, extra, strict=True)):
        if more >= step:
            taken = min(more, behind[axis])
            behind[axis] -= taken
            zeros[axis] = (more - taken) // step
    if any(zeros):
        x = _with_zeros(x, zeros)
    return x, [*before, *behind]


def _with_zeros(x: Any, counts: Sequence[int]) -> Any:
    """A copy of ``x`` with zeros behind its spatial axes."""
    if isinstance(x, Spec):
        return Spec.of((*x.shape[:2], *(size + more for size, more in zip(x.shape[2:], counts, strict=True))), x.dtype)
    sizes = (*x.shape[:2], *(size + more for size, more in zip(x.shape[2:], counts, strict=True)))
    wide = np.zeros(sizes, x.dtype) if isinstance(x, np.ndarray) else x.new_zeros(sizes)
    wide[tuple(slice(0, size) for size in x.shape)] = x
    return wide


def _each(field: str, value: Any, count: int) -> list[int]:
    """One number for each axis. Raises ``InvalidArgumentError``."""
    value = as_numbers(value)
    values = list(value) if isinstance(value, list) else [value] * count
    if len(values) == 1:
        values *= count
    if len(values) != count or any(isinstance(item, bool) or not isinstance(item, int) for item in values):
        raise _bad_sizes(field, value, count, f"{field} does not fit {count} spatial axes")
    return values


def _bad_sizes(field: str, value: Any, count: int, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        reason, field=field, value=value, rule="one_or_ndim", fix=f"give one whole number, or {count}"
    )
