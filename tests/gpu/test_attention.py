"""Attention on the GPU is right with every feature, on the memory of another process, forward and backward."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_problem import DEVICE, OFFSET, SEED, Attention, attend
from gpu_cases import relative

import tilewright
from tilewright_fmha.problem.philox import random_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fmha"))

from fmha_cases import Case, pairwise

COMPILED: dict[str, list[Any]] = {
    "dtype": ["bf16", "fp16", "fp32"],
    "mode": ["batch", "varlen", "lengths"],
    "mask": ["no", "causal", "bottom", "window", "sink"],
    "bias": ["no", "full", "keys", "alibi"],
    "drop": [False, True],
    "softcap": [False, True],
    "sinks": [False, True],
    "hdim": [(64, 64), (128, 128), (40, 72)],
}
"""What kernels differ in: every two values meet in some case."""
BACKWARD: dict[str, list[Any]] = {
    "dtype": ["bf16", "fp16", "fp32"],
    "mode": ["batch", "varlen", "lengths"],
    "mask": ["no", "causal", "window"],
    "bias": ["no", "full", "alibi"],
    "dbias": [False, True],
    "drop": [False, True],
    "softcap": [False, True],
    "sinks": [False, True],
}
SIZED: dict[str, list[Any]] = {
    "heads": [(2, 2), (4, 1), (6, 2)],
    "seq": [(17, 65), (1, 1), (3, 500), (150, 67), (257, 130)],
    "layout": ["bhsd", "bshd"],
}
"""What they are told at run time."""
PLAIN: dict[str, list[Any]] = {
    "dtype": ["bf16", "fp16"],
    "mode": ["batch", "varlen", "lengths"],
    "mask": ["no", "causal", "bottom", "window", "sink"],
    "softcap": [False, True],
    "sinks": [False, True],
    "hdim": [(64, 64), (128, 128), (192, 128), (256, 256)],
}
"""What GPUs have specialised kernels for, where there is work for all of them."""
PLAIN_BACKWARD: dict[str, list[Any]] = {
    "dtype": ["bf16", "fp16"],
    "mask": ["no", "causal", "bottom", "window"],
    "sinks": [False, True],
    "hdim": [(64, 64), (128, 128), (40, 72)],
}
"""What there are specialised gradients for."""
LARGE: dict[str, list[Any]] = {
    "heads": [(12, 4), (12, 12)],
    "seq": [(700, 700), (530, 1000)],
    "layout": ["bhsd", "bshd"],
}
WIDE = [
    Case("bf16", hdim=(256, 256), seq=(100, 300), mask="causal", heads=(4, 2)),
    Case("fp16", hdim=(192, 128), seq=(130, 130), mask="bottom"),
    Case("fp32", hdim=(256, 256), seq=(40, 100)),
    Case("fp16", hdim=(8, 8), seq=(65, 33), bias="column"),
    Case("fp16", hdim=(72, 72), seq=(90, 90), bias="rows", layout="bshd"),
    Case("fp16", hdim=(64, 64), seq=(77, 130), columns=True),
    Case("bf16", hdim=(128, 128), seq=(1, 700), heads=(8, 2), bias="head"),
    Case("bf16", hdim=(320, 320), seq=(100, 300), mask="causal", heads=(4, 2)),
    Case("fp16", hdim=(512, 512), seq=(65, 130), heads=(2, 2)),
    Case("fp16", hdim=(576, 512), seq=(33, 200), mask="bottom", heads=(4, 1)),
]
STEEP = [
    Case("bf16", hdim=(128, 128), seq=(130, 257), mask="bottom", heads=(4, 2)),
    Case("fp16", hdim=(72, 40), seq=(129, 65)),
    Case("fp32", hdim=(80, 80), seq=(33, 70), mask="causal"),
]


def covering(axes: dict[str, list[Any]], seed: int, sized: dict[str, list[Any]] = SIZED) -> list[Case]:
    """Pairs of compiled features, each case with other sizes."""
    rng, found = np.random.default_rng(seed), []
    for case in pairwise(axes, seed):
        sizes = {name: values[int(rng.integers(len(values)))] for name, values in sized.items()}
        found.append(replace(case, **sizes))
    return found


def name_of(case: Case) -> str:
    words = [case.dtype, case.mode, case.mask, case.bias]
    words += [name for name in ("dbias", "drop", "softcap", "sinks", "columns") if getattr(case, name)]
    return "-".join([*words, *(f"{a}x{b}" for a, b in (case.heads, case.seq, case.hdim)), case.layout])


def check(
    asked: Attention, client: tilewright.Client, got: dict[str, Any], want: dict[str, Any], gradients: bool
) -> None:
    report = client.report
    limits = asked.limits(gradients)
    for name, right in want.items():
        limit = limits.get(name) or max(limits.values())
        error = relative(asked.torch, got[name], right)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e} with {report and report.kernels}"


def joined(asked: Attention, tensors: dict[str, Any], name: str, keys: bool = False) -> Any:
    return asked.torch.cat([asked.of(tensors[name], piece, keys).flatten() for piece in asked.pieces])


def forward(torch: Any, client: tilewright.Client, case: Case) -> None:
    asked = Attention(torch, case)
    q, k, v = (asked.leaves[name] for name in "qkv")
    outs = asked.poisoned()
    call = client.attention_varlen if case.mode == "varlen" else client.attention
    call(q, k, v, **asked.words(), **outs)
    torch.cuda.synchronize()
    pieces = list(asked.each(asked.doubles()))
    want = {"o": torch.cat([o.detach().flatten() for _, o, _ in pieces])}
    check(asked, client, {"o": joined(asked, outs, "out")}, want, False)
    for piece, _, right in pieces:
        begin, end = piece.q
        lse = outs["lse"][:, begin:end] if case.mode == "varlen" else outs["lse"][piece.item, :, begin:end]
        assert torch.equal(torch.isinf(lse), torch.isinf(right))
        seen = ~torch.isinf(right)
        assert torch.allclose(lse[seen].double(), right[seen], rtol=1e-4, atol=1e-4)
    untouched(asked, outs)


def untouched(asked: Attention, outs: dict[str, Any]) -> None:
    """Behind the last sequence nothing is written, and behind an item's length there are zeros."""
    for piece in asked.pieces if asked.case.mode == "lengths" else asked.pieces[-1:]:
        if asked.case.mode == "varlen":
            assert asked.torch.isnan(outs["out"][piece.q[1] :]).all()
        else:
            assert (outs["out"][piece.item, :, piece.q[1] :] == 0).all()


@pytest.mark.parametrize("case", [*covering(COMPILED, 3), *WIDE], ids=name_of)
def test_forward(torch: Any, client: tilewright.Client, case: Case) -> None:
    forward(torch, client, case)


@pytest.mark.parametrize("case", covering(PLAIN, 5, LARGE), ids=name_of)
def test_forward_with_work_for_all(torch: Any, client: tilewright.Client, case: Case) -> None:
    forward(torch, client, case)
    assert client.report is not None
    if torch.cuda.get_device_capability()[0] == 9 and case.mask in ("no", "causal", "bottom"):
        assert "_ws_" in str(client.report.kernels)


@pytest.mark.parametrize("case", [*covering(BACKWARD, 4), *STEEP], ids=name_of)
def test_backward(torch: Any, client: tilewright.Client, case: Case) -> None:
    backward(torch, client, case)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any", "fixed"])
@pytest.mark.parametrize("case", covering(PLAIN_BACKWARD, 6, LARGE), ids=name_of)
def test_backward_with_work_for_all(torch: Any, client: tilewright.Client, case: Case, deterministic: bool) -> None:
    backward(torch, client, case, deterministic=deterministic)
    assert client.report is not None
    if torch.cuda.get_device_capability()[0] == 9 and case.mask == "no" and case.hdim[0] == case.hdim[1]:
        assert "_ws_" in str(client.report.kernels)


def backward(torch: Any, client: tilewright.Client, case: Case, **more: Any) -> None:
    asked = Attention(torch, case)
    q, k, v = (asked.leaves[name] for name in "qkv")
    (o, lse), words = asked.saved(), asked.words()
    given = {f"d{name}": torch.full_like(asked.leaves[name], float("nan")) for name in "qkv"}
    names = [*given, *(["dbias"] if case.dbias else []), *(["dsinks"] if case.sinks else [])]
    found = client.attention_backward(
        asked.gradient, q, k, v, o, lse, **words, **given, **more, return_dbias=case.dbias
    )
    torch.cuda.synchronize()
    got = dict(zip(names, found, strict=True))
    right = asked.gradients()
    have, want = {}, {}
    for name in "qkv":
        have[f"d{name}"] = joined(asked, got, f"d{name}", keys=name != "q")
        want[f"d{name}"] = joined(asked, right, name, keys=name != "q")
    for name, leaf in (("dbias", "bias"), ("dsinks", "sinks")):
        if name in got and case.seq[0] <= 300:  # those of sinks are sums of rows, which hundreds of them cancel
            have[name], want[name] = got[name], right[leaf]
    if case.seq == (1, 1):  # of a single key there is nothing to differ in: these are zero but for rounding
        have, want = ({"dv": part["dv"]} for part in (have, want))
    check(asked, client, have, want, True)


# ---- what pairs do not show ----


def test_dropout_drops_what_the_reference_drops(torch: Any, client: tilewright.Client) -> None:
    asked = Attention(torch, Case("fp16", drop=True, heads=(4, 2), seq=(70, 130), hdim=(64, 64)), batch=2)
    q, k, v = (asked.leaves[name] for name in "qkv")
    first, drawn = client.attention(q, k, v, return_randval=True, **asked.words())
    want = [random_bytes(SEED, OFFSET, number, 70, 130) for number in range(8)]
    assert np.array_equal(drawn.cpu().numpy().view(np.uint8).reshape(8, 70, 130), np.stack(want))
    again = client.attention(q, k, v, **asked.words())
    other = client.attention(q, k, v, dropout_p=0.3, seed=SEED, offset=OFFSET + 1)
    torch.cuda.synchronize()
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("mode", ["batch", "varlen", "lengths"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_give_the_random_values_of_the_forward_pass(
    torch: Any, client: tilewright.Client, dtype: str, mode: str
) -> None:
    asked = Attention(torch, Case(dtype, mode=mode, drop=True, heads=(4, 2), seq=(70, 130), hdim=(64, 64)))
    q, k, v = (asked.leaves[name] for name in "qkv")
    o, lse = asked.saved()
    call = client.attention_varlen if mode == "varlen" else client.attention
    _, drawn = call(q, k, v, return_randval=True, **asked.words())
    dq, dk, dv, again = client.attention_backward(asked.gradient, q, k, v, o, lse, return_randval=True, **asked.words())
    torch.cuda.synchronize()
    rows = asked.pieces[-1].q[1] if mode == "varlen" else drawn.shape[-2]
    assert drawn.any() and torch.equal(again[..., :rows, :], drawn[..., :rows, :])
    want = asked.gradients()
    pairs = (("q", dq, False), ("k", dk, True), ("v", dv, True))
    have = {f"d{name}": joined(asked, {name: got}, name, keys) for name, got, keys in pairs}
    right = {f"d{name}": joined(asked, want, name, keys) for name, _, keys in pairs}
    check(asked, client, have, right, True)


@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", heads=(8, 2), seq=(300, 520), hdim=(64, 64), mask="causal", drop=True),
        Case("bf16", heads=(8, 2), seq=(300, 520), hdim=(64, 64), mask="causal"),
        Case("bf16", heads=(8, 2), seq=(1900, 2200), hdim=(128, 128), mask="bottom"),
        Case("fp16", heads=(6, 6), seq=(2200, 1900), hdim=(64, 64)),
        Case("bf16", heads=(2, 1), seq=(700, 2900), hdim=(128, 128), mask="window"),
    ],
    ids=name_of,
)
def test_equal_gradients_have_equal_bits(torch: Any, client: tilewright.Client, case: Case) -> None:
    asked = Attention(torch, case)
    q, k, v = (asked.leaves[name] for name in "qkv")
    o, lse = client.attention(q, k, v, return_lse=True, **asked.words())
    first = client.attention_backward(asked.gradient, q, k, v, o, lse, **asked.words())
    for _ in range(10):
        again = client.attention_backward(asked.gradient, q, k, v, o, lse, **asked.words())
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_gradients_in_any_order_of_sums_are_right_too(torch: Any, client: tilewright.Client) -> None:
    asked = Attention(torch, Case("bf16", heads=(4, 4), seq=(300, 520), hdim=(64, 64)))
    q, k, v = (asked.leaves[name] for name in "qkv")
    o, lse = client.attention(q, k, v, return_lse=True)
    found = client.attention_backward(asked.gradient, q, k, v, o, lse, deterministic=False)
    torch.cuda.synchronize()
    want = asked.gradients()
    check(asked, client, dict(zip("qkv", found, strict=True)), {name: want[name] for name in "qkv"}, True)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_lies_beyond_lengths_is_never_read_as_a_number(torch: Any, client: tilewright.Client, dtype: str) -> None:
    asked = Attention(torch, Case(dtype, mode="lengths", seq=(70, 200), hdim=(64, 64), heads=(4, 2), mask="causal"))
    q, k, v = (asked.leaves[name] for name in "qkv")
    right = client.attention(q, k, v, **asked.words())
    for piece in asked.pieces:
        k[piece.item, :, piece.keys :] = float("nan")
        v[piece.item, :, piece.keys :] = float("inf")
        q[piece.item, :, piece.rows :] = float("nan")
    again = client.attention(q, k, v, **asked.words())
    torch.cuda.synchronize()
    assert torch.equal(right, again)


def test_infinity_and_nan_stay_in_the_rows_that_see_them(torch: Any, client: tilewright.Client) -> None:
    asked = Attention(torch, Case("bf16", seq=(200, 200), hdim=(64, 64), mask="causal"), batch=1)
    q, k, v = (asked.leaves[name] for name in "qkv")
    q[0, 0, 5], k[0, 1, 190] = float("nan"), float("nan")
    o = client.attention(q, k, v, is_causal=True)
    torch.cuda.synchronize()
    odd = torch.isnan(o[0]).any(2)
    assert odd[0].nonzero().flatten().tolist() == [5]
    assert odd[1].nonzero().flatten().tolist() == list(range(190, 200))


@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_eight_bit_operands(torch: Any, client: tilewright.Client, out_dtype: str) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, heads, rows, 64, device=DEVICE).to(torch.float8_e4m3fn)
               for heads, rows in ((4, 70), (2, 150), (2, 150)))  # fmt: skip
    scales = {name: torch.tensor(factor, device=DEVICE) for name, factor in (("q", 0.5), ("k", 1.5), ("v", 0.75))}
    o = client.attention(
        q, k, v, is_causal=True, out_dtype=out_dtype, **{f"{name}_descale": scale for name, scale in scales.items()}
    )
    torch.cuda.synchronize()
    i, j = torch.arange(70, device=DEVICE), torch.arange(150, device=DEVICE)
    wide = [tensor.double() * scales[name].double() for name, tensor in zip("qkv", (q, k, v), strict=True)]
    want = torch.stack([attend(torch, *(part[item] for part in wide), j <= i[:, None])[0] for item in range(2)])
    assert relative(torch, o, want) < 4e-3


def test_a_bound_plan_launches_on_the_current_stream(torch: Any, client: tilewright.Client) -> None:
    asked = Attention(torch, Case("bf16", heads=(4, 2), seq=(300, 300), hdim=(64, 64)))
    q, k, v = (asked.leaves[name] for name in "qkv")
    out = torch.full_like(q, float("nan"))
    bound = client.plan_attention(q, k, v, out=out).bind(q=q, k=k, v=v, out=out)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        bound.launch()
        doubled = out * 2
    side.synchronize()
    want = torch.stack([o.detach() for _, o, _ in asked.each(asked.doubles())])
    assert relative(torch, doubled, 2 * want) < 4e-3
