"""8-bit floats of clients (OCP) on GPUs whose matrix unit multiplies other codes for them (FNUZ)."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_kit.types.dtypes import DType

__all__ = ["fnuz_codes", "turns_codes"]


def turns_codes(config: GemmConfig, arch: ArchSpec) -> bool:
    """True if waves replace codes before they multiply (``gpu/amd/convert.hpp``)."""
    return fnuz_codes(config.dtype_a, arch)


def fnuz_codes(dtype: DType, arch: ArchSpec) -> bool:
    """True if the matrix unit takes other codes of a type. Units that multiply no 8-bit floats faster than 16-bit ones
    have them widened instead.
    """
    rates = arch.throughput.flops_per_cycle_per_unit
    faster = rates.get("fp8", 0) > rates.get("bf16", 0)
    return dtype in (DType.FP8, DType.BF8) and arch.fp8_encoding == "fnuz" and faster
