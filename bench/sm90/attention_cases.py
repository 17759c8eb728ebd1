"""Trials of attention.py: cases of attention, and the kernels for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright_arch import load
from tilewright_fmha.config.config import AttentionConfig
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.vocabulary import Family, FmhaDType, KvLookup, MaskKind, Mode, Scheduling

__all__ = ["SUITES", "Case", "Experiment", "Variant"]


@dataclass(frozen=True)
class Case:
    """One attention. Lengths are data where lists are given; ``starts_*`` put sequences end to end."""

    batch: int = 1
    heads_q: int = 2
    heads_k: int = 2
    seq_q: int = 256
    seq_k: int = 256
    hdim: int = 128
    hdim_v: int = 0
    dtype: str = "bf16"
    left: int = -1
    right: int = -1
    bottom_right: bool = False
    token_sinks: int = 0
    softcap: float = 0.0
    lse: bool = False
    sinks: bool = False
    layout: str = "bhsd"
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    varlen: bool = False
    """``lengths_*`` are those of sequences end to end; ``seq_*`` rows more lie behind the last."""
    cache_index: tuple[int, ...] = ()
    items: int = 0
    """Tokens of a cache; 0: batch."""
    min_q: int = 0
    status: bool = False
    scale: float = 0.0
    page: int = 0
    """Rows of a page of the cache; 0: keys and values lie as they are. ``lengths_k`` must be given."""
    absent: bool = False
    """The table lacks the second page of the first sequence."""
    sglang: bool = False
    """The table is one list of all sequences' pages."""

    @property
    def family(self) -> Family:
        if not self.page:
            return Family.FWD
        return Family.BATCH_PREFILL if self.varlen else Family.PAGEDKV

    @property
    def v(self) -> int:
        return self.hdim_v or self.hdim

    @property
    def mask(self) -> MaskKind:
        if self.left < 0 and self.right < 0:
            return MaskKind.NONE
        return MaskKind.CAUSAL if self.left < 0 else MaskKind.WINDOW

    @property
    def label(self) -> str:
        default = Case()
        shape = f"{self.batch}x{self.heads_q}/{self.heads_k}x{self.seq_q}/{self.seq_k}x{self.hdim}/{self.v}"
        named = ("batch", "heads_q", "heads_k", "seq_q", "seq_k", "hdim", "hdim_v")
        rest = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in named}
        words = [f"{name}={value}" for name, value in rest.items() if value != getattr(default, name)]
        return " ".join([shape, *words])


@dataclass(frozen=True)
class Variant:
    """How a kernel is cut."""

    n0: int
    consumers: int = 2
    persistent: bool = True
    pingpong: bool = False
    stages: int = 0

    @property
    def label(self) -> str:
        flags = ("p" * self.persistent) + ("t" * self.pingpong) + (f"s{self.stages}" if self.stages else "")
        return f"{64 * self.consumers}x{self.n0}{flags}"

    def config(self, case: Case, hdim: tuple[int, int]) -> AttentionConfig:
        q, v = hdim
        n, count = self.n0, self.consumers
        return AttentionConfig(
            family=case.family,
            paged=case.page > 0,
            kv_lookup=KvLookup.SGLANG if case.sglang else KvLookup.VLLM,
            dtype=FmhaDType(case.dtype),
            mode=Mode.GROUP if case.varlen else Mode.BATCH,
            hdim=hdim,
            pipeline="ws",
            tile=(64 * count, n, q, v, n, q),
            wave=(count, 1, 1, count, 1, 1, 1, 1, 1),
            warp_tile=(64, n, 16, 64, v, 16, 16, 16, 16),
            mask=case.mask,
            sink=case.token_sinks > 0 and case.left >= 0,
            softcap=case.softcap > 0,
            lse=case.lse,
            learned_sinks=case.sinks,
            skip_min_seqlen_q=case.min_q > 0,
            persistent=self.persistent,
            scheduler=Scheduling.PINGPONG if self.pingpong else Scheduling.DEFAULT,
            stages=self.stages,
        )


HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
_64 = (Variant(128, 3, pingpong=True), Variant(128, pingpong=True), Variant(192, pingpong=True), Variant(128, 1))
_128 = (Variant(128), Variant(128, pingpong=True), Variant(160, pingpong=True), Variant(176))
_192 = (Variant(112), Variant(96, pingpong=True), Variant(128))
_256 = (Variant(80), Variant(80, persistent=False), Variant(64))
FAST: Mapping[tuple[int, int], tuple[Variant, ...]] = dict(zip(HEADS, (_64, _128, _192, _256), strict=True))


def fits(case: Case, hdim: tuple[int, int], variant: Variant) -> bool:
    return not RULES.check(variant.config(case, hdim), load("sm_90a"))


def fitting(case: Case, hdim: tuple[int, int]) -> tuple[Variant, ...]:
    """Variants that the rules take with the case's features, one with a single consumer among them."""
    found = [*FAST[hdim], Variant(64, 1), Variant(96, 3), Variant(64), Variant(112, pingpong=True)]
    return tuple([item for item in found if fits(case, hdim, item)][:4])


@dataclass(frozen=True)
class Experiment:
    case: Case
    variants: tuple[Variant, ...] = ()
    checked: bool = True
    timed: bool = False
    seconds: float = 0.1
    portable: bool = False
    """The portable kernel that the planner would take runs too."""
    chosen: bool = False
    """The kernel is the planner's choice."""
    few: bool = False
    """Kernels are those for few rows of queries, with keys in one part, in three and in as many as are planned."""

    @property
    def hdim(self) -> tuple[int, int]:
        return next(item for item in HEADS if item[0] >= self.case.hdim and item[1] >= self.case.v)

    @property
    def configs(self) -> tuple[AttentionConfig, ...]:
        return tuple(item.config(self.case, self.hdim) for item in self.variants or fitting(self.case, self.hdim))

    def name_of(self, config: AttentionConfig) -> str:
        variants = self.variants or fitting(self.case, self.hdim)
        found = (item.label for item in variants if item.config(self.case, self.hdim) == config)
        parts = f" {config.num_splits} parts" if config.num_splits else ""
        return next(found, f"{config.pipeline} {config.m0}x{config.n0}{parts}")


CAUSAL = {"right": 0, "bottom_right": True}


def first() -> list[Experiment]:
    """The least that must work."""
    found = [Experiment(Case(hdim=q, hdim_v=v, **more)) for q, v in HEADS for more in ({}, CAUSAL)]  # type: ignore[arg-type]
    return [*found, Experiment(Case(seq_q=1000, seq_k=1500, batch=3, heads_q=40, heads_k=8, lse=True))]


def correct() -> list[Experiment]:
    """Every feature at odd sizes."""
    odd = Case(batch=2, heads_q=6, heads_k=2, seq_q=333, seq_k=777)
    options: list[dict[str, Any]] = [
        {"lse": True, "layout": "bshd"},
        {**CAUSAL, "lse": True, "dtype": "fp16"},
        {"right": 0, "lse": True},
        {**CAUSAL, "seq_q": 777, "seq_k": 333, "lse": True},
        {"left": 100, "right": 30, "bottom_right": True, "lse": True},
        {"left": 64, "right": 0, "token_sinks": 5, "bottom_right": True},
        {"left": 3, "right": -1, "token_sinks": 300, "lse": True},
        {"softcap": 20.0, **CAUSAL, "lse": True},
        {"sinks": True, "lse": True, "right": 0},
        {"lengths_k": (700, 65), "lengths_q": (333, 100), "lse": True},
        {"lengths_k": (0, 513), **CAUSAL, "lse": True, "status": True},
        {"lengths_k": (40, 777), "cache_index": (3, 1), "items": 4},
        {"varlen": True, "batch": 4, "lengths_q": (100, 0, 333, 257), "lengths_k": (130, 64, 777, 1), "lse": True,
         "seq_q": 40, "seq_k": 50},
        {"varlen": True, "batch": 4, "lengths_q": (100, 0, 333, 64), "lengths_k": (130, 64, 333, 0), "lse": True,
         **CAUSAL, "seq_q": 0, "seq_k": 0, "sinks": True, "status": True},
        {"varlen": True, "batch": 3, "lengths_q": (200, 3, 180), "lengths_k": (250, 64, 180), "min_q": 5, "left": 70,
         "right": 0, "token_sinks": 3, "softcap": 30.0, "sinks": True, "lse": True, "dtype": "fp16"},
        {"batch": 5, "heads_q": 48, "heads_k": 12, "seq_q": 1100, "seq_k": 1100, **CAUSAL, "lse": True},
        {"seq_q": 1, "seq_k": 1, "lse": True},
        {"scale": 2.5, "lse": True},
    ]  # fmt: skip
    found = [replace(odd, hdim=q, hdim_v=v, **more) for more in options for q, v in HEADS]
    found += [
        replace(odd, hdim=q, hdim_v=v, **CAUSAL, lse=True) for q, v in ((40, 40), (96, 96), (72, 128), (200, 136))
    ]
    return [Experiment(case) for case in found]


def shapes() -> list[Case]:
    """Those of the table, forward."""
    found = []
    for hdim, heads in ((64, 32), (128, 32), (256, 16)):
        for batch, seq in ((8, 1024), (4, 2048), (2, 4096), (2, 8192), (1, 16384)):
            if seq > 1024:
                found += [
                    Case(batch, heads, heads, seq, seq, hdim),
                    Case(batch, heads, heads, seq, seq, hdim, right=0, bottom_right=True),
                ]
    return [*found, Case(4, 32, 8, 4096, 4096, 128, right=0, bottom_right=True)]


def small() -> list[Experiment]:
    """Problems that do not fill the device, beside the best portable kernel."""
    found = [
        Case(1, 8, 8, 128, 128, 128), Case(1, 8, 8, 512, 512, 128), Case(1, 8, 8, 512, 512, 64),
        Case(8, 16, 16, 256, 256, 64), Case(1, 16, 16, 1024, 1024, 128, **CAUSAL), Case(8, 8, 8, 512, 512, 256),
        Case(2, 16, 4, 1000, 1000, 96, **CAUSAL), Case(16, 16, 16, 128, 4096, 128),
        Case(2, 32, 32, 1024, 1024, 64, **CAUSAL),
    ]  # fmt: skip
    more = {64: (Variant(128, 1), Variant(128, 2)), 128: (Variant(128, 1),), 256: (Variant(64, 1),)}
    return [
        Experiment(
            case, (*fitting(case, Experiment(case).hdim), *more[Experiment(case).hdim[0]]), False, True, 0.02, True
        )
        for case in found
    ]


def fast() -> list[Experiment]:
    more = [Case(2, 16, 16, 8192, 8192, 192, 128, right=right, bottom_right=right == 0) for right in (-1, 0)]
    return [
        Experiment(case, FAST[case.hdim, case.v], checked=False, timed=True, seconds=0.03)
        for case in (*shapes(), *more)
    ]


def chosen() -> list[Experiment]:
    """Kernels that the planner takes for the timed cases, features of the others at their sizes."""
    timed = [Experiment(item.case, (), False, True, 0.05, chosen=True) for item in (*fast(), *small())]
    return [*timed, *(Experiment(item.case, chosen=True) for item in correct()[::5])]


def unproven() -> list[Experiment]:
    """One consumer with features: what is not offered."""
    columns = {(64, 64): 128, (128, 128): 128, (192, 128): 96, (256, 256): 64}
    alone = [Experiment(item.case, (Variant(columns[item.hdim], 1),)) for item in correct()]
    return [item for item in alone if fits(item.case, item.hdim, item.variants[0])]


def paged() -> list[Experiment]:
    """Caches in pages; those of the planner's choice are timed beside portable kernels."""
    lengths = Case(batch=3, heads_q=6, heads_k=2, seq_q=200, seq_k=500, lengths_k=(500, 77, 300), page=16, lse=True)
    ragged = replace(lengths, varlen=True, lengths_q=(150, 1, 200), seq_q=30)
    cached = [
        replace(case, hdim=q, hdim_v=v, page=page, **more)
        for case in (lengths, ragged)
        for q, v in HEADS
        for page in (8, 16, 64, 256)
        for more in ({}, {**CAUSAL, "absent": True})
    ]
    cached += [replace(ragged, hdim=q, hdim_v=v, **CAUSAL, sglang=True) for q, v in HEADS]
    long = Case(4, 32, 8, 0, 4096, 128, lengths_q=(1024,) * 4, lengths_k=(4096,) * 4, varlen=True, **CAUSAL)
    cases = [replace(long, page=page, hdim=hdim) for hdim in (128, 64, 256) for page in (16, 64, 256)]
    timed = [Experiment(case, (), True, True, 0.03, True) for case in cases]
    first = [Experiment(replace(case, page=16), chosen=True) for case in (lengths, ragged)]
    return [*(Experiment(case) for case in cached), *first, *timed]


def decode() -> list[Experiment]:
    """Few queries and many keys: every feature, odd lengths and pages."""
    odd = Case(batch=3, heads_q=8, heads_k=2, seq_q=1, seq_k=1001, lse=True)
    ragged = {"lengths_k": (0, 700, 1001)}
    options: list[dict[str, Any]] = [
        {}, {"hdim": 64}, {"hdim": 256}, {"hdim": 192, "hdim_v": 128}, {"hdim": 72}, {"hdim": 40}, {"dtype": "fp16"},
        {"heads_k": 8}, {"heads_q": 32}, {"heads_q": 64}, {"heads_q": 64, "seq_q": 2}, {"layout": "bshd"},
        {"seq_q": 5, **CAUSAL}, {"seq_q": 5, "right": 0}, {"seq_q": 3, "left": 100, "right": 20, "sinks": True},
        {"seq_q": 3, "left": 100, **CAUSAL, "token_sinks": 70, "sinks": True},
        {"left": 10, **CAUSAL, "token_sinks": 4, "softcap": 20.0}, {"lengths_k": (0, 1, 1001)},
        {"lengths_k": (64, 63, 65), "sinks": True}, {"lengths_k": (5, 6, 7), "status": True},
        {"seq_q": 4, "lengths_q": (4, 0, 1), "lengths_k": (77, 500, 1000), **CAUSAL},
        {"seq_q": 4, "lengths_q": (4, 1, 2), "lengths_k": (77, 500, 1000), "min_q": 2},
        {"cache_index": (2, 0, 4), "items": 5, "lengths_k": (900, 5, 1001)},
        {"seq_q": 4, "seq_k": 1000, "varlen": True, "lengths_q": (4, 0, 1), "lengths_k": (77, 500, 1000), **CAUSAL},
        *({**ragged, "page": page} for page in (8, 16, 64, 128, 1024)),
        {"lengths_k": (100, 700, 1001), "page": 16, "absent": True},
        {"lengths_k": (100, 700, 1001), "page": 16, "sglang": True, "hdim": 64},
        {"seq_q": 3, "hdim": 256, "page": 32, "lengths_k": (5, 700, 1001), "left": 50, **CAUSAL, "token_sinks": 3},
        {"batch": 1, "heads_k": 1, "seq_q": 2, "seq_k": 20000, **CAUSAL},
    ]  # fmt: skip
    return [Experiment(replace(odd, **more), few=True) for more in options]


SUITES: Mapping[str, Callable[[], list[Experiment]]] = {
    "first": first,
    "correct": correct,
    "fast": fast,
    "small": small,
    "chosen": chosen,
    "decode": decode,
    "paged": paged,
    "unproven": unproven,
}
