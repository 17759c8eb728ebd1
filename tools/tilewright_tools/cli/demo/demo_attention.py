"""The attention of `tilewright demo`: forward, backward and steps of decoding, checked, and timed beside NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright_tools.cli.demo.demo_rows import Row, best_of
from tilewright_tools.cli.problems import attention_cases, running

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright
    from tilewright_tools.tuning.problems.families.attention import AttentionCase

    Array = npt.NDArray[Any]

__all__ = ["SHOWN", "attention_row", "cases", "numpy_attention"]

_PREFILL = {"batch": 2, "heads": 8, "seq_k": 256, "hdim": 64}
SHOWN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention fp32", _PREFILL),
    ("attention bf16 causal", {**_PREFILL, "dtype": "bf16", "causal": True}),
    ("attention fp16 8/2 heads", {**_PREFILL, "dtype": "fp16", "heads_k": 2}),
    ("attention fp32 varlen", {**_PREFILL, "varlen": True, "mask": "bottom_right"}),
    ("attention fp32 gradients", {**_PREFILL, "backward": True}),
    ("attention bf16 gradients", {**_PREFILL, "backward": True, "dtype": "bf16", "causal": True}),
    (
        "decoding fp16, pages of 64",
        {"batch": 4, "heads": 8, "heads_k": 2, "seq_q": 1, "seq_k": 1024, "hdim": 64, "page": 64, "dtype": "fp16"},
    ),
)


def cases() -> list[tuple[str, AttentionCase]]:
    """What is shown, in order, with what it is called."""
    return [(name, attention_cases.case_of(**fields)) for name, fields in SHOWN]


def attention_row(client: tilewright.Client, what: str, case: AttentionCase, device: str | None) -> Row:
    """Run attention through the service, check what its plan wrote, and time it beside NumPy."""
    operation, problem, request = attention_cases.load(case)
    inputs: dict[str, Any] = attention_cases.operands(client, operation, request)
    outputs = client.run(case.operation, inputs, attributes=request.attributes, device=device)
    report = client.report
    assert report is not None
    plan = client.plan(case.operation, inputs, outputs, request.attributes, device=device)
    for out in outputs.values():
        running.poison(out)  # what is checked is what the plan writes
    plan(**inputs, out=outputs)
    right = attention_cases.truth(operation, problem, inputs)
    found = attention_cases.check(case, inputs, outputs, right)
    seconds, numpy_seconds = best_of(plan.bind(**inputs, out=outputs), numpy_attention(case, inputs))
    main = [name for name in report.kernels if "dq-dk-dv" in name] or list(report.kernels)
    return Row(what, main[0] if main else "", seconds, numpy_seconds, case.flops, found)


def numpy_attention(case: AttentionCase, inputs: dict[str, Array]) -> Callable[[], object]:
    """The same in float32 NumPy, with all scores at a time; masks are left out, which favours it."""
    import numpy as np

    group = case.heads // case.kv_heads
    arrays: dict[str, Array] = {
        name: inputs[name].astype(np.float32) for name in ("q", "k", "v", "do") if name in inputs
    }
    if case.page:
        table = inputs["block_table"]
        for name in "kv":
            pages = arrays[name][np.maximum(table, 0)]
            arrays[name] = pages.reshape(case.batch, -1, *pages.shape[-2:]).swapaxes(1, 2)[:, :, : case.seq_k]
    elif case.is_varlen:
        arrays = {name: array.swapaxes(0, 1)[None] for name, array in arrays.items()}
    q, k, v = arrays["q"], *(np.repeat(arrays[name], group, 1) for name in "kv")
    if case.is_varlen:
        starts = [list(map(int, inputs[f"cu_seqlens_{name}"])) for name in "qk"]
        pieces = [
            (q[:, :, a:b], k[:, :, c:d], v[:, :, c:d])
            for (a, b), (c, d) in zip(*map(itertools.pairwise, starts), strict=True)
        ]
    else:
        pieces = [(q, k, v)]
    scale = np.float32(case.hdim**-0.5)

    def weights(q: Array, k: Array) -> Array:
        scores: Array = q @ k.swapaxes(-1, -2) * scale
        scores -= scores.max(-1, keepdims=True, initial=-1e30)
        np.exp(scores, out=scores)
        scores /= np.maximum(scores.sum(-1, keepdims=True), np.float32(1e-30))
        return scores

    def forward() -> object:
        return [weights(q, k) @ v for q, k, v in pieces]

    def backward() -> object:
        do = arrays["do"]
        p = weights(q, k)
        dp = do @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do

    return backward if case.direction == "bwd" else forward
