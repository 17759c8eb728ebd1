"""Custom operations of PyTorch on CUDA tensors: values, ``opcheck``, compilation, CUDA graphs, and repeated calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tilewright


@pytest.fixture
def twt(torch: Any, client: tilewright.Client) -> Iterator[Any]:
    import tilewright.torch as module

    module.use(client)
    yield module
    module.use(None)
    torch.compiler.reset()


def rand(torch: Any, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["gemm", "conv", "attention"])
def test_opcheck_passes(torch: Any, twt: Any, name: str) -> None:
    shapes = {
        "gemm": [(64, 128), (128, 96), (96,)],
        "conv": [(2, 32, 14, 14), (64, 32, 3, 3), (64,)],
        "attention": [(2, 4, 128, 64)] * 3,
    }[name]
    given = [rand(torch, *shape).requires_grad_() for shape in shapes]
    more = ([1, 1], [1, 1], [1, 1], 1) if name == "conv" else ()
    found = torch.library.opcheck(getattr(torch.ops.tilewright, name).default, (*given, *more))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_compiles_in_one_graph_and_into_a_graph_of_cuda(torch: Any, twt: Any, mode: str) -> None:
    weight, out = rand(torch, 512, 256) * 0.1, rand(torch, 256, 512) * 0.1
    functional = torch.nn.functional

    def block(own: bool, x: Any) -> Any:
        y = twt.linear(x, weight, activation="gelu") if own else functional.gelu(functional.linear(x, weight))
        heads = y.unflatten(-1, (8, 64)).transpose(1, 2)
        attend = twt.scaled_dot_product_attention if own else functional.scaled_dot_product_attention
        y = attend(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return (twt.linear if own else functional.linear)(y, out) + x

    compiled = torch.compile(lambda x: block(True, x), fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(4):
            x = rand(torch, 2, 128, 256)
            wanted = block(False, x).float()
            assert (compiled(x).float() - wanted).norm() < 1e-2 * wanted.norm()


def test_a_repeated_call_takes_the_short_way_and_follows_its_arguments(torch: Any, client: tilewright.Client) -> None:
    a, b = rand(torch, 128, 256), rand(torch, 256, 64)
    whole = torch.empty(128, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a, b = torch.randn_like(a), torch.randn_like(b)
        torch.testing.assert_close(client.gemm(a, b), a @ b, rtol=2e-2, atol=0.5)
        left = whole[:, :64]
        assert client.gemm(a, b, activation="relu", out=left) is left
        torch.testing.assert_close(left, (a @ b).relu(), rtol=2e-2, atol=0.5)
        odd = torch.empty(128 * 256 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(128, 256).copy_(a)
        torch.testing.assert_close(client.gemm(odd, b), a @ b, rtol=2e-2, atol=0.5)
    weight = torch.nn.Parameter(b)
    with pytest.raises(tilewright.InvalidArgumentError, match="requires gradients"):
        client.gemm(a, weight)
    with torch.no_grad():
        client.gemm(a, weight)
        torch.testing.assert_close(client.gemm(a, weight), a @ weight, rtol=2e-2, atol=0.5)
    with pytest.raises(tilewright.InvalidArgumentError, match="requires gradients"):
        client.gemm(a, weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = client.gemm(a, b)
    side.synchronize()
    torch.testing.assert_close(found, a @ b, rtol=2e-2, atol=0.5)
    assert client.report is not None and client.report.placement == "caller"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("choose", ["measured", "always"])
def test_the_backend_keeps_results(
    torch: Any, twt: Any, graphs: bool, choose: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from tilewright.torch.compiler.backend import tilewright as backend

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    functional = torch.nn.functional
    weight, out = rand(torch, 512, 256) * 0.1, rand(torch, 256, 512) * 0.1

    def block(x: Any) -> Any:
        y = functional.gelu(functional.linear(x, weight))
        heads = y.unflatten(-1, (8, 64)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return functional.linear(y, out) + x

    options = {"choose": choose, "triton.cudagraphs": graphs}
    compiled = torch.compile(block, backend=backend, options=options)
    before = len(twt.report())
    with torch.no_grad():
        for _ in range(4):
            x = rand(torch, 2, 128, 256)
            wanted = block(x).float()
            assert (compiled(x).float() - wanted).norm() < 1e-2 * wanted.norm()
    decisions = twt.report()[before:]
    assert len(decisions) == 3
    assert all(item.replaced for item in decisions) or choose == "measured"
