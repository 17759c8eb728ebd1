"""An analytic estimate of a kernel's time."""

from __future__ import annotations

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_rmsnorm.config import RmsNormConfig
from tilewright_rmsnorm.problem import RmsNormProblem

__all__ = ["predict"]

LANES_PER_SECOND = 2e9
"""Vector elements that one thread adds up in a second, per lane."""
TEAM_SECONDS = 3e-6
"""Time to wake each further thread."""


def predict(problem: RmsNormProblem, config: RmsNormConfig, device: DeviceInfo) -> Prediction:
    threads = config.wave[0]
    rows = -(-problem.rows // threads)
    # A row shorter than the partial sums is added up one by one.
    rate = LANES_PER_SECOND * (config.lanes if problem.columns >= config.lanes else 1)
    parts = {"compute": 2 * rows * problem.columns / rate, "team": TEAM_SECONDS * (threads - 1), "launch": 1e-6}
    return Prediction(sum(parts.values()), parts)
