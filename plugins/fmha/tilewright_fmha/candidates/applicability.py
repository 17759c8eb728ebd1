"""Requirements of a kernel on a problem, and the signature that a problem requires of a kernel."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.pipelines import FEW_ROWS
from tilewright_fmha.footprint.backward_partition import on_mma
from tilewright_fmha.problem.problem import VECTOR, FmhaProblem
from tilewright_fmha.problem.signature import signature_of
from tilewright_fmha.vocabulary import Family
from tilewright_kit.config.rules import Violation
from tilewright_kit.selection.applicability import other_signature

__all__ = ["families_of", "head_mismatches", "holds", "signature_mismatches"]

_LOOSE = ("family", "hdim", "page_size", "deterministic")
"""Fields in which a kernel may do more than the problem asks."""


def families_of(problem: FmhaProblem) -> tuple[Family, ...]:
    """Families that compute a problem: its own, and for attention that with split keys."""
    own = problem.family
    split = own in (Family.FWD, Family.PAGEDKV, Family.BATCH_PREFILL)
    return (own, Family.SPLITKV) if split else (own,)


def holds(config: FmhaConfig, problem: FmhaProblem) -> bool:
    """True for kernels of heads at least as large as those of the problem."""
    return config.hdim[0] >= problem.hdim_q and config.hdim[1] >= problem.hdim_v


def signature_mismatches(problem: FmhaProblem, config: FmhaConfig) -> Iterator[Violation]:
    """Reasons why this kernel cannot compute this problem on any device; none if it can."""
    wanted = signature_of(problem)
    yield from _family(problem, config)
    yield from other_signature(
        {name: (getattr(config, name), want) for name, want in wanted.items() if name not in _LOOSE}
    )
    if problem.operation == config.operation and wanted["deterministic"] and not config.deterministic:
        reason = "gradients must be the same in every run, and the kernel adds them in any order"
        yield Violation("signature", "deterministic", False, reason, {"deterministic": True})
    if not holds(config, problem):
        reason = f"heads have {problem.hdim_q} and {problem.hdim_v} elements, the kernel holds {config.hdim}"
        yield Violation("signature", "hdim", config.hdim, reason)
    if config.page_size and problem.paging is not None and config.page_size != problem.paging.page_size:
        reason = f"pages have {problem.paging.page_size} tokens, the kernel is for {config.page_size}"
        yield Violation("signature", "page_size", config.page_size, reason, {"page_size": 0})
    yield from _capacities(problem, config)


def _family(problem: FmhaProblem, config: FmhaConfig) -> Iterator[Violation]:
    families = families_of(problem)
    if config.family in families:
        return
    fix = {"family": families[0]} if config.operation == problem.operation else {}
    if not config.is_main:
        reason = f"a {config.family} kernel only takes part in plans of others"
        yield Violation("main_family", "family", config.family.value, reason, fix)
    else:
        reason = f"the problem is one of {families[0]}, the kernel one of {config.family}"
        yield Violation("signature", "family", config.family.value, reason, fix)


def _capacities(problem: FmhaProblem, config: FmhaConfig) -> Iterator[Violation]:
    """Sizes that a kernel without padding, or with limits, cannot take."""
    ragged_q = problem.varlen or problem.has("seqlens_q")
    ragged_k = problem.varlen or problem.has("seqlens_k")
    for name, padded, ragged, size, tile, what in (
        ("pad_s", config.pad_s, ragged_q, problem.seq_q, config.m0, "queries"),
        ("pad_sk", config.pad_sk, ragged_k, problem.seq_k, config.n0, "keys"),
    ):
        if padded or (not ragged and size % tile == 0):
            continue
        reason = (
            f"the number of {what} {'varies' if ragged else f'is {size}'}, and the kernel takes multiples of {tile}"
        )
        yield Violation("padding", name, False, reason, {name: True})
    for name, padded, size, of, step in (
        ("pad_d", config.pad_d, problem.hdim_q, config.hdim[0], config.hdim_align[0]),
        ("pad_dv", config.pad_dv, problem.hdim_v, config.hdim[1], config.hdim_align[1]),
    ):
        if not padded and (size != of or size % step):
            reason = f"heads have {size} elements, and the kernel takes just {of}, in multiples of {step}"
            yield Violation("padding", name, False, reason, {name: True})
    if config.max_seq_len_q and problem.seq_q > config.max_seq_len_q:
        reason = f"sequences have up to {problem.seq_q} queries, the kernel is for {config.max_seq_len_q}"
        yield Violation("max_seq_len_q", "max_seq_len_q", config.max_seq_len_q, reason, {"max_seq_len_q": 0})
    asked = problem.num_splits
    if asked > 1 and config.family is not Family.SPLITKV and Family.SPLITKV in families_of(problem):
        reason = f"the caller asked for {asked} parts of the keys"
        yield Violation("splits", "family", config.family.value, reason, {"family": Family.SPLITKV})
    if config.family is Family.SPLITKV and asked > config.max_splits:
        log2 = (asked - 1).bit_length()
        reason = f"the caller asked for {asked} parts of the keys, plans of the kernel have up to {config.max_splits}"
        yield Violation("splits", "max_splits_log2", config.max_splits_log2, reason, {"max_splits_log2": log2})


def head_mismatches(problem: FmhaProblem, config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Heads whose rows a kernel of a GPU cannot store: it stores vectors of a row, which end with the row only where
    heads are multiples of ``VECTOR``. What adds up the parts of split keys stores single elements.
    """
    if config.is_forward and problem.odd_values:
        if config.family is not Family.SPLITKV or config.pipeline == FEW_ROWS:
            reason = f"it stores {VECTOR} elements of a row at a time, and values have heads of {problem.hdim_v}"
            yield Violation("head_vectors", "family", config.family.value, reason, {"family": Family.SPLITKV})
    elif config.family is Family.DQ_DK_DV and arch.kind == "cuda" and not on_mma(config, arch):
        odd = next((size for size in (problem.hdim_q, problem.hdim_v) if size % VECTOR), 0)
        if odd:
            reason = (
                f"gradients in {config.dtype} are stored {VECTOR} elements at a time, and heads have {odd}: those in "
                "fp16 and bf16, and those of CPUs and AMD GPUs, take any size"
            )
            yield Violation("head_vectors", "hdim", (problem.hdim_q, problem.hdim_v), reason)
