"""The truth, in NumPy float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_rmsnorm.problem import RmsNormProblem

__all__ = ["reference"]

Array = npt.NDArray[Any]


def reference(problem: RmsNormProblem, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    x, weight = inputs["x"].astype(np.float64), inputs["weight"].astype(np.float64)
    if not x.size:
        return {"out": x}
    return {"out": x * weight / np.sqrt((x * x).mean(axis=1, keepdims=True) + problem.epsilon)}
