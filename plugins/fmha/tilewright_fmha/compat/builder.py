"""Problems said step by step, with the seeds' setters: what a kernel is asked for, before there are tensors.

spec = (FmhaProblemBuilder().api_family("fwd").data_type("bf16").dims(128, 128, 2, 4096, 4096).nheads(32, 8)
        .mask_type("causal").lse().build())
request = spec.request()
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from tilewright_fmha.compat.request import request_of
from tilewright_fmha.vocabulary import (
    API_FAMILIES,
    DTYPE_ALIASES,
    MASK_ALIASES,
    ROPE_ALIASES,
    BiasKind,
    FmhaDType,
    KvLayout,
    KvLookup,
    MaskWord,
    QScale,
    Rope,
)
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import refuse, suggest
from tilewright_kit.types.vocabulary import Word

__all__ = ["FmhaProblemBuilder", "FmhaSpec"]

W = TypeVar("W", bound=Word)
_BIASES = {"no_bias": "no", "bias": "elementwise", "0": "no", "1": "elementwise", "2": "alibi"}
_QSCALES = {"no_scale": "no", "0": "no", "1": "pertensor", "2": "blockscale", "3": "kv_blockscale"}
_ROPES = {**ROPE_ALIASES, "0": "none", "1": "interleaved", "2": "half"}
_LAYOUTS = {"0": "vectorized", "1": "linear"}
_LOOKUPS = {"0": "vllm", "1": "sglang"}


@dataclass(frozen=True, slots=True)
class FmhaSpec:
    """The seeds' problem, field for field where one means something without addresses.

    A cache is ``linear``, looked up as ``vllm`` does, in pages of 16 tokens, unless ``kv_cache`` says otherwise: the
    seeds' own default, vectorized pages of one token, has no room for a chunk.
    """

    api_family: str = "fwd"
    kernel_family: str = ""
    """Of which family the kernel must be; empty: any that computes it."""
    gfx_arch: str = ""
    data_type: FmhaDType = FmhaDType.FP16
    is_group_mode: bool = False
    is_v_rowmajor: bool = True
    has_logits_soft_cap: bool = False
    has_lse: bool = False
    has_dropout: bool = False
    use_paged_kv: bool = False
    do_fp8_static_quant: bool = False
    skip_min_seqlen_q: bool = False
    has_sink: bool = False
    has_dbias: bool = False
    is_store_randval: bool = False
    is_deterministic: bool = False
    mask_type: MaskWord = MaskWord.NO
    bias_type: BiasKind = BiasKind.NO
    qscale_type: QScale = QScale.NO
    rope_type: Rope = Rope.NONE
    kv_memory_layout: KvLayout = KvLayout.LINEAR
    kv_lookup_table: KvLookup = KvLookup.VLLM
    page_size: int = 16
    seqlen_q: int = 0
    seqlen_k: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    batch: int = 0
    hdim_q: int = 0
    hdim_v: int = 0
    nhead_q: int = 0
    nhead_k: int = 0
    num_splits: int = 1
    window_size_left: int = -1
    window_size_right: int = -1
    sink_size: int = 0

    @property
    def operation(self) -> str:
        return API_FAMILIES[self.api_family]

    @property
    def effective_max_seqlen_q(self) -> int:
        return self.max_seqlen_q or self.seqlen_q

    @property
    def effective_max_seqlen_k(self) -> int:
        return self.max_seqlen_k or self.seqlen_k

    @property
    def num_ops(self) -> int:
        """The seeds' count, which takes no notice of masks."""
        pairs = self.batch * self.nhead_q * self.seqlen_q * self.seqlen_k
        return 2 * pairs * (self.hdim_q + self.hdim_v)

    @property
    def key(self) -> str:
        """What kernels are looked up by: families, types, head dimensions, features. No lengths, batch or heads."""
        left_out = (
            "seqlen_q", "seqlen_k", "max_seqlen_q", "max_seqlen_k", "batch", "nhead_q", "nhead_k", "num_splits",
            "window_size_left", "window_size_right", "sink_size",
        )  # fmt: skip
        values = (getattr(self, item.name) for item in dataclasses.fields(self) if item.name not in left_out)
        return "\x1f".join(str(int(value)) if isinstance(value, bool) else str(value) for value in values)

    def request(self) -> OperationRequest:
        """A request of these sizes, its tensors without gaps. Raises ``InvalidArgumentError``."""
        return request_of(self)


class FmhaProblemBuilder:
    """Every setter returns the builder; ``build`` checks what they said together."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}

    def _set(self, **fields: Any) -> FmhaProblemBuilder:
        self._fields |= fields
        return self

    # ---- what is computed ----

    def api_family(self, name: str) -> FmhaProblemBuilder:
        """``fwd``, ``fwd_pagedkv``, ``fwd_splitkv``, ``fwd_appendkv``, ``batch_prefill`` or ``bwd``."""
        if name not in API_FAMILIES:
            raise _unknown("api_family", name, list(API_FAMILIES))
        return self._set(api_family=name)

    def kernel_family(self, name: str) -> FmhaProblemBuilder:
        return self._set(kernel_family=str(name))

    def gfx_arch(self, name: str) -> FmhaProblemBuilder:
        return self._set(gfx_arch=str(name))

    def data_type(self, name: str) -> FmhaProblemBuilder:
        return self._set(data_type=_word("data_type", name, FmhaDType, DTYPE_ALIASES))

    # ---- sizes ----

    def dims(self, hdim_q: int, hdim_v: int, batch: int, seqlen_q: int, seqlen_k: int) -> FmhaProblemBuilder:
        sizes = {"hdim_q": hdim_q, "hdim_v": hdim_v, "batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        return self._set(**sizes)

    def nheads(self, q: int, k: int) -> FmhaProblemBuilder:
        return self._set(nhead_q=q, nhead_k=k)

    def max_seqlen(self, q: int, k: int = 0) -> FmhaProblemBuilder:
        return self._set(max_seqlen_q=q, max_seqlen_k=k)

    # ---- scores ----

    def mask_type(self, name: str | int) -> FmhaProblemBuilder:
        return self._set(mask_type=_word("mask_type", name, MaskWord, MASK_ALIASES))

    def window(self, left: int, right: int) -> FmhaProblemBuilder:
        return self._set(window_size_left=left, window_size_right=right)

    def bias_type(self, name: str | int) -> FmhaProblemBuilder:
        return self._set(bias_type=_word("bias_type", name, BiasKind, _BIASES))

    def logits_soft_cap(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(has_logits_soft_cap=on)

    def sink(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(has_sink=on)

    def sink_size(self, size: int) -> FmhaProblemBuilder:
        return self._set(sink_size=size, has_sink=True)

    # ---- what else ----

    def lse(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(has_lse=on)

    def dropout(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(has_dropout=on)

    def qscale_type(self, name: str | int) -> FmhaProblemBuilder:
        return self._set(qscale_type=_word("qscale_type", name, QScale, _QSCALES))

    def fp8_static_quant(self, on: bool = True) -> FmhaProblemBuilder:
        """One factor for each tensor: ``qscale_type("pertensor")``."""
        return self._set(do_fp8_static_quant=on)

    def rope_type(self, name: str | int) -> FmhaProblemBuilder:
        return self._set(rope_type=_word("rope_type", name, Rope, _ROPES))

    def num_splits(self, count: int) -> FmhaProblemBuilder:
        return self._set(num_splits=count)

    def skip_min_seqlen_q(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(skip_min_seqlen_q=on)

    def bwd_flags(
        self, dbias: bool = False, store_randval: bool = False, deterministic: bool = False
    ) -> FmhaProblemBuilder:
        return self._set(has_dbias=dbias, is_store_randval=store_randval, is_deterministic=deterministic)

    # ---- how operands lie ----

    def v_rowmajor(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(is_v_rowmajor=on)

    def group_mode(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(is_group_mode=on)

    def paged_kv(self, on: bool = True) -> FmhaProblemBuilder:
        return self._set(use_paged_kv=on)

    def kv_cache(self, memory_layout: str | int, lookup_table: str | int, page_size: int) -> FmhaProblemBuilder:
        layout = _word("kv_memory_layout", memory_layout, KvLayout, _LAYOUTS)
        lookup = _word("kv_lookup_table", lookup_table, KvLookup, _LOOKUPS)
        return self._set(kv_memory_layout=layout, kv_lookup_table=lookup, page_size=page_size)

    # ---- the end ----

    def build(self) -> FmhaSpec:
        """Raises ``InvalidArgumentError`` for what is missing or does not go together."""
        given = dict(self._fields)
        if given.get("do_fp8_static_quant") and given.get("qscale_type", QScale.NO) is QScale.NO:
            given["qscale_type"] = QScale.PERTENSOR
        spec = FmhaSpec(**given)
        if "data_type" not in given:
            raise refuse("no data_type was set", "data_type", "", "problem_incomplete", "call data_type")
        for name in ("batch", "hdim_q", "hdim_v", "nhead_q", "nhead_k"):
            value = getattr(spec, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                setter = "nheads" if name.startswith("nhead") else "dims"
                raise refuse(
                    f"{name} is {value!r}",
                    name,
                    value,
                    "problem_incomplete",
                    f"call {setter} with numbers of at least 1",
                )
        if spec.api_family == "batch_prefill":
            spec = dataclasses.replace(spec, is_group_mode=True, use_paged_kv=True)
        elif spec.api_family == "fwd_pagedkv":
            spec = dataclasses.replace(spec, use_paged_kv=True)
        elif spec.api_family == "fwd_appendkv":
            spec = dataclasses.replace(spec, mask_type=MaskWord.NO, bias_type=BiasKind.NO)
        if spec.api_family == "bwd" and not spec.has_lse:
            raise refuse("backward requires lse", "has_lse", False, "lse_required", "call lse()")
        if spec.is_group_mode and spec.max_seqlen_q < 1:
            raise refuse(
                "group mode needs max_seqlen_q",
                "max_seqlen_q",
                spec.max_seqlen_q,
                "max_seqlen_given",
                "call max_seqlen with the most rows that a sequence has",
            )
        return spec

    def request(self) -> OperationRequest:
        return self.build().request()


def _word(field: str, value: object, words: type[W], aliases: Any) -> W:
    text = str(value.value if isinstance(value, Enum) else value)
    name = aliases.get(text, text)
    if name not in [item.value for item in words]:
        raise _unknown(field, text, [item.value for item in words])
    return words(name)


def _unknown(field: str, value: str, known: list[str]) -> Exception:
    return refuse(f"{field} {value!r} is not known", field, value, "attribute_choice", suggest(value, known))
