"""The vocabulary of grouped convolution: directions, layouts, kinds of kernels. Elementwise steps are the kit's."""

from __future__ import annotations

from tilewright_kit.types.vocabulary import Word

__all__ = [
    "CHANNELS_FIRST",
    "CHANNELS_LAST",
    "LAYOUTS",
    "VARIANT_ALIASES",
    "Direction",
    "Kind",
    "Scale",
    "Specialization",
    "is_channels_first",
    "layout_of",
    "ndim_of",
    "same_order",
]


class Direction(Word):
    """Directions: the result, the gradient of the image, or that of the weights."""

    FORWARD = "fwd"
    BACKWARD_DATA = "bwd_data"
    BACKWARD_WEIGHT = "bwd_weight"


VARIANT_ALIASES = {
    "fwd": "fwd",
    "forward": "fwd",
    "2d_fwd": "fwd",
    "bwd_data": "bwd_data",
    "bwdd": "bwd_data",
    "2d_bwdd": "bwd_data",
    "backward_data": "bwd_data",
    "bwd_weight": "bwd_weight",
    "bwdw": "bwd_weight",
    "2d_bwdw": "bwd_weight",
    "backward_weight": "bwd_weight",
}
"""Spellings of a direction, and the direction."""


class Kind(Word):
    """How a kernel computes.

    ``implicit``: a product one of whose operands is gathered from the image. ``pointwise``: a product that reads the
    image as the matrix that it is. ``depthwise``, ``direct``: loops without a matrix instruction, for one channel per
    group and for few.
    """

    IMPLICIT = "implicit"
    POINTWISE = "pointwise"
    DEPTHWISE = "depthwise"
    DIRECT = "direct"


class Specialization(Word):
    """Assumptions of a kernel beyond its types. The last two have no product."""

    DEFAULT = "default"
    FILTER1X1_PAD0 = "filter1x1_pad0"
    FILTER1X1_STRIDE1_PAD0 = "filter1x1_stride1_pad0"
    FILTER3X3 = "filter3x3"
    DEPTHWISE = "depthwise"
    DIRECT = "direct"


class Scale(Word):
    """How sums are scaled: not, by one fp32 value, or by one for each channel of the result."""

    NONE = "none"
    TENSOR = "tensor"
    CHANNEL = "channel"


CHANNELS_LAST = ("nwgc", "nhwgc", "ndhwgc")
"""By number of spatial axes; weights ``gkxc``, ``gkyxc``, ``gkzyxc``."""
CHANNELS_FIRST = ("ngcw", "ngchw", "ngcdhw")
LAYOUTS = (*CHANNELS_LAST, *CHANNELS_FIRST)


def is_channels_first(layout: str) -> bool:
    return layout in CHANNELS_FIRST


def ndim_of(layout: str) -> int:
    """Spatial axes of a layout; 0 if it is unknown."""
    table = CHANNELS_FIRST if is_channels_first(layout) else CHANNELS_LAST
    return table.index(layout) + 1 if layout in table else 0


def layout_of(ndim: int, channels_first: bool = False) -> str:
    """The layout for so many axes; of numbers that there are no layouts for, the nearest."""
    return (CHANNELS_FIRST if channels_first else CHANNELS_LAST)[min(max(ndim, 1), len(CHANNELS_LAST)) - 1]


def same_order(layout: str, ndim: int) -> str:
    """The layout for ``ndim`` axes with channels where ``layout`` has them; unknown ones have them last."""
    return layout_of(ndim, layout.startswith("ngc"))
