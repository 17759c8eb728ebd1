"""Convolutions and their gradients as rows of files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy.typing as npt

from tilewright_kit.commands.cases import (
    DTYPES,
    NO,
    YES,
    add_bias,
    check_dtype,
    check_positive,
    check_steps,
    check_words,
    float_output,
    step_attributes,
    wrong,
)
from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["DIRECTIONS", "LAYOUTS", "TRANSPOSED", "ConvCase"]

Array = npt.NDArray[Any]

DIRECTIONS = {"fwd": "conv", "bwd_data": "conv_backward_data", "bwd_weight": "conv_backward_weight"}
"""Names in shape files, and the operations that they mean."""
TRANSPOSED = "transposed"
"""A direction of rows that are read: their C and sizes are those of the input."""
LAYOUTS = ("channels_last", "channels_first")
_TRIPLE = re.compile(r"\d+(x\d+){0,2}")
_PADDING = re.compile(r"\d+(x\d+){0,2}(-\d+(x\d+){0,2})?")


@dataclass(frozen=True, slots=True)
class ConvCase:
    """y [N, K, *out] = activation(scale * conv(x [N, C, *size], w [K, C / groups, *filter]) + bias, D...), or one of
    its gradients. C and K count all groups.
    """

    family: ClassVar[str] = "conv"
    sizes_as_text: ClassVar[Sequence[str]] = ("filter", "stride", "padding", "dilation", "size")

    n: int
    c: int
    k: int
    size: str
    """Spatial sizes of x, one to three: ``56x56``."""
    filter: str
    """``3x3``; one number is for all axes, here and below."""
    stride: str = "1"
    padding: str = "0"
    """``1``, ``1x0``, or what comes before and what behind: ``0x0-1x1``."""
    dilation: str = "1"
    groups: int = 1
    direction: str = "fwd"
    """``fwd``, ``bwd_data`` or ``bwd_weight``."""
    dtype: str = "fp32"
    layout: str = "channels_last"
    """``channels_last`` or ``channels_first``, of every tensor."""
    out_dtype: str = ""
    bias: str = ""
    """Element type; ``yes`` is that of the output, or fp32 if that is whole numbers."""
    activation: str = ""
    d: int = 0
    """Number of D operands of the output's shape."""
    binary: str = ""
    scale: str = ""
    """``tensor`` or ``channel``."""
    accumulate: str = ""
    """``yes``: a gradient is added to the one before."""
    split_k: int = 0
    alpha: str = ""
    """Factor of the sums."""
    clamp: str = ""
    """``low:high``, either of which may be left out."""
    slope: str = ""
    """Factor below zero of ``LeakyRelu`` and ``Elu``."""

    def written(self, where: str) -> ConvCase:
        """Itself, if its words can be read. Raises ``InvalidArgumentError``."""
        check_positive(self, where, ("n", "c", "k", "groups"))
        check_dtype(self, where)
        allowed = {"scale": ("", "tensor", "channel"), "accumulate": (*YES, *NO)}
        check_words(self, where, {"direction": tuple(DIRECTIONS), "layout": LAYOUTS} | allowed)
        check_steps(self, where)
        for name in ("size", "filter", "stride", "dilation"):
            if not _TRIPLE.fullmatch(getattr(self, name)):
                raise wrong(
                    where, name, getattr(self, name), f"{name} is no size", "write it as 3x3, or 3 for all axes"
                )
        if not _PADDING.fullmatch(self.padding):
            fix = "write it as 1, 1x1, or what comes before and behind: 0x0-1x1"
            raise wrong(where, "padding", self.padding, "padding is no size", fix)
        for name in ("filter", "stride", "dilation", "padding"):
            for part in getattr(self, name).split("-"):
                if part.count("x") + 1 not in (1, self.ndim):
                    fix = f"give one number, or {self.ndim}"
                    raise wrong(where, name, getattr(self, name), f"there are {self.ndim} spatial axes", fix)
        for name, values in (("size", self.sizes), ("filter", self.filters), ("stride", self.strides)):
            if min(values) < 1:
                raise wrong(where, name, getattr(self, name), f"{name} must be positive", "give 1 or more")
        return self

    def transposed(self, where: str) -> ConvCase:
        """The gradient that a transposed convolution from C to K channels is, whose sizes are its input's.

        Raises ``InvalidArgumentError``.
        """
        if self.direction != "fwd":
            raise wrong(where, "direction", self.direction, "a transposed convolution is forward", "leave it out")
        begins, ends = self.pads
        rows = zip(self.sizes, begins, ends, self.filters, self.dilations, self.strides, strict=True)
        sizes = [(size - 1) * step - begin - end + (taps - 1) * gap + 1 for size, begin, end, taps, gap, step in rows]
        if min(sizes) < 1:
            raise wrong(where, "padding", self.padding, "padding leaves nothing of the result", "pad by less")
        size = "x".join(map(str, sizes))
        return dataclasses.replace(self, c=self.k, k=self.c, size=size, direction="bwd_data")

    def checked(self, where: str) -> ConvCase:
        """Itself, if it can be computed. Raises ``InvalidArgumentError``."""
        self.written(where)
        self.fitting(where)
        for name in ("c", "k"):
            if getattr(self, name) % self.groups:
                fix = f"use a multiple of {self.groups}, or other groups"
                raise wrong(where, name, getattr(self, name), f"{name} is no multiple of the groups", fix)
        if min(self.outputs) < 1:
            raise wrong(where, "filter", self.filter, "the filter is larger than the padded image", "pad by more")
        return self

    def fitting(self, where: str) -> ConvCase:
        """Itself, if its direction has a use for every column. Raises ``InvalidArgumentError``."""
        unused = {
            "fwd": ("accumulate",),
            "bwd_data": ("scale", "d"),
            "bwd_weight": ("bias", "scale", "d"),
        }[self.direction]
        for name in unused:
            value = getattr(self, name)
            if value and str(value).lower() not in NO:
                reason = f"{name} has no effect in the direction {self.direction}"
                raise wrong(where, name, value, reason, "leave it out")
        return self

    # ---- sizes, one for each axis ----

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(int, self.size.split("x")))

    @property
    def ndim(self) -> int:
        return self.size.count("x") + 1

    @property
    def filters(self) -> tuple[int, ...]:
        return _each(self.filter, self.ndim)

    @property
    def strides(self) -> tuple[int, ...]:
        return _each(self.stride, self.ndim)

    @property
    def dilations(self) -> tuple[int, ...]:
        return _each(self.dilation, self.ndim)

    @property
    def pads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Padding before, and behind."""
        begin, _, end = self.padding.partition("-")
        return _each(begin, self.ndim), _each(end or begin, self.ndim)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Spatial sizes of y: (size + pads - ((filter - 1) * dilation + 1)) // stride + 1."""
        begins, ends = self.pads
        rows = zip(self.sizes, begins, ends, self.filters, self.dilations, self.strides, strict=True)
        return tuple(
            (size + begin + end - ((taps - 1) * gap + 1)) // step + 1 for size, begin, end, taps, gap, step in rows
        )

    # ---- what sweeps ask ----

    @property
    def operation(self) -> str:
        return DIRECTIONS[self.direction]

    @property
    def label(self) -> str:
        """For people: ``fwd 32x64x64x56x56:3x3s1p1g32 fp16 +bias Relu``."""
        geometry = f"{self.n}x{self.c}x{self.k}x{self.size}:{self.filter}s{self.stride}p{self.padding}"
        geometry += f"d{self.dilation}" * (self.dilation != "1") + f"g{self.groups}" * (self.groups > 1)
        parts = [self.direction, geometry, self.dtype]
        parts += [self.layout] if self.layout != LAYOUTS[0] else []
        parts += [f"+{name}" for name in ("bias", "d", "scale") if getattr(self, name)]
        parts += ["+acc"] if self.accumulates else []
        parts += [f"out {self.out_dtype}"] if self.out_dtype else []
        parts += [f"*{self.alpha}"] if self.alpha else []
        parts += [self.activation] if self.activation else []
        parts += [f"slope {self.slope}"] if self.slope else []
        parts += [f"clamp {self.clamp}"] if self.clamp else []
        return " ".join(parts)

    @property
    def flops(self) -> int:
        """2 N K out C/G taps, in every direction."""
        return 2 * self.n * self.k * prod(self.outputs) * (self.c // self.groups) * prod(self.filters)

    @property
    def depth(self) -> int:
        taps = prod(self.filters)
        if self.direction == "bwd_weight":
            return self.n * prod(self.outputs)
        return taps * (self.c if self.direction == "fwd" else self.k) // self.groups

    @property
    def roundings(self) -> int:
        return 1

    @property
    def is_plain(self) -> bool:
        fused = self.bias or self.activation or self.d or self.scale or self.alpha or self.clamp
        return not (fused or self.accumulates)

    @property
    def accumulates(self) -> bool:
        return self.accumulate.lower() in YES

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def tensor(self, dtype: str, shape: Sequence[int]) -> TensorDesc:
        """An image or a filter in the case's layout; its second axis are the channels."""
        if self.layout == "channels_first":
            return TensorDesc.of(dtype, tuple(shape))
        strides = [1] * len(shape)
        step = shape[1]
        for axis in (*range(len(shape) - 1, 1, -1), 0):
            strides[axis] = step
            step *= shape[axis]
        return TensorDesc.of(dtype, tuple(shape), tuple(strides))

    def request(self) -> OperationRequest:
        first, second = DTYPES[self.dtype]
        x = (self.n, self.c, *self.sizes)
        w = (self.k, self.c // self.groups, *self.filters)
        y = (self.n, self.k, *self.outputs)
        float_out = float_output(self.dtype, self.out_dtype)
        begins, ends = self.pads
        attributes: dict[str, Attribute] = {
            "stride": self.strides,
            "padding": begins if begins == ends else (*begins, *ends),
            "dilation": self.dilations,
            "groups": self.groups,
        }
        if self.direction == "fwd":
            inputs, out = {"x": self.tensor(first, x), "w": self.tensor(second, w)}, y
        elif self.direction == "bwd_data":
            inputs, out = {"dy": self.tensor(first, y), "w": self.tensor(second, w)}, x
            attributes["input_size"] = self.sizes
        else:
            inputs, out = {"x": self.tensor(first, x), "dy": self.tensor(second, y)}, w
            attributes["filter_size"] = self.filters
        add_bias(self, inputs, out[1])
        for index in range(self.d):
            inputs[f"d[{index}]"] = self.tensor(float_out, out)
        if self.scale:
            inputs["scale"] = TensorDesc.of("fp32", (self.k,) if self.scale == "channel" else ())
        if self.accumulates:
            inputs["acc"] = self.tensor(self.out_dtype or first, out)
            attributes["accumulate"] = True
        return OperationRequest(self.operation, inputs, {}, attributes | step_attributes(self))


def _each(text: str, count: int) -> tuple[int, ...]:
    values = tuple(map(int, text.split("x")))
    return values * count if len(values) == 1 else values
