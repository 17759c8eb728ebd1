"""With the strategy ``batch_invariant`` a row's result has the same bits however many rows there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(21)
ROWS = (1, 2, 5, 8, 13, 31, 64, 130)
TYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@pytest.fixture(scope="module")
def client(real_server: Any) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


def drawn(*shape: int, dtype: str = "fp32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32).astype(TYPES[dtype])


def same_bits(part: Any, whole: Any) -> bool:
    return np.asarray(part).tobytes() == np.ascontiguousarray(np.asarray(whole)).tobytes()


@pytest.mark.parametrize(("dtype", "n", "k"), [("fp32", 96, 1100), ("bf16", 40, 257), ("fp16", 7, 640)])
def test_rows_of_a_product_do_not_depend_on_their_number(client: tw.Client, dtype: str, n: int, k: int) -> None:
    a, b = drawn(max(ROWS), k, dtype=dtype), drawn(k, n, dtype=dtype)
    whole = np.array(client.gemm(a, b, strategy="batch_invariant"))
    kernels = set()
    for rows in ROWS:
        part = np.array(client.gemm(a[:rows], b, strategy="batch_invariant"))
        assert same_bits(part, whole[:rows]), rows
        assert client.report is not None
        kernels.add(tuple(client.report.kernels))
    assert len(kernels) == 1  # the same kernel for all


@pytest.mark.extended
def test_products_of_a_batch_do_not_depend_on_their_number(client: tw.Client) -> None:
    a, b = drawn(5, 33, 300), drawn(5, 300, 48)
    whole = np.array(client.gemm(a, b, strategy="batch_invariant"))
    for count in (2, 3):
        assert same_bits(client.gemm(a[:count], b[:count], strategy="batch_invariant"), whole[:count])


@pytest.mark.extended
def test_images_of_a_convolution_do_not_depend_on_their_number(client: tw.Client) -> None:
    x, w = drawn(6, 24, 9, 9), drawn(16, 24, 3, 3)
    whole = np.array(client.conv(x, w, padding=1, strategy="batch_invariant"))
    for images in (1, 2, 5):
        assert same_bits(client.conv(x[:images], w, padding=1, strategy="batch_invariant"), whole[:images])


@pytest.mark.extended
def test_sequences_of_an_attention_do_not_depend_on_their_number(client: tw.Client) -> None:
    q, k, v = drawn(6, 4, 3, 64), drawn(6, 2, 500, 64), drawn(6, 2, 500, 64)
    whole = np.array(client.attention(q, k, v, strategy="batch_invariant"))
    for count in (1, 2, 5):
        part = client.attention(q[:count], k[:count], v[:count], strategy="batch_invariant")
        assert same_bits(part, whole[:count])


def test_what_has_no_rows_is_refused_with_the_reason(client: tw.Client) -> None:
    with pytest.raises(tw.UnsupportedError, match="batch-invariant") as caught:
        client.grouped_gemm([drawn(4, 8), drawn(3, 8)], [drawn(8, 4), drawn(8, 4)], strategy="batch_invariant")
    assert (caught.value.field, caught.value.rule) == ("selection.strategy", "batch_invariant")
    assert "strategy" in caught.value.fix
