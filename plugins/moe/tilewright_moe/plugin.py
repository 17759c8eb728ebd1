"""The operation ``moe_gemm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_moe import __version__
from tilewright_moe.candidates import moe_candidates, moe_mismatches, predict_moe
from tilewright_moe.codegen import generate
from tilewright_moe.config import RULES, MoeConfig
from tilewright_moe.counts import check_values, value_operands
from tilewright_moe.declaration import MOE_GEMM
from tilewright_moe.kernel_sets import KERNEL_SETS
from tilewright_moe.parse import parse_moe
from tilewright_moe.plan import plan_moe
from tilewright_moe.reference import moe_samples, reference_moe, sample_inputs

__all__ = ["MoeGemm", "tilewright_operations"]


class MoeGemm:
    """Each row of x times the weights of its expert."""

    name = "moe_gemm"
    version = __version__
    declaration = MOE_GEMM
    config_type = MoeConfig
    rules = RULES
    kernel_sets: Mapping[str, KernelSet[MoeConfig]] = KERNEL_SETS

    parse = staticmethod(parse_moe)
    candidates = staticmethod(moe_candidates)
    mismatches = staticmethod(moe_mismatches)
    generate = staticmethod(generate)
    plan = staticmethod(plan_moe)
    predict = staticmethod(predict_moe)
    reference = staticmethod(reference_moe)
    samples = staticmethod(moe_samples)
    sample_inputs = staticmethod(sample_inputs)
    value_operands = staticmethod(value_operands)
    check_values = staticmethod(check_values)


@hookimpl
def tilewright_operations() -> Sequence[MoeGemm]:
    return [MoeGemm()]
