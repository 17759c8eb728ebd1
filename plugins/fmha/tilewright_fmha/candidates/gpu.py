"""Kernels of GPUs that could compute a problem."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_fmha.candidates.applicability import signature_fields
from tilewright_fmha.candidates.gpu_tiles import valid_algorithms
from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.config.decode import decode_algorithms, decode_heads
from tilewright_fmha.config.judging import family_pipelines
from tilewright_fmha.config.template_support import TEMPLATES, features_of
from tilewright_fmha.config.warp_specialised import specialised_algorithms, specialised_heads
from tilewright_fmha.launch.splits import wants_splits
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family
from tilewright_kit.contract.device import DeviceInfo

__all__ = ["gpu_algorithms_for"]

MOST_SPLITS_LOG2 = 7


def gpu_algorithms_for(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    """Split kernels where there is too little work, then specialised ones, then those of every problem; the most
    general last. Only what there is a template for.
    """
    if problem.family in (Family.FWD, Family.PAGEDKV, Family.BATCH_PREFILL):
        yield from _split(problem, device)
    own = list(_cuts(problem, problem.family, device))
    general = [config for config in own if config.pipeline != "ws"]
    yield from _specialised(problem, device)
    yield from general
    if problem.paging is not None and general:
        page = problem.paging.page_size
        yield from (config.replace(page_size=page) for config in general[:2] if page in _pages(device))
        yield general[-1]


def _pages(device: DeviceInfo) -> tuple[int, ...]:
    spec = device.arch.attention
    return spec.page_sizes if spec else ()


def _specialised(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    """Specialised kernels hold heads of a few sizes, into which the copy engine pads others. Left to who names it
    are one consumer with features, and bits that tell of wrong lengths, of which no GPU has seen one.
    """
    if (device.arch.kind, "ws", problem.family) not in TEMPLATES or "ws" not in family_pipelines(
        problem.family, device.arch
    ):
        return
    fields = signature_fields(problem, problem.family, device)
    hdim = specialised_heads(problem.hdim_q, problem.hdim_v)
    if hdim is None or problem.status:
        return
    plain = config_of(problem.family)(**{**fields, "hdim": hdim})
    bare = features_of(plain) <= {"bf16", "causal"}
    for item in specialised_algorithms(hdim):
        if bare or item["wave"][0] > 1:
            yield plain.replace(**item)


def _split(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    asked = max(problem.num_splits - 1, 0).bit_length()
    for config in (*_few_rows(problem, device), *_cuts(problem, Family.SPLITKV, device)):
        cut = config.replace(max_splits_log2=max(MOST_SPLITS_LOG2, asked))
        packed = cut.replace(pack_gqa=True) if problem.group > 1 else cut
        if problem.num_splits or wants_splits(problem, packed, device):
            yield packed
            if packed != cut:
                yield cut


def _few_rows(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    """Specialised kernels, of the fewest rows that hold all query heads of a key head."""
    if "ws" not in family_pipelines(Family.SPLITKV, device.arch):
        return
    hdim = decode_heads(problem.dtype, problem.hdim_q, problem.hdim_v)
    if hdim is None:
        return
    plain = config_of(Family.SPLITKV)(**{**signature_fields(problem, Family.SPLITKV, device), "hdim": hdim})
    found = [plain.replace(**item) for item in decode_algorithms(hdim, problem.dtype)]
    rows = problem.seq_q * problem.group
    yield next((item for item in found if item.m0 >= rows), found[-1])


def _cuts(problem: FmhaProblem, family: Family, device: DeviceInfo) -> Iterator[FmhaConfig]:
    fields = signature_fields(problem, family, device)
    plain = config_of(family)(**fields)
    for item in valid_algorithms(plain, device.arch):
        few = item["pipeline"] == "ws" and family is Family.SPLITKV  # see _few_rows
        if (device.arch.kind, item["pipeline"], family) in TEMPLATES and not few:
            yield plain.replace(**item)
