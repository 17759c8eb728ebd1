"""GEMM on the GPU is right for every element type, layout and size, on the memory of another process."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import bound, matrix, poisoned, relative, torch_dtype, truth

import tilewright

DTYPES = [
    ("fp32", "fp32", "fp32"),
    ("fp16", "fp16", "fp16"),
    ("bf16", "bf16", "bf16"),
    ("fp16", "fp16", "fp32"),
    ("bf16", "bf16", "fp32"),
    ("fp8", "fp8", "bf16"),
    ("fp8", "bf8", "fp16"),
    ("bf8", "fp8", "fp32"),
    ("int8", "int8", "int32"),
    ("int8", "int8", "fp32"),
]
SIZES = [
    (256, 256, 256),
    (512, 768, 1024),
    (333, 777, 1111),
    (1, 4096, 512),
    (17, 130, 65),
    (64, 64, 1),
    (1, 1, 1),
    (16, 4096, 4096),
    (130, 8, 4096),
]
LAYOUTS = ["rcr", "rrr", "crr", "ccr"]


def product(
    torch: Any, client: tilewright.Client, m: int, n: int, k: int, dtypes: Any, layout: str, pitch: int = 0
) -> None:
    a = matrix(torch, m, k, dtypes[0], transposed=layout[0] == "c", pitch=pitch)
    b = matrix(torch, k, n, dtypes[1], transposed=layout[1] == "c", pitch=pitch)
    out = poisoned(torch, m, n, dtypes[2], pitch)
    client.gemm(a, b, out=out)
    torch.cuda.synchronize()
    want = truth(torch, a, b)
    error = relative(torch, out, want)
    limit = bound(torch, a, b, out, want)
    assert error <= limit, f"{error:.2e} > {limit:.2e} with {client.report.kernels if client.report else '?'}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_every_dtype_and_layout_at_every_size(torch: Any, client: tilewright.Client, dtypes: Any, layout: str) -> None:
    for m, n, k in SIZES:
        product(torch, client, m, n, k, dtypes, layout)


@pytest.mark.parametrize("dtypes", DTYPES[:4], ids="-".join)
@pytest.mark.parametrize("pitch", [1, 3, 8])
def test_rows_apart_and_unaligned(torch: Any, client: tilewright.Client, dtypes: Any, pitch: int) -> None:
    for layout in LAYOUTS:
        product(torch, client, 200, 136, 264, dtypes, layout, pitch)


def test_addresses_that_are_not_aligned(torch: Any, client: tilewright.Client) -> None:
    whole = torch.randn(3 * 64 * 64 + 3, device="cuda").to(torch.bfloat16)
    a, b, out = (whole[1 + i * 4096 : 1 + (i + 1) * 4096].view(64, 64) for i in range(3))
    want = truth(torch, a, b)
    client.gemm(a, b, out=out)
    torch.cuda.synchronize()
    assert relative(torch, out, want) < 4e-3


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_batches_and_broadcast(torch: Any, client: tilewright.Client, dtype: str) -> None:
    kind = torch_dtype(torch, dtype)
    a = torch.randn(3, 5, 96, 72, device="cuda").to(kind)
    b = torch.randn(5, 72, 80, device="cuda").to(kind)
    out = torch.full((3, 5, 96, 80), float("nan"), dtype=kind, device="cuda")
    client.gemm(a, b, out=out)
    torch.cuda.synchronize()
    assert relative(torch, out, truth(torch, a, b)) < 4e-3


ACTIVATIONS = ["relu", "gelu", "fast_gelu", "silu", "sigmoid", "tanh", "hard_swish"]


def activated(torch: Any, x: Any, name: str) -> Any:
    functional = torch.nn.functional
    known = {"relu": functional.relu, "silu": functional.silu, "hard_swish": functional.hardswish}
    if name == "gelu":
        return functional.gelu(x)
    if name == "fast_gelu":
        return functional.gelu(x, approximate="tanh")
    return known[name](x) if name in known else getattr(torch, name)(x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(512, 512, 256), (333, 777, 111), (8, 1024, 512)])
def test_bias_and_activation_are_fused(torch: Any, client: tilewright.Client, activation: str, shape: Any) -> None:
    m, n, k = shape
    a, b = matrix(torch, m, k, "bf16"), matrix(torch, k, n, "bf16", transposed=True)
    bias = torch.randn(n, device="cuda").to(torch.bfloat16)
    scale = k**-0.5
    out = poisoned(torch, m, n, "bf16")
    client.gemm(a, b, out=out, bias=bias, activation=activation, alpha=scale)
    torch.cuda.synchronize()
    want = activated(torch, truth(torch, a, b) * scale + bias.double(), activation)
    assert relative(torch, out, want) < 4e-3


def test_scales_and_d_operands(torch: Any, client: tilewright.Client) -> None:
    m, n, k = 384, 512, 640
    a, b = matrix(torch, m, k, "fp8"), matrix(torch, k, n, "fp8", transposed=True)
    rows, cols = torch.rand(m, 1, device="cuda") + 0.5, torch.rand(n, device="cuda") + 0.5
    d = torch.randn(m, n, device="cuda").to(torch.bfloat16)
    out = poisoned(torch, m, n, "bf16")
    client.gemm(a, b, out=out, scale_a=rows, scale_b=cols, d=[d])
    torch.cuda.synchronize()
    want = truth(torch, a, b) * rows.double() * cols.double() + d.double()
    assert relative(torch, out, want) < 4e-3


@pytest.mark.parametrize("slices", [2, 3, 8])
def test_split_k_gives_the_same_bits_every_time(torch: Any, client: tilewright.Client, slices: int) -> None:
    a, b = matrix(torch, 100, 5000, "bf16"), matrix(torch, 5000, 136, "bf16", transposed=True)
    results = []
    for _ in range(4):
        out = poisoned(torch, 100, 136, "fp32")
        client.gemm(a, b, out=out, split_k=slices)
        torch.cuda.synchronize()
        results.append(out)
    assert relative(torch, results[0], truth(torch, a, b)) < 1e-5
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_nan_and_infinity_propagate_as_in_the_reference(torch: Any, client: tilewright.Client) -> None:
    a, b = matrix(torch, 128, 256, "bf16"), matrix(torch, 256, 128, "bf16", transposed=True)
    a[3, 5], a[7, 9], b[11, 13] = float("nan"), float("inf"), -float("inf")
    out = poisoned(torch, 128, 128, "bf16")
    client.gemm(a, b, out=out)
    torch.cuda.synchronize()
    want = a.float() @ b.float()
    assert torch.equal(torch.isnan(out), torch.isnan(want))
    assert torch.equal(torch.isinf(out), torch.isinf(want))


def test_numpy_arrays_reach_the_gpu_too(torch: Any, client: tilewright.Client) -> None:
    import numpy as np

    random = np.random.default_rng(5)
    a, b = random.standard_normal((65, 129), np.float32), random.standard_normal((129, 33), np.float32)
    np.testing.assert_allclose(client.gemm(a, b), a @ b, rtol=1e-4, atol=1e-4)
    shared = client.asarray(a)
    np.testing.assert_allclose(client.gemm(shared, b), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "n", "k"), [("bf16", 1024, 4096), ("fp16", 264, 1000), ("fp32", 96, 777)])
def test_rows_do_not_depend_on_their_number(torch: Any, client: tilewright.Client, dtype: str, n: int, k: int) -> None:
    """With the strategy ``batch_invariant``: the same bits, by the same kernel."""
    a, b = matrix(torch, 1000, k, dtype), matrix(torch, k, n, dtype, transposed=True)
    whole = client.gemm(a, b, strategy="batch_invariant")
    torch.cuda.synchronize()
    kernels = set()
    for rows in (1, 3, 16, 17, 64, 128, 333, 999):
        part = client.gemm(a[:rows], b, strategy="batch_invariant")
        torch.cuda.synchronize()
        assert torch.equal(part, whole[:rows]), rows
        kernels.add(tuple(client.report.kernels) if client.report else ())
    assert len(kernels) == 1
