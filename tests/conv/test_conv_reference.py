"""The reference itself: by hand, by the definition written as loops, by the adjoint identity, and by PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conv_cases import Case
from conv_requests import backward_data, backward_weight, first, forward

from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.references.reference import reference_conv, reference_transform
from tilewright_grouped_conv.strided_copy.request import parse_transform
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

Array = npt.NDArray[Any]

CASES = (
    Case(2, 6, 4, 2, (7, 5), (3, 2), (2, 1), (1, 2), (1, 0, 2, 1)),
    Case(1, 3, 6, 3, (9,), (4,), (3,), (2,), (2, 0)),
    Case(2, 5, 5, 5, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    Case(1, 4, 6, 1, (4, 5, 3), (2, 3, 1), (1, 2, 2), (2, 1, 1), (1, 1, 0, 0, 1, 0)),
    Case(2, 4, 3, 1, (5, 5), (1, 1), (3, 2)),
)


def numbers(case: Case) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    attributes = {"stride": case.stride, "dilation": case.dilation, "padding": case.padding, "groups": case.groups}
    shapes = {
        "x": (case.n, case.c, *case.size),
        "w": (case.k, case.c // case.groups, *case.filter),
        "y": (case.n, case.k, *case.output),
    }
    return attributes, shapes


def problems(case: Case) -> tuple[ConvProblem, ConvProblem, ConvProblem]:
    attributes, shapes = numbers(case)
    x, w, y = (first("fp32", *shapes[name]) for name in "xwy")
    return (
        forward({"x": x, "w": w}, **attributes),
        backward_data({"dy": y, "w": w}, input_size=case.size, **attributes),
        backward_weight({"x": x, "dy": y}, filter_size=case.filter, **attributes),
    )


def by_definition(case: Case, x: Array, w: Array) -> Array:
    """Every output from every tap and channel, one at a time."""
    _, shapes = numbers(case)
    y = np.zeros(shapes["y"])
    per_group, outputs = case.c // case.groups, case.k // case.groups
    for n, k, *out in itertools.product(*map(range, shapes["y"])):
        for c, *tap in itertools.product(range(per_group), *map(range, case.filter)):
            at = [
                o * stride + t * dilation - begin
                for o, t, stride, dilation, begin in zip(
                    out, tap, case.stride, case.dilation, case.padding[: case.ndim], strict=True
                )
            ]
            if all(0 <= place < size for place, size in zip(at, case.size, strict=True)):
                y[(n, k, *out)] += x[(n, k // outputs * per_group + c, *at)] * w[(k, c, *tap)]
    return y


def draw(case: Case) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(7)
    _, shapes = numbers(case)
    x, w, dy = (rng.standard_normal(shapes[name]) for name in "xwy")
    return x, w, dy


def test_a_small_convolution_by_hand() -> None:
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    w = np.array([[[1.0, 10.0]]])
    problem, data, weight = problems(Case(1, 1, 1, 1, (4,), (2,), (2,), (1,), (1, 0)))
    assert reference_conv(problem, {"x": x, "w": w})["y"].tolist() == [[[10.0, 32.0]]]
    dy = np.array([[[1.0, 100.0]]])
    assert reference_conv(data, {"dy": dy, "w": w})["dx"].tolist() == [[[10.0, 100.0, 1000.0, 0.0]]]
    assert reference_conv(weight, {"x": x, "dy": dy})["dw"].tolist() == [[[200.0, 301.0]]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_is_what_the_definition_says(case: Case) -> None:
    x, w, _ = draw(case)
    found = reference_conv(problems(case)[0], {"x": x, "w": w})["y"]
    np.testing.assert_allclose(found, by_definition(case, x, w), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_adjoints_of_forward(case: Case) -> None:
    """<conv(x, w), dy> = <x, gradient of x> = <w, gradient of w>, for each of them."""
    x, w, dy = draw(case)
    problem, data, weight = problems(case)
    value = float(np.sum(by_definition(case, x, w) * dy))
    assert np.sum(reference_conv(problem, {"x": x, "w": w})["y"] * dy) == pytest.approx(value, rel=1e-10)
    assert np.sum(reference_conv(data, {"dy": dy, "w": w})["dx"] * x) == pytest.approx(value, rel=1e-10)
    assert np.sum(reference_conv(weight, {"x": x, "dy": dy})["dw"] * w) == pytest.approx(value, rel=1e-10)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_pytorch(case: Case) -> None:
    torch = pytest.importorskip("torch")
    x, w, dy = draw(case)
    problem, data, weight = problems(case)
    given, weights = torch.from_numpy(x).requires_grad_(True), torch.from_numpy(w).requires_grad_(True)
    begins, ends = case.padding[: case.ndim], case.padding[case.ndim :]
    edges = [edge for pair in zip(begins[::-1], ends[::-1], strict=True) for edge in pair]
    run = getattr(torch.nn.functional, f"conv{case.ndim}d")
    padded = torch.nn.functional.pad(given, edges)
    y = run(padded, weights, stride=case.stride, dilation=case.dilation, groups=case.groups)
    y.backward(torch.from_numpy(dy))
    assert given.grad is not None and weights.grad is not None
    for mine, theirs in (
        (reference_conv(problem, {"x": x, "w": w})["y"], y.detach()),
        (reference_conv(data, {"dy": dy, "w": w})["dx"], given.grad),
        (reference_conv(weight, {"x": x, "dy": dy})["dw"], weights.grad),
    ):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-10, atol=1e-10)


def test_the_epilogue_comes_in_its_order() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((2, 4, 3, 3)), rng.standard_normal((6, 4, 1, 1))
    scale, bias = rng.standard_normal(6), rng.standard_normal(6)
    d = [rng.standard_normal((2, 6, 3, 3)) for _ in range(2)]
    problem = forward(
        {
            "x": first("fp32", 2, 4, 3, 3),
            "w": first("fp32", 6, 4, 1, 1),
            "scale": TensorDesc.of("fp32", (6,)),
            "bias": TensorDesc.of("fp32", (6,)),
            "d[0]": first("fp32", 2, 6, 3, 3),
            "d[1]": first("fp32", 2, 6, 3, 3),
        },
        alpha=0.5,
        binary="MultiDMultiply",
        unary="Clamp",
        clamp_lo=-1.0,
        clamp_hi=2.0,
    )
    inputs = {"x": x, "w": w, "scale": scale, "bias": bias, "d[0]": d[0], "d[1]": d[1]}
    sums = np.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0])
    wanted = np.clip((sums * 0.5 * scale[:, None, None] + bias[:, None, None]) * d[0] * d[1], -1.0, 2.0)
    np.testing.assert_allclose(reference_conv(problem, inputs)["y"], wanted, rtol=1e-12)


def test_gradients_are_added_to_what_is_there() -> None:
    case = CASES[0]
    _, w, dy = draw(case)
    attributes, shapes = numbers(case)
    acc = np.random.default_rng(1).standard_normal(shapes["x"])
    tensors = {name: first("fp32", *shapes[key]) for name, key in (("dy", "y"), ("w", "w"), ("acc", "x"))}
    problem = backward_data(tensors, accumulate=True, alpha=2.0, input_size=case.size, **attributes)
    plain = reference_conv(problems(case)[1], {"dy": dy, "w": w})["dx"]
    found = reference_conv(problem, {"dy": dy, "w": w, "acc": acc})["dx"]
    np.testing.assert_allclose(found, 2.0 * plain + acc, rtol=1e-12)


def test_int8_sums_are_exact_and_wrap_and_saturate() -> None:
    x = np.full((1, 140000, 1), -128, np.int8)
    w = np.full((1, 140000, 1), -128, np.int8)
    tensors = {"x": first("int8", *x.shape), "w": first("int8", *w.shape)}
    found = reference_conv(forward(tensors), {"x": x, "w": w})["y"]
    assert found.dtype == np.int64
    assert found.item() == 140000 * 128 * 128 - 2**32
    scaled = forward(
        {"x": first("int8", 1, 2, 1), "w": first("int8", 1, 2, 1), "scale": TensorDesc.of("fp32", ())}, out_dtype="int8"
    )
    values = {
        "x": np.array([[[100], [100]]], np.int8),
        "w": np.array([[[100], [1]]], np.int8),
        "scale": np.float32(0.5),
    }
    assert reference_conv(scaled, {name: np.asarray(value) for name, value in values.items()})["y"].item() == 127


def test_copies_fill_up_with_zeros() -> None:
    request = OperationRequest(
        "conv_transform", {"x": first("fp16", 2, 3, 4)}, {"out": TensorDesc.of("fp32", (2, 5, 4))}
    )
    x = np.random.default_rng(2).standard_normal((2, 3, 4)).astype(np.float16)
    out = reference_transform(parse_transform(request), {"x": x})["out"]
    assert np.array_equal(out[:, :3], x.astype(np.float64)) and not out[:, 3:].any()
