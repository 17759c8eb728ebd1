"""What the plugin gives to the server: the operations ``gemm`` and ``gemm_pack_b``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_gemm import __version__
from tilewright_gemm.analysis import DEFAULT_SHAPE, gemm_analysis_request, gemm_product
from tilewright_gemm.candidates import gemm_candidates, gemm_mismatches, pack_b_candidates, pack_b_mismatches
from tilewright_gemm.codegen import generate
from tilewright_gemm.config import GemmConfig
from tilewright_gemm.cost import predict_gemm, predict_pack_b
from tilewright_gemm.features import gemm_features
from tilewright_gemm.generate_set import select_set
from tilewright_gemm.pack_b import PackBConfig, parse_pack_b
from tilewright_gemm.parse import parse_gemm
from tilewright_gemm.plan import plan_gemm, plan_pack_b
from tilewright_gemm.problem import GemmProblem, PackBProblem
from tilewright_gemm.reference import reference_gemm, reference_pack_b
from tilewright_gemm.rules import RULES
from tilewright_gemm.samples import gemm_samples, pack_b_samples
from tilewright_gemm.sets import KERNEL_SETS, PACK_B_SETS, SPACES
from tilewright_kit.declare import KernelSet
from tilewright_kit.device import DeviceInfo
from tilewright_kit.hookspecs import hookimpl
from tilewright_kit.operation import Operation, Prediction, Product
from tilewright_kit.plan import ExecutionPlan
from tilewright_kit.problem import OperationRequest
from tilewright_kit.rules import RuleBook, Violation
from tilewright_kit.source import SourceUnit

__all__ = ["GemmOperation", "PackBOperation", "tilewright_operations"]

Arrays = Mapping[str, npt.NDArray[Any]]


class GemmOperation:
    """C = epilogue(alpha * A x B)."""

    name = "gemm"
    version = __version__
    config_type: type[GemmConfig] = GemmConfig
    rules: RuleBook[GemmConfig] = RULES
    kernel_sets: Mapping[str, KernelSet[GemmConfig]] = KERNEL_SETS
    spaces: Mapping[str, KernelSet[GemmConfig]] = SPACES
    """Sets for tuning: whole spaces of configurations, in which nobody looks for a kernel by name."""

    def parse(self, request: OperationRequest) -> GemmProblem:
        return parse_gemm(request)

    def candidates(self, problem: GemmProblem, device: DeviceInfo) -> Sequence[GemmConfig]:
        return gemm_candidates(problem, device)

    def mismatches(self, problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Sequence[Violation]:
        return gemm_mismatches(problem, config, device)

    def generate(self, config: GemmConfig, arch: ArchSpec) -> SourceUnit:
        return generate(config, arch)

    def plan(self, problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> ExecutionPlan:
        return plan_gemm(problem, config, device)

    def predict(self, problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
        return predict_gemm(problem, config, device)

    def features(self, problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Mapping[str, float]:
        return gemm_features(problem, config, device)

    def reference(self, problem: GemmProblem, inputs: Arrays) -> Arrays:
        return reference_gemm(problem, inputs)

    def samples(self) -> Iterable[OperationRequest]:
        return gemm_samples()

    def select_set(self, arch: ArchSpec, **options: Any) -> Sequence[GemmConfig]:
        """The kernels that the options of the seeds' generator select, sweeps included; see ``generate_set``."""
        return select_set(arch, **options)

    def analysis_shape(self, config: GemmConfig) -> str:  # noqa: ARG002
        return DEFAULT_SHAPE

    def analysis_request(self, config: GemmConfig, shape: str) -> OperationRequest:
        return gemm_analysis_request(config, shape)

    def product_of(self, problem: GemmProblem) -> Product:
        return gemm_product(problem)


class PackBOperation:
    """Packing of B for later products."""

    name = "gemm_pack_b"
    version = __version__
    config_type: type[PackBConfig] = PackBConfig
    rules: RuleBook[PackBConfig] = RuleBook(RULES.rules)
    kernel_sets: Mapping[str, KernelSet[PackBConfig]] = PACK_B_SETS

    def parse(self, request: OperationRequest) -> PackBProblem:
        return parse_pack_b(request)

    def candidates(self, problem: PackBProblem, device: DeviceInfo) -> Sequence[PackBConfig]:
        return pack_b_candidates(problem, device)

    def refusal(self, problem: PackBProblem, device: DeviceInfo) -> Violation | None:
        """Why there is nothing that packs for a device of this kind."""
        if device.arch.preshuffle_pipelines:
            return None
        reason = f"kernels of {device.arch.id} read a plain B as fast: there is nothing to gain by packing it"
        return Violation("packing", "b", str(problem.layout[1]), reason)

    def mismatches(self, problem: PackBProblem, config: PackBConfig, device: DeviceInfo) -> Sequence[Violation]:
        return pack_b_mismatches(problem, config, device)

    def generate(self, config: PackBConfig, arch: ArchSpec) -> SourceUnit:
        return generate(config, arch)

    def plan(self, problem: PackBProblem, config: PackBConfig, device: DeviceInfo) -> ExecutionPlan:
        return plan_pack_b(problem, config, device)

    def predict(self, problem: PackBProblem, config: PackBConfig, device: DeviceInfo) -> Prediction:
        return predict_pack_b(problem, config, device)

    def features(self, problem: PackBProblem, config: PackBConfig, device: DeviceInfo) -> Mapping[str, float]:
        return {
            "m": float(problem.m),
            "n": float(problem.n),
            "k": float(problem.k),
            "nr": float(config.warp_tile[1]),
            "vk": float(config.warp_tile[2]),
            "units": float(device.units),
        }

    def reference(self, problem: PackBProblem, inputs: Arrays) -> Arrays:
        return reference_pack_b(problem, inputs)

    def samples(self) -> Iterable[OperationRequest]:
        return pack_b_samples()


@hookimpl
def tilewright_operations() -> Sequence[Operation[Any, Any]]:
    return (GemmOperation(), PackBOperation())
