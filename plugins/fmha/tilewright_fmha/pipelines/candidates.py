"""Candidates for a problem on any kind of device, reasons against other kernels, and their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_fmha.candidates.applicability import families_of, head_mismatches, holds, signature_mismatches
from tilewright_fmha.candidates.wide_heads import PART_SIZES, is_wide, refused_parts, value_parts
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.config.defaults import cpu_algorithm, cpu_register_tiles, spec_of
from tilewright_fmha.config.heads import CPU_MOST_HDIM, held_hdim, most_hdim
from tilewright_fmha.config.pipelines import family_pipelines
from tilewright_fmha.config.tile_order import tile_order
from tilewright_fmha.launch.splits import wants_splits
from tilewright_fmha.pipelines.algorithms import is_free, valid_algorithms
from tilewright_fmha.pipelines.records import PIPELINES, pipeline_of, record_of
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.pipelines.templates import TEMPLATES, templates_of
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.signature import signature_of
from tilewright_fmha.vocabulary import KV_APPEND, Family
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Prediction
from tilewright_kit.selection.candidates import Verdicts, shortlist, teams_for

__all__ = [
    "MOST_CPU",
    "MOST_GPU",
    "fmha_candidates",
    "fmha_mismatches",
    "fmha_refusal",
    "predict_fmha",
    "signature_fields",
    "with_signature",
]

MOST_CPU, MOST_GPU = 12, 32
_COLUMNS = (256, 128)
"""Sizes of a CPU's blocks."""
_MOST_SPLITS_LOG2 = 7
"""A GPU cuts keys into up to 128 parts, more only on request."""
_SPLITS_LOG2 = 5
"""A CPU cuts keys into up to 32 parts, more only for who asks for them."""

_verdicts = Verdicts(RULES)
_PROPOSALS = tuple((name, record.algorithms) for record in PIPELINES if record.algorithms for name in record.names)


def signature_fields(problem: FmhaProblem, family: Family, device: DeviceInfo) -> dict[str, Any]:
    """The signature of a kernel of ``family`` that computes ``problem`` on the device: sizes of heads are the next
    larger ones that the arch has, the problem's own where it has none, which rules then refuse.
    """
    spec = spec_of(device.arch)
    columns = spec.combine_columns if family is Family.SPLITKV else 1
    own = (problem.hdim_q, problem.hdim_v)
    hdim = held_hdim(device.arch, problem.dtype.value, *own, columns) or own
    found = {**signature_of(problem), "family": family, "hdim": hdim}
    templates = templates_of(device.arch.kind, Family.DQ_DK_DV).values()
    if problem.family is Family.DQ_DK_DV and not any("atomics" in words for words in templates):
        found["deterministic"] = True  # nobody minds an order that is always the same
    return found


def with_signature(problem: FmhaProblem, family: Family, device: DeviceInfo) -> FmhaConfig:
    """A kernel of ``family`` that computes ``problem``, with the device's default algorithm."""
    config = config_of(family)(**signature_fields(problem, family, device))
    if device.arch.kind == "cpu":
        return config.replace(**cpu_algorithm(config, device.arch))
    cuts = valid_algorithms(config, device.arch)
    return config.replace(**cuts[0]) if cuts else config


def fmha_candidates(problem: FmhaProblem, device: DeviceInfo) -> Candidates[FmhaConfig]:
    """Valid kernels for the problem: ``tile_order`` among those of a family, split ones first where cutting
    keys could pay, and the most general last.
    """
    cpu = device.arch.kind == "cpu"
    found = list(dict.fromkeys(_cpu_algorithms(problem, device) if cpu else _gpu_algorithms(problem, device)))
    kept = _kept(problem, found, device)
    for size in PART_SIZES if not kept and not cpu and is_wide(problem) else ():
        _, part = next(value_parts(problem, size))
        kept = kept or _kept(problem, list(dict.fromkeys(_valid_cuts(part, part.family, device))), device)
    if len(kept) > 1:
        kept = [*tile_order(kept[:-1], problem.seq_q), kept[-1]]
        # Sorts are stable: all threads before one, and split kernels before others.
        kept.sort(key=lambda config: (config.family is not Family.SPLITKV, -config.team if cpu else 0))
    return shortlist(kept, MOST_CPU if cpu else MOST_GPU, lambda config: predict_fmha(problem, config, device))


def _kept(problem: FmhaProblem, found: list[FmhaConfig], device: DeviceInfo) -> list[FmhaConfig]:
    return [
        config for config in found if _verdicts.allows(config, device) and not fmha_mismatches(problem, config, device)
    ]


def fmha_mismatches(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> tuple[Violation, ...]:
    """Reasons why this kernel cannot compute this problem on this device; empty if it can."""
    found = tuple(_mismatches(problem, config, device))
    if not found or not _takes_parts(problem, config, device):
        return found
    parts = value_parts(problem, config.hdim[1])
    return found if any(tuple(_mismatches(part, config, device)) for _, part in parts) else ()


def _takes_parts(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> bool:
    """The kernel might compute the values of larger heads part by part."""
    return device.arch.kind != "cpu" and config.family is problem.family and is_wide(problem)


def _mismatches(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Iterator[Violation]:
    yield from signature_mismatches(problem, config)
    if device.arch.kind != "cpu":
        yield from head_mismatches(problem, config, device.arch)
    record = record_of(config.pipeline, device.arch.kind)
    if record is not None:
        yield from record.mismatches(problem, config)
    if device.arch.kind == "cpu" and config.team > max(device.units, 1):
        reason = f"the kernel runs on a team of {config.team}, the device has {device.units} units"
        yield Violation("team", "wave", config.wave, reason)


def predict_fmha(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the whole plan, and its parts. Raises ``UnsupportedError`` for a pipeline that the device lacks."""
    predict = pipeline_of(config, device.arch).predict
    if device.arch.kind == "cpu" or holds(config, problem):
        return predict(problem, config, device)
    parts = [predict(part, config, device).seconds for _, part in value_parts(problem, config.hdim[1])]
    scores = 2.0 * problem.pairs * problem.hdim_q / (device.arch.throughput.peak_flops("fp32") or 1e13)
    return Prediction(sum(parts) + scores, {"values": sum(parts), "scores": scores})


def fmha_refusal(problem: FmhaProblem, device: DeviceInfo) -> Violation | None:
    """Why there is no kernel for the problem, and which is the nearest; None if there are some."""
    odd = problem.odd_values and device.arch.kind != "cpu"
    split = (problem.num_splits > 1 or odd) and Family.SPLITKV in families_of(problem)
    config = with_signature(problem, Family.SPLITKV if split else problem.family, device)
    violations = (*RULES.check(config, device.arch), *fmha_mismatches(problem, config, device))
    # That nothing could be chosen for a signature is no reason, but follows from one.
    told = [item for item in violations if not is_free(config, item.field)]
    found = next(iter(told or violations), None)
    large = max(problem.hdim_q, problem.hdim_v) > most_hdim(device.arch)
    if found is None or not large or not (reason := refused_parts(problem)):
        return found
    # A kernel's fix is no problem's: its heads are what they are.
    return Violation(found.rule, found.field, config.hdim, f"{reason}; those of CPUs up to {CPU_MOST_HDIM}")


def _gpu_algorithms(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    """Split kernels where there is too little work, then those that a pipeline proposes, then the cuts of every
    problem; the most general last. Only kernels that have a template.
    """
    if problem.family in (Family.FWD, Family.PAGEDKV, Family.BATCH_PREFILL):
        yield from _split(problem, device)
    yield from _proposed(problem, problem.family, device)
    general = list(_valid_cuts(problem, problem.family, device))
    yield from general
    if problem.paging is not None and general:
        page, spec = problem.paging.page_size, attention_of(device.arch)
        sizes = spec.page_sizes if spec else ()
        yield from (config.replace(page_size=page) for config in general[:2] if page in sizes)
        yield general[-1]


def _split(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    asked = max(problem.num_splits - 1, 0).bit_length()
    family = Family.SPLITKV
    for config in (*_proposed(problem, family, device), *_valid_cuts(problem, family, device)):
        cut = config.replace(max_splits_log2=max(_MOST_SPLITS_LOG2, asked))
        packed = cut.replace(pack_gqa=True) if problem.group > 1 else cut
        if problem.num_splits or problem.odd_values or wants_splits(problem, packed, device):
            yield packed
            if packed != cut:
                yield cut


def _proposed(problem: FmhaProblem, family: Family, device: DeviceInfo) -> Iterator[FmhaConfig]:
    """Kernels of the pipelines that know better than to try every cut."""
    for name, algorithms in _PROPOSALS:
        if (device.arch.kind, name, family) in TEMPLATES and name in family_pipelines(family, device.arch):
            yield from algorithms(problem, config_of(family)(**signature_fields(problem, family, device)))


def _valid_cuts(problem: FmhaProblem, family: Family, device: DeviceInfo) -> Iterator[FmhaConfig]:
    plain = config_of(family)(**signature_fields(problem, family, device))
    for item in valid_algorithms(plain, device.arch):
        record = record_of(item["pipeline"], device.arch.kind)
        if record and not record.algorithms and (device.arch.kind, item["pipeline"], family) in TEMPLATES:
            yield plain.replace(**item)


def _cpu_algorithms(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    plain = with_signature(problem, problem.family, device)
    teams = tuple(reversed(teams_for(problem, device)))
    if problem.family in (Family.FWD, Family.PAGEDKV, Family.BATCH_PREFILL):
        split = with_signature(problem, Family.SPLITKV, device).replace(max_splits_log2=_SPLITS_LOG2)
        for team in teams:
            config = split.replace(**_cut(split, device, team))
            if problem.num_splits or wants_splits(problem, config, device):
                asked = max(problem.num_splits - 1, 0).bit_length()
                yield config.replace(max_splits_log2=max(_SPLITS_LOG2, asked))
    if problem.operation == KV_APPEND:
        yield from (plain.replace(**cpu_algorithm(plain, device.arch, team)) for team in teams)
        return
    columns = _COLUMNS if problem.seq_k > _COLUMNS[-1] and problem.family is not Family.DQ_DK_DV else _COLUMNS[-1:]
    for team in teams:
        for register_tile in cpu_register_tiles(device.arch)[:2]:
            for count in columns:
                yield plain.replace(**_cut(plain, device, team, register_tile, count))


def _cut(
    config: FmhaConfig,
    device: DeviceInfo,
    team: int,
    register_tile: tuple[int, int] | None = None,
    columns: int = 0,
) -> Mapping[str, Any]:
    return cpu_algorithm(config, device.arch, team, register_tile, columns=columns)
