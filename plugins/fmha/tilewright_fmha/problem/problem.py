"""Problems: attention, its gradients, or new rows in a cache of keys and values.

    s = softcap(scale * q k^T) + bias + alibi,  masked,  p = softmax(s),  o = p v,  lse = log sum exp s

q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv]; query head h reads head h // (Hq / Hk) of k and v. Sequences of
different lengths may lie end to end, and keys and values in pages. ``parse`` makes problems from requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tilewright_fmha.problem.masks import Mask
from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    KV_APPEND,
    BiasKind,
    Family,
    FmhaDType,
    KvLayout,
    KvLookup,
    MaskKind,
    Mode,
    QScale,
    Rope,
    Scores,
    VLayout,
)
from tilewright_kit.contract.problem import Operand, Problem
from tilewright_kit.requests.attributes import DEFAULT_ALIGNMENT
from tilewright_kit.types.dtypes import DType

__all__ = [
    "PROBLEMS",
    "VECTOR",
    "AttentionBackwardProblem",
    "AttentionProblem",
    "FmhaProblem",
    "KvAppendProblem",
    "Mask",
    "Paging",
    "Scaling",
    "SharedPrefix",
    "Strides",
]


VECTOR = 8
"""Elements of a row that kernels of GPUs store at a time, at most."""


@dataclass(frozen=True, slots=True)
class Strides:
    """Where element (batch item, head, row, column) of an operand lies, in elements; 0 along what it is not sized by
    or broadcasts.

    In a paged operand ``batch`` is the step to the next page and ``row`` to the next token in one. In a vectorized one
    ``chunk`` is the step to the next sixteen bytes: of columns of K, of rows of V.
    """

    operand: str = ""
    """The operand's name; empty: it is not there."""
    batch: int = 0
    head: int = 0
    row: int = 0
    col: int = 1
    chunk: int = 0


_ABSENT = Strides()
_EVERYTHING = Mask()


@dataclass(frozen=True, slots=True)
class Paging:
    """A cache in pages. ``table_stride``: from one sequence's row of the table to the next (``vllm``), or
    the entries of all (``sglang``).
    """

    page_size: int
    pages: int
    lookup: KvLookup = KvLookup.VLLM
    layout: KvLayout = KvLayout.LINEAR
    table_stride: int = 0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors of fp8 operands. ``row`` of a factor's strides is from one block of rows to the next; with
    ``kv_blockscale`` ``batch`` of k's and v's is from page to page. A factor that is not given is 1. Rows that are
    appended are divided by theirs.
    """

    kind: QScale
    block_q: int = 0
    """Rows of q that share a factor; 0: all of a head."""
    block_k: int = 0
    q: Strides = _ABSENT
    k: Strides = _ABSENT
    v: Strides = _ABSENT


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Attention in two parts, both with the logarithms of their sums, which a stage of the plan makes one."""

    prefix: FmhaProblem
    """All queries of a group over its prefix, as rows of one item: without a mask, and without gaps in ``o``."""
    rest: FmhaProblem
    """Each sequence over the keys that are its own, without the operands of prefixes."""

    @property
    def groups(self) -> int:
        return self.prefix.batch


@dataclass(frozen=True, eq=True)
class FmhaProblem(Problem):
    """A checked request, in canonical form. ``seq_q`` and ``seq_k`` are capacities: true lengths are data."""

    operation: ClassVar[str] = ""

    dtype: FmhaDType
    batch: int
    heads_q: int
    heads_k: int
    seq_q: int
    """Rows of queries in a batch item, at most; of ``kv_append`` 0 if no queries are rotated."""
    seq_k: int
    """Keys of a sequence, at most; of ``kv_append`` the room of a cache."""
    hdim_q: int
    hdim_v: int
    tensors: tuple[Operand, ...]
    places: tuple[Strides, ...]
    """One for every operand that is indexed by batch item, head, row and column."""
    varlen: bool = False
    total_q: int = 0
    """Rows of q in all (without ``varlen``: batch * seq_q)."""
    total_k: int = 0
    mask: Mask = _EVERYTHING
    scale: float = 1.0
    softcap: float = 0.0
    dropout: int = 0
    """Probabilities whose random byte is below this are dropped."""
    seed: int = 0
    offset: int = 0
    bias: BiasKind = BiasKind.NONE
    dtype_bias: DType | None = None
    """Operand of ``elementwise`` only."""
    lse: bool = False
    randval: bool = False
    scores: Scores = Scores.NONE
    """Stage of the scores that is an output."""
    status: bool = False
    dbias: bool = False
    dsinks: bool = False
    learned_sinks: bool = False
    deterministic: bool = True
    paging: Paging | None = None
    scaling: Scaling | None = None
    rope: Rope = Rope.NONE
    dtype_rope: DType | None = None
    rotary_dim: int = 0
    rotary_rows: int = 0
    """Positions of the rotary tables."""
    new_rows: int = 0
    """Rows that ``kv_append`` adds to a sequence, at most."""
    open_bias: bool = False
    """The bias is made by a stage of the plan: all scores but for the mask."""
    v_in_k: bool = False
    """Values are the first elements of keys: there is no operand ``v``."""
    cache_items: int = 0
    """Batch items of a cache that is not paged: those of k and v."""
    num_splits: int = 0
    """Parts of the keys that the caller asked for; 0: the planner decides."""
    min_q: int = 0
    """Sequences with fewer queries are skipped."""
    shared: SharedPrefix | None = None
    """Prefixes that sequences share; all else is said of the keys that are their own."""
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes of which every operand's address is a multiple, by the caller's word."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Plans are looked up by problem at every dispatch: the rest differs where these are equal too rarely to matter.
        sizes = (self.batch, self.heads_q, self.heads_k, self.seq_q, self.seq_k, self.hdim_q, self.hdim_v)
        return hash((self.operation, self.dtype, sizes, self.mask, self.varlen, len(self.tensors)))

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.tensors

    # ---- operands by name ----

    @cached_property
    def _places(self) -> Mapping[str, Strides]:
        return {place.operand: place for place in self.places}

    @cached_property
    def _names(self) -> Mapping[str, Operand]:
        return {operand.name: operand for operand in self.tensors}

    def place(self, name: str) -> Strides:
        """Where an operand's elements lie; one without a name if it is not there."""
        return self._places.get(name, _ABSENT)

    def has(self, name: str) -> bool:
        return name in self._names

    def source(self, name: str) -> str:
        """The operand that holds what ``name`` is."""
        return "k" if name == "v" and self.v_in_k else name

    def operand(self, name: str) -> Operand:
        return self._names[self.source(name)]

    # ---- what kind it is ----

    @property
    def group(self) -> int:
        """Query heads that read one head of keys and values."""
        return self.heads_q // max(self.heads_k, 1)

    @property
    def mode(self) -> Mode:
        return Mode.GROUP if self.varlen else Mode.BATCH

    @property
    def paged(self) -> bool:
        return self.paging is not None

    @property
    def v_row_major(self) -> bool:
        """True also of values of one element, which lie in both ways."""
        return self.hdim_v == 1 or not self._column_major("v")

    @property
    def v_layout(self) -> VLayout:
        return VLayout.VR if self.v_row_major else VLayout.VC

    def _column_major(self, name: str) -> bool:
        place = self.place(name)
        return bool(place.operand) and place.chunk == 0 and place.col != 1 and place.row == 1

    @property
    def qscale(self) -> QScale:
        return self.scaling.kind if self.scaling else QScale.NONE

    @property
    def joint_bias(self) -> bool:
        """True for a bias together with slopes, whose sum a stage of its own makes."""
        return self.bias is BiasKind.ELEMENTWISE and self.has("alibi_slopes")

    @property
    def odd_values(self) -> bool:
        """True if rows of the output are no whole vectors."""
        return self.hdim_v % VECTOR > 0

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0

    @property
    def drop_probability(self) -> float:
        """Probability that ``dropout_p`` becomes with random bytes."""
        return self.dropout / 256

    @property
    def keep_scale(self) -> float:
        return 256 / (256 - self.dropout)

    @property
    def family(self) -> Family:
        """The family that computes it without splitting."""
        return Family.FWD

    # ---- work ----

    @property
    def m(self) -> int:
        return self.seq_q

    @property
    def n(self) -> int:
        return self.seq_k

    @property
    def k(self) -> int:
        return self.hdim_q

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of a query and a key in all batch items and heads, of full sequences."""
        return self.batch * self.heads_q * self.mask.pairs(self.seq_q, self.seq_k)

    @property
    def flops(self) -> int:
        return 2 * self.pairs * (self.hdim_q + self.hdim_v)

    @property
    def num_ops(self) -> int:
        """Floating-point operations of all pairs, masked ones included."""
        return 2 * self.batch * self.heads_q * self.seq_q * self.seq_k * (self.hdim_q + self.hdim_v)

    def describe(self) -> dict[str, Any]:
        """Integers are sizes, words what the kernel must do: measurements are found by both."""
        mask = self.mask
        record: dict[str, Any] = {
            "operation": self.operation,
            "family": self.family.value,
            "dtype": self.dtype.value,
            "mode": self.mode.value,
            "batch": self.batch,
            "heads_q": self.heads_q,
            "heads_k": self.heads_k,
            "seq_q": self.seq_q,
            "seq_k": self.seq_k,
            "hdim_q": self.hdim_q,
            "hdim_v": self.hdim_v,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "mask": mask.kind.value,
            "bias": self.bias.value,
            "v_layout": self.v_layout.value,
            "flops": self.flops,
            "num_ops": self.num_ops,
        }
        if self.shared is not None:
            record |= {"prefix_groups": self.shared.groups, "prefix_keys": self.shared.prefix.seq_k}
        return {**record, **self._unusual()}

    def _unusual(self) -> dict[str, Any]:
        """Deviations from plain attention, and only these."""
        mask, words = self.mask, {}
        if mask.kind is not MaskKind.NONE or self.has("alibi_slopes"):
            words["mask_align"] = "bottom_right" if mask.bottom_right else "top_left"
        if mask.kind is MaskKind.WINDOW:
            words["window"] = f"{mask.left},{mask.right}"
        if mask.sink:
            words["sink_size"] = str(mask.sink)
        if self.dtype_bias is not None:
            words["dtype_bias"] = self.dtype_bias.value
        if self.softcap:
            words["softcap"] = f"{self.softcap:g}"
        if self.scores is not Scores.NONE:
            words["scores"] = self.scores.value
        if self.joint_bias:
            words["alibi"] = "on"
        if self.dropout:
            words["drop_probability"] = f"{self.drop_probability:g}"
        if self.paging is not None:
            words["page_size"] = str(self.paging.page_size)
            words["kv_layout"], words["kv_lookup"] = self.paging.layout.value, self.paging.lookup.value
        if self.qscale is not QScale.NONE:
            words["qscale"] = self.qscale.value
        if self.rope is not Rope.NONE:
            words["rope"] = self.rope.value
        if self.num_splits:
            words["num_splits"] = str(self.num_splits)
        if self.alignment != DEFAULT_ALIGNMENT:
            words["alignment"] = str(self.alignment)
        switches = ("lse", "randval", "status", "dbias", "dsinks", "learned_sinks", "v_in_k")
        words |= {name: "on" for name in switches if getattr(self, name)}
        if not self.deterministic:
            words["deterministic"] = "off"
        return words


class AttentionProblem(FmhaProblem):
    operation: ClassVar[str] = ATTENTION

    @property
    def family(self) -> Family:
        if not self.paged:
            return Family.FWD
        return Family.BATCH_PREFILL if self.varlen else Family.PAGEDKV

    @property
    def flops(self) -> int:
        """FLOP of visible pairs; those of a prefix count once for each row of queries."""
        if self.shared is None:
            return super().flops
        rows = self.total_q * self.heads_q * self.shared.prefix.seq_k
        return self.shared.rest.flops + 2 * rows * (self.hdim_q + self.hdim_v)

    @property
    def bytes_moved(self) -> int:
        """Bytes of every operand once; of a cache in pages those of no more keys than sequences may have."""
        moved, paging = super().bytes_moved, self.paging
        if paging is not None and paging.pages:
            parts = (self,) if self.shared is None else (self.shared.prefix, self.shared.rest)
            seen = -(-sum(part.batch * part.seq_k for part in parts) // paging.page_size)
            for desc in (self.operand(name).desc for name in ("k", "v") if self.has(name)):
                moved -= max(paging.pages - seen, 0) * (desc.size // paging.pages) * desc.dtype.bytes
        return moved


class AttentionBackwardProblem(FmhaProblem):
    """Gradients of q, k and v, and of a bias and of learned sinks where asked for."""

    operation: ClassVar[str] = ATTENTION_BACKWARD

    @property
    def family(self) -> Family:
        return Family.DQ_DK_DV

    @property
    def flops(self) -> int:
        """Five products: scores again, gradients of probabilities and values, of queries and keys."""
        return 2 * self.pairs * (3 * self.hdim_q + 2 * self.hdim_v)


class KvAppendProblem(FmhaProblem):
    """Rows that are written behind the others of a cache, rotated on the way if asked for."""

    operation: ClassVar[str] = KV_APPEND

    @property
    def family(self) -> Family:
        return Family.APPENDKV

    @property
    def flops(self) -> int:
        """FLOP of the rotation: four products and two sums for a pair."""
        rows = self.batch * (self.new_rows * self.heads_k + self.seq_q * self.heads_q)
        return 3 * rows * self.rotary_dim if self.rope is not Rope.NONE else 0

    @property
    def num_ops(self) -> int:
        return self.flops


PROBLEMS: Mapping[str, type[FmhaProblem]] = {
    kind.operation: kind for kind in (AttentionProblem, AttentionBackwardProblem, KvAppendProblem)
}
