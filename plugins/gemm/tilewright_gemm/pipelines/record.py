"""The record of a pipeline: all that planning, rules, code generation and kernel sets know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.config.rules import Rule, Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.kernel_sets.declare import Declaration, KernelSet

__all__ = ["Pipeline", "PipelineRules"]


@dataclass(frozen=True)
class PipelineRules:
    """Rules of a pipeline beside those of every kernel, by their place in the order of corrections."""

    instruction: tuple[Rule[GemmConfig], ...] = ()
    """After the warp tile is one of the arch's."""
    registers: tuple[Rule[GemmConfig], ...] = ()
    """After the workgroup is small enough."""
    copies: tuple[Rule[GemmConfig], ...] = ()
    """After the stages are counted."""


def _always(problem: GemmProblem, arch: ArchSpec) -> bool:  # noqa: ARG001
    return True


def _none(problem: GemmProblem, config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    return iter(())


@dataclass(frozen=True)
class Pipeline:
    """Pipelines that share a template, on one kind of device."""

    names: tuple[str, ...]
    """Names in arch specs."""
    kind: str
    """Kind of device: ``cpu``, ``cuda`` or ``hip``."""
    template: str
    """File in ``templates/``."""
    algorithms: Callable[[GemmProblem, DeviceInfo, bool], Iterator[GemmConfig]]
    """Configurations worth considering for a problem, without signature, the most general last. The flag says that an
    earlier record has kernels for it, so that a few will do.
    """
    predict: Callable[[GemmProblem, GemmConfig, DeviceInfo], Prediction]
    """Seconds of a kernel."""
    declarations: Sequence[Declaration[GemmConfig]]
    """Declarations of the default kernel set."""
    instructions: frozenset[str] = frozenset()
    """Instructions of arch specs that the template issues; empty: those of every spec of this kind."""
    rules: PipelineRules = PipelineRules()
    reaches: Callable[[GemmProblem, ArchSpec], bool] = _always
    """True if its kernels can load the operands where they lie."""
    mismatches: Callable[[GemmProblem, GemmConfig, ArchSpec], Iterator[Violation]] = _none
    """Reasons why one of its kernels cannot compute a problem, beside those of every kernel."""
    spaces: tuple[KernelSet[GemmConfig], ...] = ()
    """Kernel sets for tuning."""

    def has(self, name: str, arch: ArchSpec) -> bool:
        """True if ``name`` is one of its pipelines, and the arch offers it with an instruction that it issues."""
        if arch.kind != self.kind or name not in self.names or name not in arch.pipelines:
            return False
        offered = arch.pipeline(name).instructions
        return not self.instructions or not self.instructions.isdisjoint(offered)

    def drives(self, arch: ArchSpec) -> bool:
        """True if it has a pipeline of the arch."""
        return any(self.has(name, arch) for name in self.names)
