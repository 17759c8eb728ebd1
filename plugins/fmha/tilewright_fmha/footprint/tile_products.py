"""The products of a kernel, each as tiles see it: sizes, waves and warp tile of one of them."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import DECODE_THREADS, decodes
from tilewright_fmha.config.latent import is_latent, latent_threads
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.vocabulary import Family
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["ProductView", "products_of", "threads_of", "wave_threads"]

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ProductView:
    """One product of a tile: m rows, n columns, k at a time, shared out over waves, each a number of warp tiles."""

    name: str
    fields: tuple[int, int, int]
    """Places of m, n and k in the configuration's tile."""
    tile: Triple
    wave: Triple
    warp_tile: Triple

    @property
    def accumulators(self) -> int:
        """fp32 values of a wave's part of the result."""
        m, n, _ = self.tile
        rows, columns = m // max(self.wave[0], 1), n // max(self.wave[1], 1)
        return _up(rows, self.warp_tile[0]) * _up(columns, self.warp_tile[1])


def _up(size: int, step: int) -> int:
    return ceil_div(max(size, 1), max(step, 1)) * step


def products_of(config: FmhaConfig) -> tuple[ProductView, ...]:
    """The products that a workgroup makes for each block of keys: two forward, five for gradients, of which the third
    triple of waves is for the gradients of queries.
    """
    waves = [config.wave[start : start + 3] for start in (0, 3, 6)]
    warps = [config.warp_tile[start : start + 3] for start in (0, 3, 6)]
    tile = config.tile

    def view(name: str, fields: tuple[int, int, int], stage: int) -> ProductView:
        m, n, k = (tile[index] for index in fields)
        return ProductView(name, fields, (m, n, k), _triple(waves[stage]), _triple(warps[stage]))

    if config.family is not Family.DQ_DK_DV:
        return (view("scores", (0, 1, 2), 0), view("values", (0, 3, 4), 1))
    # Rows of keys come first in what is summed over queries.
    return (
        view("scores", (0, 1, 2), 0),
        view("dv", (1, 8, 3), 1),
        view("dp", (0, 1, 4), 0),
        view("dk", (1, 7, 5), 1),
        view("dq", (0, 7, 6), 2),
    )


def _triple(numbers: tuple[int, ...]) -> Triple:
    m, n, k = numbers
    return (m, n, k)


def wave_threads(config: FmhaConfig, arch: ArchSpec) -> int:
    """Threads that one wave of a configuration stands for: a warpgroup where the pipeline is warp-specialised."""
    return 128 if is_specialised(config) else arch.wave_size


def threads_of(config: FmhaConfig, arch: ArchSpec) -> int:
    """Threads of a workgroup, producers included."""
    if is_latent(config):
        return latent_threads(config)
    if decodes(config):
        return DECODE_THREADS
    producers = 128 if is_specialised(config) else 0
    return config.waves * wave_threads(config, arch) + producers
