"""What calls of attention have in common: operands and attributes out of arguments, runs and plans out of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from tilewright.arguments import flag
from tilewright.attention_words import (
    bias_operand,
    heads_first,
    heads_last,
    indices,
    mask_words,
    scales_of,
    score_words,
    seeds,
    type_word,
)
from tilewright.core import Core
from tilewright.device_arrays import alignment, all_recognised
from tilewright.dispatch import run, spec_of
from tilewright.driving import renamed
from tilewright.matrices import deliver, laid_out
from tilewright.plans import PlanState, prepare
from tilewright.steps import Flow

__all__ = ["Asked", "asked_for", "forward", "operands", "planning", "running"]

P = ParamSpec("P")
Given = Mapping[str, Any]
"""Arguments by name."""
_CHOICE = ("kernel", "strategy", "build", "device", "timeout")


@dataclass(frozen=True)
class Asked:
    """A call, in the generic call's terms."""

    operation: str
    inputs: Given
    attributes: Given
    choice: Given
    outs: Given
    """What the caller gave for outputs, in the order of the results; None: fresh ones."""
    targets: dict[str, Any]
    """What the server is to write."""
    swapped: Collection[str] = ()
    """Outputs whose rows come before their heads."""
    extra: tuple[Any, ...] = ()
    """Results that are known already."""


def running(ask: Callable[Concatenate[Core, P], Asked]) -> Callable[Concatenate[Core, P], Flow[Any]]:
    """The flow that makes a call; a single result comes alone, several as a tuple."""
    named = renamed(ask, ask.__name__.lstrip("_"), "Flow[Any]")

    @functools.wraps(named)
    def flow(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[Any]:
        asked = named(core, *args, **kwargs)
        results = yield from run(core, asked.operation, asked.inputs, asked.targets, asked.attributes, **asked.choice)
        found: list[Any] = []
        for name, out in asked.outs.items():
            swapped = name in asked.swapped
            result = deliver(core, heads_first(out, name) if swapped else out, results[name])
            found.append(out if out is not None else heads_last(result) if swapped else result)
        found += asked.extra
        return found[0] if len(found) == 1 else tuple(found)

    return flow


def planning(ask: Callable[Concatenate[Core, P], Asked]) -> Callable[Concatenate[Core, P], Flow[PlanState]]:
    """The flow that prepares a plan for such calls."""
    name = ask.__name__.lstrip("_")
    named = renamed(ask, f"plan_{name}", "Flow[PlanState]")

    @functools.wraps(named)
    def flow(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[PlanState]:
        asked = named(core, *args, **kwargs)
        state = yield from prepare(core, asked.operation, asked.inputs, asked.targets, asked.attributes, **asked.choice)
        return state

    flow.__doc__ = f"""Prepare ``{name}`` for operands like these: arrays, ``Spec``, or ``(shape, dtype)``. Calling the
    plan does no planning; lengths, starts, pages and seeds are read anew at every call.

    The plan takes its tensors by the operation's names (``plan(q=q, k=k, v=v, out=o)``), heads before rows also where
    ``layout="bshd"`` was said: pass ``x.swapaxes(1, 2)``. With several outputs it gives a dict.
    """
    return flow


def operands(given: Given, tensors: Given, swapped: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and attributes that forward and backward pass share."""
    inputs = {name: heads_first(value, name) if name in swapped else value for name, value in tensors.items()}
    inputs["bias"] = bias_operand(given.get("attn_mask"), given["bias"])
    inputs |= {name: given[name] for name in ("alibi_slopes", "sinks")}
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
    found |= {"num_splits": given["num_splits"], "out_dtype": type_word(given["out_dtype"])}
    outs = {"o": given["out"]}
    for name, wanted in (
        ("lse", flag("return_lse", given["return_lse"]) or given["lse"] is not None),
        ("randval", flag("return_randval", given["return_randval"])),
    ):
        if wanted:
            outs[name] = given.get(name)
            found[f"return_{name}"] = True
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
    choice = {name: given[name] for name in _CHOICE}
    return Asked(operation, present, attributes, choice, outs, targets, swapped, extra)
