"""Calls on NumPy's arrays that this process launches, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_by_hand import attend
from conv_by_hand import forward

import tilewright as tw

SIZES = [(1, 1, 1), (5, 7, 3), (64, 64, 64), (33, 129, 65), (1, 300, 257), (130, 1, 77), (257, 129, 511)]
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}


def twice(call: Any) -> tuple[Any, Any]:
    """The same call again, which takes the shortest way."""
    return call(), call()


def check(result: Any, wanted: np.ndarray, tolerance: float = 2e-5) -> None:
    assert isinstance(result, np.ndarray)
    np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_products_of_any_size_are_right(caller: tw.Client, rng: np.random.Generator, m: int, n: int, k: int) -> None:
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    for result in twice(lambda: caller.gemm(a, b)):
        check(result, a.astype(float) @ b.astype(float))
        assert caller.report is not None
        assert caller.report.placement == "caller"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["rr", "rc", "cr", "cc"])
@pytest.mark.some(6)
def test_layouts_are_read_off_the_strides(caller: tw.Client, rng: np.random.Generator, dtype: str, layout: str) -> None:
    kind = tw.DTYPES[dtype]
    a, b = rng.standard_normal((37, 53)).astype(kind), rng.standard_normal((53, 29)).astype(kind)
    left = a if layout[0] == "r" else np.asfortranarray(a)
    right = b if layout[1] == "r" else np.asfortranarray(b)
    for result in twice(lambda: caller.gemm(left, right)):
        check(result, a.astype(float) @ b.astype(float), TOLERANCE[dtype])


def test_whole_numbers_are_exact(caller: tw.Client, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-100, 100, shape).astype(np.int8) for shape in ((33, 70), (70, 19)))
    assert (caller.gemm(a, b, out_dtype="int32") == a.astype(int) @ b.astype(int)).all()


def test_every_operand_of_a_product_is_used_in_place(caller: tw.Client, rng: np.random.Generator) -> None:
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((31, 45), (45, 23), (31, 23)))
    bias, d = (rng.standard_normal(shape).astype(np.float32) for shape in ((23,), (31, 23)))
    wanted = np.maximum(0.5 * (a.astype(float) @ b) + c + bias + d, 0)
    out = np.full((31, 23), np.nan, np.float32)
    options: dict[str, Any] = {"c": c, "bias": bias, "d": [d], "alpha": 0.5, "activation": "relu"}
    for _ in range(2):
        out[...] = np.nan
        assert caller.gemm(a, b, out=out, **options) is out
        check(out, wanted)
    other = 3 * d
    check(caller.gemm(a, b, **{**options, "d": [other]}), np.maximum(wanted_with(a, b, c, bias, other), 0))


def wanted_with(a: Any, b: Any, c: Any, bias: Any, d: Any) -> np.ndarray:
    return np.asarray(0.5 * (a.astype(float) @ b) + c + bias + d)


def test_numbers_count_by_their_value_and_sign(caller: tw.Client) -> None:
    one = np.ones((4, 4), np.float32)
    for alpha in (1.0, 2.0, 1.0, 2.0, 3, 1):
        assert (caller.gemm(one, one, alpha=alpha) == 4 * float(alpha)).all()
    for alpha in (0.0, -0.0, 0.0, -0.0):
        result, wanted = caller.gemm(one, one, alpha=alpha), caller.gemm(one, one, alpha=alpha, launch="server")
        assert result.tobytes() == wanted.tobytes()


def test_equal_arrays_of_one_call_may_be_different_ones_in_the_next(
    caller: tw.Client, rng: np.random.Generator
) -> None:
    x, y, z = (rng.standard_normal((24, 24)).astype(np.float32) for _ in range(3))
    for a, b, c, out in ((x, x, x, None), (x, x, x, None), (x, y, z, None), (y, x, z, None), (x, y, z, z.copy())):
        wanted = a.astype(float) @ b + c
        check(caller.gemm(a, b, c=c, out=out), wanted)
    accumulated = z.copy()
    for _ in range(2):
        wanted = x.astype(float) @ y + accumulated
        check(caller.gemm(x, y, c=accumulated, out=accumulated), wanted)
    wanted = x.astype(float) @ y + z
    check(caller.gemm(x, y, c=z, out=accumulated), wanted)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:, 2:],
        lambda x: x[:, ::2],
        lambda x: x[::-1],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: x[3::2, 1:-3],
    ],
    ids=["offset", "gaps", "backwards", "broadcast", "rows apart"],
)
def test_views_are_read_as_they_lie(auto: tw.Client, rng: np.random.Generator, view: Any) -> None:
    a, b = view(rng.standard_normal((40, 44)).astype(np.float32)), rng.standard_normal((44, 40)).astype(np.float32)
    b = b[: a.shape[1]]
    for result in twice(lambda: auto.gemm(a, b)):
        check(result, a.astype(float) @ b.astype(float))


def test_a_target_that_is_a_view_is_written_and_nothing_beside_it(caller: tw.Client, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((9, 11)).astype(np.float32), rng.standard_normal((11, 13)).astype(np.float32)
    whole = np.full((20, 30), 7.0, np.float32)
    target = whole[5:14, 8:21]
    for _ in range(2):
        assert caller.gemm(a, b, out=target) is target
    check(target, a.astype(float) @ b)
    target[...] = 7.0
    assert (whole == 7.0).all()


def test_products_of_many_matrices_and_groups(caller: tw.Client, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((3, 17, 19)).astype(np.float32), rng.standard_normal((19, 21)).astype(np.float32)
    for result in twice(lambda: caller.gemm(a, b)):
        check(result, a.astype(float) @ b)
    parts = [rng.standard_normal((rows, 19)).astype(np.float32) for rows in (3, 8, 1)]
    for results in twice(lambda: caller.grouped_gemm(parts, [b, b, b])):
        assert isinstance(results, list)
        for part, result in zip(parts, results, strict=True):
            check(result, part.astype(float) @ b)


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 4, 0)])
def test_products_without_elements(caller: tw.Client, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for result in twice(lambda: caller.gemm(np.ones((m, k), np.float32), np.ones((k, n), np.float32))):
        assert result.shape == (m, n)
        assert (result == 0).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_are_right(caller: tw.Client, rng: np.random.Generator, channels_last: bool) -> None:
    x, w = rng.standard_normal((2, 6, 17, 13)).astype(np.float32), rng.standard_normal((5, 6, 3, 2)).astype(np.float32)
    if channels_last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    wanted = forward(x, w, stride=(2, 1), padding=1)
    for result in twice(lambda: caller.conv(x, w, stride=(2, 1), padding=1)):
        check(result, wanted)
        assert caller.report is not None
        assert caller.report.placement == "caller"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_attention_is_right(caller: tw.Client, rng: np.random.Generator, layout: str) -> None:
    q = rng.standard_normal((2, 4, 33, 24)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, 41, 24)).astype(np.float32) for _ in range(2))
    wanted = attend(q, k, v)[0]
    given = (q, k, v)
    if layout == "bshd":
        given = tuple(np.ascontiguousarray(item.swapaxes(1, 2)) for item in given)
    for result in twice(lambda: caller.attention(*given, layout=layout)):
        check(result if layout == "bhsd" else result.swapaxes(1, 2), wanted, 1e-4)
        assert caller.report is not None
        assert caller.report.placement == "caller"


def test_several_results_come_as_a_tuple(caller: tw.Client, rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 2, 9, 16)).astype(np.float32)
    for out, lse in twice(lambda: caller.attention(q, q, q, return_lse=True)):
        assert out.shape == q.shape
        assert lse.shape == (1, 2, 9)
        scores = np.einsum("bhid,bhjd->bhij", q, q).astype(float) / 4
        check(lse, np.log(np.exp(scores).sum(-1)), 1e-4)
