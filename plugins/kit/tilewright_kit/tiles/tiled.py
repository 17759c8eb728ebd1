"""The part of a configuration that the modules of this folder read."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from tilewright_kit.types.vocabulary import Epilogue, Reduction

__all__ = ["GROUP_BYTES", "Tiled", "Triple"]

Triple = tuple[int, int, int]

GROUP_BYTES = 4
"""Bytes that a CPU packs together along k, and bytes of an accumulator."""

T = TypeVar("T", bound="Tiled")


class Tiled(Protocol):
    """A product of A and B that is computed tile by tile. A configuration has these as fields or as properties; those
    of which an operation knows one value only are constant properties, and no rule of this folder corrects them.
    """

    @property
    def pipeline(self) -> str: ...
    @property
    def scheduler(self) -> str: ...
    @property
    def epilogue(self) -> Epilogue: ...
    @property
    def tile(self) -> Triple: ...
    @property
    def wave(self) -> Triple: ...
    @property
    def warp_tile(self) -> Triple: ...
    @property
    def own_waves(self) -> tuple[Triple, ...]:
        """Arrangements of waves that kernels of its kind have beyond those of the arch."""

    @property
    def waves(self) -> int:
        """Waves of a workgroup (CPU: threads of the team)."""

    @property
    def table_key(self) -> str:
        """The key of arch tables: ``{a}_{b}_{acc}``."""

    @property
    def a(self) -> str:
        """Element types of A, B and C, by name."""

    @property
    def b(self) -> str: ...
    @property
    def c(self) -> str: ...
    @property
    def packed_bits(self) -> int:
        """Bits of a value of A and B in shared memory, where these are fewer than their types have; else 0."""

    @property
    def bytes_beside_tiles(self) -> int:
        """Bytes of shared memory of an AMD GPU's workgroup for what lies there beside tiles of A and B."""

    @property
    def bytes_beside_stage(self) -> int:
        """Bytes of shared memory that a specialised pipeline has beside A and B in each stage."""

    @property
    def letters(self) -> str:
        """Layout of A, B and C: ``r`` row-major, ``c`` column-major."""

    @property
    def fused(self) -> bool:
        """True if the epilogue does more than to convert."""

    @property
    def any_alignment(self) -> bool:
        """True if lines of A and B may begin at any address, so that shared memory has room for their first bytes."""

    @property
    def gather_registers(self) -> int:
        """Registers in which a GPU's thread keeps its places in A or B, beyond the addresses of matrices."""

    @property
    def split_k(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def num_wave_groups(self) -> int: ...
    @property
    def block_size(self) -> int:
        """Threads of a workgroup; 0: what waves and instruction imply."""

    @property
    def reduction(self) -> Reduction:
        """Stream-K."""

    @property
    def preshuffle(self) -> bool:
        """B was packed ahead of time."""

    @property
    def transpose_c(self) -> bool:
        """The warp tile is computed transposed."""

    @property
    def cluster(self) -> Triple:
        """Workgroups that are launched together."""

    @property
    def promote(self) -> int:
        """8-bit floats: instructions along k between additions to fp32 accumulators; 0: never."""

    @property
    def name(self) -> str: ...
    @classmethod
    def field_names(cls) -> tuple[str, ...]: ...
    def replace(self: T, **changes: Any) -> T: ...
