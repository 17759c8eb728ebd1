"""One kernel whatever the number of rows, so that a row's result does not depend on who else is in its batch.

The kernel is chosen for the problem without its rows: it has to compute every one of ``ROWS`` rows, and is the one that
the cost model finds nearest to the fastest over all of them. Measurements have no say, for they differ by rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.abilities import Resizes, RowInvariant
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.measurements import point_of
from tilewright_kit.selection.strategies import Ranked
from tilewright_kit.types.errors import UnsupportedError

__all__ = ["ROWS", "BatchInvariant"]

ROWS = (1, 7, 16, 128, 1000, 2048)
"""Numbers of rows that a kernel has to compute to be chosen, odd ones among them; it is judged by all of them."""


class BatchInvariant:
    """The one kernel of a problem's other sizes. One is given and no other, so that nothing else runs meanwhile."""

    name = "batch_invariant"

    def rank(
        self,
        operation: Operation[Any, Any],
        problem: Problem,
        candidates: Sequence[KernelConfig],  # noqa: ARG002
        device: DeviceInfo,
    ) -> Sequence[Ranked]:
        """Raises ``UnsupportedError`` where the operation has no rows, or no kernel computes all numbers of them."""
        others = _others(operation, problem)
        if not others:
            raise _refused(operation, "results of its rows depend on one another, or on their number")
        pool = dict.fromkeys(
            config
            for other in others
            for config in operation.candidates(other, device)
            if operation.keeps_order(config, device)  # type: ignore[attr-defined]  # asked by _others
        )
        fitting = [
            config for config in pool if not any(operation.mismatches(other, config, device) for other in others)
        ]
        if not fitting:
            raise _refused(operation, f"no kernel computes any number of rows on {device.arch.id} in one order")
        best = min(fitting, key=lambda config: (_lag(operation, others, config, device), config.name))
        if found := tuple(operation.mismatches(problem, best, device)):
            raise _refused(operation, f"the kernel for all numbers of rows cannot compute it: {found[0].reason}")
        return [Ranked(best, "the one kernel for any number of rows")]


def _others(operation: Operation[Any, Any], problem: Problem) -> list[Any]:
    """The problem with every number of rows; none if it has no rows."""
    if not isinstance(operation, RowInvariant) or not isinstance(operation, Resizes):
        return []
    sizes = dict(point_of(problem).sizes)
    names = operation.row_sizes(problem)
    if not names or names[0] not in sizes:
        return []
    found = [operation.resized(problem, _with_rows(sizes, names, rows)) for rows in ROWS]
    return [item for item in found if item is not None] if all(item is not None for item in found) else []


def _with_rows(sizes: Mapping[str, int], names: Sequence[str], rows: int) -> dict[str, int]:
    """So many rows along the first of the sizes; along others as many as where there is one."""
    return {**sizes, **{name: min(sizes[name], 2) for name in names[1:] if name in sizes}, names[0]: rows}


def _lag(operation: Operation[Any, Any], others: Sequence[Any], config: KernelConfig, device: DeviceInfo) -> float:
    """Sum of the logarithms of the kernel's predicted times: the least is the best by the geometric mean."""
    times = [operation.predict(other, config, device).seconds for other in others]
    return math.fsum(math.log(value) if 0 < value < math.inf else 1e3 for value in times)


def _refused(operation: Operation[Any, Any], reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{operation.name} cannot be batch-invariant here: {reason}", field="selection.strategy",
        value=BatchInvariant.name, rule="batch_invariant",
        fix="use contiguous operands of one product, or another strategy",
    )  # fmt: skip
