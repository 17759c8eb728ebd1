"""Hooks of the plugin: ``attention``, ``attention_backward`` and ``kv_append``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_fmha import __version__
from tilewright_fmha.codegen import generate
from tilewright_fmha.commands.analysis import fmha_analysis_request, fmha_analysis_shape, fmha_product, fmha_share
from tilewright_fmha.config.config import CONFIGS, FmhaConfig
from tilewright_fmha.kernel_sets.composable_kernel import is_foreign, read_foreign
from tilewright_fmha.pipelines.algorithms import CompletedRules, completed
from tilewright_fmha.pipelines.generator import GENERATE_OPTIONS, select_set
from tilewright_fmha.pipelines.kernel_sets import KERNEL_SETS
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.pipelines.templates import TEMPLATES
from tilewright_fmha.plan.prefix import (
    attention_candidates,
    attention_mismatches,
    attention_refusal,
    plan_attention,
    predict_attention,
)
from tilewright_fmha.plan.search import FmhaSearch
from tilewright_fmha.problem.declared.operations import DECLARATIONS
from tilewright_fmha.problem.integer_operands import check_values, value_operands
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.resize import resized_fmha
from tilewright_fmha.references.append import reference_append
from tilewright_fmha.references.backward import reference_backward
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.references.sample_inputs import PARSERS, sample_inputs
from tilewright_fmha.references.samples import fmha_samples
from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    FAMILY_OPERATIONS,
    KV_APPEND,
    MAIN_FAMILIES,
    OPERATIONS,
    VARIANT_ALIASES,
    Family,
)
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation, Prediction
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.loading.hookspecs import hookimpl

__all__ = ["FmhaOperation", "tilewright_operations"]

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_REFERENCES = {
    ATTENTION: reference_attention,
    ATTENTION_BACKWARD: reference_backward,
    KV_APPEND: reference_append,
}


class FmhaOperation(FmhaSearch):
    """One of the three operations: what differs is in its problems, configurations and reference."""

    version = __version__
    variants: Mapping[str, str] = VARIANT_ALIASES
    generate_options = GENERATE_OPTIONS
    """Options of ``select_set`` beside the arch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.declaration = DECLARATIONS[name]
        self.config_type: type[FmhaConfig] = CONFIGS[name]
        self.rules: RuleBook[FmhaConfig] = CompletedRules(RULES.rules)
        self.kernel_sets: Mapping[str, KernelSet[FmhaConfig]] = KERNEL_SETS[name]

    def parse(self, request: OperationRequest) -> FmhaProblem:
        return PARSERS[self.name](request)

    def reference(self, problem: FmhaProblem, inputs: Arrays) -> Arrays:
        return _REFERENCES[self.name](problem, inputs)

    def samples(self) -> Iterable[OperationRequest]:
        return fmha_samples(self.name)

    is_foreign = staticmethod(is_foreign)
    read_foreign = staticmethod(read_foreign)

    def select_set(self, arch: ArchSpec, **options: Any) -> Sequence[FmhaConfig]:
        return select_set(arch, self.name, **options)

    def row_sizes(self, problem: FmhaProblem) -> Sequence[str]:
        """Sequences of a forward pass."""
        plain = self.name == ATTENTION and not problem.varlen and problem.shared is None
        return ("batch",) if plain else ()

    def keeps_order(self, config: FmhaConfig, device: DeviceInfo) -> bool:  # noqa: ARG002
        """How often split kernels cut the keys depends on how many sequences there are."""
        return config.family is not Family.SPLITKV

    resized = staticmethod(resized_fmha)
    candidates = staticmethod(attention_candidates)
    refusal = staticmethod(attention_refusal)

    # What a configuration leaves to the arch is filled first.

    def mismatches(self, problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> tuple[Violation, ...]:
        return attention_mismatches(problem, completed(config, device.arch), device)

    def generate(self, config: FmhaConfig, arch: ArchSpec) -> SourceUnit:
        return generate(completed(config, arch), arch, config)

    def plan(self, problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> ExecutionPlan:
        return plan_attention(problem, completed(config, device.arch), device)

    def predict(self, problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
        return predict_attention(problem, completed(config, device.arch), device)

    value_operands = staticmethod(value_operands)
    check_values = staticmethod(check_values)
    sample_inputs = staticmethod(sample_inputs)

    analysis_shape = staticmethod(fmha_analysis_shape)
    analysis_request = staticmethod(fmha_analysis_request)
    product_of = staticmethod(fmha_product)
    share_of = staticmethod(fmha_share)


@hookimpl
def tilewright_operations() -> Sequence[Operation[Any, Any]]:
    # A server takes only operations that have a kernel somewhere.
    computed = {FAMILY_OPERATIONS[family] for _, _, family in TEMPLATES if family in MAIN_FAMILIES}
    return tuple(FmhaOperation(name) for name in OPERATIONS if name in computed)
