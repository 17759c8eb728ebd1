"""The configuration of kernels that pack B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewright_gemm.config.config import GemmConfig

__all__ = ["PackBConfig"]


@dataclass(frozen=True)
class PackBConfig(GemmConfig):
    """A pre-shuffle kernel, of which only the packing entry is used: what it packs, the GEMM kernel of the same warp
    tile reads.
    """

    operation: ClassVar[str] = "gemm_pack_b"
