"""Attention over latent caches through the client, whose keys hold their values, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

if TYPE_CHECKING:
    from conftest import Server


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


TYPES = {"fp32": (np.float32, 1e-5), "fp16": (np.float16, 2e-3), "bf16": (ml_dtypes.bfloat16, 1e-2)}
KEYS, VALUES = 576, 512


def truth(q: np.ndarray, keys: np.ndarray, values: int, causal: bool = False) -> np.ndarray:
    """``[H, S, D]`` over ``[K, D]``; causal from the last query and key on."""
    q, keys = q.astype(np.float64), keys.astype(np.float64)
    s = q @ keys.T * q.shape[-1] ** -0.5
    if causal:
        i, j = np.arange(q.shape[1])[:, None], np.arange(len(keys))
        s = np.where(j > i + len(keys) - q.shape[1], -np.inf, s)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ keys[:, :values]


def error(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(have.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.some(2)
def test_values_are_the_first_elements_of_keys(client: tw.Client, dtype: str) -> None:
    kind, bound = TYPES[dtype]
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 5, 3, KEYS)).astype(kind)
    k = rng.standard_normal((2, 1, 37, KEYS)).astype(kind)
    out = client.attention(q, k, None, head_dim_v=VALUES, mask="bottom_right")
    assert out.shape == (2, 5, 3, VALUES) and out.dtype == kind
    for b in range(2):
        assert error(out[b], truth(q[b], k[b, 0], VALUES, causal=True)) < bound
    # As if the values were an operand of their own.
    assert np.array_equal(out, client.attention(q, k, k[..., :VALUES], mask="bottom_right"))


def test_pages_hold_keys_alone(client: tw.Client) -> None:
    rng = np.random.default_rng(2)
    lengths, page = [33, 0, 16], 16
    q = rng.standard_normal((3, 4, 1, 96)).astype(np.float32)
    pages = np.full((8, page, 1, 96), np.nan, np.float32)
    table = np.full((3, 3), -1, np.int32)
    table[0], table[2, 0] = [5, 1, 7], 2
    caches = [rng.standard_normal((length, 96)).astype(np.float32) for length in lengths]
    for b, cache in enumerate(caches):
        for row in range(0, lengths[b], page):
            part = cache[row : row + page]
            pages[table[b, row // page], : len(part), 0] = part
    out = client.attention_paged(q, pages, None, table, lengths, head_dim_v=72)
    assert not out[1].any()
    for b in (0, 2):
        assert error(out[b], truth(q[b], caches[b], 72)) < 1e-5


def test_sequences_end_to_end_and_rows_before_heads(client: tw.Client) -> None:
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((7, 3, 64)).astype(np.float32), rng.standard_normal((20, 1, 64)).astype(np.float32)
    out = client.attention_varlen(q, k, None, [0, 2, 7], [0, 11, 20], 5, 11, head_dim_v=40)
    for first, last, begin, end in ((0, 2, 0, 11), (2, 7, 11, 20)):
        want = truth(q[first:last].swapaxes(0, 1), k[begin:end, 0], 40).swapaxes(0, 1)
        assert error(out[first:last], want) < 1e-5
    rows = client.attention(q[None], k[None], None, head_dim_v=40, layout="bshd")
    assert error(rows[0].swapaxes(0, 1), truth(q.swapaxes(0, 1), k[:, 0], 40)) < 1e-5
    # One sequence, without a batch.
    plain = client.attention(q.swapaxes(0, 1), k.swapaxes(0, 1), None, head_dim_v=40)
    assert np.array_equal(plain, rows[0].swapaxes(0, 1))


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({}, "v", "operand_missing"),
        ({"head_dim_v": 33}, "head_dim_v", "latent_values"),
        ({"head_dim_v": 8, "v": True}, "head_dim_v", "latent_values"),
        ({"head_dim_v": -1}, "head_dim_v", "attribute_range"),
    ],
)
def test_values_that_keys_do_not_hold_are_refused(
    client: tw.Client, changes: dict[str, int], field: str, rule: str
) -> None:
    q = np.ones((1, 2, 3, 32), np.float32)
    v = q if changes.pop("v", False) else None
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention(q, q, v, **changes)
    assert (caught.value.field.removeprefix("attributes."), caught.value.rule) == (field, rule)
