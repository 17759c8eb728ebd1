"""How an attention kernel may vary: its signature (what it computes) and its algorithm (how)."""

# ruff: noqa: RUF009  (part and suffix make fields; they hold no state)
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    FAMILY_OPERATIONS,
    KV_APPEND,
    MAIN_FAMILIES,
    BiasKind,
    Family,
    FmhaDType,
    KvLayout,
    KvLookup,
    MaskKind,
    Mode,
    QScale,
    Rope,
    Scheduling,
    SmallType,
    VLayout,
)
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.types.dtypes import DType

__all__ = [
    "ADVICE_FIELDS",
    "AUTO",
    "CONFIGS",
    "FLAGS",
    "SIGNATURE_FIELDS",
    "AttentionBackwardConfig",
    "AttentionConfig",
    "FmhaConfig",
    "KvAppendConfig",
    "config_of",
]

SIGNATURE_FIELDS = (
    "family", "dtype", "mode", "v_layout", "hdim", "mask", "bias", "dtype_bias", "rope_dtype", "lse", "dropout",
    "softcap", "sink", "learned_sinks", "skip_min_seqlen_q", "dbias", "randval", "deterministic", "paged", "qscale",
    "rope", "kv_layout", "kv_lookup", "page_size",
)  # fmt: skip
AUTO = "auto"
"""The word of a field that nobody filled: as the arch prefers."""
FLAGS = (
    "lse", "dropout", "softcap", "sink", "learned_sinks", "skip_min_seqlen_q", "dbias", "randval", "deterministic",
    "paged",
)  # fmt: skip
ADVICE_FIELDS = (
    "max_splits_log2", "num_splits", "max_seq_len_q", "selection_rank", "constraint_tag", "receipt",
)  # fmt: skip
"""Fields that choice and planning read; the source is the same whatever they say."""


def _hdim_text(value: tuple[int, int]) -> str:
    return f"h{'x'.join(map(str, value))}"


def _numbers_text(value: tuple[int, ...]) -> str:
    return "x".join(map(str, value)) or AUTO


def _switch_text(value: bool) -> str:
    return "on" if value else "off"


@dataclass(frozen=True)
class FmhaConfig(KernelConfig):
    """One attention kernel, of any family. Its class is that of the family's operation (``config_of``).

    Names read ``{prefix}_{family}_{dtype}_{mode}_{v_layout}_{hdim}_{pipeline}_{tile}_{wave}_{warp_tile}``, then a
    suffix for every field that is not at its default.

    Scores S = Q K^T come first, then O = P V. Of the six numbers of ``tile``, m0 is rows of queries, n0 columns of
    keys, k0 the step along a head's elements in the first product, n1 columns and k1 the step (along keys) of the
    second, k0max the elements of Q that are kept. Gradients have nine: m0, n0, k0, then the steps of the four products
    that follow (k1: queries, k2: elements of values, k3: queries, k4: keys), then the elements of q and v that are
    kept.
    """

    operation: ClassVar[str] = "fmha"
    """The base has no operation of its own: see ``CONFIGS``."""
    signature_fields: ClassVar[tuple[str, ...]] = SIGNATURE_FIELDS
    plan_fields: ClassVar[tuple[str, ...]] = ADVICE_FIELDS

    family: Family = part(Family.FWD)
    dtype: FmhaDType = part(FmhaDType.FP16)
    mode: Mode = part(Mode.BATCH)
    v_layout: VLayout = part(VLayout.VR)
    hdim: tuple[int, int] = part((128, 128), text=_hdim_text)
    """Elements of a head of q and k, and of v, at most; fewer are padded with zeros."""
    pipeline: str = part(AUTO)
    """``auto``, and no numbers in the three fields that follow: what the arch prefers for the signature."""
    tile: tuple[int, ...] = part((), text=_numbers_text)
    wave: tuple[int, ...] = part((), text=_numbers_text)
    """Waves along m, n and k of the first product, of the second, and (gradients) of the third. CPU: the first is the
    number of threads.
    """
    warp_tile: tuple[int, ...] = part((), text=_numbers_text)
    """(m, n, k) of the matrix instruction of each product (CPU: register tile and depth)."""

    mask: MaskKind = suffix("mask", MaskKind.NONE)
    """Top-left and bottom-right are one kernel: where the diagonal begins is a number."""
    bias: BiasKind = suffix("bias", BiasKind.NONE)
    dtype_bias: SmallType = suffix("biastype", SmallType.AS_Q)
    rope_dtype: SmallType = suffix("ropetype", SmallType.AS_Q)
    """Element type of the rotary tables."""
    lse: bool = suffix("lse", False)
    """The logarithm of each row's sum is written."""
    dropout: bool = suffix("drop", False)
    softcap: bool = suffix("cap", False)
    sink: bool = suffix("sink", False)
    """The first keys are seen by all, whatever the window."""
    learned_sinks: bool = suffix("lsink", False)
    """Every head has a further score, without a value."""
    skip_min_seqlen_q: bool = suffix("skipmin", False)
    dbias: bool = suffix("dbias", False)
    randval: bool = suffix("rand", False)
    """The random bytes are written."""
    deterministic: bool = suffix("det", False)
    """Gradients of q are added in a fixed order."""
    paged: bool = suffix("paged", False)
    qscale: QScale = suffix("qs", QScale.NONE)
    rope: Rope = suffix("rope", Rope.NONE)
    kv_layout: KvLayout = suffix("kv", KvLayout.LINEAR)
    kv_lookup: KvLookup = suffix("lookup", KvLookup.VLLM)
    page_size: int = suffix("page", 0)
    """Tokens of a page, compiled in; 0: of any size."""

    pad_s: bool = suffix("pads", True, text=_switch_text)
    """Handles numbers of queries that m0 does not divide; likewise ``pad_sk`` for keys, ``pad_d`` and ``pad_dv`` for
    elements that ``hdim`` is larger than.
    """
    pad_sk: bool = suffix("padsk", True, text=_switch_text)
    pad_d: bool = suffix("padd", True, text=_switch_text)
    pad_dv: bool = suffix("paddv", True, text=_switch_text)
    use_trload: bool = suffix("trload", False)
    """Reads that transpose on the way from the LDS."""
    block_per_cu: int = suffix("bpc", -1)
    """Workgroups that should share a unit; -1: as the compiler likes."""
    num_wave_groups: int = suffix("wg", 1)
    max_splits_log2: int = suffix("ms", 0)
    """Split-KV: plans have up to two to the power of this many parts."""
    max_seq_len_q: int = suffix("mq", 0)
    """Not for longer queries; 0: for any."""
    hdim_align: tuple[int, int] = suffix("al", (8, 8))
    """Elements of which the heads' sizes of q and v are multiples, of kernels that do not pad them."""
    selection_rank: int = suffix("rank", 0)
    """Lower comes first where kernels are chosen by declaration."""
    constraint_tag: str = suffix("tag", "")
    receipt: int = suffix("rc", -1)
    """The list of kernels that this one was declared in; -1: none."""
    pack_gqa: bool = suffix("gqa", False)
    """All query heads of a key head are rows of one tile."""
    persistent: bool = suffix("persistent", False)
    stages: int = suffix("st", 0)
    """Tiles of keys and values in shared memory; 0: as many as the pipeline has."""
    scheduler: Scheduling = suffix("", Scheduling.DEFAULT)
    num_splits: int = suffix("splits", 0)
    """Split-KV: parts of the keys in plans; 0: as many as keep the device busy."""

    # ---- what the fields mean ----

    @property
    def q(self) -> DType:
        return self.dtype.q

    @property
    def kv(self) -> DType:
        return self.dtype.kv

    @property
    def o(self) -> DType:
        return self.dtype.o

    @property
    def p(self) -> DType:
        """Element type of probabilities where the matrix unit wants two operands of a kind."""
        return self.dtype.p

    @property
    def is_main(self) -> bool:
        """Computes a problem, rather than only taking part in a plan."""
        return self.family in MAIN_FAMILIES

    @property
    def is_forward(self) -> bool:
        """Scores, softmax and values: one of the four families that share a loop."""
        return self.family in (Family.FWD, Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL)

    @property
    def is_backward(self) -> bool:
        return self.operation == ATTENTION_BACKWARD

    @property
    def varlen(self) -> bool:
        return self.mode is Mode.GROUP

    @property
    def team(self) -> int:
        """Threads of a CPU's kernel."""
        return self.wave[0] if self.wave else 1

    @property
    def waves(self) -> int:
        """Waves of a workgroup: those of the first product."""
        return math.prod(self.wave[:3])

    @property
    def m0(self) -> int:
        return self._tile(0)

    @property
    def n0(self) -> int:
        return self._tile(1)

    @property
    def k0(self) -> int:
        return self._tile(2)

    @property
    def n1(self) -> int:
        return self._tile(3)

    @property
    def k1(self) -> int:
        return self._tile(4)

    @property
    def k0max(self) -> int:
        return self._tile(5)

    def _tile(self, index: int) -> int:
        """A number of the tile; 1 where a broken configuration has none."""
        return self.tile[index] if index < len(self.tile) else 1

    @property
    def max_splits(self) -> int:
        return 1 << min(max(self.max_splits_log2, 0), 16)

    @property
    def bias_type(self) -> DType:
        return _small(self.dtype_bias, self.q) if self.bias is BiasKind.ELEMENTWISE else DType.FP32

    @property
    def rope_type(self) -> DType:
        return _small(self.rope_dtype, self.q) if self.rope is not Rope.NONE else DType.FP32

    def statistics(self) -> dict[str, str]:
        return {
            "by_family": self.family.value,
            "by_dtype": self.dtype.value,
            "by_pipeline": self.pipeline,
        }


def _small(word: SmallType, q: DType) -> DType:
    return q if word is SmallType.AS_Q else DType(word.value)


@dataclass(frozen=True)
class AttentionConfig(FmhaConfig):
    """A kernel of ``attention``."""

    operation: ClassVar[str] = ATTENTION
    prefix: ClassVar[str] = "fmha"


@dataclass(frozen=True)
class AttentionBackwardConfig(FmhaConfig):
    """A kernel of ``attention_backward``."""

    operation: ClassVar[str] = ATTENTION_BACKWARD
    prefix: ClassVar[str] = "fmha_grad"

    family: Family = part(Family.DQ_DK_DV)


@dataclass(frozen=True)
class KvAppendConfig(FmhaConfig):
    """A kernel of ``kv_append``."""

    operation: ClassVar[str] = KV_APPEND
    prefix: ClassVar[str] = "fmha_cache"

    family: Family = part(Family.APPENDKV)


CONFIGS: Mapping[str, type[FmhaConfig]] = {
    kind.operation: kind for kind in (AttentionConfig, AttentionBackwardConfig, KvAppendConfig)
}


def config_of(family: Family) -> type[FmhaConfig]:
    """The class of a family's kernels."""
    return CONFIGS[FAMILY_OPERATIONS[family]]
