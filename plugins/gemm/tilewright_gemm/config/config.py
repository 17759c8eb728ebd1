"""Configurations of GEMM kernels: signature (what it computes) and its algorithm (how)."""

# ruff: noqa: RUF009  (part and suffix make fields; they hold no state)
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tilewright_gemm.config.block_scales import (
    bytes_of_rounds,
    bytes_of_slot,
    is_block_scaled,
    packed_bits,
    waves_of_rounds,
)
from tilewright_gemm.config.int4 import is_int4
from tilewright_gemm.config.narrow import widths
from tilewright_gemm.vocabulary import (
    Binary,
    Epilogue,
    Reduction,
    ScaleA,
    ScaleB,
    Switch,
    Unary,
    accumulator,
    default_output,
)
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.tiles.forms import TiledForms
from tilewright_kit.tiles.tiled import Triple
from tilewright_kit.types.dtypes import DType

__all__ = ["GemmConfig", "Triple"]


def _epilogue_text(value: Epilogue) -> str:
    return value.value.replace("_", "")


@dataclass(frozen=True)
class GemmConfig(TiledForms, KernelConfig):
    """One GEMM kernel. Equal kernels have equal configurations: what follows from other fields is stored as its
    default.

    Names read ``gemm_{dtype}_{layout}_{pipeline}_{epilogue}_{scheduler}_{padM}_{padN}_{padK}_{persistent}_{tile}_{wave}
    _{warp_tile}``, then a suffix for every field that is not at its default.
    """

    operation: ClassVar[str] = "gemm"
    kinds: ClassVar[tuple[str, ...]] = ("batched", "grouped", "multi_d", "preshuffle", "standard", "stream_k")
    signature_fields: ClassVar[tuple[str, ...]] = (
        "dtype_a", "dtype_b", "dtype_c", "dtype_acc", "layout", "transpose_a", "transpose_b", "structured_sparsity",
        "grouped", "batched", "split_k", "binary", "num_d_tensors", "dtype_d", "unary", "bias", "scale_a", "scale_b",
    )  # fmt: skip

    dtype_a: DType = part(DType.FP16)
    layout: str = part("rcr")
    """Letters of A, B, C: ``r`` row-major, ``c`` column-major."""
    pipeline: str = part("compv4")
    epilogue: Epilogue = part(Epilogue.CSHUFFLE, text=_epilogue_text)
    scheduler: str = part("intrawave")
    pad_m: bool = part(True)
    """Handles sizes that the tile does not divide; likewise ``pad_n``, ``pad_k``. On CUDA all kernels do."""
    pad_n: bool = part(True)
    pad_k: bool = part(True)
    persistent: bool = part(False)
    """Workgroups (CPU: threads) claim tiles until none is left, rather than owning a fixed share."""
    tile: Triple = part((128, 128, 32))
    """(m, n, k) of output and reduction that one workgroup owns (CPU: the cache block)."""
    wave: Triple = part((2, 2, 1))
    """Waves (CPU: threads) along m, n and k."""
    warp_tile: Triple = part((32, 32, 16))
    """(m, n, k) of the matrix instruction (CPU: register tile and dot-product depth)."""

    dtype_b: str = suffix("B", "")
    """Empty: as A."""
    dtype_c: str = suffix("out", "")
    """Empty: the default output of A's type."""
    dtype_acc: str = suffix("ACC", "")
    """Empty: the accumulator that the pair implies."""
    transpose_a: bool = suffix("tra", False)
    """A is handed over transposed: stored as the other letter of ``layout``."""
    transpose_b: bool = suffix("trb", False)
    structured_sparsity: bool = suffix("sparse", False)
    """A is 2:4 sparse."""
    binary: Binary = suffix("multid", Binary.NONE)
    num_d_tensors: int = suffix("d", 0)
    dtype_d: tuple[str, ...] = suffix("D", ())
    """Element type of each D; empty: all as C."""
    unary: Unary = suffix("", Unary.NONE)
    bias: str = suffix("bias", "")
    """Element type of the bias row; empty: none."""
    scale_a: ScaleA = suffix("scaleA", ScaleA.NONE)
    scale_b: ScaleB = suffix("scaleB", ScaleB.NONE)
    split_k: int = suffix("splitk", 1)
    """Slices of K: above 1 partial sums go to the workspace and are added in a fixed order (a CPU's by a second
    stage).
    """
    batched: bool = suffix("batched", False)
    grouped: bool = suffix("grouped", False)
    reduction: Reduction = suffix("streamk", Reduction.NONE)
    """Stream-K."""
    preshuffle: bool = suffix("preshuffle", False)
    """B was packed ahead of time."""
    block_size: int = suffix("bs", 0)
    """Threads of a workgroup; 0: what wave and instruction imply."""
    num_wave_groups: int = suffix("wg", 1)
    double_buffer: Switch = suffix("db", Switch.AUTO)
    transpose_c: bool = suffix("trc", False)
    """The warp tile is computed transposed, so that a thread holds neighbours along n. Hopper's ``ws``: the long side
    of the instruction runs along n, its flexible side along m, so that products of few rows waste nothing.
    """
    cluster: Triple = suffix("cluster", (1, 1, 1))
    """Workgroups that are launched together: along m and n they share what they load; those along k are the slices of
    ``split_k``, whose sums go from one to the other without the workspace.
    """
    stages: int = suffix("st", 0)
    """Stages of A and B in shared memory; 0: as many as fit (``footprint.stages_of``)."""
    promote: int = suffix("promote", 0)
    """8-bit floats: instructions along k between additions to fp32 accumulators, because the matrix unit itself keeps
    fewer bits; 0: never.
    """

    def __post_init__(self) -> None:
        layout = self.layout
        if len(layout) == 3 and (self.transpose_a or self.transpose_b):
            a, b = (_flip(layout[0], self.transpose_a), _flip(layout[1], self.transpose_b))
            self._store(layout=a + b + layout[2], transpose_a=False, transpose_b=False)
        if self.dtype_b == self.dtype_a.value:
            self._store(dtype_b="")
        if self.dtype_c == default_output(self.dtype_a).value:
            self._store(dtype_c="")
        if self.dtype_acc == accumulator(self.dtype_a).value:
            self._store(dtype_acc="")
        if self.d_as_c:
            self._store(dtype_d=())

    # ---- what the short forms mean ----

    @cached_property
    def a(self) -> str:
        """Element type of A, by name."""
        return self.dtype_a.value

    @cached_property
    def b(self) -> str:
        return self.dtype_b or self.a

    @cached_property
    def c(self) -> str:
        return self.dtype_c or default_output(self.dtype_a).value

    @cached_property
    def acc(self) -> str:
        return self.dtype_acc or accumulator(self.dtype_a).value

    @property
    def letters(self) -> str:
        """Layout of A, B and C, under the name that all tiled products have."""
        return self.layout

    @property
    def any_alignment(self) -> bool:
        """Lines of A and B begin anywhere."""
        return True

    @property
    def gather_registers(self) -> int:
        """Operands are matrices."""
        return 0

    @property
    def fused(self) -> bool:
        """True if the epilogue does more than to convert."""
        plain = self.unary is Unary.NONE and not self.bias and not self.num_d_tensors
        if self.block_scaled:  # which the main loop does
            return not plain
        if self.int4:  # likewise, but for A's
            return not plain or self.scale_a is not ScaleA.NONE
        return not plain or self.scale_a is not ScaleA.NONE or self.scale_b is not ScaleB.NONE

    @property
    def block_scaled(self) -> bool:
        """True if sums of blocks are scaled before they are added (``block_scales``)."""
        return is_block_scaled(self.scale_a, self.scale_b)

    @property
    def int4(self) -> bool:
        """True if B is packed 4-bit weights (``int4``)."""
        return is_int4(self.scale_b)

    @property
    def packed_bits(self) -> int:
        """Bits of a value of A and B that stay packed in shared memory; else 0."""
        return packed_bits(self)

    @property
    def own_waves(self) -> tuple[Triple, ...]:
        """Eight waves, of 4-bit operands whose exponents come in rounds."""
        return waves_of_rounds(self)

    @property
    def bytes_beside_tiles(self) -> int:
        """Bytes of shared memory of an AMD GPU's workgroup for exponents of blocks."""
        return bytes_of_rounds(self)

    @property
    def bytes_beside_stage(self) -> int:
        """Bytes of factors of blocks in a stage of ``ws``."""
        return bytes_of_slot(self)

    @property
    def narrow(self) -> bool:
        """True if A or B has fewer than 8 bits (``narrow``)."""
        return min(widths(self.scale_a, self.scale_b)) < 8

    @property
    def variant(self) -> str:
        """Name of the kind of kernel."""
        if self.preshuffle:
            return "preshuffle"
        if self.reduction is not Reduction.NONE:
            return "stream_k"
        if self.grouped:
            return "grouped"
        if self.batched:
            return "batched"
        return "multi_d" if self.num_d_tensors else "standard"


def _flip(letter: str, flip: bool) -> str:
    return {"r": "c", "c": "r"}.get(letter, letter) if flip else letter
