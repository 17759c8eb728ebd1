"""Cases of attention in sweeps: usual ones by name, read from rows, checked by parts, compared with a peer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.commands.cases import DIRECTIONS, AttentionCase
from tilewright_fmha.commands.torch_peer import peer_call
from tilewright_kit.commands.cases import Part, Projection, read_case, wrong

__all__ = ["ATTENTION", "AttentionFamily"]

Array = npt.NDArray[Any]

_WRITTEN = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)(?:/(\d+))?x(\d+)(?:/(\d+))?(c|b)?")

NAMED: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "tiny": (
        {"batch": 1, "heads": 2, "seq_k": 33, "hdim": 40},
        {"batch": 2, "heads": 4, "heads_k": 2, "seq_k": 64, "seq_q": 17, "hdim": 64, "mask": "bottom_right"},
    ),
    "performance": tuple(
        {"batch": batch, "heads": 8, "seq_k": rows, "hdim": hdim, "mask": mask}
        for hdim in (64, 128)
        for batch, rows in ((4, 256), (1, 1024), (1, 2048))
        for mask in ("", "top_left")
    ),
    "decode": tuple(
        {"batch": batch, "heads": 32, "heads_k": heads, "seq_q": 1, "seq_k": rows, "hdim": 128}
        for heads in (32, 8)
        for batch, rows in ((1, 4096), (1, 16384), (8, 2048))
    ),
}


class AttentionFamily:
    name = "attention"
    operations: Sequence[str] = tuple(DIRECTIONS.values())
    case_type: type[Any] = AttentionCase
    required: Sequence[str] = ("batch", "heads", "seq_k", "hdim")
    plain: Sequence[str] = ("batch", "heads", "seq_k", "hdim", "seq_q", "heads_k", "mask")
    named: Mapping[str, Sequence[Mapping[str, Any]]] = NAMED
    example = "2x32/8x1/4096x128b"

    def parse_text(self, text: str) -> Mapping[str, Any] | None:
        """``BxHq/HkxSq/SkxD/Dv`` with ``c`` (causal, top left) or ``b`` (bottom right) behind."""
        written = _WRITTEN.fullmatch(text)
        if written is None:
            return None
        batch, heads, heads_k, first, second, hdim, hdim_v, mask = written.groups()
        found = {"batch": batch, "heads": heads, "heads_k": heads_k, "hdim": hdim, "hdim_v": hdim_v}
        found |= {"seq_k": second or first, "seq_q": first if second else None}
        found["mask"] = {"c": "top_left", "b": "bottom_right"}.get(mask or "")
        return {name: value for name, value in found.items() if value is not None}

    def from_record(
        self, record: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None
    ) -> AttentionCase:
        case = read_case(AttentionCase, record, where, defaults, self.required).checked(where)
        if case.is_varlen:
            fix = "use items of one size; run attention does the others"
            raise wrong(where, "varlen", case.varlen, "sweeps do not know sequences end to end", fix)
        if case.direction == "append":
            fix = "use fwd or bwd; run attention --append does it"
            raise wrong(where, "direction", case.direction, "sweeps do not append", fix)
        if case.dropout:
            fix = "leave dropout out; run attention does it"
            raise wrong(where, "dropout", case.dropout, "sweeps do not drop weights", fix)
        return case

    def settle(self, case: AttentionCase, inputs: Mapping[str, Array], rng: np.random.Generator) -> None:
        """Pages lie in any order. What gradients are made from belongs to no forward pass: they are a function of
        ``o`` and ``lse`` as of the others, and weights add up to about one if rows of scores are normal.
        """
        if case.page:
            table = inputs["block_table"]
            table[...] = rng.permutation(table.size).reshape(table.shape)
            inputs["seqlens_k"][...] = case.seq_k
        if "alibi_slopes" in inputs:
            inputs["alibi_slopes"][...] = 2.0 ** -rng.uniform(1, 6, case.heads)
        for name in ("q_descale", "k_descale", "v_descale"):
            if name in inputs:
                inputs[name][...] = rng.uniform(0.5, 1.5)
        if case.direction == "bwd":
            seen = case.seen_by_row()
            inputs["lse"][...] = np.where(seen > 0, np.log(np.maximum(seen, 1)) + 0.5, -np.inf)

    def parts(
        self, case: AttentionCase, inputs: Mapping[str, Array], rng: np.random.Generator, budget: int
    ) -> list[Part]:
        """A head of queries with the first and with the last head of keys, of one item; of gradients all that share
        these.
        """
        del budget  # a head is the least that can be asked for
        item, heads = int(rng.integers(case.batch)), sorted({0, case.kv_heads - 1})
        if case.direction == "bwd":
            return [part for head in heads for part in _gradients(case, inputs, item, head)]
        return [_part(case, inputs, item, head) for head in heads]

    def projection(
        self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator, reference: Callable[..., Array]
    ) -> Projection:
        raise NotImplementedError("attention is not linear in its operands")

    def peer_call(self, torch: Any, case: AttentionCase, operands: Mapping[str, Any]) -> Callable[[], object]:
        return peer_call(torch, case, operands)


def _part(case: AttentionCase, inputs: Mapping[str, Array], item: int, head: int) -> Part:
    """One query head of one key head: a problem of its own."""
    own = head * (case.heads // case.kv_heads)
    smaller = dataclasses.replace(case, batch=1, heads=1, heads_k=1, lse="", layout="bhsd")
    picked = {"q": inputs["q"][item : item + 1, own : own + 1]}
    if case.page:
        pages = inputs["block_table"][item]
        picked |= {name: inputs[name][pages][:, :, head : head + 1] for name in "kv" if name in inputs}
        picked["block_table"] = np.arange(len(pages), dtype=np.int32)[None]
        picked["seqlens_k"] = inputs["seqlens_k"][item : item + 1]
    else:
        picked |= {name: inputs[name][item : item + 1, head : head + 1] for name in "kv" if name in inputs}
    picked |= _shared(inputs, slice(own, own + 1))
    return Part(lambda out: out[item : item + 1, own : own + 1], smaller.request(), picked, "o")


def _gradients(case: AttentionCase, inputs: Mapping[str, Array], item: int, head: int) -> list[Part]:
    """One key head with all its query heads."""
    group = case.heads // case.kv_heads
    smaller = dataclasses.replace(case, batch=1, heads=group, heads_k=1, layout="bhsd")
    request = smaller.request()
    mine = (slice(item, item + 1), slice(head * group, (head + 1) * group))
    keys = (slice(item, item + 1), slice(head, head + 1))
    picked = _shared(inputs, mine[1])
    picked |= {
        name: inputs[name][keys if name in ("k", "v") else mine] for name in request.inputs if name not in picked
    }
    places = {"dq": mine, "dk": keys, "dv": keys}
    return [
        Part(lambda out, place=place: out[place], request, picked, name)  # type: ignore[misc]
        for name, place in places.items()
    ]


def _shared(inputs: Mapping[str, Array], heads: slice) -> dict[str, Array]:
    """Operands of the scores for some heads of queries: the same for every item."""
    found = {name: inputs[name][heads] for name in ("alibi_slopes", "sinks") if name in inputs}
    whole = ("bias", "q_descale", "k_descale", "v_descale")
    return found | {name: inputs[name] for name in whole if name in inputs}


ATTENTION = AttentionFamily()
