"""Operations of PyTorch for weights of other forms, and over latent caches: values, gradients, compilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tilewright.torch as twt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("client")]


def rand(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(ours: Any, theirs: Any, tolerance: float = 2e-4) -> None:
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach(), theirs.detach()
    assert float((ours.float() - theirs.float()).abs().max()) <= tolerance * (float(theirs.float().abs().max()) + 1e-6)


def int4(k: int, n: int, zeros: bool) -> tuple[list[Any], Any]:
    """The tensors of a quantised weight, and the weight ``[K, N]`` that they stand for."""
    weights = tw.quantize_int4(rand(n, k).numpy(), zeros=zeros)
    zero = weights.zero_b if zeros else np.full(weights.scale_b.shape, 8, np.int8)
    values = tw.unpack_int4(np.asarray(weights.b).T, k).astype(np.float32) - np.repeat(zero, 128, 1)[:, :k].astype(
        np.float32
    )
    values *= np.repeat(weights.scale_b.astype(np.float32), 128, 1)[:, :k]
    packed = torch.from_numpy(np.asarray(weights.b).T.copy()).t()
    given = [packed, torch.from_numpy(weights.scale_b), torch.from_numpy(zero) if zeros else None]
    return given, torch.from_numpy(values).t()


@pytest.mark.parametrize("zeros", [False, True])
def test_4_bit_weights_and_the_gradients_that_pass_through_them(zeros: bool) -> None:
    given, weight = int4(261, 48, zeros)
    a, bias = rand(6, 261, dtype=torch.bfloat16).requires_grad_(), rand(48, dtype=torch.bfloat16).requires_grad_()
    found = twt.gemm_int4(a, *given, bias)
    wanted = a.float() @ weight + bias.float()
    close(found, wanted, 2e-2)
    step = rand(6, 48)
    ours, theirs = (torch.autograd.grad((out.float() * step).sum(), [a, bias]) for out in (found, wanted))
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other, 2e-2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        close(twt.gemm_int4(a.float(), *given, bias.float()), found, 1e-6)
    with pytest.raises(NotImplementedError, match="activation"):
        twt.gemm_int4(a, *given, activation="relu").sum().backward()


@pytest.mark.parametrize("kind", ["fp32", "exponents"])
def test_factors_of_blocks_are_fp32_or_exponents(kind: str) -> None:
    a, w = rand(5, 260, dtype=torch.float8_e4m3fn), rand(140, 260, dtype=torch.float8_e4m3fn)
    if kind == "fp32":
        scales, blocks = (rand(5, 3).abs(), rand(2, 3).abs()), "1x128_128x128"
        wide = [scales[0].repeat_interleave(128, 1)[:, :260]]
        wide.append(scales[1].repeat_interleave(128, 0).repeat_interleave(128, 1)[:140, :260])
    else:
        blocks = "1x32_1x32"
        own = [torch.exp2(torch.randint(-4, 5, (rows, 9)).float()) for rows in (5, 140)]
        scales = tuple(item.to(torch.float8_e8m0fnu) for item in own)
        wide = [item.repeat_interleave(32, 1)[:, :260] for item in own]
    found = twt.gemm_block_scaled(a, w.t(), *scales, blocks=blocks, out_dtype=torch.float32)
    close(found, (a.float() * wide[0]) @ (w.float() * wide[1]).t(), 1e-3)


def test_rows_of_experts_and_their_gradient() -> None:
    x, w = rand(10, 24), rand(3, 16, 24)
    counts = torch.tensor([4, 0, 5], dtype=torch.int32)
    flat = x.clone().requires_grad_()
    found = twt.moe_gemm(flat, w, counts, alpha=0.5)
    wanted = torch.cat([0.5 * x[:4] @ w[0].t(), 0.5 * x[4:9] @ w[2].t()])
    close(found[:9], wanted)
    (dx,) = torch.autograd.grad(found[:9].sum(), [flat])
    close(dx[:4], (0.5 * w[0].sum(0)).expand(4, 24))
    assert not dx[9].any(), "a row of no expert has no gradient"
    roomy = rand(3, 6, 24).requires_grad_()
    out = twt.moe_gemm(roomy, w, counts)
    close(out[2, :5], roomy[2, :5] @ w[2].t())
    (dx,) = torch.autograd.grad(out[2, :5].sum() + out[0, :4].sum(), [roomy])
    close(dx[2, :5], w[2].sum(0).expand(5, 24))
    assert not dx[1].any() and not dx[2, 5].any()
    with pytest.raises(NotImplementedError, match="weights"):
        twt.moe_gemm(x, w.clone().requires_grad_(), counts).sum().backward()


def test_experts_in_8_bits_with_factors_of_blocks() -> None:
    x, w = rand(10, 200, dtype=torch.float8_e4m3fn), rand(3, 16, 200, dtype=torch.float8_e4m3fn)
    counts, scales = torch.tensor([4, 0, 6], dtype=torch.int32), (rand(10, 2).abs(), rand(3, 1, 2).abs())
    found = twt.moe_gemm(x, w, counts, *scales, blocks="1x128_128x128", out_dtype=torch.float32)
    wide = [item.float() * s.repeat_interleave(128, -1)[..., :200] for item, s in zip((x, w), scales, strict=True)]
    close(found, torch.cat([wide[0][:4] @ wide[1][0].t(), wide[0][4:] @ wide[1][2].t()]), 1e-3)
    assert twt.moe_gemm(x, w, counts).dtype is torch.float16


def test_experts_with_a_gate_and_results_in_8_bits() -> None:
    x, gate, up = rand(10, 64), rand(3, 24, 64), rand(3, 24, 64)
    counts, w = torch.tensor([4, 0, 6], dtype=torch.int32), tw.join_gate_up(gate, up)
    own = [0] * 4 + [2] * 6
    wanted = torch.nn.functional.silu(torch.einsum("tk,tnk->tn", x, gate[own]))
    wanted = wanted * torch.einsum("tk,tnk->tn", x, up[own])
    close(twt.moe_gemm(x, w, counts, activation="swiglu"), wanted)
    values, scales = twt.moe_gemm_quantised(x, w, counts, activation="swiglu")
    assert values.dtype is torch.float8_e4m3fn and scales.shape == (10, 1)
    close(values.float() * scales, wanted, 5e-2)
    with pytest.raises(NotImplementedError, match="activation"):
        twt.moe_gemm(x.clone().requires_grad_(), w, counts, activation="swiglu").sum().backward()


def test_packed_weights_are_packed_once_and_go_with_their_object(client: tw.Client) -> None:
    x, w, bias = rand(2, 16, 64), rand(64, 96), rand(96)
    packed = twt.PackedWeight(w, rows=32)
    found = twt.linear(x, packed, bias, activation="relu")
    close(found, torch.relu(x @ w + bias))
    number = packed.number
    del packed
    with pytest.raises(ValueError, match="keep the PackedWeight"):
        twt.gemm_packed(x[0], number, 96)


def truth(q: Any, k: Any, values: int, scale: float) -> Any:
    return torch.softmax(scale * q @ k.mT, -1) @ k[..., :values]


def test_latent_caches_are_attended_to_and_in_pages() -> None:
    q, k = rand(2, 4, 3, 96), rand(2, 1, 20, 96)
    close(twt.attention_latent(q, k, 72, scale=0.1), truth(q, k, 72, 0.1))
    pages = torch.zeros(4, 16, 1, 96)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    for b in range(2):
        pages[table[b, 0], :, 0], pages[table[b, 1], :4, 0] = k[b, 0, :16], k[b, 0, 16:]
    lengths = torch.full((2,), 20, dtype=torch.int32)
    close(twt.attention_latent_paged(q, pages, table, lengths, 72, scale=0.1), truth(q, k, 72, 0.1))


@pytest.mark.filterwarnings("default")
def test_they_compile_in_one_graph() -> None:
    given, weight = int4(128, 64, False)
    packed, w, counts = twt.PackedWeight(rand(64, 64)), rand(2, 96, 64), torch.tensor([3, 5], dtype=torch.int32)
    plain = rand(64, 64)

    def layer(x: Any) -> Any:
        y = twt.gemm_int4(x, *given).float()
        y = twt.linear(y, packed)
        y = twt.moe_gemm(y, w, counts)
        return twt.attention_latent(y.reshape(1, 2, 4, 96), y[:4].reshape(1, 1, 4, 96), 64, None, False, 0.1)

    x = rand(8, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    y = (x.float() @ weight).bfloat16().float() @ plain
    y = torch.cat([y[:3] @ w[0].t(), y[3:] @ w[1].t()])
    close(found, truth(y.reshape(1, 2, 4, 96), y[:4].reshape(1, 1, 4, 96), 64, 0.1), 3e-2)


CHECKED = {
    "gemm_int4": lambda: (rand(4, 128, dtype=torch.bfloat16).requires_grad_(), *int4(128, 8, True)[0]),
    "moe_gemm": lambda: (rand(8, 24).requires_grad_(), rand(2, 16, 24), torch.tensor([3, 5], dtype=torch.int32)),
    "moe_gemm_quantised": lambda: (rand(8, 24), rand(2, 16, 24), torch.tensor([3, 5], dtype=torch.int32)),
    "attention_latent": lambda: (rand(1, 2, 3, 32), rand(1, 1, 9, 32), 16),
    "attention_latent_paged": lambda: (
        rand(1, 2, 1, 32), rand(2, 16, 1, 32), torch.tensor([[1, 0]], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32), 16,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*CHECKED, "gemm_block_scaled", "gemm_packed"])
def test_opcheck_passes_for_these(name: str) -> None:
    words: dict[str, Any] = {}
    if name == "gemm_packed":
        packed = twt.PackedWeight(rand(64, 32))
        given: tuple[Any, ...] = (rand(16, 64), packed.number, 32)
    elif name == "gemm_block_scaled":
        a, w = rand(5, 128, dtype=torch.float8_e4m3fn), rand(8, 128, dtype=torch.float8_e4m3fn)
        given, words = (a, w.t(), rand(5, 1), rand(1, 1)), {"out_dtype": torch.float32}
    else:
        given = CHECKED[name]()
    # Products of fp8 are nothing that PyTorch's own check of the schema can add up.
    utils = ("test_faketensor", "test_autograd_registration") if words else "ALL"
    found = torch.library.opcheck(getattr(torch.ops.tilewright, name).default, given, words, test_utils=utils)
    assert set(found.values()) == {"SUCCESS"}
