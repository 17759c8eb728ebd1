"""Faults on their way from the place that finds them to the one that can name the instruction."""

from __future__ import annotations

from .errors import EmulationError


class LaneFault(Exception):
    """Something that one of the lanes of an access did. ``lane`` counts the lanes of the access, active ones only."""

    def __init__(self, kind: type[EmulationError], lane: int, message: str) -> None:
        super().__init__(message)
        self.kind, self.lane, self.message = kind, lane, message


class WaveFault(Exception):
    """Something that a wave did; ``wave`` is its place in the lock-step group."""

    def __init__(self, kind: type[EmulationError], wave: int, message: str) -> None:
        super().__init__(message)
        self.kind, self.wave, self.message = kind, wave, message
