"""Counts of experts, where they can be read before a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.requests.attributes import refuse
from tilewright_moe.problem import MoeProblem

__all__ = ["check_values", "value_operands"]


def value_operands(problem: MoeProblem) -> tuple[str, ...]:  # noqa: ARG001 (of every operation)
    """The operands that ``check_values`` looks at."""
    return ("counts",)


def check_values(problem: MoeProblem, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ``InvalidArgumentError`` for counts that are negative, or more than the rows that there are."""
    counts = values.get("counts")
    if counts is None or not counts.size:
        return
    most = problem.rows
    if int(counts.min()) < 0 or int(counts.max()) > most:
        at = int(np.flatnonzero((counts < 0) | (counts > most))[0])
        room = f"an expert has room for {most}" if problem.masked else f"x has {most}"
        raise refuse(
            f"expert {at} has {int(counts[at])} rows, but {room}",
            f"counts[{at}]",
            int(counts[at]),
            "count_range",
            f"give counts from 0 to {most}",
        )
    if not problem.masked and (total := int(counts.sum(dtype=np.int64))) > most:
        at = int(np.flatnonzero(np.cumsum(counts, dtype=np.int64) > most)[0])
        raise refuse(
            f"the experts have {total} rows together, but x has {most}",
            f"counts[{at}]",
            int(counts[at]),
            "count_sum",
            f"give counts whose sum is at most {most}",
        )
