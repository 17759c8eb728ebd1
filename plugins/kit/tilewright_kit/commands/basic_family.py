"""A family of cases for operations that need no checks of their own: results are compared as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.commands.cases import Case, Part, Projection, check_positive, columns_of, read_case

__all__ = ["BasicFamily"]

Array = npt.NDArray[Any]


class BasicFamily:
    """See ``CaseFamily``. A shape is written as whole numbers joined by ``x``, one for each required column."""

    def __init__(
        self,
        name: str,
        operations: Sequence[str],
        case_type: type[Any],
        required: Sequence[str],
        named: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        """``required`` are columns of positive whole numbers; ``named`` are lists of rows by name."""
        self.name = name
        self.operations = operations
        self.case_type = case_type
        self.required = required
        self.plain: Sequence[str] = columns_of(case_type)
        self.named = named
        self.example = "x".join("64" for _ in required)

    def parse_text(self, text: str) -> Mapping[str, Any] | None:
        numbers = text.split("x")
        if len(numbers) != len(self.required) or not all(number.isdecimal() for number in numbers):
            return None
        return dict(zip(self.required, numbers, strict=True))

    def from_record(self, record: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> Case:
        case: Case = read_case(self.case_type, record, where, defaults, self.required)
        check_positive(case, where, self.required)
        return case

    def settle(self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator) -> None:
        """All inputs are free."""

    def parts(self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator, budget: int) -> list[Part]:  # noqa: ARG002
        return [Part(lambda out: out, case.request(), inputs)]

    def projection(
        self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator, reference: Callable[..., Array]
    ) -> Projection:
        raise NotImplementedError("cases of a basic family are not linear: is_plain is False")

    def peer_call(self, torch: Any, case: Any, operands: Mapping[str, Any]) -> Callable[[], object]:
        raise NotImplementedError(f"no peer is known for {self.name}")
