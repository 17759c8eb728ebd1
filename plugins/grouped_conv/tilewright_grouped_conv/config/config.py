"""How a convolution kernel may vary: its signature (what it computes) and its algorithm (how)."""

# ruff: noqa: RUF009  (part and suffix make fields; they hold no state)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tilewright_grouped_conv.vocabulary import Direction, Kind, Scale, Specialization, is_channels_first
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.tiles.forms import PlainForms, TiledForms
from tilewright_kit.tiles.tiled import Triple
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Reduction, Switch, Unary, accumulator, default_output

__all__ = [
    "BULK_PIPELINE",
    "CONFIGS",
    "DIRECT_PIPELINE",
    "IM2COL_PIPELINE",
    "TAPS_PIPELINE",
    "ConvBackwardDataConfig",
    "ConvBackwardWeightConfig",
    "ConvConfig",
    "Triple",
]

DIRECT_PIPELINE = "direct"
"""The pipeline of kernels without a matrix instruction: a word of this operation, not of archs."""
BULK_PIPELINE = "bulk"
"""Likewise: of merged groups whose tensors are moved by a copy engine."""
IM2COL_PIPELINE = "ws"
"""Pipeline of Hopper: producer waves gather pixels by the copy engine, through im2col maps."""
TAPS_PIPELINE = "taps"
"""Pipeline of AMD GPUs: steps along k keep within a tap, and what taps add to a pixel's place is known ahead."""
_ONE: Triple = (1, 1, 1)


def _dimensions(value: int) -> str:
    return f"{value}d"


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def _epilogue_text(value: Epilogue) -> str:
    return value.value.replace("_", "")


@dataclass(frozen=True)
class ConvConfig(TiledForms, PlainForms, KernelConfig):
    """One kernel of forward convolution; the other directions have the same fields. Equal kernels have equal
    configurations: what follows from other fields is stored as its default.

    Names read ``{prefix}_{dtype}_{layout}_{n}d_{pipeline}_{epilogue}_{scheduler}_{tile}_{wave}_{warp_tile}``, then a
    suffix for every field that is not at its default. ``tile``, ``wave`` and ``warp_tile`` are those of the implicit
    product: its m, n and k are pixels, channels of the result, and taps with channels.
    """

    operation: ClassVar[str] = "conv"
    prefix: ClassVar[str] = "grouped_conv_fwd"
    direction: ClassVar[Direction] = Direction.FORWARD
    signature_fields: ClassVar[tuple[str, ...]] = (
        "dtype_in", "layout", "ndim", "dtype_wei", "dtype_out", "bias", "unary", "binary", "num_d_tensors", "dtype_d",
        "scale", "accumulate", "mapped_rows",
    )  # fmt: skip
    plan_fields: ClassVar[tuple[str, ...]] = ("split_image",)

    dtype_in: DType = part(DType.FP16)
    """Element type of the gathered operand: the image, or for backward data the gradient."""
    layout: str = part("nhwgc")
    """Where channels lie: last, or first (``ngchw``)."""
    ndim: int = part(2, text=_dimensions)
    """Spatial axes."""
    pipeline: str = part("compv4")
    epilogue: Epilogue = part(Epilogue.CSHUFFLE, text=_epilogue_text)
    scheduler: str = part("intrawave")
    tile: Triple = part((128, 128, 32))
    """(m, n, k) of output and reduction that one workgroup owns (CPU: the cache block)."""
    wave: Triple = part((2, 2, 1))
    """Waves (CPU: threads) along m, n and k; without a matrix instruction their number is the first."""
    warp_tile: Triple = part((32, 32, 16))
    """(m, n, k) of the matrix instruction (CPU: register tile and dot-product depth)."""

    dtype_wei: str = suffix("W", "")
    """Element type of the other operand: weights, or for backward weight the gradient. Empty: as ``dtype_in``."""
    dtype_out: str = suffix("out", "")
    """Empty: the default output of ``dtype_in``."""
    vector_sizes: Triple = suffix("vec", (4, 8, 8))
    """Elements of one access to A, B and C in global memory; 1 gathers element by element."""
    num_wave_groups: int = suffix("wg", 1)
    num_groups_to_merge: int = suffix("gm", 1)
    """Groups that one tile computes together, as a product with zeros off the diagonal."""
    double_smem_buffer: Switch = suffix("dsb", Switch.AUTO)
    two_stage: bool = suffix("2stage", False)
    """Partial sums go to a workspace in fp32, and a second kernel converts them."""
    specialization: Specialization = suffix("", Specialization.DEFAULT)
    explicit_gemm: bool = suffix("explicit", False)
    """Pointwise: the image is read as the matrix that it is."""
    streamk: Reduction = suffix("streamk", Reduction.NONE)
    streamk_persistent: bool = suffix("persistent", False)
    split_image: bool = suffix("si", False)
    """Tensors beyond 32-bit offsets: the planner launches over ranges of images."""
    pad_m: bool = suffix("padm", True, text=_on_off)
    """Handles sizes that the tile does not divide; likewise ``pad_n``, ``pad_k``. On CUDA all kernels do."""
    pad_n: bool = suffix("padn", True, text=_on_off)
    pad_k: bool = suffix("padk", True, text=_on_off)
    split_k: int = suffix("splitk", 1)
    """Slices of the reduction, added in a fixed order."""
    block_per_cu: int = suffix("bpc", 0)
    """CUDA: workgroups that a unit shall hold at once, so many registers each may have; 0: the template's choice."""
    stages: int = suffix("st", 0)
    """Stages of A and B in shared memory; 0: as many as fit."""
    bias: str = suffix("bias", "")
    """Element type of the bias, one for each channel of the result; empty: none."""
    unary: Unary = suffix("", Unary.NONE)
    binary: Binary = suffix("multid", Binary.NONE)
    num_d_tensors: int = suffix("d", 0)
    dtype_d: tuple[str, ...] = suffix("D", ())
    """Element type of each D; empty: all as the result."""
    scale: Scale = suffix("scale", Scale.NONE)
    accumulate: bool = suffix("acc", False)
    """Adds to what a gradient already holds."""
    channel_tile: int = suffix("ct", 0)
    """Without a matrix instruction: channels of one step; 0: one vector."""
    pixel_tile: Triple = suffix("p", (0, 0, 0))
    """Likewise: pixels (D, H, W) of one step; 0: the template's choice."""
    filter: Triple = suffix("f", (0, 0, 0))
    """Likewise: a filter that is compiled in; 0: known at run time."""
    stride: Triple = suffix("s", (0, 0, 0))
    dilation: Triple = suffix("dl", (0, 0, 0))
    mapped_rows: bool = suffix("mapped", False)
    """Rows of the result do not lie at one distance: a phase of backward data with a stride, or strided pixels."""

    def __post_init__(self) -> None:
        if self.dtype_wei == self.dtype_in.value:
            self._store(dtype_wei="")
        if self.dtype_out == default_output(self.dtype_in).value:
            self._store(dtype_out="")
        if self.d_as_c:
            self._store(dtype_d=())

    def statistics(self) -> dict[str, str]:
        return {**super().statistics(), "by_variant": self.direction.value, "by_ndim": _dimensions(self.ndim)}

    # ---- what the short forms mean ----

    @cached_property
    def kind(self) -> Kind:
        if self.specialization is Specialization.DEPTHWISE:
            return Kind.DEPTHWISE
        if self.specialization is Specialization.DIRECT:
            return Kind.DIRECT
        return Kind.POINTWISE if self.explicit_gemm else Kind.IMPLICIT

    @cached_property
    def is_matrix(self) -> bool:
        """True if the kernel is a product with matrix instructions (CPU: register tiles)."""
        return self.kind in (Kind.IMPLICIT, Kind.POINTWISE)

    @property
    def channels_first(self) -> bool:
        return is_channels_first(self.layout)

    @cached_property
    def image_is_b(self) -> bool:
        """True if the image is the right operand of the product rather than the left."""
        return self.channels_first or self.direction is Direction.BACKWARD_WEIGHT

    @property
    def image_dtype(self) -> str:
        """Element type of what is gathered, by name."""
        return self.dtype_in.value

    @property
    def other_dtype(self) -> str:
        """Element type of the other operand."""
        return self.dtype_wei or self.dtype_in.value

    @cached_property
    def a(self) -> str:
        """Element type of the product's left operand, by name."""
        return self.other_dtype if self.image_is_b else self.image_dtype

    @cached_property
    def b(self) -> str:
        return self.image_dtype if self.image_is_b else self.other_dtype

    @cached_property
    def c(self) -> str:
        return self.dtype_out or default_output(self.dtype_in).value

    @cached_property
    def acc(self) -> str:
        return accumulator(self.dtype_in).value

    @property
    def letters(self) -> str:
        """How A, B and C of the product lie, as in GEMM: ``r`` row-major, ``c`` column-major.

        The image lies along k, except where pixels are summed or channels come first. Weights lie along k, except for
        backward data, which exchanges their channels.
        """
        if self.direction is Direction.BACKWARD_WEIGHT:
            return "rcr" if self.channels_first else "crr"
        backward = self.direction is Direction.BACKWARD_DATA
        if self.channels_first:
            return "crr" if backward else "rrr"
        return "rrr" if backward else "rcr"

    # ---- what the kit's rules on tiles ask, beside fields of the same name ----

    @property
    def fused(self) -> bool:
        """True if the epilogue does more than to convert."""
        plain = self.unary is Unary.NONE and not self.bias and not self.num_d_tensors
        return not plain or self.scale is not Scale.NONE or self.accumulate

    @property
    def any_alignment(self) -> bool:
        """Vectors are aligned: the kernel's ``vector_sizes`` see to that."""
        return False

    @property
    def gather_registers(self) -> int:
        """The place of a line in the image and of a chunk among taps and channels, as ptxas counts: for fp32, whose
        products have no registers left for it otherwise.
        """
        return 24 if self.kind is Kind.IMPLICIT and self.dtype_in is DType.FP32 else 0

    @property
    def variant(self) -> str:
        """The direction in statistics and names of kernels."""
        return "forward" if self.direction is Direction.FORWARD else self.direction.value

    @property
    def fixed_filter(self) -> Triple:
        """The filter that the kernel may rely on, 0 where it is known at run time only."""
        special = self.specialization
        if special in (Specialization.FILTER1X1_PAD0, Specialization.FILTER1X1_STRIDE1_PAD0):
            return _ONE
        if special is Specialization.FILTER3X3:
            sizes = [3 if axis >= 3 - self.ndim else 1 for axis in range(3)]
            return sizes[0], sizes[1], sizes[2]
        return self.filter

    @property
    def fixed_stride(self) -> Triple:
        """Likewise the stride."""
        return _ONE if self.specialization is Specialization.FILTER1X1_STRIDE1_PAD0 else self.stride

    @property
    def unpadded(self) -> bool:
        """True if the kernel may rely on that nothing lies outside the image."""
        return self.specialization in (Specialization.FILTER1X1_PAD0, Specialization.FILTER1X1_STRIDE1_PAD0)


@dataclass(frozen=True)
class ConvBackwardDataConfig(ConvConfig):
    """One kernel of the image's gradient."""

    operation: ClassVar[str] = "conv_backward_data"
    prefix: ClassVar[str] = "grouped_conv_bwd_data"
    direction: ClassVar[Direction] = Direction.BACKWARD_DATA


@dataclass(frozen=True)
class ConvBackwardWeightConfig(ConvConfig):
    """One kernel of the weights' gradient."""

    operation: ClassVar[str] = "conv_backward_weight"
    prefix: ClassVar[str] = "grouped_conv_bwd_weight"
    direction: ClassVar[Direction] = Direction.BACKWARD_WEIGHT


CONFIGS: Mapping[Direction, type[ConvConfig]] = {
    item.direction: item for item in (ConvConfig, ConvBackwardDataConfig, ConvBackwardWeightConfig)
}
