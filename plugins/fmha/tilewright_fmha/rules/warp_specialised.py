"""Rules on how warp-specialised kernels are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decode_form, few_rows_cut, splits_tiles
from tilewright_fmha.config.gradients import gradient_form
from tilewright_fmha.config.judging import must_be, replaced
from tilewright_fmha.config.latent import is_latent, latent_form
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.config.warp_specialised import HEADS, specialised_bytes, specialised_heads
from tilewright_fmha.rules.gpu import of_products
from tilewright_fmha.vocabulary import Family, MaskKind, Scheduling
from tilewright_kit.config.rules import Violation

__all__ = ["ws_form"]

MOST_CONSUMERS = 3
_WS_MOST_TURNS = 128
"""Elements of v up to which consumers may take turns."""
_WS_STEP = 64
"""Rows of one warpgroup."""
_WS_FEW_ROWS, _WS_BYTES = 16, 2
"""Rows of a tile that every kernel for few rows has; bytes of an element."""
_WS_REGISTERS, _WS_REGISTERS_OF_THREE = 196, 128
"""Registers of a thread for scores, probabilities and results: with one or two consumers, with three."""
_WS_CAPPING, _WS_WINDOWS = 20, 16
"""Registers that a soft cap and windows take of them."""


@of_products
def ws_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Warp-specialised kernels: each consumer warpgroup has 64 rows, heads of a few sizes, whole in shared memory."""
    if not is_specialised(config):
        if config.is_forward and config.stages:
            yield from must_be("ws_form", config, "stages", 0, "the pipeline says how many tiles are on their way")
        return
    if config.family is Family.SPLITKV and not splits_tiles(config):
        yield from latent_form(config, arch) if is_latent(config) else decode_form(config, arch)
        return
    if config.family is Family.DQ_DK_DV:
        yield from gradient_form(config)
        return
    if config.hdim not in HEADS:
        other = specialised_heads(*config.hdim)
        reason = f"its heads are {', '.join(f'{q}x{v}' for q, v in HEADS)}"
        yield Violation("ws_form", "hdim", config.hdim, reason, {"hdim": other or HEADS[-1]})
        return
    if splits_tiles(config):
        yield from _of_parts(config)
    consumers = min(max(config.m0 // _WS_STEP, 1), MOST_CONSUMERS)
    q, v = config.hdim
    columns = min(max(config.n0 // 16, 1) * 16, 256)
    wanted: dict[str, tuple[int, ...]] = {
        "tile": (consumers * _WS_STEP, columns, q, v, columns, q),
        "wave": (consumers, 1, 1, consumers, 1, 1, 1, 1, 1),
        "warp_tile": (_WS_STEP, columns, 16, _WS_STEP, v, 16, 16, 16, 16),
    }
    for name, value in wanted.items():
        reason = f"each of 1 to {MOST_CONSUMERS} consumers has {_WS_STEP} rows, blocks whole heads: {name} is {value}"
        yield from must_be("ws_form", config, name, value, reason)
    if config.paged and columns & (columns - 1):
        reason = "pages divide its blocks, or the reverse: n0 is a power of two"
        yield Violation("ws_form", "tile", config.tile, reason, _of_columns(config, 1 << (columns.bit_length() - 1)))
    if config.paged and consumers > 2:
        reason = "three consumers leave too few registers to who looks pages up"
        cut = {"tile": replaced(config.tile, 0, 2 * _WS_STEP), "wave": (2, 1, 1, 2, 1, 1, 1, 1, 1)}
        yield Violation("ws_form", "tile", config.tile, reason, cut)
    yield from _ws_registers(config, consumers)
    if (need := specialised_bytes(config, arch)) > arch.lds_bytes:
        reason = f"the tile needs {need} bytes of shared memory, and {arch.lds_bytes} may be used"
        yield Violation("ws_form", "stages", config.stages, reason, {"stages": 0} if config.stages > 2 else {})
    if config.stages not in (0, 2, 3, 4):
        yield Violation("ws_form", "stages", config.stages, "2 to 4 tiles are on their way", {"stages": 0})
    if config.scheduler is Scheduling.PINGPONG and (consumers < 2 or v > _WS_MOST_TURNS):
        reason = "one consumer has nobody to alternate with, and heads of more than 128 elements leave no registers"
        fix = {"scheduler": Scheduling.DEFAULT}
        yield Violation("ws_form", "scheduler", config.scheduler.value, reason, fix)


def _of_parts(config: FmhaConfig) -> Iterator[Violation]:
    """Features that kernels of many rows over parts of the keys lack; those for few rows have them."""
    lacked = {
        "mask": config.mask is not MaskKind.NONE,
        "learned_sinks": config.learned_sinks,
        "dtype": config.kv.bytes != _WS_BYTES,
    }
    fewer = few_rows_cut(config.hdim, _WS_FEW_ROWS, _WS_STEP)
    for name in (name for name, asked in lacked.items() if asked):
        reason = "tiles of many rows over parts of the keys have no masks, no learned sinks and no caches of 8 bits"
        yield Violation("ws_form", "tile", config.tile, f"{reason}: {name} is {getattr(config, name)}", fewer)


def _ws_registers(config: FmhaConfig, consumers: int) -> Iterator[Violation]:
    """A thread holds scores and results in fp32 and probabilities in 16 bits. What is beside them was measured: more
    where scores are capped, or windows have two sides.
    """
    v = config.hdim[1]
    room = _WS_REGISTERS_OF_THREE if consumers > 2 else _WS_REGISTERS
    if config.softcap:
        room -= _WS_CAPPING
    elif config.mask is MaskKind.WINDOW and consumers < 3:
        room -= _WS_WINDOWS
    most = (room - v // 2) * 4 // 3 // 16 * 16
    if config.n0 > most > 0:
        reason = f"registers of {consumers} consumers hold the scores of {most} columns beside their results"
        yield Violation("ws_form", "tile", config.tile, reason, _of_columns(config, most))


def _of_columns(config: FmhaConfig, columns: int) -> dict[str, Any]:
    """Fix that gives a warp-specialised kernel other blocks of keys."""
    q, v = config.hdim
    warp_tile = (_WS_STEP, columns, 16, _WS_STEP, v, 16, 16, 16, 16)
    return {"tile": (config.m0, columns, q, v, columns, q), "warp_tile": warp_tile}
