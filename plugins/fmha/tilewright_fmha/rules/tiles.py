"""Rules on how work is cut, for every device, and those of CPUs."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.defaults import (
    ELEMENTWISE,
    cpu_columns,
    cpu_depth,
    cpu_register_tiles,
    cpu_tile,
    elementwise_tile,
)
from tilewright_fmha.config.judging import is_well_formed, must_be, tile_length, wanted_values
from tilewright_kit.config.rules import Violation

__all__ = ["CPU_RULES", "TILE_RULES"]

MOST_ROWS, MOST_COLUMNS = 512, 1024
"""Sizes of a CPU's block: more would leave the cache."""


def tile_lengths(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """A tile has six numbers, that of gradients nine; waves and warp tiles have nine; all are positive."""
    length = tile_length(config)
    default = (16, 128, 128, 16, 128, 16, 32, 128, 128) if length == 9 else (64, 128, 32, 128, 32, 128)
    for name, size, usual in (
        ("tile", length, default),
        ("wave", 9, (4, 1, 1, 4, 1, 1, 1, 1, 1)),
        ("warp_tile", 9, (32, 32, 16, 32, 32, 16, 16, 16, 16)),
    ):
        numbers = getattr(config, name)
        if len(numbers) != size or min(numbers, default=0) < 1:
            mended = tuple(max(number, 1) for number in numbers) if len(numbers) == size else usual
            reason = f"there are {size} numbers, each at least 1"
            yield Violation("tile_lengths", name, numbers, reason, {name: mended})


def block_per_cu(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Workgroups that share a unit are one or more, or -1 for as many as come; CPUs have none."""
    if arch.kind == "cpu":
        yield from must_be("block_per_cu", config, "block_per_cu", -1, "a CPU has no workgroups")
    elif config.block_per_cu != -1 and not 1 <= config.block_per_cu <= 32:
        reason = "it is from 1 to 32, or -1 for as many as come"
        yield Violation("block_per_cu", "block_per_cu", config.block_per_cu, reason, {"block_per_cu": -1})


def wave_groups(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """There is at least one group of waves; no template has several that alternate."""
    reason = "no template of attention has wave groups that alternate"
    yield from must_be("wave_groups", config, "num_wave_groups", 1, reason)


def page_tile(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Where the size of pages is compiled in, a tile of keys is whole pages or part of one; CPUs learn it later."""
    if not config.page_size or not is_well_formed(config):
        return
    if arch.kind == "cpu":
        reason = "a CPU's kernel learns the size of pages at run time"
        yield Violation("page_tile", "page_size", config.page_size, reason, {"page_size": 0})
    elif config.family not in ELEMENTWISE and config.n0 % config.page_size and config.page_size % config.n0:
        reason = f"neither of n0 = {config.n0} and a page of {config.page_size} divides the other"
        yield Violation("page_tile", "page_size", config.page_size, reason, {"page_size": 0})


def advice_fields(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """Limits are not negative, and alignments positive."""
    if config.max_seq_len_q < 0:
        reason = "it is the longest sequence, or 0 for any"
        yield Violation("advice_fields", "max_seq_len_q", config.max_seq_len_q, reason, {"max_seq_len_q": 0})
    if min(config.hdim_align) < 1:
        reason = "sizes of heads are multiples of at least 1"
        yield Violation("advice_fields", "hdim_align", config.hdim_align, reason, {"hdim_align": (8, 8)})


def elementwise_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Kernels without a product are cut in one way."""
    if config.family not in ELEMENTWISE or not is_well_formed(config) or attention_of(arch) is None:
        return
    if arch.kind == "cpu":
        wave = (config.team, *(1,) * 8)
    else:
        wave = (128 // arch.wave_size, *(1,) * 8)
    wanted = {"tile": elementwise_tile(config, arch), "wave": wave, "warp_tile": (1,) * 9}
    yield from wanted_values("elementwise_form", config, wanted, "kernels without a product are cut in one way")


# ---- CPUs ----


def cpu_defaults(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CPUs: free are the team, the register tile, and rows and columns of a block in whole register tiles. All else
    follows from these, so that equal kernels have equal names.
    """
    if arch.kind != "cpu" or not is_well_formed(config):
        return
    teams = [wave[0] for wave in arch.waves if wave[1:] == (1, 1)]
    team = max((size for size in teams if size <= config.team), default=1)
    reason = f"threads are one team of {', '.join(map(str, teams[:8]))}, ..."
    yield from must_be("cpu_defaults", config, "wave", (team, *(1,) * 8), reason)
    if config.family in ELEMENTWISE:
        return
    shapes, depth = cpu_register_tiles(arch), cpu_depth(config.dtype)
    shape = next((item for item in shapes if item == config.warp_tile[:2]), shapes[0])
    reason = f"all products have one register tile of {', '.join(f'{m}x{n}' for m, n in shapes)}, and depth {depth}"
    yield from must_be("cpu_defaults", config, "warp_tile", (*shape, depth) * 3, reason)
    rows = min(max(config.m0 // shape[0], 1), MOST_ROWS // shape[0]) * shape[0]
    columns = cpu_columns(arch, shape[1], depth, min(config.n0, MOST_COLUMNS))
    reason = f"blocks are whole register tiles of {shape[0]}x{shape[1]}, and heads are not cut"
    yield from must_be("cpu_defaults", config, "tile", cpu_tile(config, rows, columns), reason)


TILE_RULES = (tile_lengths, block_per_cu, wave_groups, page_tile, advice_fields, elementwise_form)
CPU_RULES = (cpu_defaults,)
