"""Common parts of calls of attention: operands and attributes out of arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tilewright.dispatch.operands.request import spec_of
from tilewright.operations.attention.attributes import (
    bias_operand,
    block_words,
    indices,
    mask_words,
    scales_of,
    score_words,
    seeds,
    stage_word,
    type_word,
)
from tilewright.operations.call import Asked, choice_of
from tilewright.operations.epilogue import scale_operand
from tilewright.operations.layouts import heads_first
from tilewright.operations.matrices import laid_out
from tilewright.tensor.interop import alignment, all_recognised
from tilewright.types.arguments import flag

__all__ = ["asked_for", "forward", "operands"]

Given = Mapping[str, Any]
"""Arguments by name."""


def operands(given: Given, tensors: Given, swapped: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and attributes that forward and backward pass share."""
    tensors = {name: value for name, value in tensors.items() if value is not None}
    inputs = {name: heads_first(value, name) if name in swapped else value for name, value in tensors.items()}
    inputs["bias"] = bias_operand(given.get("attn_mask"), given["bias"])
    inputs |= {name: scale_operand(given[name], name) for name in ("alibi_slopes", "sinks")}
    inputs |= {name: indices(given[name], name) for name in ("seqlens_q", "seqlens_k")}
    inputs["rng"] = seeds(given["dropout_p"], given["seed"], given["offset"], given["rng"])
    words = mask_words(*(given[name] for name in ("is_causal", "mask", "window", "mask_align", "sink_size")))
    heads = {}
    if not flag("enable_gqa", given.get("enable_gqa", True)):
        heads = {name: spec_of(inputs[name], name).shape[1:2] for name in ("q", "k")}
    return inputs, words | score_words(
        scale=given["scale"], softcap=given["softcap"], dropout_p=given["dropout_p"], heads=heads
    )


def forward(given: Given, tensors: Given, swapped: Collection[str], more: Given, words: Given | None = None) -> Asked:
    """A forward pass. ``more`` are inputs of its own kind, and ``words`` attributes."""
    inputs, found = operands(given, tensors, swapped)
    inputs |= more
    inputs |= scales_of(given["q_descale"], given["k_descale"], given["v_descale"])
    found |= words or {}
    found |= block_words(given)
    found["out_dtype"] = type_word(given["out_dtype"])
    outs = {"o": given["out"]}
    for name, wanted in (
        ("lse", flag("return_lse", given["return_lse"]) or given["lse"] is not None),
        ("randval", flag("return_randval", given["return_randval"])),
        ("status", flag("return_status", given["return_status"])),
    ):
        if wanted:
            outs[name] = given.get(name)
            found[f"return_{name}"] = True
    if given.get("return_scores") is not None:
        outs["scores"], found["return_scores"] = None, stage_word(given["return_scores"])
    extra = (inputs["rng"],) if flag("return_rng", given["return_rng"]) else ()
    return asked_for(given, "attention", inputs, outs, found, ("o",) if "q" in swapped else (), extra)


def asked_for(
    given: Given,
    operation: str,
    inputs: Given,
    outs: Given,
    words: Given,
    swapped: Collection[str] = (),
    extra: tuple[Any, ...] = (),
) -> Asked:
    """The call, without what was left out."""
    core = given["core"]
    present = all_recognised({name: value for name, value in inputs.items() if value is not None})
    attributes = {name: value for name, value in words.items() if value is not None}
    targets = {name: laid_out(core, heads_first(out, name) if name in swapped else out) for name, out in outs.items()}
    if (least := alignment((*present.values(), *targets.values()))) is not None:
        attributes["alignment"] = least
    own = {"bias": "attn_mask"} if given.get("attn_mask") is not None else {}
    return Asked(operation, present, attributes, choice_of(given), outs, targets, swapped, extra, words=own)
