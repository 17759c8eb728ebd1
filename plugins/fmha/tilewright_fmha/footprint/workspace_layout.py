"""Contents of a plan's workspace: dense arrays that stages hand on to each other, then scratch memory."""

from __future__ import annotations

from tilewright_kit.types.arithmetic import padded

__all__ = ["Parts"]

ALIGNMENT = 256


class Parts:
    """Hands out aligned places, by the names that ``rows.args_of`` knows."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.bytes = 0

    def reserve(self, name: str, nbytes: int) -> None:
        offset = padded(self.bytes, ALIGNMENT)
        self.offsets[name] = offset
        self.bytes = offset + nbytes
