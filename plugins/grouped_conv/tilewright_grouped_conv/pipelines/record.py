"""The record of a pipeline: all that planning knows of it. Its form, which rules and code generation read too, is in
``config.pipelines``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import PipelineForm
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.strided_copy.copies import Transform
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.plan import Pointer, Stage, WorkspaceLayout

__all__ = ["Pipeline"]

Stages = Callable[[ConvProblem, ConvConfig, DeviceInfo, WorkspaceLayout, Pointer], tuple[list[Stage], int]]


def _none(problem: ConvProblem, config: ConvConfig) -> Iterator[Violation]:  # noqa: ARG001
    return iter(())


@dataclass(frozen=True)
class Pipeline:
    """Pipelines that share a template."""

    form: PipelineForm
    algorithms: Callable[[ConvProblem, DeviceInfo], Iterator[ConvConfig]]
    """Configurations worth considering for a problem, without signature, the most general last."""
    predict: Callable[[ConvProblem, ConvConfig, DeviceInfo, tuple[Transform, ...]], Prediction]
    """Seconds of a plan with the given copies."""
    stages: Stages | None = None
    """The launches of a GPU, whose old gradient lies at the last argument, and the bytes of their counters. None on
    CPUs: of all pipelines the stages are the same.
    """
    mismatches: Callable[[ConvProblem, ConvConfig], Iterator[Violation]] = _none
    """Reasons why one of its kernels cannot compute a problem, beside those of every kernel."""
