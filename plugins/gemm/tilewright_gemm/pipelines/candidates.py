"""Candidates for a problem on any kind of device, reasons against other kernels, and their times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_gemm.candidates.applicability import gpu_mismatches, signature_mismatches
from tilewright_gemm.candidates.block_scaled import block_scaled
from tilewright_gemm.candidates.int4 import int4_mismatches, with_int4
from tilewright_gemm.candidates.narrow import with_narrow
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import INT4_RING
from tilewright_gemm.pipelines.records import PIPELINES, pipeline_of
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Prediction
from tilewright_kit.selection.candidates import Verdicts, shortlist
from tilewright_kit.types.errors import UnsupportedError

__all__ = ["MOST", "gemm_candidates", "gemm_mismatches", "predict_gemm", "signature_of", "with_signature"]

MOST = 32
"""Candidates of a GPU."""

_verdicts = Verdicts(RULES)
_configs: dict[GemmConfig, GemmConfig] = {}
"""Candidates of earlier problems."""
_MOST_KNOWN = 4096
"""Candidates that are kept; one more, and all are forgotten."""


def with_signature(problem: GemmProblem, config: GemmConfig) -> GemmConfig:
    """``config``'s algorithm for what ``problem`` asks. Slices of K are the algorithm's, unless the caller asked."""
    split = 1 if problem.grouped else problem.split_k or config.split_k
    return config.replace(**signature_of(problem), split_k=split)


def signature_of(problem: GemmProblem) -> dict[str, Any]:
    """The fields that ``problem`` decides, but for slices of K."""
    return {
        "dtype_a": problem.dtype_a,
        "dtype_b": problem.dtype_b.value,
        "dtype_c": problem.dtype_c.value,
        "layout": problem.layout,
        "binary": problem.binary,
        "unary": problem.unary,
        "num_d_tensors": problem.num_d,
        "dtype_d": tuple(dtype.value for dtype in problem.dtype_d),
        "bias": problem.dtype_bias.value if problem.dtype_bias else "",
        "scale_a": problem.scale_a,
        "scale_b": problem.scale_b,
        "grouped": problem.grouped,
        "batched": problem.is_batched and not problem.grouped,
        "preshuffle": problem.packing is not None,
    }


def _known(config: GemmConfig) -> GemmConfig:
    """The same configuration, as it was made for another problem: with its name and its hash."""
    if len(_configs) >= _MOST_KNOWN:
        _configs.clear()
    return _configs.setdefault(config, config)


def gemm_candidates(problem: GemmProblem, device: DeviceInfo) -> Candidates[GemmConfig]:
    """Valid kernels for the problem, the preferred first, the most general last."""
    asked = list(dict.fromkeys(_known(with_signature(problem, item)) for item in _algorithms(problem, device)))
    found = Candidates(asked)
    if device.arch.kind != "cpu":
        # Rules take longer than the model, so kernels without a chance are not judged.
        found = shortlist(asked, MOST, lambda config: predict_gemm(problem, config, device))
    return found.kept(lambda config: _verdicts.allows(config, device) and not gemm_mismatches(problem, config, device))


def _algorithms(problem: GemmProblem, device: DeviceInfo) -> Iterator[GemmConfig]:
    if problem.packing and not device.arch.preshuffle_pipelines:
        return
    few = False
    for record in PIPELINES:
        if record.drives(device.arch) and record.reaches(problem, device.arch):
            found = record.algorithms(problem, device, few)
            if problem.int4:
                found = with_int4(found, problem, device, ring=INT4_RING in record.names and record.kind == "cuda")
            if problem.narrow:
                found = with_narrow(found, problem, device)
            yield from block_scaled(found, device, problem.scale_b) if problem.block_scaled else found
            few = True


def gemm_mismatches(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> tuple[Violation, ...]:
    """Reasons why this kernel cannot compute this problem on this device; empty if it can."""
    return tuple(_mismatches(problem, config, device))


def _mismatches(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Iterator[Violation]:
    yield from signature_mismatches(problem, config, device)
    if device.arch.kind != "cpu":
        yield from gpu_mismatches(problem, config, device.arch)
        yield from int4_mismatches(problem, config)
    record = pipeline_of(config, device.arch)
    if record:
        yield from record.mismatches(problem, config, device.arch)


def predict_gemm(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """Seconds of all stages, and their parts. Raises ``UnsupportedError`` for a pipeline without a template."""
    record = pipeline_of(config, device.arch)
    if record is None:
        raise UnsupportedError(
            f"pipeline {config.pipeline} of {device.arch.id} has no template",
            field="pipeline",
            value=config.pipeline,
            rule="template",
            fix="choose another pipeline",
        )
    return record.predict(problem, config, device)
