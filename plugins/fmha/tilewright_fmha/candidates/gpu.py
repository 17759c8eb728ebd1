"""Cuts of GPU kernels: tiles from the arch's table, with waves and warp tiles that the rules take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.judging import replaced
from tilewright_fmha.footprint.backward_partition import gradient_waves, on_mma
from tilewright_fmha.rules.gpu import k0_of
from tilewright_fmha.rules.hip import k1_for
from tilewright_fmha.vocabulary import Family

__all__ = ["backward_cuts", "few_rows_cuts", "row_cuts"]

Triple = tuple[int, int, int]


def _warps(config: FmhaConfig, arch: ArchSpec) -> tuple[Triple, ...]:
    spec = attention_of(arch)
    return spec.warp_tiles.get(config.dtype.value, ()) if spec else ()


def _tiles(config: FmhaConfig, arch: ArchSpec) -> tuple[tuple[int, ...], ...]:
    spec = attention_of(arch)
    if spec is None:
        return ()
    table = spec.backward_tiles if config.family is Family.DQ_DK_DV else spec.tiles
    return table.get("x".join(map(str, config.hdim)), ())


def row_cuts(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:
    """Waves share out rows."""
    warps, spec = _warps(config, arch), attention_of(arch)
    waves = sorted(spec.waves if spec else (4,), key=lambda count: (abs(count - 4), count))
    for tile in _tiles(config, arch):
        for warp in warps:
            if tile[1] % warp[1] or config.hdim[1] % warp[1] or tile[2] % warp[2] or tile[1] % warp[2]:
                continue
            whole = replaced(tile, 2, k0_of(config.replace(tile=tile), arch, tile[1]))
            cut = replaced(whole, 4, k1_for(config.replace(tile=whole, pipeline=pipeline)))
            for count in _counts(arch, [item for item in waves if tile[0] % (item * warp[0]) == 0], tile[0]):
                wave = (count, 1, 1, count, 1, 1, 1, 1, 1)
                yield {"tile": cut, "wave": wave, "warp_tile": (*warp, *warp, 16, 16, 16)}


def _counts(arch: ArchSpec, fitting: Sequence[int], rows: int) -> Sequence[int]:
    """The best two numbers of waves. CUDA devices have one: four or more, or sixteen rows each. With more rows, few
    waves spill, and more than four waves wait for each other.
    """
    if arch.kind != "cuda":
        return fitting[:2]
    return [count for count in fitting if count >= 4 or rows == count * 16][:1]


def few_rows_cuts(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:
    """All waves have the rows of one warp tile, and share its columns."""
    tiles = _tiles(config, arch)
    if not tiles:
        return
    for warp in sorted(_warps(config, arch), key=lambda item: item[0]):
        for count in (4, 2, 1):
            n0 = max(64, count * max(warp[1], warp[2]))
            k0, k0max = k0_of(config, arch, n0), tiles[0][5]
            if n0 % (count * warp[1]) or n0 % (count * warp[2]) or config.hdim[1] % warp[1] or k0 % warp[2]:
                continue
            tile: tuple[int, ...] = (warp[0], n0, k0, config.hdim[1], warp[2], k0max)
            tile = replaced(tile, 4, k1_for(config.replace(tile=tile, pipeline=pipeline)))
            yield {"tile": tile, "wave": (1, count, 1, 1, 1, count, 1, 1, 1), "warp_tile": (*warp, *warp, 16, 16, 16)}
            break


def backward_cuts(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:  # noqa: ARG001
    """Waves share out keys: the columns of scores, and the rows of what is summed over queries."""
    for tile in _tiles(config, arch):
        for warp in sorted(_warps(config, arch), key=lambda item: (item[0], item[1])):
            cut = config.replace(tile=tile, warp_tile=warp * 3)
            for wave in gradient_waves(cut, arch):
                if _divides(tile, wave, warp):
                    yield {"tile": tile, "wave": wave, "warp_tile": warp * 3}
                    if on_mma(cut, arch):
                        break


def _divides(tile: tuple[int, ...], wave: tuple[int, ...], warp: Triple) -> bool:
    places = (((0, 1, 2), 0), ((1, 8, 3), 3), ((0, 1, 4), 0), ((1, 7, 5), 3), ((0, 7, 6), 6))
    return all(
        tile[index] % (warp[axis] * wave[stage + axis]) == 0
        for fields, stage in places
        for axis, index in enumerate(fields)
    )
