"""Results beside the truth: relative norms with a bound that says where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    from tilewright_tools.cli.problems.loading import Loaded

    Array = npt.NDArray[Any]

__all__ = ["Check", "check", "check_outputs", "tolerance"]

# Rounding of the result to its own type, and of the sums to fp32: relative to the norm of the whole result.
_TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3, "int32": 0.0, "float8_e4m3fn": 4e-2}
_ELEMENT = 0.02
"""Error up to which an element counts as right in ``Check.accuracy``, relative to it, or to the root mean square of all
if that is more: near zero a sum has no relative error that says something."""


@dataclass(frozen=True)
class Check:
    """A result against the truth. ``error`` is the norm of the difference over the norm of the truth."""

    error: float
    tolerance: float
    accuracy: float
    """Percent of elements within 2 % of the truth, or of the truth's root mean square."""
    max_error: float
    correct: int
    total: int

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def tolerance(dtype: str, depth: int) -> float:
    """Bound on a result's relative error: the rounding of its dtype, and of sums of ``depth`` products."""
    base = _TOLERANCE.get(dtype, 1e-2)
    return base if base == 0.0 else base + 6e-8 * depth**0.5


def check(result: Array, truth: Array, depth: int, least: float = 0.0) -> Check:
    """Compare a result with the truth. A result with NaN or infinity where the truth has none is off by infinity.

    ``least`` is a relative error that is always allowed.
    """
    import numpy as np

    got = result.astype(np.float64)
    difference = np.abs(got - truth)
    scale = float(np.linalg.norm(truth))
    error = float(np.linalg.norm(difference)) / scale if scale else float(np.linalg.norm(difference))
    total = int(truth.size)
    usual = scale / max(total, 1) ** 0.5
    correct = int(np.count_nonzero(difference <= _ELEMENT * np.maximum(np.abs(truth), max(usual, 1e-5))))
    return Check(
        error=error if np.isfinite(error) else float("inf"),
        tolerance=max(tolerance(result.dtype.name, depth), least),
        accuracy=100.0 * correct / total if total else 100.0,
        max_error=float(difference.max()) if total else 0.0,
        correct=correct,
        total=total,
    )


def check_outputs(loaded: Loaded, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Check:
    """The worst of all outputs, each where its operation defines it."""
    command, case = loaded.command, loaded.case
    found = []
    for name, right in loaded.truth(inputs).items():
        have, want = (command.compared(case, inputs, name, array) for array in (outputs[name], right))
        found.append(check(have, want, case.depth, command.least_tolerance(case)))
    return max(found, key=lambda item: item.error / max(item.tolerance, 1e-30))
