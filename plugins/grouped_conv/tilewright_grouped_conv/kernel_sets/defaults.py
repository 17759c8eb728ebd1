"""The default kernel of every direction, dimension and arch."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import VARIANT_ALIASES, Direction, layout_of
from tilewright_kit.tiles.choices import cpu_tiles, cpu_warp_tiles
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["default_config", "direction_of"]


def direction_of(variant: str, field: str = "variant") -> Direction:
    """The direction of a spelling. Raises ``InvalidArgumentError`` naming ``field``."""
    if variant not in VARIANT_ALIASES:
        raise InvalidArgumentError(
            f"there is no variant {variant!r}",
            field=field,
            value=variant,
            rule="variant_known",
            fix=f"use one of: {', '.join(VARIANT_ALIASES)}",
        )
    return Direction(VARIANT_ALIASES[variant])


def default_config(variant: str, ndim: int, arch: ArchSpec, dtype: DType | str = DType.FP16) -> ConvConfig:
    """A valid kernel: the usual values (``compv4``, for gradients ``compv3``; 2x2x1 waves; vectors of 4, 8 and 8),
    corrected for the arch; on CPUs its own preferred tile for one thread.

    Raises ``ConfigInvalidError`` if the arch or the direction has no kernels of the type.
    """
    direction = direction_of(str(variant))
    make = CONFIGS[direction]
    config = make(
        dtype_in=make.coerce("dtype_in", getattr(dtype, "value", dtype)),
        ndim=ndim,
        layout=layout_of(min(max(ndim, 1), 3)),
        pipeline="compv4" if direction is Direction.FORWARD else "compv3",
    )
    warp_tiles = cpu_warp_tiles(arch, config.table_key, "compv3", 1) if arch.kind == "cpu" else ()
    for warp_tile in warp_tiles:
        tile, wave = cpu_tiles(arch, "compv3", warp_tile)[0]
        own = {"pipeline": "compv3", "epilogue": Epilogue.DEFAULT}
        config = config.replace(tile=tile, wave=wave, warp_tile=warp_tile, **own)
    mended = RULES.correct(config, arch).config
    RULES.require(mended, arch)
    return mended
