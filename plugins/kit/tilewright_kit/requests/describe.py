"""Problems of products as JSON and as requests: the parts that operations share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from tilewright_kit.contract.problem import Attribute
from tilewright_kit.requests.attributes import DEFAULT_ALIGNMENT
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import SLOPES, Binary, Unary

__all__ = ["Steps", "describe_steps", "describe_unusual", "step_attributes"]


class Steps(Protocol):
    """A problem with elementwise steps behind its products: the fields of these names."""

    @property
    def alpha(self) -> float: ...
    @property
    def binary(self) -> Binary: ...
    @property
    def unary(self) -> Unary: ...
    @property
    def clamp_lo(self) -> float: ...
    @property
    def clamp_hi(self) -> float: ...
    @property
    def dtype_bias(self) -> DType | None: ...
    @property
    def dtype_d(self) -> tuple[DType, ...]: ...
    @property
    def split_k(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def fast_accumulation(self) -> bool: ...


def describe_steps(problem: Steps) -> dict[str, Any]:
    """For ``Problem.describe``: what happens to sums before they are stored."""
    return {
        "alpha": problem.alpha,
        "binary": problem.binary.value,
        "unary": problem.unary.value,
        "bias": problem.dtype_bias.value if problem.dtype_bias else None,
        "d": [dtype.value for dtype in problem.dtype_d],
        "split_k": problem.split_k,
    }


def describe_unusual(problem: Steps) -> dict[str, Any]:
    """For ``Problem.describe``: what is not as usual, and only that: measurements are found by what describes a
    problem, and those from before such a field was known must still be found.
    """
    record: dict[str, Any] = {}
    if problem.alignment != DEFAULT_ALIGNMENT:
        record["alignment"] = problem.alignment
    if problem.fast_accumulation:
        record["fast_accumulation"] = True
    if problem.unary is Unary.CLAMP:
        # An open bound is left out: JSON has no infinity.
        bounds = {"clamp_lo": problem.clamp_lo, "clamp_hi": problem.clamp_hi}
        record |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    if problem.unary in SLOPES:
        record["slope"] = problem.clamp_lo
    return record


def step_attributes(problem: Steps, sizes: Mapping[str, int]) -> dict[str, Attribute]:
    """For ``Problem.resized``: attributes of a request for the same steps. ``sizes`` may name other slices."""
    found: dict[str, Attribute] = {
        "unary": problem.unary.value,
        "alpha": problem.alpha,
        "split_k": sizes.get("split_k", problem.split_k),
    }
    if problem.unary is Unary.CLAMP:
        found |= {"clamp_lo": problem.clamp_lo, "clamp_hi": problem.clamp_hi}
    if problem.unary in SLOPES:
        found["slope"] = problem.clamp_lo
    if problem.binary is not Binary.NONE:
        found["binary"] = problem.binary.value
    return found
