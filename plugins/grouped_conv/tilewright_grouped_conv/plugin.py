"""Hooks of the plugin: ``conv``, its two gradients, and the copies that plans may make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_grouped_conv import __version__
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.commands.analysis import (
    conv_analysis_request,
    conv_analysis_shape,
    conv_product,
    conv_share,
)
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.kernel_sets.composable_kernel import is_foreign, read_foreign
from tilewright_grouped_conv.kernel_sets.generator import GENERATE_OPTIONS, select_set
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS
from tilewright_grouped_conv.pipelines.candidates import conv_candidates, conv_mismatches, predict_conv
from tilewright_grouped_conv.pipelines.search import ConvSearch
from tilewright_grouped_conv.plan.plan import plan_conv
from tilewright_grouped_conv.problem.declaration import DECLARATIONS
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.problem.resize import resized_conv
from tilewright_grouped_conv.references.reference import reference_conv
from tilewright_grouped_conv.references.samples import conv_samples
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.strided_copy.operation import TransformOperation
from tilewright_grouped_conv.vocabulary import VARIANT_ALIASES, Direction
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_kit.types.vocabulary import Reduction

__all__ = ["ConvOperation", "TransformOperation", "tilewright_operations"]

Arrays = Mapping[str, npt.NDArray[Any]]


class ConvOperation(ConvSearch):
    """A convolution, or one of its gradients: what differs is in the direction's problem and configuration."""

    version = __version__
    variants: Mapping[str, str] = {name: CONFIGS[Direction(value)].operation for name, value in VARIANT_ALIASES.items()}
    """Every spelling of a direction, and its operation."""
    generate_options = GENERATE_OPTIONS
    """Options of ``select_set`` beside the arch."""

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.config_type: type[ConvConfig] = CONFIGS[direction]
        self.name = self.config_type.operation
        self.declaration = DECLARATIONS[direction]
        self.rules: RuleBook[ConvConfig] = RuleBook(RULES.rules)
        self.kernel_sets: Mapping[str, KernelSet[ConvConfig]] = KERNEL_SETS[direction]

    def parse(self, request: OperationRequest) -> ConvProblem:
        return parse_conv(request, self.direction)

    is_foreign = staticmethod(is_foreign)
    read_foreign = staticmethod(read_foreign)

    def select_set(self, arch: ArchSpec, **options: Any) -> Sequence[ConvConfig]:
        return select_set(arch, self.direction, **options)

    def samples(self) -> Iterable[OperationRequest]:
        return conv_samples(self.direction)

    def row_sizes(self, problem: ConvProblem) -> Sequence[str]:
        """Images, over which the weights' gradient sums."""
        return () if problem.direction is Direction.BACKWARD_WEIGHT else ("images",)

    def keeps_order(self, config: ConvConfig, device: DeviceInfo) -> bool:  # noqa: ARG002
        """Kernels that do not cut the reduction."""
        return config.split_k == 1 and config.streamk is Reduction.NONE

    resized = staticmethod(resized_conv)
    candidates = staticmethod(conv_candidates)
    mismatches = staticmethod(conv_mismatches)
    generate = staticmethod(generate)
    plan = staticmethod(plan_conv)
    predict = staticmethod(predict_conv)
    reference = staticmethod(reference_conv)

    analysis_shape = staticmethod(conv_analysis_shape)
    analysis_request = staticmethod(conv_analysis_request)
    product_of = staticmethod(conv_product)
    share_of = staticmethod(conv_share)


@hookimpl
def tilewright_operations() -> Sequence[Operation[Any, Any]]:
    return (*(ConvOperation(direction) for direction in Direction), TransformOperation())
