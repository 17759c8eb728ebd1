"""Properties that configurations of tiled products share, to inherit beside ``KernelConfig``: see ``Tiled``."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from tilewright_kit.tiles.tiled import Triple
from tilewright_kit.types.vocabulary import Reduction

__all__ = ["PlainForms", "TiledForms"]


class _Fields(Protocol):
    """The members that ``TiledForms`` needs of a class that inherits it."""

    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...
    @property
    def c(self) -> str: ...
    @property
    def acc(self) -> str: ...
    @property
    def wave(self) -> Triple: ...
    @property
    def num_d_tensors(self) -> int: ...
    @property
    def dtype_d(self) -> tuple[str, ...]: ...


class TiledForms:
    """Properties that follow from the fields of any tiled product."""

    @property
    def d(self: _Fields) -> tuple[str, ...]:
        """Element type of every D, by name. No ``dtype_d``: all as C."""
        return self.dtype_d or (self.c,) * max(self.num_d_tensors, 0)

    @property
    def d_as_c(self: _Fields) -> bool:
        """True if ``dtype_d`` says no more than its default."""
        return bool(self.dtype_d) and self.dtype_d == (self.c,) * self.num_d_tensors

    @cached_property
    def table_key(self: _Fields) -> str:
        """The key of arch tables: ``{a}_{b}_{acc}``."""
        return f"{self.a}_{self.b}_{self.acc}"

    @property
    def own_waves(self) -> tuple[tuple[int, int, int], ...]:
        """Those of the arch are all."""
        return ()

    @property
    def bytes_beside_tiles(self) -> int:
        """Nothing but tiles."""
        return 0

    @property
    def bytes_beside_stage(self) -> int:
        """Nothing but A and B."""
        return 0

    @property
    def packed_bits(self) -> int:
        """Values have the bits of their types."""
        return 0

    @property
    def waves(self: _Fields) -> int:
        """Waves of a workgroup (CPU: threads of the team)."""
        return self.wave[0] * self.wave[1] * self.wave[2]


class PlainForms:
    """The constants of an operation whose products come in one way only: workgroups of the threads that their waves
    imply, each of which sums whole tiles in fp32 (int32), for itself, of operands that were not packed before.
    """

    @property
    def block_size(self) -> int:
        return 0

    @property
    def reduction(self) -> Reduction:
        return Reduction.NONE

    @property
    def preshuffle(self) -> bool:
        return False

    @property
    def transpose_c(self) -> bool:
        return False

    @property
    def cluster(self) -> Triple:
        return (1, 1, 1)

    @property
    def promote(self) -> int:
        return 0
