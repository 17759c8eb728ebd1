"""Ways of operands to the LDS of AMD GPUs that some kernels have alone, each with a header of its own."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import TAPS, form_of
from tilewright_grouped_conv.vocabulary import Direction, Kind

__all__ = ["shares_pixels", "turns_weights"]


def turns_weights(config: ConvConfig, arch: ArchSpec) -> bool:
    """True for kernels of the image's gradient whose weights the LDS transposes as it is read: of 16 bits, by warp
    tiles of 16 rows (``gpu/conv/turned_taps.hpp``).
    """
    fits = config.warp_tile[1] == 16 and config.tile[1] in (64, 128, 256) and config.dtype_in.bytes == 2
    gradient = config.direction is Direction.BACKWARD_DATA
    return arch.id == "gfx950" and gradient and form_of(config.pipeline) is TAPS and fits


def shares_pixels(config: ConvConfig, arch: ArchSpec) -> bool:
    """True for kernels of the weights' gradient whose lanes find the places of pixels for each other: of 16 bits, on
    waves of 64 (``gpu/conv/shared_pixels.hpp``).
    """
    gathers = config.direction is Direction.BACKWARD_WEIGHT and config.is_matrix and config.kind is Kind.IMPLICIT
    fits = config.dtype_in.bytes == 2 and config.tile[1] % 64 == 0
    return arch.kind == "hip" and arch.wave_size == 64 and gathers and fits and not form_of(config.pipeline).header
