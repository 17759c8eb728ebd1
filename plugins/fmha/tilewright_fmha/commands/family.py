"""Cases of attention in sweeps: usual ones by name, read from rows, checked by parts, compared with a peer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.commands.cases import DIRECTIONS, AttentionCase
from tilewright_fmha.commands.torch_peer import peer_call
from tilewright_fmha.references.backward import reference_backward
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.references.sample_inputs import PARSERS, structure
from tilewright_kit.commands.cases import Part, Projection, read_case
from tilewright_kit.contract.problem import Role

__all__ = ["ATTENTION", "AttentionFamily"]

Array = npt.NDArray[Any]

_WRITTEN = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)(?:/(\d+))?x(\d+)(?:/(\d+))?(c|b)?")
_BY_HEAD = ("o", "lse", "scores", "dq", "dk", "dv")
"""Outputs of which a head of an item is a part; others are sums over items."""

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
        return read_case(AttentionCase, record, where, defaults, self.required).checked(where)

    def settle(self, case: AttentionCase, inputs: Mapping[str, Array], rng: np.random.Generator) -> None:
        """Sequences are as long as there is room, and pages lie in any order. What gradients are made from belongs to
        no forward pass: they are a function of ``o`` and ``lse`` as of the others, and weights add up to about one if
        rows of scores are normal.
        """
        request = case.request()
        for name, content in structure(PARSERS[case.operation](request), request, rng, full=True).items():
            inputs[name][...] = content
        if "seqlens_k" in inputs:  # the last page may have more room
            inputs["seqlens_k"][...] = case.seq_k - (case.queries if case.direction == "append" else 0)
        if case.direction == "bwd":
            seen = case.seen_by_row()
            lse = np.where(seen > 0, np.log(np.maximum(seen, 1)) + 0.5, -np.inf)
            inputs["lse"][...] = np.tile(lse, case.batch) if case.is_varlen else lse

    def parts(
        self, case: AttentionCase, inputs: Mapping[str, Array], rng: np.random.Generator, budget: int
    ) -> list[Part]:
        """A head of queries with the first and with the last head of keys, of one item; of gradients all that share
        these.
        """
        del budget  # a head is the least that can be asked for
        item, group = int(rng.integers(case.batch)), case.heads // case.kv_heads
        request = case.request()
        problem = PARSERS[case.operation](request)
        backward = case.direction == "bwd"
        reference = reference_backward if backward else reference_attention
        found = []
        for head in sorted({0, case.kv_heads - 1}):
            first = head * group
            own = range(first, first + (group if backward else 1))
            right = cache(partial(reference, problem, inputs, [(item, one) for one in own]))
            outputs = [output.name for output in problem.operands if output.role is Role.OUTPUT]
            for name in filter(_BY_HEAD.__contains__, outputs):
                heads = slice(head, head + 1) if name in ("dk", "dv") else slice(own.start, own.stop)
                found.append(Part(_rows_of(case, name, item, heads), request, inputs, name, right))
        return found

    def projection(
        self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator, reference: Callable[..., Array]
    ) -> Projection:
        raise NotImplementedError("attention is not linear in its operands")

    def peer_call(self, torch: Any, case: AttentionCase, operands: Mapping[str, Any]) -> Callable[[], object]:
        return peer_call(torch, case, operands)


def _rows_of(case: AttentionCase, name: str, item: int, heads: slice) -> Callable[[Array], Array]:
    """The rows of one item and some heads of an output, whose sequences are all as long as there is room."""
    if not case.is_varlen:
        return lambda out: out[item, heads]
    count = case.seq_k if name in ("dk", "dv") else case.queries
    rows = slice(item * count, (item + 1) * count)
    return lambda out: out[heads, rows] if name in ("lse", "scores") else out[rows, heads]


ATTENTION = AttentionFamily()
