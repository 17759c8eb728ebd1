"""How GPU kernels are cut: for a signature and a pipeline, tiles from the arch's table, with waves and warp tiles that
the rules take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decode_algorithms
from tilewright_fmha.config.defaults import ELEMENTWISE, elementwise_algorithm
from tilewright_fmha.config.judging import family_pipelines, replaced
from tilewright_fmha.config.warp_specialised import specialised_algorithms
from tilewright_fmha.footprint.backward_partition import gradient_waves, on_mma
from tilewright_fmha.rules.gpu import GPU_RULES, k0_of
from tilewright_fmha.rules.hip import HIP_RULES, k1_for
from tilewright_fmha.vocabulary import Family

__all__ = ["gpu_algorithms", "valid_algorithms"]

Triple = tuple[int, int, int]


def gpu_algorithms(config: FmhaConfig, arch: ArchSpec) -> Iterator[Mapping[str, Any]]:
    """Pipeline, tile, waves and warp tiles worth trying, the preferred first; not all of them need be valid."""
    if config.family in ELEMENTWISE:
        yield elementwise_algorithm(config, arch)
        return
    for pipeline in family_pipelines(config.family, arch):
        for shapes in _shapes(config, arch, pipeline):
            yield {"pipeline": pipeline, "use_trload": pipeline == "qr_async_trload", **shapes}


def valid_algorithms(config: FmhaConfig, arch: ArchSpec) -> tuple[Mapping[str, Any], ...]:
    """Those of them that fit the device; whether there are templates is for other rules to say."""
    names = ("family", "dtype", "mode", "hdim", "v_layout", "qscale", "paged", "page_size")
    bare = type(config)(**{name: getattr(config, name) for name in names})
    return _valid(bare, arch)


@lru_cache(maxsize=1024)
def _valid(config: FmhaConfig, arch: ArchSpec) -> tuple[Mapping[str, Any], ...]:
    found = []
    for item in gpu_algorithms(config, arch):
        cut = config.replace(**item)
        if not any(True for rule in (*GPU_RULES, *HIP_RULES) for _ in rule(cut, arch)):
            found.append(item)
    return tuple(found)


def _shapes(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:
    if config.family is Family.DQ_DK_DV:
        yield from _backward(config, arch)
    elif pipeline == "ws":
        few = config.family is Family.SPLITKV
        yield from decode_algorithms(config.hdim, config.dtype) if few else specialised_algorithms(config.hdim)
    elif pipeline == "qr_nwarp_sshuffle":
        yield from _few_rows(config, arch)
    else:
        yield from _rows(config, arch, pipeline)


def _warps(config: FmhaConfig, arch: ArchSpec) -> tuple[Triple, ...]:
    spec = arch.attention
    return spec.warp_tiles.get(config.dtype.value, ()) if spec else ()


def _tiles(config: FmhaConfig, arch: ArchSpec) -> tuple[tuple[int, ...], ...]:
    spec = arch.attention
    if spec is None:
        return ()
    table = spec.backward_tiles if config.family is Family.DQ_DK_DV else spec.tiles
    return table.get("x".join(map(str, config.hdim)), ())


def _rows(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:
    """Waves share out rows."""
    warps, spec = _warps(config, arch), arch.attention
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


def _few_rows(config: FmhaConfig, arch: ArchSpec) -> Iterator[Mapping[str, Any]]:
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
            tile = replaced(tile, 4, k1_for(config.replace(tile=tile, pipeline="qr_nwarp_sshuffle")))
            yield {"tile": tile, "wave": (1, count, 1, 1, 1, count, 1, 1, 1), "warp_tile": (*warp, *warp, 16, 16, 16)}
            break


def _backward(config: FmhaConfig, arch: ArchSpec) -> Iterator[Mapping[str, Any]]:
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
