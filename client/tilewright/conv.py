"""Convolution and its gradients: arguments as people write them, turned into the generic call. All rules about shapes
and dtypes are the server's, but for those of ``conv_transpose``, which only this library knows by that name.

Nothing is copied for its layout: strides go to the server, so channels-last tensors (PyTorch's memory format, or a
transposed view in NumPy) are read as they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import numpy as np

from tilewright.arguments import flag
from tilewright.core import Core
from tilewright.device_arrays import alignment, all_recognised
from tilewright.dispatch import BuildPolicy, run, spec_of
from tilewright.driving import renamed
from tilewright.dtypes import DTypeLike
from tilewright.elementwise import addends, elementwise, scale_operand
from tilewright.errors import InvalidArgumentError
from tilewright.layout import Array, Spec
from tilewright.matrices import deliver, fold_scales, laid_out
from tilewright.plans import PlanState, prepare
from tilewright.steps import Flow

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
Operand = Any
"""An array, a nested list of numbers that NumPy reads, or a tensor that the server keeps."""
Sizes = int | Sequence[int]
"""One number for all spatial axes, or one for each."""
Padding = int | Sequence[int] | str
"""One number; one for each spatial axis; all that come before and then all that come behind; or a word."""
_WORDS = {"same": "same_upper"}
"""PyTorch's words for padding, and the operation's."""


@dataclass(frozen=True)
class _Asked:
    """A call, in the generic call's terms."""

    operation: str
    inputs: Mapping[str, Any]
    output: str
    out: Any
    """As the caller gave it."""
    target: Any
    """What the server is to write for it."""
    attributes: Mapping[str, Any]
    choice: Mapping[str, Any]


def _running(ask: Callable[Concatenate[Core, P], _Asked]) -> Callable[Concatenate[Core, P], Flow[Any]]:
    called = renamed(ask, ask.__name__.lstrip("_"), "Flow[Any]")

    @functools.wraps(called)
    def flow(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[Any]:
        asked = called(core, *args, **kwargs)
        outputs = {asked.output: asked.target}
        results = yield from run(core, asked.operation, asked.inputs, outputs, asked.attributes, **asked.choice)
        return deliver(core, asked.out, results[asked.output])

    return flow


def _planning(ask: Callable[Concatenate[Core, P], _Asked]) -> Callable[Concatenate[Core, P], Flow[PlanState]]:
    name = ask.__name__.lstrip("_")
    called = renamed(ask, f"plan_{name}", "Flow[PlanState]")

    @functools.wraps(called)
    def flow(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[PlanState]:
        asked = called(core, *args, **kwargs)
        outputs = {asked.output: asked.target}
        state = yield from prepare(core, asked.operation, asked.inputs, outputs, asked.attributes, **asked.choice)
        return state

    flow.__doc__ = f"""Prepare ``{name}`` for operands like these: arrays, ``Spec``, or ``(shape, dtype)``. Calling the
    plan does no planning.

    The plan takes the tensors in the order of ``{name}``'s arguments, the old gradient (``acc``, if it is to be added
    to) last, or by name, and ``out=``. It is made for the strides that it was given.
    """
    return flow


def _conv(
    core: Core,
    x: Operand,
    w: Operand,
    *,
    bias: Operand | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    d: Sequence[Operand] = (),
    binary: str | None = None,
    alpha: float = 1.0,
    scale: Operand | float | None = None,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    channels_last: bool | None = None,
    split_k: int | None = None,
    kernel: str | None = None,
    strategy: str | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> _Asked:
    """``activation(binary(alpha * scale * (x convolved with w) + bias, d...))``, in one pass; as PyTorch's ``conv1d``,
    ``conv2d`` and ``conv3d``.

    ``x`` is ``[N, C, *spatial]`` with one to three spatial axes, ``w`` is ``[K, C / groups, *filter]``; the result is
    ``[N, K, *out]``. Layouts are read off the strides: channels-last tensors are views of these shapes, and what
    kernels read fastest. Element types: equal ones, or fp8 with bf8.

    ``stride`` and ``dilation`` are a number or one for each spatial axis. ``padding`` is that, or all that is added
    before and then all that is added behind each axis, or "same" ("same_upper"; "same_lower" puts the odd one before)
    or "valid". ``bias`` is ``[K]``; ``d`` are tensors like the result, brought in by ``binary`` ("add", the default,
    or "multiply"); ``activation`` and ``clamp`` are those of ``gemm``. ``scale`` is a number or one for each of the K
    channels. ``out`` is an array to write the result into; without it the result is laid out as ``x``, or as
    ``channels_last`` says. The other arguments, and the errors, are those of ``run``.

        >>> y = client.conv(x, w, bias=b, padding=1, activation="relu")  # doctest: +SKIP
    """
    alpha, scale, _ = fold_scales(x, alpha, scale, None)
    inputs = {"x": x, "w": w, "bias": bias, **addends(d), "scale": scale_operand(scale)}
    words = elementwise(
        alpha=alpha, binary=binary, count_d=len(d), activation=activation, clamp=clamp, out_dtype=out_dtype
    )
    words |= _geometry(stride, padding, dilation, groups) | {"layout": _layout(channels_last), "split_k": split_k}
    choice = {"kernel": kernel, "strategy": strategy, "build": build, "device": device, "timeout": timeout}
    return _asked(core, "conv", inputs, "y", out, words, choice)


def _conv_backward_data(
    core: Core,
    dy: Operand,
    w: Operand,
    *,
    input_size: Sizes | None = None,
    bias: Operand | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    channels_last: bool | None = None,
    split_k: int | None = None,
    kernel: str | None = None,
    strategy: str | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> _Asked:
    """The gradient of ``conv`` for its ``x``, from ``dy`` ``[N, K, *out]`` and ``w`` ``[K, C / groups, *filter]``:
    ``[N, C, *input_size]``.

    ``input_size`` are the spatial sizes of ``x``; they follow from ``out`` if that is given. With ``accumulate`` the
    gradient is added to what ``out`` holds. ``bias`` ``[C]`` and ``activation`` are for transposed convolution; the
    other arguments are those of ``conv``.
    """
    inputs = {"dy": dy, "w": w, "bias": bias}
    words = elementwise(alpha=alpha, activation=activation, clamp=clamp, out_dtype=out_dtype)
    words |= _geometry(stride, padding, dilation, groups)
    words |= {"input_size": _for_each(input_size, dy, "dy"), "layout": _layout(channels_last), "split_k": split_k}
    choice = {"kernel": kernel, "strategy": strategy, "build": build, "device": device, "timeout": timeout}
    return _asked(core, "conv_backward_data", inputs, "dx", out, words, choice, accumulate)


def _conv_backward_weight(
    core: Core,
    x: Operand,
    dy: Operand,
    *,
    filter_size: Sizes | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    alpha: float = 1.0,
    accumulate: bool = False,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    channels_last: bool | None = None,
    split_k: int | None = None,
    kernel: str | None = None,
    strategy: str | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> _Asked:
    """The gradient of ``conv`` for its ``w``, from ``x`` ``[N, C, *spatial]`` and ``dy`` ``[N, K, *out]``:
    ``[K, C / groups, *filter_size]``.

    ``filter_size`` are the filter's sizes; they follow from ``out`` if that is given. With ``accumulate`` the gradient
    is added to what ``out`` holds. The sums are made in a fixed order, so equal calls have equal results. The other
    arguments are those of ``conv``.
    """
    words = elementwise(alpha=alpha, out_dtype=out_dtype) | _geometry(stride, padding, dilation, groups)
    words |= {"filter_size": _for_each(filter_size, x, "x"), "layout": _layout(channels_last), "split_k": split_k}
    choice = {"kernel": kernel, "strategy": strategy, "build": build, "device": device, "timeout": timeout}
    return _asked(core, "conv_backward_weight", {"x": x, "dy": dy}, "dw", out, words, choice, accumulate)


def _conv_transpose(
    core: Core,
    x: Operand,
    w: Operand,
    *,
    bias: Operand | None = None,
    stride: Sizes = 1,
    padding: int | Sequence[int] = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    alpha: float = 1.0,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    channels_last: bool | None = None,
    kernel: str | None = None,
    strategy: str | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> _Asked:
    """Transposed convolution, as PyTorch's ``conv_transpose1d``, ``conv_transpose2d`` and ``conv_transpose3d``:
    ``conv_backward_data`` by another name.

    ``x`` is ``[N, C, *spatial]``, ``w`` is ``[C, K / groups, *filter]`` and ``bias`` is ``[K]``; the result is
    ``[N, K, *out]`` with ``out = (spatial - 1) * stride - padding before - padding behind + dilation * (filter - 1) +
    output_padding + 1``. ``output_padding`` is less than ``stride``: it says which of the sizes is meant that a
    convolution with that stride maps to those of ``x``. The other arguments are those of ``conv``.
    """
    size = _transposed_size(spec_of(x, "x"), spec_of(w, "w"), stride, padding, output_padding, dilation)
    inputs = {"dy": x, "w": w, "bias": bias}
    words = elementwise(alpha=alpha, activation=activation, clamp=clamp, out_dtype=out_dtype)
    words |= _geometry(stride, padding, dilation, groups)
    words |= {"input_size": size, "layout": _layout(channels_last)}
    choice = {"kernel": kernel, "strategy": strategy, "build": build, "device": device, "timeout": timeout}
    return _asked(core, "conv_backward_data", inputs, "dx", out, words, choice)


conv, plan_conv = _running(_conv), _planning(_conv)
conv_backward_data, plan_conv_backward_data = _running(_conv_backward_data), _planning(_conv_backward_data)
conv_backward_weight, plan_conv_backward_weight = _running(_conv_backward_weight), _planning(_conv_backward_weight)
conv_transpose, plan_conv_transpose = _running(_conv_transpose), _planning(_conv_transpose)


def _asked(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    output: str,
    out: Any,
    words: Mapping[str, Any],
    choice: Mapping[str, Any],
    accumulate: bool = False,
) -> _Asked:
    given = {name: value for name, value in inputs.items() if value is not None}
    words = {name: value for name, value in words.items() if value is not None}
    if flag("accumulate", accumulate):
        if out is None:
            raise InvalidArgumentError(
                "there is nothing to add the gradient to",
                field="out",
                value=None,
                rule="accumulate_output",
                fix="pass the gradient so far as out, or leave accumulate out",
            )
        given["acc"] = out
        words["accumulate"] = True
    given, target = all_recognised(given), laid_out(core, out)
    if (least := alignment((*list(given.values())[:2], target))) is not None:
        words["alignment"] = least
    return _Asked(operation, given, output, out, target, words, choice)


def _geometry(stride: Any, padding: Any, dilation: Any, groups: Any) -> dict[str, Any]:
    padding = _WORDS.get(padding, padding) if isinstance(padding, str) else _sizes(padding)
    return {"stride": _sizes(stride), "padding": padding, "dilation": _sizes(dilation), "groups": groups}


def _sizes(value: Any) -> Any:
    """Numbers as the protocol has them; what are none is the server's to refuse."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [item.item() if isinstance(item, np.generic) else item for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _for_each(size: Any, image: Any, field: str) -> Any:
    """A size for each spatial axis of an image."""
    return [size] * (len(spec_of(image, field).shape) - 2) if isinstance(size, int) else _sizes(size)


def _layout(channels_last: bool | None) -> str | None:
    if channels_last is None:
        return None
    return "channels_last" if flag("channels_last", channels_last) else "channels_first"


def _transposed_size(
    x: Spec, w: Spec, stride: Any, padding: Any, output_padding: Any, dilation: Any
) -> list[int] | None:
    """The spatial sizes of a transposed convolution; ``None`` where the server will refuse the operands anyhow."""
    count = len(x.shape) - 2
    if not 1 <= count <= 3 or len(w.shape) != len(x.shape):
        return None
    if isinstance(padding, str):
        raise _bad_sizes("padding", padding, count, "transposed convolution takes no words for padding")
    steps, gaps = _each("stride", stride, count), _each("dilation", dilation, count)
    extra = _each("output_padding", output_padding, count)
    for step, more in zip(steps, extra, strict=True):
        if not 0 <= more < max(step, 1):
            raise InvalidArgumentError(
                f"output_padding {more} does not go with stride {step}",
                field="output_padding",
                value=output_padding,
                rule="output_padding",
                fix="give zero or more, and less than the stride",
            )
    padding = _sizes(padding)
    both = isinstance(padding, list) and len(padding) == 2 * count
    pads = _each("padding", padding, 2 * count if both else count)
    ends = pads[count:] if both else pads
    return [
        (size - 1) * step - begin - end + gap * (taps - 1) + more + 1
        for size, step, begin, end, gap, taps, more in zip(
            x.shape[2:], steps, pads[:count], ends, gaps, w.shape[2:], extra, strict=True
        )
    ]


def _each(field: str, value: Any, count: int) -> list[int]:
    """One number for each axis. Raises ``InvalidArgumentError``."""
    value = _sizes(value)
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
