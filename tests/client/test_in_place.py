"""An output may be the very tensor that is added: a residual, or an accumulation over calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw


def random(client: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return client.asarray(np.random.default_rng().standard_normal(shape).astype(dtype))


def assert_close(actual: Any, wanted: Any, bound: float) -> None:
    error = np.linalg.norm(actual.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < bound


@pytest.mark.parametrize(("m", "n", "k"), [(1, 513, 77), (5, 7, 3), (65, 130, 33), (300, 257, 1030)])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (np.float16, 2e-3)])
@pytest.mark.parametrize("split_k", [None, 3])
@pytest.mark.some(3)
def test_the_product_is_added_in_place(
    real_server: Any, m: int, n: int, k: int, dtype: Any, bound: float, split_k: int | None
) -> None:
    with tw.connect(real_server.target) as client:
        a, b, x = random(client, (m, k), dtype), random(client, (k, n), dtype), random(client, (m, n), dtype)
        wanted = x.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
        assert client.gemm(a, b, c=x, out=x, split_k=split_k) is x
        assert client.report.bytes_copied == 0
        assert_close(x, wanted, bound)


def test_columns_of_one_matrix_are_accumulated_by_groups(real_server: Any) -> None:
    with tw.connect(real_server.target) as client:
        x = random(client, (40, 60))
        parts = [x[:, :20], x[:, 20:60]]
        a = [random(client, (40, 30)) for _ in parts]
        b = [random(client, (30, part.shape[1])) for part in parts]
        wanted = [
            part.astype(np.float64) + one.astype(np.float64) @ other.astype(np.float64)
            for part, one, other in zip(parts, a, b, strict=True)
        ]
        client.grouped_gemm(a, b, c=parts, out=parts)
        for part, truth in zip(parts, wanted, strict=True):
            assert_close(part, truth, 1e-5)


def test_an_output_that_is_an_operand_of_the_product_is_refused(real_server: Any) -> None:
    with tw.connect(real_server.target) as client:
        a = random(client, (32, 32))
        for inputs in ({"a": a, "b": a.copy()}, {"a": a.copy(), "b": a}):
            with pytest.raises(tw.InvalidArgumentError, match="overlaps"):
                client.gemm(**inputs, out=a)
        with pytest.raises(tw.InvalidArgumentError, match="overlaps"):
            client.gemm(a.copy(), a.copy(), c=a.T, out=a)
