"""The kernels that the tests of AMD GPUs compile and run: every matrix atom of the arch specs, all else in turns."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

import numpy as np
from amd_config import ARCHS, WAVE, AmdConfig
from native_case import UNARY, Call
from sampling import covering, fields_of

import tilewright_arch

LAYOUTS = list(itertools.product((False, True), repeat=2))
SIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "bf8": 1, "int8": 1}
RESULTS = {"int8": ("int32", "bf16"), "fp32": ("fp32", "fp16"), "fp8": ("bf16", "fp32"), "bf8": ("fp16", "fp32")}


def atoms(arch: str) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """Element types of A and B, and the warp tile."""
    for key, tiles in tilewright_arch.load(arch).warp_tiles.items():
        a, b, _ = key.split("_")
        for tile in tiles:
            yield a, b, tile


def tile_for(
    arch: str, a: str, warp_tile: tuple[int, int, int], n: int
) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """A small tile and its waves. ``n`` varies their shape, and whether a lane's part of k is 16 bytes or less."""
    m, columns, k = warp_tile
    wave = ((2, 2), (1, 2), (2, 1))[n % 3]
    if 4 in warp_tile[:2]:
        wave = (4, 1) if m == 4 else (1, 4)
    tile_m, tile_n = m * wave[0], columns * wave[1]
    if n % 2 and max(m, columns) < 64:
        tile_m *= 2
    bytes_of_k = max(k * SIZE[a], (64, 32, 128)[n % 3] if n % 4 else k * SIZE[a])
    return (tile_m, tile_n, -(-bytes_of_k // 16) * 16 // SIZE[a]), wave


def products(arch: str) -> dict[str, AmdConfig]:
    """Every atom once; layouts, pipelines, epilogues, results, split-K and persistence take turns."""
    configs = {}
    for n, (a, b, warp_tile) in enumerate(atoms(arch)):
        tile, wave = tile_for(arch, a, warp_tile, n)
        a_col, b_col = LAYOUTS[n % 4]
        config = AmdConfig(
            arch=arch,
            wave_size=WAVE[arch],
            a=a,
            b=b,
            c=RESULTS.get(a, ("bf16", "fp16", "fp32"))[n % len(RESULTS.get(a, "123"))],
            a_col=a_col,
            b_col=b_col,
            tile=tile,
            wave=wave,
            warp_tile=warp_tile,
            pipeline=("compv3", "compv4", "mem")[n // 4 % 3],
            scheduler="interwave" if n // 4 % 6 == 5 else "intrawave",
            epilogue=("default", "cshuffle")[(n + n // 4) % 2],
            persistent=n % 5 == 1,
            split_k=3 if n % 3 == 2 else 1,
        )
        name = f"{arch}_{a}_{b}_{'x'.join(map(str, warp_tile))}_{'rc'[a_col]}{'rc'[b_col]}_{config.pipeline}"
        configs[name] = config
    return configs


PRODUCTS = {name: config for arch in ARCHS for name, config in products(arch).items()}
GROUPED = {
    f"{name}_grouped": config.replace(grouped=True, persistent=n % 2 == 0)
    for n, (name, config) in enumerate(itertools.islice(PRODUCTS.items(), 3, None, 13))
}


def epilogues() -> dict[str, AmdConfig]:
    """Every unary step and every way in which operands enter, each on one arch."""
    archs = itertools.cycle(ARCHS)

    def config(**changes: object) -> AmdConfig:
        arch = next(archs)
        base = AmdConfig(arch=arch, wave_size=WAVE[arch], tile=(32, 64, 32), wave=(1, 2), epilogue="default")
        return base.replace(**changes)  # type: ignore[return-value]

    found = {
        f"unary_{u}": config(unary=u, bias="fp32", c="fp32", d=("fp32",), binary="Add", epilogue=e)
        for u, e in zip(UNARY, itertools.cycle(("cshuffle", "default")))
    }
    scaled = {"a": "int8", "b": "int8", "tile": (32, 64, 64)}
    found |= {
        "multiply": config(d=("fp16",), binary="Multiply"),
        "multi_d_add": config(d=("fp16", "fp32", "bf16"), binary="MultiDAdd"),
        "many_d": config(a="bf16", b="bf16", c="fp32", d=("fp16",) * 6, binary="MultiDAdd", epilogue="cshuffle"),
        "multi_d_multiply": config(d=("fp32", "bf16"), binary="MultiDMultiply"),
    }
    for n, arch in enumerate(ARCHS):
        k = 32 if WAVE[arch] == 64 else 16
        found[f"int8_scaled_{arch}"] = config(
            **scaled, arch=arch, wave_size=WAVE[arch], warp_tile=(16, 16, k), c="bf16", scale_a="row", scale_b="column",
            bias="fp32", unary="Silu", b_col=n % 2 == 0, epilogue=("default", "cshuffle")[n % 2],
        )  # fmt: skip
    return found


EPILOGUES = epilogues()


def shown(config: AmdConfig) -> set[Hashable]:
    """What products of every run have: all values on each arch, and each atom on one arch of each kind of wave."""
    fields = fields_of(config, "arch", "wave_size", "tile", "wave", "warp_tile", "stages")
    found: set[Hashable] = {(config.arch, name, value) for name, value in fields.items()}
    return found | {(config.wave_size, config.a, config.b, config.warp_tile)}


COMMON = dict([*PRODUCTS.items()][place] for place in covering([*PRODUCTS.values()], shown))
"""The products of every run."""
ALL = [*COMMON.values(), *GROUPED.values(), *EPILOGUES.values(), *PRODUCTS.values()]


def drop_subnormals(call: Call) -> None:
    """The matrix unit of gfx90a takes fp16 values below 2^-14 for zeros."""
    config = call.config
    assert isinstance(config, AmdConfig)
    if config.arch == "gfx90a" and config.a == "fp16":
        for view in call.views:
            for side in ("a", "b"):
                view[side][np.abs(view[side]) < 2.0**-14] = 0
