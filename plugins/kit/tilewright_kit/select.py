"""Strategies: which of the candidates runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright_kit.config import KernelConfig
from tilewright_kit.device import DeviceInfo
from tilewright_kit.operation import Operation, Prediction
from tilewright_kit.problem import Problem

__all__ = ["Ranked", "Strategy"]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate in its place, with what decided it."""

    config: KernelConfig
    reason: str
    prediction: Prediction | None = None


class Strategy(Protocol):
    """Orders candidates, best first. Deterministic: the same inputs give the same order."""

    name: str

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]: ...
