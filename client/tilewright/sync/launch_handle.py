"""A launch under way, for the blocking client."""

from __future__ import annotations

from typing import Any

from tilewright.dispatch.plans.pipeline import LaunchBase

__all__ = ["Launch"]


class Launch(LaunchBase):
    """A launch of a bound plan. On a CPU it is over when it is returned."""

    __slots__ = ()

    def synchronize(self) -> Any:
        """Wait, on the host, until it is over. Returns the output."""
        self._synchronize()
        return self.out
