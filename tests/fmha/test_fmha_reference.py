"""The references: against loops over single elements, against PyTorch, against each other, and at the edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attention_truth import attention_truth
from fmha_requests import (
    REFERENCES,
    ROTARY,
    VARLEN,
    Array,
    append_of,
    append_paged_of,
    backward_of,
    batch_of,
    desc,
    drawn,
    ints,
    paged_of,
    parsed,
    prefill_of,
    varlen_of,
    vectorized_of,
)

from tilewright_fmha.problem.masks import Mask
from tilewright_fmha.problem.philox import random_bytes
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.append import reference_append
from tilewright_fmha.references.backward import reference_backward
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND
from tilewright_kit.contract.problem import OperationRequest


def content(
    operation: str, tensors: dict[str, Any], draw: int = 0, **words: Any
) -> tuple[FmhaProblem, dict[str, Array]]:
    request = OperationRequest(operation, tensors, {}, words)
    return parsed(operation, tensors, **words), drawn(request, draw)


def row_by_hand(
    q: Array, keys: list[Array], values: list[Array], scores: list[float], sink: float | None = None
) -> Array:
    """One row of the output, from the scores of the keys that it sees."""
    weights = [math.exp(score) for score in scores]
    total = sum(weights) + (math.exp(sink) if sink is not None else 0.0)
    assert len(keys) == len(values) == len(scores)
    found = np.zeros(values[0].shape)
    for weight, value in zip(weights, values, strict=True):
        found += weight / total * value.astype(np.float64)
    return found


def dot(a: Array, b: Array) -> float:
    return float(sum(float(x) * float(y) for x, y in zip(a, b, strict=True)))


def test_every_option_of_a_score_is_what_its_formula_says() -> None:
    tensors = {**batch_of("fp32"), "alibi_slopes": desc("fp32", 2, 4), "sinks": desc("fp32", 4)}
    words = {"window_left": 3, "window_right": 1, "mask_align": "bottom_right", "softcap": 1.5, "sink_size": 1}
    problem, x = content(ATTENTION, tensors, **words, scale=0.3)
    out = reference_attention(problem, x)["o"]
    for b, h, i in ((0, 0, 0), (1, 3, 2), (0, 2, 4)):
        kv = h // 2
        seen = [j for j in range(7) if j <= i + 2 + 1 and (j >= i + 2 - 3 or j < 1)]
        scores = []
        for j in seen:
            s = 1.5 * math.tanh(0.3 * dot(x["q"][b, h, i], x["k"][b, kv, j]) / 1.5)
            scores.append(s - float(x["alibi_slopes"][b, h]) * abs(i + 2 - j))
        keys, values = ([x[name][b, kv, j] for j in seen] for name in "kv")
        wanted = row_by_hand(x["q"][b, h, i], keys, values, scores, float(x["sinks"][h]))
        assert np.allclose(out[b, h, i], wanted, rtol=1e-12)


def test_bias_is_added_before_the_softmax_and_broadcasts() -> None:
    problem, x = content(ATTENTION, {**batch_of("fp32"), "bias": desc("fp32", 2, 1, 1, 7)}, return_lse=True)
    out = reference_attention(problem, x)
    scores = [0.25 * dot(x["q"][1, 2, 3], x["k"][1, 1, j]) + float(x["bias"][1, 0, 0, j]) for j in range(7)]
    assert out["lse"][1, 2, 3] == pytest.approx(math.log(sum(math.exp(s) for s in scores)), rel=1e-12)
    values = list(x["v"][1, 1])
    assert np.allclose(out["o"][1, 2, 3], row_by_hand(x["q"], values, values, scores), rtol=1e-12)


def test_plain_arrays_and_whole_problems_agree() -> None:
    words = {"causal": True, "dropout_p": 0.4, "seed": 11, "offset": 5, "return_lse": True, "return_randval": True}
    problem, x = content(ATTENTION, batch_of("fp32"), **words)
    out = reference_attention(problem, x)
    for b, h in ((0, 1), (1, 3)):
        o, lse = attention_truth(
            x["q"][b, h], x["k"][b, h // 2], x["v"][b, h // 2], mask=Mask(right=0), drop_below=problem.dropout, seed=11,
            offset=5, batch_head=b * 4 + h,
        )  # fmt: skip
        assert np.array_equal(out["o"][b, h], o)
        assert np.array_equal(out["lse"][b, h], lse)
        assert np.array_equal(out["randval"][b, h].astype(np.uint8), random_bytes(11, 5, b * 4 + h, 5, 7))


def test_dropped_probabilities_are_lost_and_the_others_grow() -> None:
    plain, x = content(ATTENTION, batch_of("fp32"))
    dropped = parsed(ATTENTION, batch_of("fp32"), dropout_p=0.25, seed=3)
    x["v"] = np.tile(np.eye(7, 24, dtype=np.float32), (2, 2, 1, 1))  # the output is the probabilities
    p, kept = reference_attention(plain, x)["o"], reference_attention(dropped, x)["o"]
    there = random_bytes(3, 0, 6, 5, 7) >= 64
    assert 0 < there.sum() < there.size
    assert np.allclose(kept[1, 2, :, :7], np.where(there, p[1, 2, :, :7] / 0.75, 0.0))


def test_rng_replaces_the_attributes() -> None:
    tensors = {**batch_of("fp32"), "rng": ints(4)}
    problem, x = content(ATTENTION, tensors, dropout_p=0.5)
    x["rng"] = np.array([7, -1, 9, 0], np.int32)
    seeded = parsed(ATTENTION, batch_of("fp32"), dropout_p=0.5, seed=(2**31 - 1) << 32 | 7, offset=9)
    assert not np.array_equal(reference_attention(problem, x)["o"], reference_attention(seeded, x)["o"])
    x["rng"][1] = 2**31 - 1
    assert np.array_equal(reference_attention(problem, x)["o"], reference_attention(seeded, x)["o"])


def test_a_row_that_sees_nothing_is_zero_and_never_nan() -> None:
    words = {"mask": "bottom_right", "return_lse": True}
    problem, x = content(
        ATTENTION, {**batch_of("fp32"), "k": desc("fp32", 2, 2, 3, 16), "v": desc("fp32", 2, 2, 3, 24)}, **words
    )
    out = reference_attention(problem, x)
    assert np.all(out["o"][:, :, :2] == 0) and np.all(np.isneginf(out["lse"][:, :, :2]))
    assert np.all(out["o"][:, :, 2:] != 0)
    biased, x = content(ATTENTION, {**batch_of("fp32"), "bias": desc("fp32", 1, 1, 5, 7)}, return_lse=True)
    x["bias"][0, 0, 3] = -np.inf
    out = reference_attention(biased, x)
    assert np.all(out["o"][:, :, 3] == 0) and np.all(np.isneginf(out["lse"][:, :, 3]))
    assert np.isfinite(out["o"]).all() and np.isfinite(out["lse"][:, :, :3]).all()


def test_a_learned_sink_alone_is_what_the_sum_is() -> None:
    none = {"k": desc("fp32", 2, 2, 0, 16), "v": desc("fp32", 2, 2, 0, 24), "sinks": desc("fp32", 4)}
    problem, x = content(ATTENTION, {**batch_of("fp32"), **none}, return_lse=True)
    out = reference_attention(problem, x)
    assert np.all(out["o"] == 0)
    assert np.allclose(out["lse"], x["sinks"][None, :, None])


def test_what_nobody_may_see_can_be_nan() -> None:
    tensors = {**batch_of("fp32"), "seqlens_k": ints(2)}
    problem, x = content(ATTENTION, tensors, causal=True)
    x["seqlens_k"] = np.array([3, 6], np.int32)
    before = reference_attention(problem, x)["o"]
    for name in "kv":
        x[name][0, :, 3:], x[name][1, :, 5:] = np.nan, np.nan
    assert np.array_equal(reference_attention(problem, x)["o"], before)
    x["v"][1, 0, 4] = np.inf
    out = reference_attention(problem, x)["o"]
    assert np.isfinite(out[1, :, :4]).all() and not np.isfinite(out[1, :2, 4]).any(), "only the row that sees it"


@pytest.mark.parametrize("words", [{}, {"causal": True}, {"mask": "b"}, {"window_left": 2, "window_right": 0}])
def test_sequences_end_to_end_are_items_of_their_own(words: dict[str, Any]) -> None:
    problem, x = content(ATTENTION, varlen_of("fp32"), **VARLEN, **words, return_lse=True)
    out = reference_attention(problem, x)
    starts_q, starts_k = x["cu_seqlens_q"], x["cu_seqlens_k"]
    for b in range(3):
        q, k, v = (
            x[name][starts[b] : starts[b + 1]].swapaxes(0, 1)[None]
            for name, starts in (("q", starts_q), ("k", starts_k), ("v", starts_k))
        )
        tensors = {name: desc("fp32", *array.shape) for name, array in (("q", q), ("k", k), ("v", v))}
        alone = parsed(ATTENTION, tensors, **words, return_lse=True)
        wanted = reference_attention(alone, {"q": q, "k": k, "v": v})
        assert np.array_equal(out["o"][starts_q[b] : starts_q[b + 1]], wanted["o"][0].swapaxes(0, 1))
        assert np.array_equal(out["lse"][:, starts_q[b] : starts_q[b + 1]], wanted["lse"][0])


@pytest.mark.parametrize("layout", ["linear", "vectorized"])
@pytest.mark.parametrize("lookup", ["vllm", "sglang"])
@pytest.mark.parametrize("prefill", [False, True])
def test_pages_hold_what_a_plain_cache_holds(layout: str, lookup: str, prefill: bool) -> None:
    tensors = prefill_of("fp32") if prefill else paged_of("fp32")
    if layout == "vectorized":
        tensors |= {name: vectorized_of("fp32")[name] for name in "kv"}
    if lookup == "sglang":
        tensors |= {"block_table": ints(12), "page_starts": ints(4)}
    words = {"kv_layout": layout, "kv_lookup": lookup, **({"max_seqlen_q": 4} if prefill else {})}
    problem, x = content(ATTENTION, tensors, draw=4, **words)
    out = reference_attention(problem, x)["o"]
    for b in range(3):
        length = int(x["seqlens_k"][b])
        first = int(x["page_starts"][b]) if lookup == "sglang" else 0
        table = x["block_table"][first:] if lookup == "sglang" else x["block_table"][b]
        k, v = np.zeros((length, 2, 16)), np.zeros((length, 2, 24))
        for token in range(length):
            page, row = table[token // 8], token % 8
            for head in range(2):
                for e in range(24):
                    if layout == "linear":
                        if e < 16:
                            k[token, head, e] = x["k"][page, row, head, e]
                        v[token, head, e] = x["v"][page, row, head, e]
                    else:
                        if e < 16:
                            k[token, head, e] = x["k"][page, head, e // 4, row, e % 4]
                        v[token, head, e] = x["v"][page, head, row // 4, e, row % 4]
        rows = slice(x["cu_seqlens_q"][b], x["cu_seqlens_q"][b + 1]) if prefill else None
        for h in range(4):
            q = x["q"][rows, h] if rows else x["q"][b, h]
            o, _ = attention_truth(q, k[:, h // 2], v[:, h // 2])
            assert np.allclose(out[rows, h] if rows else out[b, h], o, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "shapes, words",
    [
        ({"q": (), "k": (), "v": ()}, {}),
        ({"q": (2, 4), "k": (2, 2), "v": (2, 2)}, {}),
        ({"q": (2, 4, 3), "k": (2, 2, 2), "v": (2, 2, 2)}, {"scale_block_q": 2, "scale_block_k": 4}),
    ],
)
def test_factors_multiply_what_they_belong_to(shapes: dict[str, Any], words: dict[str, Any]) -> None:
    factors = {f"{name}_descale": desc("fp32", *shape) for name, shape in shapes.items()}
    problem, x = content(ATTENTION, {**batch_of("fp8"), **factors}, **words)
    out = reference_attention(problem, x)["o"]
    wide: dict[str, Array] = {}
    for name in "qkv":
        factor = x[f"{name}_descale"].astype(np.float64)
        block = words.get(f"scale_block_{'q' if name == 'q' else 'k'}", 1)
        if factor.ndim == 3:
            factor = np.repeat(factor, block, axis=2)[:, :, : x[name].shape[2], None]
        elif factor.ndim == 2:
            factor = factor[:, :, None, None]
        wide[name] = x[name].astype(np.float64) * factor
    plain = parsed(ATTENTION, batch_of("fp32"))
    assert np.allclose(out, reference_attention(plain, wide)["o"], rtol=1e-12)


def test_items_of_a_cache_are_chosen() -> None:
    tensors = {
        **batch_of("fp32"),
        "k": desc("fp32", 5, 2, 7, 16),
        "v": desc("fp32", 5, 2, 7, 24),
        "cache_index": ints(2),
    }
    problem, x = content(ATTENTION, tensors)
    x["cache_index"] = np.array([4, 1], np.int32)
    chosen = {"q": x["q"], "k": x["k"][[4, 1]], "v": x["v"][[4, 1]]}
    wanted = reference_attention(parsed(ATTENTION, batch_of("fp32")), chosen)["o"]
    assert np.array_equal(reference_attention(problem, x)["o"], wanted)


def test_rows_beyond_a_length_and_short_items_are_zero() -> None:
    problem, x = content(ATTENTION, {**batch_of("fp32"), "seqlens_q": ints(2)}, return_lse=True, min_seqlen_q=3)
    x["seqlens_q"] = np.array([4, 2], np.int32)
    out = reference_attention(problem, x)
    assert np.all(out["o"][0, :, :4] != 0) and np.all(out["o"][0, :, 4:] == 0)
    assert np.all(out["o"][1] == 0) and np.all(np.isneginf(out["lse"][1]))


@pytest.mark.torch
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"scale": 0.7}])
@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_is_what_pytorch_computes_in_float64(words: dict[str, Any], bias: bool) -> None:
    torch = pytest.importorskip("torch")
    if bias and words.get("causal"):
        pytest.skip("PyTorch takes a mask or is_causal")
    tensors = {**batch_of("fp32"), **({"bias": desc("fp32", 2, 1, 5, 7)} if bias else {})}
    x = content(ATTENTION, tensors, **words)[1]
    q, k, v = (torch.from_numpy(x[name].astype(np.float64)).requires_grad_() for name in "qkv")
    mask = torch.from_numpy(x["bias"].astype(np.float64)) if bias else None
    k4, v4 = (item.repeat_interleave(2, dim=1) for item in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k4, v4, attn_mask=mask, is_causal=bool(words.get("causal")), scale=words.get("scale")
    )
    out = reference_attention(parsed(ATTENTION, tensors, **words, return_lse=True), x)
    assert np.allclose(out["o"], wanted.detach().numpy(), rtol=1e-12)
    do = np.random.default_rng(8).standard_normal(out["o"].shape)
    wanted.backward(torch.from_numpy(do))
    backward = parsed(ATTENTION_BACKWARD, {**backward_of("fp32"), **tensors}, **words)
    found = reference_backward(backward, {**x, "o": out["o"], "lse": out["lse"], "do": do})
    for name, item in (("dq", q), ("dk", k), ("dv", v)):
        assert np.allclose(found[name], item.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "extra, words",
    [
        ({}, {}),
        ({"sinks": desc("fp32", 4)}, {"mask": "bottom_right"}),
        ({"alibi_slopes": desc("fp32", 4)}, {"softcap": 2.0, "window_left": 2, "window_right": 1, "dropout_p": 0.3}),
        ({"bias": desc("fp32", 1, 4, 1, 7)}, {"dropout_p": 0.2, "seed": 9}),
        ({"bias": desc("fp32", 2, 1, 5, 7), "seqlens_q": ints(2), "seqlens_k": ints(2)}, {"causal": True}),
    ],
)
def test_gradients_are_differences_of_the_forward_pass(extra: dict[str, Any], words: dict[str, Any]) -> None:
    tensors = {"q": desc("fp32", 2, 4, 5, 8), "k": desc("fp32", 2, 2, 7, 8), "v": desc("fp32", 2, 2, 7, 16), **extra}
    forward, x = content(ATTENTION, tensors, **words, return_lse=True)
    x = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in x.items()}
    saved = reference_attention(forward, x)
    do = np.random.default_rng(2).standard_normal(saved["o"].shape)
    more = {"o": desc("fp32", 2, 4, 5, 16), "do": desc("fp32", 2, 4, 5, 16), "lse": desc("fp32", 2, 4, 5)}
    bias = {"return_dbias": True} if "bias" in extra else {}
    backward = parsed(ATTENTION_BACKWARD, {**tensors, **more}, **words, **bias)
    found = reference_backward(backward, {**x, "o": saved["o"], "lse": saved["lse"], "do": do})
    rng = np.random.default_rng(1)
    for name in ("q", "k", "v", *(name for name in ("bias", "sinks") if name in extra)):
        direction = rng.standard_normal(x[name].shape)
        sums = []
        for step in (1e-5, -1e-5):
            moved = reference_attention(forward, {**x, name: x[name] + step * direction})["o"]
            sums.append(float((moved * do).sum()))
        slope = (sums[0] - sums[1]) / 2e-5
        assert slope == pytest.approx(float((found[f"d{name}"] * direction).sum()), rel=1e-6, abs=1e-8), name


def test_rows_that_saw_nothing_have_no_gradient() -> None:
    tensors = {**backward_of("fp32"), "k": desc("fp32", 2, 2, 3, 16), "v": desc("fp32", 2, 2, 3, 24)}
    problem, x = content(ATTENTION_BACKWARD, tensors, mask="bottom_right")
    assert np.isneginf(x["lse"][:, :, :2]).all()
    found = reference_backward(problem, x)
    assert np.all(found["dq"][:, :, :2] == 0) and np.all(found["dq"][:, :, 3:] != 0)
    assert all(np.isfinite(item).all() for item in found.values())


# ---- appending ----


@pytest.mark.parametrize("rope", ["none", "interleaved", "half"])
def test_new_rows_lie_behind_the_old_ones_rotated_by_their_position(rope: str) -> None:
    rotary = {**ROTARY, "q": desc("fp32", 2, 4, 3, 16)} if rope != "none" else {}
    problem, x = content(KV_APPEND, {**append_of("fp32"), **rotary}, **({"rope": rope} if rotary else {}))
    x["seqlens_k"] = np.array([0, 11], np.int32)
    out = reference_append(problem, x)
    for b, before in enumerate((0, 11)):
        assert np.array_equal(out["k_cache"][b, :, :before], x["k_past"][b, :, :before])
        assert np.array_equal(out["k_cache"][b, :, before + 3 :], x["k_past"][b, :, before + 3 :])
        assert np.array_equal(out["v_cache"][b, :, before : before + 3], x["v_new"][b])
        for n in range(3):
            row = x["k_new"][b, 1, n].astype(np.float64)
            turned = row.copy()
            for t in range(4) if rotary else ():
                c, s = float(x["rotary_cos"][before + n, t]), float(x["rotary_sin"][before + n, t])
                i, j = (2 * t, 2 * t + 1) if rope == "interleaved" else (t, t + 4)
                turned[i], turned[j] = row[i] * c - row[j] * s, row[i] * s + row[j] * c
            assert np.allclose(out["k_cache"][b, 1, before + n], turned, rtol=1e-15, atol=0)
    if rotary:
        lengths = np.linalg.norm(x["q"].astype(np.float64), axis=-1)
        assert np.allclose(np.linalg.norm(out["q_out"], axis=-1), lengths, rtol=1e-6)


@pytest.mark.parametrize("layout", ["linear", "vectorized"])
def test_appended_pages_are_read_back_by_attention(layout: str) -> None:
    tensors = append_paged_of("fp32")
    if layout == "vectorized":
        tensors |= {f"{name}_past": vectorized_of("fp32")[name] for name in "kv"}
    outputs = {"seqlens_out": ints(3)}
    problem = parsed(KV_APPEND, tensors, outputs, kv_layout=layout)
    x = drawn(OperationRequest(KV_APPEND, tensors, outputs, {"kv_layout": layout}), 3)
    out = reference_append(problem, x)
    assert np.array_equal(out["seqlens_out"], x["seqlens_k"] + 3)
    q = np.random.default_rng(0).standard_normal((3, 4, 1, 16))
    request = {**paged_of("fp32"), "k": tensors["k_past"], "v": tensors["v_past"]}
    paged = parsed(ATTENTION, request, kv_layout=layout)
    table = {"block_table": x["block_table"], "seqlens_k": out["seqlens_out"]}
    o = reference_attention(paged, {"q": q, "k": out["k_cache"], "v": out["v_cache"], **table})["o"]
    old = reference_attention(
        paged, {"q": q, "k": x["k_past"], "v": x["v_past"], **table | {"seqlens_k": x["seqlens_k"]}}
    )
    assert not np.allclose(o, old["o"])
    for b in range(3):
        before = int(x["seqlens_k"][b])
        k = [_token(x, "k", layout, b, t) if t < before else x["k_new"][b, :, t - before] for t in range(before + 3)]
        v = [_token(x, "v", layout, b, t) if t < before else x["v_new"][b, :, t - before] for t in range(before + 3)]
        for h in range(4):
            wanted, _ = attention_truth(q[b, h], np.stack(k)[:, h // 2], np.stack(v)[:, h // 2])
            assert np.allclose(o[b, h], wanted, rtol=1e-12)


def _token(x: dict[str, Array], name: str, layout: str, b: int, token: int) -> Array:
    """[heads, elements] of one token of a cache."""
    past, page, row = x[f"{name}_past"], x["block_table"][b, token // 8], token % 8
    if layout == "linear":
        return past[page, row]
    return past[page, :, :, row].reshape(2, -1) if name == "k" else past[page, :, row // 4, :, row % 4]


def test_rows_without_room_are_dropped_and_touch_nothing() -> None:
    problem = parsed(KV_APPEND, append_of("fp32"), {"seqlens_out": ints(2)})
    x = drawn(OperationRequest(KV_APPEND, append_of("fp32")))
    x["seqlens_k"] = np.array([19, 20], np.int32)
    out = reference_append(problem, x)
    assert np.array_equal(out["k_cache"][0, :, 19], x["k_new"][0, :, 0])
    assert np.array_equal(out["k_cache"][1], x["k_past"][1])
    assert np.array_equal(out["seqlens_out"], [20, 20])


def test_references_do_not_write_to_their_inputs() -> None:
    for operation, tensors in ((ATTENTION, batch_of()), (ATTENTION_BACKWARD, backward_of()), (KV_APPEND, append_of())):
        problem, x = content(operation, tensors)
        copies = {name: array.copy() for name, array in x.items()}
        REFERENCES[operation](problem, x)
        assert all(np.array_equal(x[name].astype(np.float64), copy.astype(np.float64)) for name, copy in copies.items())
