"""The reference against formulas written out plainly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tilewright_gemm.problem.parse import parse_gemm
from tilewright_gemm.references.reference import apply_unary, reference_gemm
from tilewright_gemm.vocabulary import Unary
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

of = TensorDesc.of
PLAIN = {
    Unary.NONE: lambda x: x,
    Unary.RELU: lambda x: max(x, 0.0),
    Unary.GELU: lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    Unary.FAST_GELU: lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Unary.SILU: lambda x: x / (1 + math.exp(-x)),
    Unary.SIGMOID: lambda x: 1 / (1 + math.exp(-x)),
    Unary.TANH: math.tanh,
    Unary.HARD_SWISH: lambda x: x * min(max(x + 3, 0), 6) / 6,
    Unary.CLAMP: lambda x: min(max(x, -0.5), 0.75),
    Unary.LEAKY_RELU: lambda x: x if x > 0 else -0.5 * x,
    Unary.ELU: lambda x: x if x > 0 else -0.5 * (math.exp(x) - 1),
    Unary.SOFTPLUS: lambda x: math.log(1 + math.exp(x)),
    Unary.MISH: lambda x: x * math.tanh(math.log(1 + math.exp(x))),
}


@pytest.mark.parametrize("unary", list(Unary))
def test_unary_steps_are_their_formulas(unary: Unary) -> None:
    x = np.linspace(-8, 8, 101)
    wanted = [PLAIN[unary](float(value)) for value in x]
    assert np.allclose(apply_unary(unary, x, -0.5, 0.75), wanted, rtol=1e-14, atol=1e-15)
    assert np.isnan(apply_unary(unary, np.array([np.nan]), -0.5, 0.75)).all()


def run(arrays: dict[str, Any], **attributes: Any) -> Any:
    inputs = {name: of(str(array.dtype).replace("float", "fp"), array.shape) for name, array in arrays.items()}
    problem = parse_gemm(OperationRequest("gemm", inputs, {}, attributes))
    return reference_gemm(problem, arrays)


def test_a_full_epilogue_in_its_order() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in {
            "a": (2, 3, 4), "b": (4, 5), "bias": (5,), "d[0]": (3, 5), "d[1]": (2, 1, 5), "c": (1,),
            "scale_a": (3,), "scale_b": (5,),
        }.items()
    }  # fmt: skip
    x = {name: array.astype(np.float64) for name, array in arrays.items()}
    wanted = 0.5 * (x["a"] @ x["b"]) * x["scale_a"][:, None] * x["scale_b"] + x["bias"]
    wanted = np.maximum(wanted + x["d[0]"] + x["d[1]"] + x["c"], 0)
    assert np.allclose(run(arrays, alpha=0.5, unary="Relu")["out"], wanted, rtol=1e-14)


def test_groups_are_independent() -> None:
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {
        "a[0]": (2, 3), "b[0]": (3, 4), "a[1]": (5, 1), "b[1]": (1, 2)}.items()}  # fmt: skip
    out = run(arrays)
    assert np.allclose(out["out[0]"], arrays["a[0]"].astype(float) @ arrays["b[0]"].astype(float))
    assert np.allclose(out["out[1]"], arrays["a[1]"].astype(float) @ arrays["b[1]"].astype(float))


def test_integers_are_exact_and_wrap_as_int32_does() -> None:
    k = 140_000
    a, b = np.full((1, k), -128, np.int8), np.full((k, 1), -128, np.int8)
    (value,) = run({"a": a, "b": b})["out"].ravel()
    assert value == (k * 128 * 128 + 2**31) % 2**32 - 2**31
    assert run({"a": a[:, :1000], "b": b[:1000]})["out"].item() == 1000 * 128 * 128
