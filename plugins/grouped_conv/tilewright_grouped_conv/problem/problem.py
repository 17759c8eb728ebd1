"""Problems: a convolution or one of its gradients.

    y  = unary(binary(alpha * scale * conv(x, w) + bias, d[0], d[1], ...))
    dx = unary(alpha * (gradient of conv's x) + bias)  [+ acc]
    dw = alpha * (gradient of conv's w)  [+ acc]

x [N, C, *spatial], w [K, C/G, *filter], y [N, K, *out]. ``parse`` makes problems from requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tilewright_grouped_conv.problem.implicit_gemm import Phase, phases_of
from tilewright_grouped_conv.problem.layout import (
    FilterOrder,
    FilterView,
    ImageView,
    Order,
    VectorView,
    filter_orders,
    orders,
)
from tilewright_grouped_conv.problem.sizes import ConvGeometry, text_of
from tilewright_grouped_conv.vocabulary import Direction, Scale, layout_of
from tilewright_kit.contract.problem import Operand, Problem
from tilewright_kit.requests.attributes import DEFAULT_ALIGNMENT
from tilewright_kit.requests.describe import describe_steps, describe_unusual
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Unary, accumulator

__all__ = [
    "PROBLEMS",
    "ConvBackwardData",
    "ConvBackwardWeight",
    "ConvForward",
    "ConvProblem",
    "TransformProblem",
    "layout_name",
]


def layout_name(order: Order, ndim: int) -> str:
    """``nhwgc``, ``ngchw`` and their like for one and three dimensions; ``mixed``."""
    return "mixed" if order is Order.MIXED else layout_of(ndim, order is Order.FIRST)


@dataclass(frozen=True, eq=True)
class ConvProblem(Problem):
    """A checked request, in canonical form."""

    operation: ClassVar[str] = ""
    direction: ClassVar[Direction]

    geometry: ConvGeometry
    dtype_in: DType
    """Element type of the gathered image: x, or dy of the image's gradient."""
    dtype_wei: DType
    """Element type of the other operand: w, or dy of the weights' gradient."""
    dtype_out: DType
    image: ImageView
    """x or dx."""
    filter: FilterView
    """w or dw."""
    pixels: ImageView
    """y or dy."""
    tensors: tuple[Operand, ...]
    alpha: float = 1.0
    accumulate: bool = False
    """The output is added to ``acc``, which may be the same memory."""
    unary: Unary = Unary.NONE
    binary: Binary = Binary.NONE
    clamp_lo: float = 0.0
    clamp_hi: float = 0.0
    bias: VectorView | None = None
    dtype_bias: DType | None = None
    d: tuple[ImageView, ...] = ()
    dtype_d: tuple[DType, ...] = ()
    scale: Scale = Scale.NONE
    scale_view: VectorView | None = None
    split_k: int = 0
    """Slices of the reduction that the caller asked for; 0: the planner decides."""
    deterministic: bool = True
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes of which every operand's address is a multiple, by the caller's word."""
    fast_accumulation: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Plans are looked up by problem at every dispatch: the rest differs where these are equal too rarely to matter.
        return hash((self.operation, self.geometry, self.dtype_in, self.dtype_out, self.image, self.filter, self.unary))

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.tensors

    @property
    def flops(self) -> int:
        return self.geometry.flops

    @property
    def ndim(self) -> int:
        return self.geometry.ndim

    @property
    def dtype_acc(self) -> DType:
        return accumulator(self.dtype_in)

    @property
    def num_d(self) -> int:
        return len(self.dtype_d)

    # ---- how it lies in memory ----

    @cached_property
    def image_orders(self) -> tuple[Order, ...]:
        """Orders that describe x or dx."""
        geometry = self.geometry
        return orders(self.image, geometry.input, geometry.groups, geometry.cg)

    @cached_property
    def own_pixel_orders(self) -> tuple[Order, ...]:
        """Orders that describe y or dy."""
        geometry = self.geometry
        return orders(self.pixels, geometry.output, geometry.groups, geometry.kg)

    @cached_property
    def pixel_orders(self) -> tuple[Order, ...]:
        """Orders that describe y or dy, and every D operand."""
        geometry = self.geometry
        sets = [orders(view, geometry.output, geometry.groups, geometry.kg) for view in self.d]
        return tuple(order for order in self.own_pixel_orders if all(order in others for others in sets))

    @cached_property
    def order(self) -> Order:
        """The one order of all images, channels-last where both would do."""
        return next((order for order in self.image_orders if order in self.pixel_orders), Order.MIXED)

    @property
    def layout(self) -> str:
        """``nhwgc``, ``ngchw`` (one dimension ``nwgc``, three ``ndhwgc``, ...) or ``mixed``."""
        return layout_name(self.order, self.ndim)

    @property
    def channels_first(self) -> bool:
        return self.order is Order.FIRST

    @cached_property
    def filter_orders(self) -> tuple[FilterOrder, ...]:
        return filter_orders(self.filter, self.geometry.filter, self.geometry.cg)

    @property
    def wlayout(self) -> str:
        """``gkyxc``, ``gkcyx`` or ``mixed``."""
        return next(iter(self.filter_orders), FilterOrder.MIXED).value

    # ---- the implicit product ----

    def phases(self, channels_first: bool | None = None) -> tuple[Phase, ...]:
        """The products as a kernel of the given order sees them; None: of the problem's own order."""
        first = self.channels_first if channels_first is None else channels_first
        return phases_of(self.geometry, self.direction, first)

    @cached_property
    def largest(self) -> Phase:
        """The phase with the most work; what models and tables go by."""
        return max(self.phases(), key=lambda phase: phase.m * phase.n * phase.k)

    @property
    def m(self) -> int:
        return self.largest.m

    @property
    def n(self) -> int:
        return self.largest.n

    @property
    def k(self) -> int:
        return self.largest.k

    @property
    def batch(self) -> int:
        return self.largest.batch

    def describe(self) -> dict[str, Any]:
        """Integers are sizes, words what the kernel must do: measurements are found by both."""
        geometry, ndim = self.geometry, self.ndim
        record: dict[str, Any] = {
            "operation": self.operation,
            "direction": self.direction.value,
            "dtype_in": self.dtype_in.value,
            "dtype_wei": self.dtype_wei.value,
            "dtype_out": self.dtype_out.value,
            "layout": self.layout,
            "wlayout": self.wlayout,
            "ndim": f"{ndim}d",
            "filter": text_of(geometry.filter, ndim),
            "stride": text_of(geometry.stride, ndim),
            "dilation": text_of(geometry.dilation, ndim),
            "pads": f"{text_of(geometry.pad_begin, ndim)}-{text_of(geometry.pad_end, ndim)}",
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch": self.batch,
            "images": geometry.n,
            "channels": geometry.c,
            "out_channels": geometry.k,
            "groups": geometry.groups,
        }
        names = ("depth", "height", "width")[3 - ndim :]
        record |= dict(zip(names, geometry.input[3 - ndim :], strict=True))
        record |= {
            **describe_steps(self),
            "accumulate": self.accumulate,
            "scale": self.scale.value,
            "flops": self.flops,
            **describe_unusual(self),
        }
        if not self.deterministic:
            record["deterministic"] = False
        return record


@dataclass(frozen=True, eq=True)
class ConvForward(ConvProblem):
    operation: ClassVar[str] = "conv"
    direction: ClassVar[Direction] = Direction.FORWARD

    __hash__ = ConvProblem.__hash__


@dataclass(frozen=True, eq=True)
class ConvBackwardData(ConvProblem):
    """The gradient of the image; by another name the transposed convolution of dy."""

    operation: ClassVar[str] = "conv_backward_data"
    direction: ClassVar[Direction] = Direction.BACKWARD_DATA

    __hash__ = ConvProblem.__hash__


@dataclass(frozen=True, eq=True)
class ConvBackwardWeight(ConvProblem):
    operation: ClassVar[str] = "conv_backward_weight"
    direction: ClassVar[Direction] = Direction.BACKWARD_WEIGHT

    __hash__ = ConvProblem.__hash__


PROBLEMS: Mapping[Direction, type[ConvProblem]] = {
    kind.direction: kind for kind in (ConvForward, ConvBackwardData, ConvBackwardWeight)
}


@dataclass(frozen=True, eq=True)
class TransformProblem(Problem):
    """A strided copy with conversion: ``out[i] = x[i]`` where ``x`` has that element, else zero.

    Both are [N, C, *spatial] or any other shape of three to five dimensions, the output's sizes no smaller.
    """

    operation: ClassVar[str] = "conv_transform"

    dtype_in: DType
    dtype_out: DType
    sizes: tuple[int, ...]
    """Sizes of the output."""
    kept: tuple[int, ...]
    """Sizes of the input: elements beyond are zero."""
    from_strides: tuple[int, ...]
    to_strides: tuple[int, ...]
    tensors: tuple[Operand, ...]
    alignment: int = DEFAULT_ALIGNMENT

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.tensors

    @property
    def flops(self) -> int:
        return 0

    @property
    def ndim(self) -> int:
        return len(self.sizes) - 2

    def describe(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "dtype_in": self.dtype_in.value,
            "dtype_out": self.dtype_out.value,
            "ndim": f"{self.ndim}d",
            "sizes": list(self.sizes),
            "kept": list(self.kept),
            "from_strides": list(self.from_strides),
            "to_strides": list(self.to_strides),
        }
