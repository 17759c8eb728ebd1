"""Candidates for a problem on any kind of device, reasons against other kernels, and their times."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_grouped_conv.candidates.applicability.gpu import range_mismatches
from tilewright_grouped_conv.candidates.applicability.tensors import (
    common_mismatches,
    needed_transforms,
    signature_mismatches,
    with_signature,
)
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.launch.image_ranges import parts_of
from tilewright_grouped_conv.pipelines.records import PIPELINES, pipeline_of
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Prediction
from tilewright_kit.selection.candidates import Verdicts, shortlist

__all__ = ["MOST_CPU", "MOST_GPU", "conv_candidates", "conv_mismatches", "predict_conv"]

MOST_CPU, MOST_GPU = 12, 32
_verdicts = Verdicts(RULES)


def conv_candidates(problem: ConvProblem, device: DeviceInfo) -> Candidates[ConvConfig]:
    """Valid kernels for the problem, the preferred first, the most general last."""
    algorithms = _algorithms(problem, device)
    found = list(dict.fromkeys(with_signature(problem, algorithm, device) for algorithm in algorithms))
    kept = [
        config for config in found if _verdicts.allows(config, device) and not conv_mismatches(problem, config, device)
    ]
    most = MOST_CPU if device.arch.kind == "cpu" else MOST_GPU
    return shortlist(kept, most, lambda config: predict_conv(problem, config, device))


def _algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    for record in PIPELINES:
        if record.form.drives(device.arch):
            for config in record.algorithms(problem, device):
                yield config if device.arch.kind == "cpu" else _in_ranges(problem, config, device)


def _in_ranges(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> ConvConfig:
    """A GPU's kernel, launched over ranges of images where offsets do not reach all of them."""
    parts = parts_of(problem, config, device.arch)
    if parts <= 1:
        return config
    ranges = config.replace(split_image=True)
    if problem.direction is not Direction.BACKWARD_WEIGHT:
        return ranges
    return ranges.replace(two_stage=config.is_matrix, split_k=max(config.split_k, parts))


def conv_mismatches(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> tuple[Violation, ...]:
    """Why this kernel cannot compute this problem on this device, even with copies; empty if it can."""
    return tuple(_mismatches(problem, config, device))


def _mismatches(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> Iterator[Violation]:
    yield from signature_mismatches(problem, config)
    if config.ndim != problem.ndim:
        return
    yield from common_mismatches(problem, config, device)
    yield from pipeline_of(config, device.arch.kind).mismatches(problem, config)
    if device.arch.kind != "cpu":
        yield from range_mismatches(problem, config, device.arch)


def predict_conv(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> Prediction:
    """Seconds of all stages, and what they are made of."""
    copies = needed_transforms(problem, config, device)
    return pipeline_of(config, device.arch.kind).predict(problem, config, device, copies)
