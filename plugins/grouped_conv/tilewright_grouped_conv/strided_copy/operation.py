"""The operation ``conv_transform``: a strided copy with conversion. The kernel of transform stages is an
operation, so that it is tested, measured and called like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tilewright_grouped_conv import __version__
from tilewright_grouped_conv.problem.problem import TransformProblem
from tilewright_grouped_conv.references.reference import reference_transform
from tilewright_grouped_conv.references.samples import transform_samples
from tilewright_grouped_conv.strided_copy.config import (
    TRANSFORM_RULES,
    TRANSFORM_SETS,
    TransformConfig,
    generate_transform,
)
from tilewright_grouped_conv.strided_copy.plan import plan_transform, transform_seconds
from tilewright_grouped_conv.strided_copy.request import DECLARATION, parse_transform
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.kernel_sets.declare import KernelSet

__all__ = ["TransformOperation"]

Arrays = Mapping[str, npt.NDArray[Any]]


class TransformOperation:
    """out[i] = x[i] where x has that element, else zero."""

    name = "conv_transform"
    version = __version__
    declaration = DECLARATION
    config_type: type[TransformConfig] = TransformConfig
    rules: RuleBook[TransformConfig] = TRANSFORM_RULES
    kernel_sets: Mapping[str, KernelSet[TransformConfig]] = TRANSFORM_SETS

    def candidates(self, problem: TransformProblem, device: DeviceInfo) -> Sequence[TransformConfig]:
        config = TransformConfig(problem.dtype_in, problem.dtype_out.value)
        return () if self.rules.check(config, device.arch) else (config,)

    def mismatches(self, problem: TransformProblem, config: TransformConfig, _: DeviceInfo) -> Sequence[Violation]:
        wanted = {"dtype_in": problem.dtype_in.value, "dtype_out": problem.dtype_out.value}
        have = {"dtype_in": config.dtype_in.value, "dtype_out": config.to}
        return tuple(
            Violation("signature", field, have[field], f"the tensors are {wanted[field]}, the kernel's {have[field]}")
            for field in wanted
            if wanted[field] != have[field]
        )

    def predict(self, problem: TransformProblem, _: TransformConfig, device: DeviceInfo) -> Prediction:
        seconds = transform_seconds(problem.bytes_moved // 2, device)
        return Prediction(seconds, {"copy": seconds})

    parse = staticmethod(parse_transform)
    generate = staticmethod(generate_transform)
    plan = staticmethod(plan_transform)
    reference = staticmethod(reference_transform)
    samples = staticmethod(transform_samples)
