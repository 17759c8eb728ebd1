"""The object that the server finds through the entry point ``tilewright.plugins``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_kit.types.tensor import TensorDesc
from tilewright_rmsnorm import __version__, codegen, cost, plan, problem, reference
from tilewright_rmsnorm.config import KERNEL_SETS, RmsNormConfig
from tilewright_rmsnorm.problem import RmsNormProblem
from tilewright_rmsnorm.rules import RULES

__all__ = ["RmsNorm", "tilewright_operations"]


class RmsNorm:
    """RMS normalisation of rows."""

    name = "rmsnorm"
    version = __version__
    config_type = RmsNormConfig
    declaration = problem.DECLARATION
    rules = RULES
    kernel_sets: Mapping[str, KernelSet[RmsNormConfig]] = KERNEL_SETS

    def parse(self, request: OperationRequest) -> RmsNormProblem:
        return problem.parse(request)

    def candidates(self, problem: RmsNormProblem, device: DeviceInfo) -> Sequence[RmsNormConfig]:
        kernels = self.kernel_sets["default"].expand(device.arch, self.rules)
        return [config for config in kernels if not self.mismatches(problem, config, device)]

    def mismatches(self, problem: RmsNormProblem, config: RmsNormConfig, device: DeviceInfo) -> Sequence[Violation]:
        if config.wave[0] > device.units:
            return [Violation("team_fits", "wave", config.wave, f"{device.id} has {device.units} threads")]
        return []

    def generate(self, config: RmsNormConfig, arch: ArchSpec) -> SourceUnit:
        return codegen.generate(config, arch)

    def plan(self, problem: RmsNormProblem, config: RmsNormConfig, device: DeviceInfo) -> ExecutionPlan:
        return plan.plan(problem, config, device)

    def predict(self, problem: RmsNormProblem, config: RmsNormConfig, device: DeviceInfo) -> Prediction:
        return cost.predict(problem, config, device)

    def reference(self, problem: RmsNormProblem, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return reference.reference(problem, inputs)

    def samples(self) -> Iterable[OperationRequest]:
        for rows, columns in ((1, 1), (3, 5), (17, 384), (64, 1000), (0, 8)):
            inputs = {"x": TensorDesc.of("fp32", (rows, columns)), "weight": TensorDesc.of("fp32", (columns,))}
            yield OperationRequest("rmsnorm", inputs)


@hookimpl
def tilewright_operations() -> Sequence[RmsNorm]:
    return [RmsNorm()]
