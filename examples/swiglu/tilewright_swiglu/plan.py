"""Candidates, times and plans: those of the second product, and what they imply for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright_gemm.fusion import (
    GemmConfig,
    best_kernel,
    gemm_candidates,
    gemm_mismatches,
    kernel_for,
    plan_gemm,
    predict_gemm,
)
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.arguments import Pointer
from tilewright_kit.contract.composition import Composition
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_swiglu.config import SwigluConfig
from tilewright_swiglu.problem import SwigluProblem

__all__ = ["plan_swiglu", "predict_swiglu", "swiglu_candidates", "swiglu_mismatches"]


def swiglu_candidates(problem: SwigluProblem, device: DeviceInfo) -> Sequence[SwigluConfig]:
    """GEMM's kernels for the second product."""
    return [SwigluConfig(**_fields(config)) for config in gemm_candidates(problem.up, device)]


def _fields(config: GemmConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in GemmConfig.field_names()}


def swiglu_mismatches(problem: SwigluProblem, config: SwigluConfig, device: DeviceInfo) -> Sequence[Violation]:
    return gemm_mismatches(problem.up, config, device)


def _kernels(problem: SwigluProblem, config: SwigluConfig, device: DeviceInfo) -> tuple[GemmConfig, ...]:
    return kernel_for(problem.gate, config, device), config, best_kernel(problem.down, device)


def predict_swiglu(problem: SwigluProblem, config: SwigluConfig, device: DeviceInfo) -> Prediction:
    """The sum of the three products' times."""
    products = {"gate": problem.gate, "up": problem.up, "down": problem.down}
    kernels = _kernels(problem, config, device)
    parts = {
        name: predict_gemm(product, kernel, device).seconds
        for (name, product), kernel in zip(products.items(), kernels, strict=True)
    }
    return Prediction(sum(parts.values()), parts)


def plan_swiglu(problem: SwigluProblem, config: SwigluConfig, device: DeviceInfo) -> ExecutionPlan:
    """Three products, the gate and the hidden values in the workspace."""
    whole = Composition()
    gated, hidden = (whole.intermediate(product.operands[-1].desc) for product in (problem.gate, problem.up))
    gate, up, down = _kernels(problem, config, device)
    whole.add("gate", plan_gemm(problem.gate, gate, device), {"a": "x", "b": "w_gate", "out": gated})
    steps: dict[str, str | Pointer] = {"a": "x", "b": "w_up", "d[0]": gated, "out": hidden}
    whole.add("up", plan_gemm(problem.up, up, device), steps)
    whole.add("down", plan_gemm(problem.down, down, device), {"a": hidden, "b": "w_down", "out": "out"})
    moved = problem.bytes_moved
    return whole.plan(problem.operation, device.arch.id, problem.operands, flops=problem.flops, bytes_moved=moved)
