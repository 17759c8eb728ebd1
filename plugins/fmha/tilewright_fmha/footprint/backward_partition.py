"""How the products of gradients are shared out among the waves of a GPU kernel, and what that takes: the Python mirror
of ``gpu/fmha/backward/backward.hpp`` and ``gpu/fmha/backward/mma.hpp``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright_arch import ArchSpec, Rates
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.pipelines import DIRECT
from tilewright_fmha.footprint.tile_products import products_of, wave_threads
from tilewright_kit.config.rules import Violation

__all__ = [
    "counted_clocks",
    "gradient_bytes",
    "gradient_clocks",
    "gradient_registers",
    "gradient_waves",
    "misplaced_waves",
    "on_mma",
]

Wave = tuple[int, int, int, int, int, int, int, int, int]
_STEP = 16
"""Rows and columns of a matrix instruction that a wave has at least."""
_LAYOUTS = ((1, 4), (2, 4), (1, 2), (2, 2), (4, 2), (1, 8))
"""Parts by groups of keys, the preferred first."""
_KEYS = 32
"""Rows and columns of a wave that make it read the least from shared memory (measured on an H200)."""
_LONG = 128
"""Heads whose dK and dV are many for one wave: elsewhere than on ``mma.sync`` waves share their columns."""
_OTHER_REGISTERS = 64
_MMA_REGISTERS = 60
"""Beside results: addresses, fragments that are on their way."""
_WMMA_REGISTERS, _WMMA_COPY, _WMMA_ROW = 8, 32, 30
"""RDNA, 16 bits: what operands on their way take beside that, what they take more where both halves of a wave hold
them, and for every sixteen keys of a wave beyond the first (measured: what is above 256 by this spills).
"""
_MFMA_REGISTERS = 70
"""CDNA: what operands on their way take beside that (measured: what is above 512 by this spills)."""
_PRODUCTS, _READS, _SCORES, _MEETING, _SHARED_PER_CLOCK = 1.6, 0.43, 0.18, 800.0, 128
"""See ``gradient_clocks``."""


def on_mma(config: FmhaConfig, arch: ArchSpec) -> bool:
    """True if the template is that of ``mma.sync``, whose 16-bit tiles are read along either axis."""
    return arch.kind == "cuda" and config.q.bytes == 2


def gradient_waves(config: FmhaConfig, arch: ArchSpec) -> Iterator[Wave]:
    """Layouts worth trying for the tile of ``config``, the preferred first. On ``mma.sync`` groups of waves share out
    keys, and the waves of a group queries of scores and columns of dK and dV.
    """
    if not on_mma(config, arch):
        yield from _shared_lines(config, arch)
        return
    for parts, keys in sorted(_LAYOUTS, key=lambda item: config.n0 // item[1] != _KEYS or math.prod(item) < 4):
        for rows, columns in _parts_of_dq(config, parts * keys):
            wave = (parts, keys, 1, keys, parts, 1, rows, columns, 1)
            if _has_sixteens(config, wave) and _holds(config, arch, wave):
                yield wave
                break


def _shared_lines(config: FmhaConfig, arch: ArchSpec) -> Iterator[Wave]:
    """Waves that share out keys; of long heads, where no two fit, the columns of dK and dV."""
    least = max(config.warp_tile[:2], default=_STEP)
    lines: list[Wave] = [(1, count, 1, count, 1, 1, 1, count, 1) for count in (4, 8, 2)]
    fitting = (config.n0 % (wave[1] * least) == 0 and _holds(config, arch, wave) for wave in lines)
    several = any(fitting)
    yield from lines
    if max(config.hdim) >= _LONG and not several:
        four = all(size % (4 * _STEP) == 0 for size in config.hdim)
        for parts, keys in ((2, 2), (4 if four else 2, 1)):
            yield (1, keys, parts, keys, parts, 1, 1, parts * keys, 1)
    yield (1, 1, 1, 1, 1, 1, 1, 1, 1)


def _parts_of_dq(config: FmhaConfig, waves: int) -> list[tuple[int, int]]:
    """Rows by columns, those that read the least first."""
    found = [(rows, waves // rows) for rows in (1, 2, 4, 8) if waves % rows == 0]
    return sorted(found, key=lambda item: (config.m0 / item[0] + config.hdim[0] / item[1], abs(item[0] - 2)))


def _has_sixteens(config: FmhaConfig, wave: tuple[int, ...]) -> bool:
    parts, keys, (rows, columns) = wave[0], wave[1], wave[6:8]
    (q, v), m0, n0 = config.hdim, config.m0, config.n0
    sizes = ((m0, parts), (n0, keys), (q, parts), (v, parts), (m0, rows), (q, columns))
    return all(size % (_STEP * count) == 0 for size, count in sizes)


def _holds(config: FmhaConfig, arch: ArchSpec, wave: Wave) -> bool:
    cut = config.replace(wave=wave)
    return gradient_registers(cut, arch) <= arch.registers_per_thread(cut.waves * arch.wave_size)


def misplaced_waves(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A wave's part of the scores, which are made transposed, is its part of the sums over queries."""
    wave, waves = config.wave, config.waves
    if on_mma(config, arch):
        parts, keys, rows, columns = wave[0], wave[1], wave[6], wave[7]
        formed = wave == (parts, keys, 1, keys, parts, 1, rows, columns, 1) and rows * columns == waves
        if formed and _has_sixteens(config, wave):
            return
        reason = (
            "groups of waves share out keys, the waves of a group queries of scores and columns of dK and dV; all "
            f"share out dQ; each has a multiple of {_STEP} of everything"
        )
    else:
        keys, parts = wave[1], wave[2]
        if wave == (1, keys, parts, keys, parts, 1, 1, waves, 1):
            return
        reason = (
            "groups of waves share out the columns of scores and the rows of dK and dV, the waves of a group (third "
            "number) columns of dK and dV, and all waves those of dQ"
        )
    other = next(gradient_waves(config, arch), None)
    yield Violation("wave_table", "wave", wave, reason, {"wave": other} if other and other != wave else {})


def gradient_bytes(config: FmhaConfig, arch: ArchSpec) -> int:
    """Bytes of shared memory of a workgroup."""
    element, (q, v), m0, n0 = config.q.bytes, config.hdim, config.m0, config.n0
    keys, queries, scores = n0 * (q + v) * element, m0 * (q + v) * element + 8 * m0, n0 * m0 * element
    random = m0 * max(n0 // 64, 1) * 4 * 16
    if on_mma(config, arch):
        # Queries come in while those before are multiplied; P is there where it goes from wave to wave.
        return keys + 2 * queries + (3 if config.wave[0] > 1 else 2) * scores + random
    copies = (n0 * q + m0 * (q + v) + m0 * n0) * element
    return keys + queries + 2 * scores + random + copies


def gradient_registers(config: FmhaConfig, arch: ArchSpec) -> int:
    """Registers of a thread, about."""
    threads = wave_threads(config, arch)
    products = {item.name: item.accumulators // threads for item in products_of(config)}
    if on_mma(config, arch):
        keys = config.n0 // max(config.wave[1], 1)
        passing = max(2 * keys * _held(config) // threads, products["dq"])
        return products["dv"] + products["dk"] + passing + _MMA_REGISTERS
    passing = max(products["scores"] + products["dp"], products["dq"])
    return products["dv"] + products["dk"] + passing + _OTHER_REGISTERS + _operands_under_way(config, arch)


def _operands_under_way(config: FmhaConfig, arch: ArchSpec) -> int:
    if arch.kind == "hip" and arch.wave_size == 64:
        return _MFMA_REGISTERS
    instruction = arch.instructions.get("wmma")
    if instruction is None or config.q.bytes != 2:
        return 0
    sixteens = config.n0 // (max(config.wave[1], 1) * _STEP)
    return _WMMA_REGISTERS + _WMMA_COPY * (instruction.operand_copies - 1) + _WMMA_ROW * max(sixteens - 1, 0)


def _held(config: FmhaConfig) -> int:
    """Queries whose scores a wave has in registers at a time."""
    parts, groups = max(config.wave[0], 1), max(config.wave[1], 1)
    few = parts > 1 or config.n0 // groups == _STEP
    return 32 if few and config.m0 // parts % 32 == 0 else _STEP


def gradient_clocks(config: FmhaConfig, flops_per_clock: float) -> float:
    """Clocks of a unit for a block of m0 queries and n0 keys on ``mma.sync``: what its products take, what its waves
    read from shared memory for them, its scores, and the waves' meeting. The weights are fitted to an H200, where they
    tell tiles apart, not more.
    """
    (q, v), m0, n0 = config.hdim, config.m0, config.n0
    parts, groups, rows, columns = config.wave[0], config.wave[1], config.wave[6], config.wave[7]
    keys, queries, passes = n0 // groups, m0 // parts, parts > 1
    again = queries // _held(config)  # reads of a wave's keys
    of_scores = (keys * again + queries) * (q + v)
    of_keys = (2 * keys if passes else 0) * m0 + m0 * (q + v) // parts
    of_queries = m0 // rows * n0 + n0 * q // columns
    moved = 2 * (config.waves * (of_scores + of_keys + of_queries) + n0 * m0 * (1 + passes) + m0 * (q + v))
    products = 2.0 * m0 * n0 * (3 * q + 2 * v) / flops_per_clock
    return _PRODUCTS * products + _READS * moved / _SHARED_PER_CLOCK + _SCORES * m0 * n0 + _MEETING


def counted_clocks(config: FmhaConfig, rates: Rates, flops_per_clock: float, resident: int) -> float:
    """The same elsewhere, counted from the template and the arch's rates: products on the SIMDs that ``resident``
    workgroups have waves for, what waves read from and write to shared memory, and a block's trip to memory, which only
    other workgroups fill. Nothing of it is fitted.
    """
    (q, v), m0, n0 = config.hdim, config.m0, config.n0
    waves, keys, parts = config.waves, n0 // max(config.wave[1], 1), max(config.wave[2], 1)
    of_scores = (keys + m0) * (q + v)
    of_keys = 2 * keys * m0 + m0 * (q + v) // parts
    of_queries = m0 * n0 + n0 * q // waves
    stored = 2 * m0 * (q + v) + 3 * m0 * n0
    if config.pipeline == DIRECT:  # keys, values and P lie in registers
        of_scores, of_keys, of_queries, stored = m0 * (q + v), m0 * (q + v), m0 * n0, stored - 2 * m0 * n0
    moved = (waves * (of_scores + of_keys + of_queries) + stored) * config.q.bytes
    products = 2.0 * m0 * n0 * (3 * q + 2 * v) / flops_per_clock / min(1.0, waves * resident / rates.simds)
    return products + moved / rates.lds_bytes_per_cycle + rates.global_latency / resident
