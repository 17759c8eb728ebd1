"""The object that the server finds through the entry point ``tilewright.plugins``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright_gemm.fusion import generate
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_kit.numerics.elementwise import apply_unary
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Unary
from tilewright_swiglu import __version__
from tilewright_swiglu.config import KERNEL_SETS, RULES, SwigluConfig
from tilewright_swiglu.plan import plan_swiglu, predict_swiglu, swiglu_candidates, swiglu_mismatches
from tilewright_swiglu.problem import INPUTS, SwigluProblem, parse_swiglu

__all__ = ["Swiglu", "tilewright_operations"]


class Swiglu:
    """``(silu(x w_gate) * (x w_up)) w_down``."""

    name = "swiglu"
    version = __version__
    config_type = SwigluConfig
    rules = RULES
    kernel_sets: Mapping[str, KernelSet[SwigluConfig]] = KERNEL_SETS

    parse = staticmethod(parse_swiglu)
    candidates = staticmethod(swiglu_candidates)
    mismatches = staticmethod(swiglu_mismatches)
    generate = staticmethod(generate)
    plan = staticmethod(plan_swiglu)
    predict = staticmethod(predict_swiglu)

    def reference(self, problem: SwigluProblem, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        x, w_gate, w_up, w_down = (inputs[name].astype(np.float64) for name in INPUTS)
        return {"out": (apply_unary(Unary.SILU, x @ w_gate, 0.0, 0.0) * (x @ w_up)) @ w_down}

    def samples(self) -> Iterable[OperationRequest]:
        for dtype, m, k, n in (("fp32", 17, 40, 23), ("bf16", 5, 64, 48), ("fp32", 0, 8, 8), ("fp16", 33, 16, 7)):
            weights = {"w_gate": (k, n), "w_up": (k, n), "w_down": (n, k)}
            inputs = {name: TensorDesc.of(dtype, shape) for name, shape in {"x": (m, k), **weights}.items()}
            yield OperationRequest("swiglu", inputs)


@hookimpl
def tilewright_operations() -> Sequence[Swiglu]:
    return [Swiglu()]
