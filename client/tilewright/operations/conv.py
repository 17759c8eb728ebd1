"""Convolution and its gradients: arguments as people write them, turned into the generic call. All rules about shapes
and dtypes are the server's, but for those of ``conv_transpose``, which only this library knows by that name.

Nothing is copied for its layout: strides go to the server, so channels-last tensors (PyTorch's memory format, or a
transposed view in NumPy) are read as they lie.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tilewright.dispatch.operands.request import spec_of
from tilewright.errors import InvalidArgumentError, TilewrightError
from tilewright.operations.call import CHOICE, Asked, Choice, choice_of, planning, running
from tilewright.operations.conv_sizes import (
    Padding,
    Sizes,
    as_numbers,
    room_behind,
    transposed_padding,
    transposed_size,
)
from tilewright.operations.epilogue import addends, elementwise, scale_operand
from tilewright.operations.matrices import fold_scales, laid_out
from tilewright.session.state import Core
from tilewright.tensor.interop import alignment, all_recognised
from tilewright.transport.rpc import Flow
from tilewright.types.arguments import flag
from tilewright.types.dtypes import DTypeLike
from tilewright.types.spec import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "conv",
    "conv_backward_data",
    "conv_backward_weight",
    "conv_transpose",
    "plan_conv",
    "plan_conv_backward_data",
    "plan_conv_backward_weight",
    "plan_conv_transpose",
]

P = ParamSpec("P")
T = TypeVar("T")

Operand = Any
"""An array, a nested list of numbers that NumPy reads, or a tensor that the server keeps."""
_WORDS = {"same": "same_upper"}
"""PyTorch's words for padding, and the operation's."""


class _Common(Choice, total=False):
    """Arguments of every direction."""

    stride: Sizes
    dilation: Sizes
    groups: int
    alpha: float
    out_dtype: DTypeLike | None
    out: Array | None
    channels_last: bool | None


_COMMON: dict[str, Any] = {
    "stride": 1, "dilation": 1, "groups": 1, "alpha": 1.0, "out_dtype": None, "out": None, "channels_last": None,
    **CHOICE,
}  # fmt: skip
_TAKES = """The plan takes the tensors in the order of the call's arguments, the old gradient (``acc``, if it is to be
    added to) last, or by name, and ``out=``. It is made for the strides that it was given."""


def _conv(
    core: Core,
    /,
    x: Operand,
    w: Operand,
    *,
    bias: Operand | None = None,
    padding: Padding = 0,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    slope: float | None = None,
    d: Sequence[Operand] = (),
    binary: str | None = None,
    scale: Operand | float | None = None,
    split_k: int | None = None,
    **options: Unpack[_Common],
) -> Asked:
    """``activation(binary(alpha * scale * (x convolved with w) + bias, d...))``, in one pass; as PyTorch's ``conv1d``,
    ``conv2d`` and ``conv3d``.

    ``x`` is ``[N, C, *spatial]`` with one to three spatial axes, ``w`` is ``[K, C / groups, *filter]``; the result is
    ``[N, K, *out]``. Layouts are read off the strides: channels-last tensors are views of these shapes, and what
    kernels read fastest. Element types: equal ones, or fp8 with bf8.

    ``stride`` and ``dilation`` are a number or one for each spatial axis. ``padding`` is that, or all that is added
    before and then all that is added behind each axis, or "same" ("same_upper"; "same_lower" puts the odd one before)
    or "valid". ``bias`` is ``[K]``; ``d`` are tensors like the result, brought in by ``binary`` ("add", the default,
    or "multiply"); ``activation``, ``clamp`` and ``slope`` are those of ``gemm``. ``scale`` is a number or one for each
    of the K channels. ``out`` is an array to write the result into; without it the result is laid out as ``x``, or as
    ``channels_last`` says. The other arguments, and the errors, are those of ``run``.

        >>> y = client.conv(x, w, bias=b, padding=1, activation="relu")  # doctest: +SKIP
    """
    given = {**_COMMON, **options}
    given["alpha"], scale, _ = fold_scales(x, given["alpha"], scale, None)
    inputs = {"x": x, "w": w, "bias": bias, **addends(d), "scale": scale_operand(scale)}
    words = _words(given, padding, binary=binary, count_d=len(d), activation=activation, clamp=clamp, slope=slope)
    return _asked(core, "conv", inputs, "y", given, words | {"split_k": split_k})


def _conv_backward_data(
    core: Core,
    /,
    dy: Operand,
    w: Operand,
    *,
    input_size: Sizes | None = None,
    bias: Operand | None = None,
    padding: Padding = 0,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    slope: float | None = None,
    accumulate: bool = False,
    split_k: int | None = None,
    **options: Unpack[_Common],
) -> Asked:
    """The gradient of ``conv`` for its ``x``, from ``dy`` ``[N, K, *out]`` and ``w`` ``[K, C / groups, *filter]``:
    ``[N, C, *input_size]``.

    ``input_size`` are the spatial sizes of ``x``; they follow from ``out`` if that is given. With ``accumulate`` the
    gradient is added to what ``out`` holds. ``bias`` ``[C]`` and ``activation`` are for transposed convolution; the
    other arguments are those of ``conv``.
    """
    given = {**_COMMON, **options}
    inputs = {"dy": dy, "w": w, "bias": bias}
    words = _words(given, padding, activation=activation, clamp=clamp, slope=slope)
    words |= {"input_size": _for_each(input_size, dy, "dy"), "split_k": split_k}
    return _asked(core, "conv_backward_data", inputs, "dx", given, words, accumulate)


def _conv_backward_weight(
    core: Core,
    /,
    x: Operand,
    dy: Operand,
    *,
    filter_size: Sizes | None = None,
    padding: Padding = 0,
    accumulate: bool = False,
    split_k: int | None = None,
    **options: Unpack[_Common],
) -> Asked:
    """The gradient of ``conv`` for its ``w``, from ``x`` ``[N, C, *spatial]`` and ``dy`` ``[N, K, *out]``:
    ``[K, C / groups, *filter_size]``.

    ``filter_size`` are the filter's sizes; they follow from ``out`` if that is given. With ``accumulate`` the gradient
    is added to what ``out`` holds. The sums are made in a fixed order, so equal calls have equal results. The other
    arguments are those of ``conv``.
    """
    given = {**_COMMON, **options}
    words = _words(given, padding) | {"filter_size": _for_each(filter_size, x, "x"), "split_k": split_k}
    return _asked(core, "conv_backward_weight", {"x": x, "dy": dy}, "dw", given, words, accumulate)


def _conv_transpose(
    core: Core,
    /,
    x: Operand,
    w: Operand,
    *,
    bias: Operand | None = None,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    output_size: Sizes | None = None,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    slope: float | None = None,
    **options: Unpack[_Common],
) -> Asked:
    """Transposed convolution, as PyTorch's ``conv_transpose1d``, ``conv_transpose2d`` and ``conv_transpose3d``:
    ``conv_backward_data`` by another name.

    ``x`` is ``[N, C, *spatial]``, ``w`` is ``[C, K / groups, *filter]`` and ``bias`` is ``[K]``; the result is ``[N, K,
    *out]`` with ``out = (spatial - 1) * stride - padding before - padding behind + dilation * (filter - 1) +
    output_padding + 1``. ``output_padding`` is less than ``stride`` or ``dilation``: it says which of the sizes is
    meant that a convolution with that stride maps to those of ``x``, or adds some that see less of it. It follows from
    ``output_size``, the spatial sizes of the result, where these are given beside numbers of padding.

    The words "same" ("same_upper") and "same_lower" make the result ``output_size``, or else ``spatial * stride``: what
    is too much is taken away in halves, an odd one behind, or with "same_lower" before (ONNX's ``auto_pad``; its
    ``output_shape`` alone is "same_lower"). The other arguments are those of ``conv``.
    """
    given = {**_COMMON, **options}
    stride, dilation = given["stride"], given["dilation"]
    specs = spec_of(x, "x"), spec_of(w, "w")
    padding, output_padding = transposed_padding(*specs, stride, padding, output_padding, dilation, output_size)
    size = transposed_size(*specs, stride, padding, output_padding, dilation)
    if size is not None:
        if min(size) < 1:
            raise InvalidArgumentError(
                f"the result would have the sizes {size}",
                field="padding",
                value=padding,
                rule="output_size",
                fix="use less padding, or larger images or filters",
            )
        x, padding = room_behind(x, size, stride, padding, output_padding)
    inputs = {"dy": x, "w": w, "bias": bias}
    words = _words(given, padding, activation=activation, clamp=clamp, slope=slope) | {"input_size": size}
    return _asked(core, "conv_backward_data", inputs, "dx", given, words)


conv, plan_conv = running(_conv, _COMMON), planning(_conv, _TAKES, _COMMON)
conv_backward_data = running(_conv_backward_data, _COMMON)
plan_conv_backward_data = planning(_conv_backward_data, _TAKES, _COMMON)
conv_backward_weight = running(_conv_backward_weight, _COMMON)
plan_conv_backward_weight = planning(_conv_backward_weight, _TAKES, _COMMON)


def _by_own_names(flow: Callable[Concatenate[Core, P], Flow[T]]) -> Callable[Concatenate[Core, P], Flow[T]]:
    """The same flow of a transposed convolution, whose errors name its arguments as its caller does: what is ``x`` here
    is ``dy`` to the server, and its result ``dx``.
    """

    @functools.wraps(flow)
    def named(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[T]:
        try:
            return (yield from flow(core, *args, **kwargs))
        except TilewrightError as error:
            for part in ("message", "field", "fix"):
                text = re.sub(r"\bd[xy]\b", lambda found: {"dy": "x", "dx": "out"}[found[0]], getattr(error, part))
                setattr(error, part, text)
            error.args = (error.message,)
            raise

    return named


conv_transpose = _by_own_names(running(_conv_transpose, _COMMON))
plan_conv_transpose = _by_own_names(planning(_conv_transpose, _TAKES, _COMMON))


def _asked(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    output: str,
    given: Mapping[str, Any],
    words: Mapping[str, Any],
    accumulate: bool = False,
) -> Asked:
    operands = {name: value for name, value in inputs.items() if value is not None}
    words = {name: value for name, value in words.items() if value is not None}
    out = given["out"]
    if flag("accumulate", accumulate):
        if out is None:
            raise InvalidArgumentError(
                "there is nothing to add the gradient to",
                field="out",
                value=None,
                rule="accumulate_output",
                fix="pass the gradient so far as out, or leave accumulate out",
            )
        operands["acc"] = out
        words["accumulate"] = True
    operands, target = all_recognised(operands), laid_out(core, out)
    if (least := alignment((*list(operands.values())[:2], target))) is not None:
        words["alignment"] = least
    return Asked(operation, operands, words, choice_of(given), {output: out}, {output: target})


def _words(given: Mapping[str, Any], padding: Any, **epilogue: Any) -> dict[str, Any]:
    """Attributes that every direction has. Raises ``InvalidArgumentError`` for words that are none."""
    found = elementwise(alpha=given["alpha"], out_dtype=given["out_dtype"], **epilogue)
    if isinstance(padding, str):
        found["padding"] = _WORDS.get(padding.lower(), padding.lower())
    else:
        found["padding"] = as_numbers(padding)
    found |= {name: as_numbers(given[name]) for name in ("stride", "dilation")}
    return found | {"groups": given["groups"], "layout": _layout(given["channels_last"])}


def _for_each(size: Any, image: Any, field: str) -> Any:
    """A size for each spatial axis of an image."""
    return [size] * (len(spec_of(image, field).shape) - 2) if isinstance(size, int) else as_numbers(size)


def _layout(channels_last: bool | None) -> str | None:
    if channels_last is None:
        return None
    return "channels_last" if flag("channels_last", channels_last) else "channels_first"
