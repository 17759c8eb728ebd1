"""Rules on how AMD GPU kernels are cut. Those of the matrix unit and of direct copies are the system's that Tilewright
rebuilds, with numbers from the arch.
"""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.judging import must_be, replaced
from tilewright_fmha.config.pipelines import DIRECT, FEW_ROWS, direct_algorithm, is_specialised
from tilewright_fmha.rules.gpu import forms_of, is_async, of_products
from tilewright_kit.config.rules import Violation

__all__ = ["HIP_RULES", "direct_form", "k1_for"]

_HALF_STEPS = ((128, 64, 32, 128), (32, 128, 32, 128), (32, 128, 16, 48))
"""(m0, n0, k0, heads of q) whose second product takes half steps."""
_SYMMETRIC = ((64, 64), (128, 128))
_STEP, _HALF = 32, 16


@of_products
def qr_256_mfma(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Pipeline qr with heads of 256: matrix instructions of a step come in multiples of what the arch says."""
    spec = attention_of(arch)
    group = spec.mfma_groups if spec else 0
    if not group or config.pipeline != "qr" or config.hdim[0] != 256 or not config.is_forward:
        return
    columns = max(config.n0 // (config.warp_tile[1] * config.wave[1]), 1)
    if columns * (config.k0 // config.warp_tile[2]) % group:
        step = config.warp_tile[2] * (group // math.gcd(group, columns))
        reason = (
            f"a step has {columns} x {config.k0 // config.warp_tile[2]} matrix instructions, no multiple of {group}"
        )
        fix = {"tile": replaced(config.tile, 2, step)} if 256 % step == 0 else {}
        yield Violation("qr_256_mfma", "tile", config.tile, reason, fix)


@of_products
def async_vectors(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Direct copies move whole vectors of all threads."""
    spec = attention_of(arch)
    if arch.kind != "hip" or config.pipeline != "qr_async" or spec is None or not spec.async_vector_bytes:
        return
    vector = max(spec.async_vector_bytes // config.kv.bytes, 1)
    unit = config.waves * arch.wave_size * vector
    if config.n0 * config.k0 % unit:
        steps = [
            size for size in spec.sweep.get("k0", ()) if config.n0 * size % unit == 0 and config.hdim[0] % size == 0
        ]
        reason = f"n0 x k0 = {config.n0 * config.k0} elements are no multiple of the {unit} that threads copy at a time"
        fix = {"tile": replaced(config.tile, 2, steps[0])} if steps else {"pipeline": "qr"}
        yield Violation("async_vectors", "tile", config.tile, reason, fix)


@of_products
def tile_128_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Heads of 128 have tiles that the arch lists for them."""
    if config.hdim == (128, 128):
        yield from _listed("tile_128_form", config, forms_of(config, arch))


@of_products
def bm0_list(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Heads of other sizes have numbers of rows that the arch lists."""
    if config.hdim != (128, 128):
        yield from _listed("bm0_list", config, forms_of(config, arch))


def _listed(rule: str, config: FmhaConfig, forms: Mapping[str, tuple[int, ...]]) -> Iterator[Violation]:
    tile = config.tile
    for index, name in enumerate(("async_m0" if is_async(config) else "m0", "n0", "k0")):
        listed = forms.get(name, ())
        if listed and tile[index] not in listed:
            tile = replaced(tile, index, max((size for size in listed if size <= tile[index]), default=listed[0]))
    reason = "; ".join(f"{name} is {', '.join(map(str, sizes))}" for name, sizes in forms.items())
    yield from must_be(rule, config, "tile", tile, reason)


@of_products
def gfx950_trload_v3(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The loop with transposing reads has less than 128 columns where heads have 128 elements; v3 has 256 rows."""
    if config.pipeline == "qr_async_trload" and config.hdim == (128, 128) and config.n0 == 128:
        reason = "with heads of 128, the loop has fewer than 128 columns"
        yield Violation("gfx950_trload_v3", "tile", config.tile, reason, {"tile": replaced(config.tile, 1, 64)})
    if config.pipeline == DIRECT and config.is_forward and config.m0 != 256:
        reason = "the loop v3 has 256 rows"
        yield Violation("gfx950_trload_v3", "tile", config.tile, reason, {"tile": replaced(config.tile, 0, 256)})


@of_products
def direct_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The loops v3 have one cut for each size of heads: eight waves of 32 rows, blocks whose pairs fill the LDS; of
    gradients, four waves of 32 keys.
    """
    if config.pipeline != DIRECT or arch.kind != "hip":
        return
    cut = direct_algorithm(config.family, config.hdim)
    if not cut and not config.is_forward:
        reason = "gradients by the loop v3 have heads of 128 elements"
        yield Violation("direct_form", "hdim", config.hdim, reason, {"hdim": _SYMMETRIC[1]})
    for name, value in cut.items():
        reason = "the loop v3 has eight waves of 32 rows, of gradients four of 32 keys"
        yield from must_be("direct_form", config, name, value, reason)


@of_products
def trload_symmetric(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Loops with transposing reads, and v3, have heads of 64 or 128 elements, of q and v alike."""
    if config.pipeline in ("qr_async_trload", DIRECT) and config.hdim not in _SYMMETRIC:
        reason = "heads of q and v have 64 elements each, or 128"
        other = _SYMMETRIC[0] if max(config.hdim) <= 64 else _SYMMETRIC[1]
        yield Violation("trload_symmetric", "hdim", config.hdim, reason, {"hdim": other})


def k1_for(config: FmhaConfig) -> int:
    """Steps of the second product: 32 keys, in some tiles of AMD GPUs 16; a whole block where waves share its keys.
    (There, of 8-bit floats they were k0; here these are widened.)
    """
    m0, n0, k0 = config.tile[:3]
    if config.pipeline == FEW_ROWS:
        return n0
    return _HALF if (m0, n0, k0, config.hdim[0]) in _HALF_STEPS else min(_STEP, config.n0)


@of_products
def k1_value(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """How far the second product steps follows from the tile. Loops that have a block's keys at once take no steps:
    for them it is only a number in the name, and so has one value.
    """
    if not config.is_forward or is_specialised(config):
        return
    step = k1_for(config)
    if config.k1 != step and step % config.warp_tile[5] == 0:
        reason = f"the second product of this tile steps by {step} keys"
        yield Violation("k1_value", "tile", config.tile, reason, {"tile": replaced(config.tile, 4, step)})


HIP_RULES = (
    trload_symmetric, gfx950_trload_v3, tile_128_form, bm0_list, qr_256_mfma, k1_value, async_vectors,
)  # fmt: skip
