"""PyTorch's tensors in the host's memory as operands and outputs of the client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def product(dtype: Any) -> tuple[Any, Any, Any]:
    a, b = torch.randn(9, 16).to(dtype), torch.randn(16, 5).to(dtype)
    return a, b, a.double() @ b.double()


def close(found: Any, expected: Any, dtype: Any) -> bool:
    return bool((found.double() - expected).norm() <= BOUND[dtype] * expected.norm())


@pytest.mark.parametrize("launch", ["caller", "server"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_outputs_are_written_and_given_back(client: tw.Client, dtype: Any, launch: Any) -> None:
    a, b, expected = product(dtype)
    out = torch.full((9, 5), torch.nan, dtype=dtype)
    assert client.gemm(a, b, out=out, launch=launch) is out
    assert close(out, expected, dtype)
    columns = torch.full((5, 9), torch.nan, dtype=dtype).t()  # in another order of elements
    assert client.gemm(a, b, out=columns, launch=launch) is columns
    assert close(columns, expected, dtype)


def test_prepared_plans_write_tensors(client: tw.Client) -> None:
    a, b, expected = product(torch.float32)
    out = torch.full((9, 5), torch.nan)
    assert client.plan_gemm(a, b)(a, b, out=out) is out
    assert close(out, expected, torch.float32)
    out.fill_(torch.nan)
    assert client.plan_gemm(a, b, out=out)(a, b, out={"out": out}) is out
    assert close(out, expected, torch.float32)


def test_lists_of_tensors_come_back_as_they_were(client: tw.Client) -> None:
    problems = [product(torch.float32) for _ in range(3)]
    outs = [torch.full((9, 5), torch.nan) for _ in problems]
    found = client.grouped_gemm([a for a, _, _ in problems], [b for _, b, _ in problems], out=outs)
    assert all(one is out for one, out in zip(found, outs, strict=True))
    assert all(close(out, expected, torch.float32) for out, (_, _, expected) in zip(outs, problems, strict=True))


def test_caches_of_tensors_are_written_in_place(client: tw.Client) -> None:
    k, v = torch.randn(2, 1, 3, 16), torch.randn(2, 1, 3, 16)
    keys, values = torch.zeros(2, 1, 8, 16), torch.zeros(2, 1, 8, 16)
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    found = client.kv_append(k, v, keys, values, lengths)
    assert found[0] is keys and found[1] is values
    assert torch.equal(keys[0, :, :3], k[0]) and torch.equal(values[1, :, 2:5], v[1])


def test_what_cannot_be_written_is_refused(client: tw.Client) -> None:
    a, b, _ = product(torch.float32)
    with pytest.raises(tw.TilewrightError) as refused:
        client.gemm(a, b, out=torch.zeros(9, 5, requires_grad=True))
    assert refused.value.fix
    with pytest.raises(tw.TilewrightError):
        client.gemm(a, b, out=torch.zeros(9, 4))
    with pytest.raises(tw.TilewrightError):
        client.gemm(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32), out=torch.zeros(4, 4).to_sparse())
