"""Cases of convolution in sweeps: read from rows, checked by parts, compared with a peer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_grouped_conv.commands.cases import DIRECTIONS, TRANSPOSED, ConvCase
from tilewright_grouped_conv.commands.checks import parts_of, projection_of
from tilewright_grouped_conv.commands.layers import NAMED
from tilewright_grouped_conv.commands.torch_peer import peer_call
from tilewright_kit.commands.cases import Part, Projection, read_case

__all__ = ["CONV", "ConvFamily"]

Array = npt.NDArray[Any]

_WRITTEN = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+(?:x\d+){0,2}):(\d+(?:x\d+){0,2})((?:[spdg][\dx-]+)*)")
_OPTIONS = {"s": "stride", "p": "padding", "d": "dilation", "g": "groups"}


class ConvFamily:
    name = "conv"
    operations: Sequence[str] = tuple(DIRECTIONS.values())
    case_type: type[Any] = ConvCase
    required: Sequence[str] = ("n", "c", "k", "size", "filter")
    plain: Sequence[str] = ("n", "c", "k", "size", "filter", "stride", "padding", "groups")
    named: Mapping[str, Sequence[Mapping[str, Any]]] = NAMED
    example = "32x64x64x56x56:3s1p1g1"

    def parse_text(self, text: str) -> Mapping[str, Any] | None:
        """``NxCxKxHxW:3s1p1d1g1``: sizes, then the filter, stride, padding, dilation and groups."""
        written = _WRITTEN.fullmatch(text)
        if written is None:
            return None
        n, c, k, size, taps, options = written.groups()
        found = {_OPTIONS[name]: value for name, value in re.findall(r"([spdg])([\dx-]+)", options)}
        return {"n": n, "c": c, "k": k, "size": size, "filter": taps} | found

    def from_record(self, record: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> ConvCase:
        """Rows of the direction ``transposed`` are the gradient that a transposed convolution is."""
        case = read_case(ConvCase, record, where, defaults, self.required)
        if case.direction != TRANSPOSED:
            return case.checked(where)
        return replace(case, direction="fwd").written(where).transposed(where).checked(where)

    def settle(self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator) -> None:
        """All inputs are free."""

    def parts(self, case: ConvCase, inputs: Mapping[str, Array], rng: np.random.Generator, budget: int) -> list[Part]:
        return parts_of(case, inputs, rng, budget)

    def projection(
        self, case: ConvCase, inputs: Mapping[str, Array], rng: np.random.Generator, reference: Callable[..., Array]
    ) -> Projection:
        return projection_of(case, inputs, rng, reference)

    def peer_call(self, torch: Any, case: ConvCase, operands: Mapping[str, Any]) -> Callable[[], object]:
        return peer_call(torch, case, operands)


CONV = ConvFamily()
