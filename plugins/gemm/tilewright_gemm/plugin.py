"""The operations ``gemm`` and ``gemm_pack_b``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tilewright_gemm import __version__
from tilewright_gemm.codegen import generate
from tilewright_gemm.commands.analysis import DEFAULT_SHAPE, gemm_analysis_request, gemm_product, gemm_share
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.cost.pack_b import predict_pack_b
from tilewright_gemm.kernel_sets.composable_kernel import is_foreign, read_foreign
from tilewright_gemm.pipelines.candidates import gemm_candidates, gemm_mismatches, predict_gemm
from tilewright_gemm.pipelines.generator import FIELD_NAMES, select_set
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS, PACK_B_SETS, SPACES
from tilewright_gemm.pipelines.pack_b import pack_b_candidates, pack_b_mismatches, pack_b_refusal
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.pipelines.search import GemmSearch
from tilewright_gemm.plan.plan import plan_gemm, plan_pack_b
from tilewright_gemm.problem.declaration import GEMM, PACK_B
from tilewright_gemm.problem.pack_b import parse_pack_b
from tilewright_gemm.problem.parse import parse_gemm
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.problem.resize import resized_gemm
from tilewright_gemm.references.reference import reference_gemm, reference_pack_b
from tilewright_gemm.references.samples import gemm_sample_inputs, gemm_samples, pack_b_samples
from tilewright_gemm.vocabulary import Reduction
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.loading.hookspecs import hookimpl

__all__ = ["GemmOperation", "PackBOperation", "tilewright_operations"]

Arrays = Mapping[str, npt.NDArray[Any]]


class GemmOperation(GemmSearch):
    """C = epilogue(alpha * A x B)."""

    name = "gemm"
    version = __version__
    declaration = GEMM
    config_type: type[GemmConfig] = GemmConfig
    rules: RuleBook[GemmConfig] = RULES
    kernel_sets: Mapping[str, KernelSet[GemmConfig]] = KERNEL_SETS
    spaces: Mapping[str, KernelSet[GemmConfig]] = SPACES
    """Sets for tuning: whole spaces of configurations, in which no kernel is looked up by name."""

    parse = staticmethod(parse_gemm)
    is_foreign = staticmethod(is_foreign)
    read_foreign = staticmethod(read_foreign)
    resized = staticmethod(resized_gemm)
    candidates = staticmethod(gemm_candidates)
    mismatches = staticmethod(gemm_mismatches)
    generate = staticmethod(generate)
    plan = staticmethod(plan_gemm)
    predict = staticmethod(predict_gemm)
    reference = staticmethod(reference_gemm)
    samples = staticmethod(gemm_samples)
    sample_inputs = staticmethod(gemm_sample_inputs)

    select_set = staticmethod(select_set)
    """Kernels by options, sweeps included."""
    field_names: Mapping[str, str] = FIELD_NAMES
    analysis_request = staticmethod(gemm_analysis_request)
    product_of = staticmethod(gemm_product)
    share_of = staticmethod(gemm_share)

    def row_sizes(self, problem: GemmProblem) -> Sequence[str]:
        """Rows of a product, and products of a batch; several products are of sizes of their own."""
        return () if problem.grouped else ("m", "batch")

    def keeps_order(self, config: GemmConfig, device: DeviceInfo) -> bool:
        """On GPUs slices of K are added as they come, and Stream-K divides all tiles together."""
        return config.reduction is Reduction.NONE and (device.kind == "cpu" or config.split_k == 1)

    def analysis_shape(self, config: GemmConfig) -> str:  # noqa: ARG002
        return DEFAULT_SHAPE


class PackBOperation:
    """Packing of B for later products."""

    name = "gemm_pack_b"
    version = __version__
    declaration = PACK_B
    config_type: type[PackBConfig] = PackBConfig
    rules: RuleBook[PackBConfig] = RuleBook(RULES.rules)
    kernel_sets: Mapping[str, KernelSet[PackBConfig]] = PACK_B_SETS

    parse = staticmethod(parse_pack_b)
    candidates = staticmethod(pack_b_candidates)
    refusal = staticmethod(pack_b_refusal)
    mismatches = staticmethod(pack_b_mismatches)
    generate = staticmethod(generate)
    plan = staticmethod(plan_pack_b)
    predict = staticmethod(predict_pack_b)
    reference = staticmethod(reference_pack_b)
    samples = staticmethod(pack_b_samples)


@hookimpl
def tilewright_operations() -> Sequence[Operation[Any, Any]]:
    return (GemmOperation(), PackBOperation())
