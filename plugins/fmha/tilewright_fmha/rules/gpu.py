"""Rules on how GPU kernels are cut: waves, warp tiles, shared memory and registers."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.defaults import ELEMENTWISE
from tilewright_fmha.config.judging import is_well_formed, must_be, replaced
from tilewright_fmha.config.pipelines import FEW_ROWS, is_specialised
from tilewright_fmha.footprint.backward_partition import gradient_waves, misplaced_waves
from tilewright_fmha.footprint.gpu import registers_estimate, shared_bytes
from tilewright_fmha.footprint.tile_products import products_of, threads_of
from tilewright_fmha.vocabulary import Family, FmhaDType
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.arithmetic import padded

__all__ = ["GPU_RULES", "forms_of", "is_async", "k0_of", "of_products", "tiles_for"]

Rule = Callable[[FmhaConfig, ArchSpec], Iterator[Violation]]

_LOOPS = ("qr", "qr_async", "qs")


def of_products(rule: Rule) -> Rule:
    """A rule on tiles of GPU kernels that have products, for configurations that have tiles at all."""

    @wraps(rule)
    def judged(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
        if arch.kind != "cpu" and config.family not in ELEMENTWISE and is_well_formed(config) and attention_of(arch):
            yield from rule(config, arch)

    return judged


def _is_gradient(config: FmhaConfig) -> bool:
    return config.family is Family.DQ_DK_DV


def is_async(config: FmhaConfig) -> bool:
    """The pipeline copies from global to shared memory without registers."""
    return config.pipeline in ("qr_async", "qr_async_trload", "v3", "batch_prefill_async")


def tiles_for(config: FmhaConfig, arch: ArchSpec) -> tuple[tuple[int, ...], ...]:
    """Cuts of the arch that are worth trying for the heads of ``config``."""
    spec = attention_of(arch)
    if spec is None:
        return ()
    table = spec.backward_tiles if len(config.tile) == 9 else spec.tiles
    return table.get("x".join(map(str, config.hdim)), ())


def forms_of(config: FmhaConfig, arch: ArchSpec) -> Mapping[str, tuple[int, ...]]:
    """Values of m0, n0 and k0 that the arch's lists allow for these heads; only of the three oldest loops, in 16
    bits."""
    spec = attention_of(arch)
    if spec is None or config.pipeline not in _LOOPS or not config.is_forward or config.dtype is FmhaDType.FP32:
        return {}
    return spec.forms.get("x".join(map(str, config.hdim)), spec.forms.get("*", {}))


def k0_of(config: FmhaConfig, arch: ArchSpec, n0: int) -> int:
    """Steps along heads of q, as the arch's table has them for blocks of ``n0`` columns. Loops that keep whole heads in
    shared memory take no steps: for them it is only a number in the name, and so has one value.
    """
    rows = tiles_for(config, arch)
    return next((tile[2] for tile in rows if tile[1] == n0), rows[0][2] if rows else config.hdim[0])


@of_products
def softmax_rows(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Forward kernels: a row of scores lives in one wave, so waves share out rows. Only ``qr_nwarp_sshuffle`` has few
    rows, whose columns waves share.
    """
    if not config.is_forward:
        return
    spec = attention_of(arch)
    most = max(spec.waves, default=8) if spec else 8
    waves = min(config.waves, most)
    if config.pipeline == FEW_ROWS:
        wanted: tuple[int, ...] = (1, waves, 1, 1, 1, waves, 1, 1, 1)
        reason = "waves share the columns of few rows: of scores, and along k of the second product"
    else:
        wanted = (waves, 1, 1, waves, 1, 1, 1, 1, 1)
        reason = "a row of scores lives in one wave: waves share out rows"
    yield from must_be("softmax_rows", config, "wave", wanted, reason)
    if config.pipeline == FEW_ROWS and config.m0 != config.warp_tile[0]:
        tile = replaced(config.tile, 0, config.warp_tile[0])
        reason = f"all waves have the same rows: m0 is those of one warp tile, {config.warp_tile[0]}"
        yield Violation("softmax_rows", "tile", config.tile, reason, {"tile": tile})
    if config.pipeline == FEW_ROWS and config.n0 > config.waves * arch.wave_size:
        columns = config.waves * arch.wave_size
        reason = f"each lane looks up one of its wave's columns: n0 is at most {columns}"
        tile = replaced(replaced(config.tile, 1, columns), 4, min(config.tile[4], columns))
        yield Violation("softmax_rows", "tile", config.tile, reason, {"tile": tile})


@of_products
def wave_table(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The arch lists how many waves may share a tile; all products of a kernel have the same."""
    spec = attention_of(arch)
    offered = (1, 2, 3) if is_specialised(config) else spec.waves if spec else ()
    if offered and config.waves not in offered:
        count = max((item for item in offered if item <= config.waves), default=offered[0])
        reason = f"a tile has {', '.join(map(str, offered))} waves"
        yield Violation("wave_table", "wave", config.wave, reason, {"wave": _waves(config, count)})
    elif _is_gradient(config) and not is_specialised(config):
        yield from misplaced_waves(config, arch)


def _waves(config: FmhaConfig, count: int) -> tuple[int, ...]:
    if _is_gradient(config):
        return (1, count, 1, count, 1, 1, 1, count, 1)
    if config.pipeline == FEW_ROWS:
        return (1, count, 1, 1, 1, count, 1, 1, 1)
    return (count, 1, 1, count, 1, 1, 1, 1, 1)


@of_products
def warp_tile_table(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The arch lists warp tiles of attention; the third is of gradients only."""
    spec = attention_of(arch)
    offered = spec.warp_tiles.get(config.dtype.value, ()) if spec else ()
    if not offered or is_specialised(config):
        return
    mended = []
    for start in (0, 3, 6):
        own = config.warp_tile[start : start + 3]
        close = next((item for item in offered if item[:2] == own[:2]), offered[0])
        mended += list(own if own in offered else close)
    if not _is_gradient(config):
        # Rows of scores and of results are the same lanes'.
        mended[3:] = [*mended[:3], 16, 16, 16]
    listed = ", ".join("x".join(map(str, item)) for item in offered)
    reason = (
        f"warp tiles of {config.dtype} on {arch.id} are {listed}; both forward products have the same, and the third "
        "is of gradients, else 16x16x16"
    )
    yield from must_be("warp_tile_table", config, "warp_tile", tuple(mended), reason)


@of_products
def warp_divides_tile(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Waves times their warp tiles divide what a tile has along each axis."""
    units: dict[int, int] = {}
    for item in products_of(config):
        for axis, index in enumerate(item.fields):
            units[index] = math.lcm(units.get(index, 1), item.warp_tile[axis] * item.wave[axis])
    if config.pipeline == FEW_ROWS:  # the second product steps by a whole block, of which waves have parts
        units[1] = math.lcm(units[1], units.pop(4, 1))
    heads = (7, 8) if _is_gradient(config) else (3,)
    tile = tuple(
        size if index in heads else padded(size, units.get(index, 1)) for index, size in enumerate(config.tile)
    )
    reason = "waves times their warp tiles divide m0, n0 and k0, and m0, n1 and k1"
    yield from must_be("warp_divides_tile", config, "tile", tile, reason)
    for index in heads:
        if config.tile[index] % units[index]:
            reason = f"{units[index]} columns of all waves do not divide heads of {config.tile[index]}"
            counts = [count for count in (4, 2, 1) if count < config.waves]
            fitting = (config.replace(wave=_waves(config, count)) for count in counts)
            other = next((item for item in fitting if _heads_divide(item, heads)), None)
            fix = {"wave": other.wave} if other else {}
            yield Violation("warp_divides_tile", "wave", config.wave, reason, fix)
            return


def _heads_divide(config: FmhaConfig, heads: tuple[int, ...]) -> bool:
    return all(
        config.tile[index] % (item.warp_tile[axis] * item.wave[axis]) == 0
        for item in products_of(config)
        for axis, index in enumerate(item.fields)
        if index in heads
    )


@of_products
def hdim_tile_table(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """m0 and n0 are sizes that the arch lists, k0 is its table's for the heads; the second product has the whole head
    of v; gradients keep whole heads.
    """
    spec = attention_of(arch)
    if spec is None or is_specialised(config):
        return
    tile = list(config.tile)
    if _is_gradient(config):
        # Scores, and what is subtracted from them, are sums over whole heads.
        tile[2], tile[4], tile[7], tile[8] = config.hdim[0], config.hdim[1], *config.hdim
        reason = f"heads of {config.hdim} are not cut"
        yield from must_be("hdim_tile_table", config, "tile", tuple(tile), reason)
        return
    for index, name in enumerate(("m0", "n0")):
        listed = spec.sweep.get(name, ())
        if listed and tile[index] not in listed:
            tile[index] = max((size for size in listed if size <= tile[index]), default=listed[0])
    tile[2] = k0_of(config, arch, tile[1])
    tile[3] = config.hdim[1]
    reason = f"m0 and n0 are sizes that {arch.id} lists, k0 is {tile[2]}, and n1 the whole head of v, {config.hdim[1]}"
    yield from must_be("hdim_tile_table", config, "tile", tuple(tile), reason)


@of_products
def k0_divides_hdim(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Steps along heads of q divide them."""
    q = config.hdim[0]
    if _is_gradient(config) or (config.k0 <= q and q % config.k0 == 0):
        return
    spec = attention_of(arch)
    listed = (spec.sweep.get("k0", ()) if spec else ()) or (16, 32, 64, 128, q)
    step = max((size for size in listed if size <= config.k0 and q % size == 0), default=16)
    reason = f"steps of {config.k0} do not divide heads of {q}"
    yield Violation("k0_divides_hdim", "tile", config.tile, reason, {"tile": replaced(config.tile, 2, step)})


@of_products
def k0max_table(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """How many elements of q are kept follows from its heads."""
    spec = attention_of(arch)
    if _is_gradient(config) or spec is None:
        return
    kept = spec.k0max.get(str(config.hdim[0]), config.hdim[0])
    if config.k0max != kept:
        reason = f"of heads of {config.hdim[0]} elements {kept} are kept"
        yield Violation("k0max_table", "tile", config.tile, reason, {"tile": replaced(config.tile, 5, kept)})


@of_products
def k1_divides_tile(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Steps of the second product divide the columns of a block."""
    if _is_gradient(config) or config.n0 % config.k1 == 0:
        return
    step = config.warp_tile[5]
    while step * 2 <= config.k1 and config.n0 % (step * 2) == 0:
        step *= 2
    reason = f"steps of k1 = {config.k1} do not divide n0 = {config.n0}"
    fix = {"tile": replaced(config.tile, 4, step)} if config.n0 % step == 0 else {}
    yield Violation("k1_divides_tile", "tile", config.tile, reason, fix)


@of_products
def workgroup_threads(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A workgroup has no more threads than the arch allows."""
    threads = threads_of(config, arch)
    if threads > arch.max_threads_per_workgroup:
        count = config.waves
        while (
            count > 1 and threads_of(config.replace(wave=_waves(config, count)), arch) > arch.max_threads_per_workgroup
        ):
            count //= 2
        reason = f"{threads} threads are more than {arch.max_threads_per_workgroup}"
        yield Violation("workgroup_threads", "wave", config.wave, reason, {"wave": _waves(config, count)})


@of_products
def lds_budget(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A workgroup's shared memory fits the arch."""
    if not is_async(config):
        yield from _budget("lds_budget", config, arch, arch.lds_bytes)


@of_products
def lds_budget_async(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The same for pipelines with direct copies, which have several tiles on their way. (The limit is the arch's own;
    where this rule comes from, it was that of one arch.)
    """
    if not is_async(config):
        return
    spec = attention_of(arch)
    limit = min(spec.async_lds_bytes, arch.lds_bytes) if spec else 0
    if limit:
        yield from _budget("lds_budget_async", config, arch, limit)


def _budget(rule: str, config: FmhaConfig, arch: ArchSpec, limit: int) -> Iterator[Violation]:
    need = shared_bytes(config, arch)
    if need <= limit:
        return
    fix = _other_cut(config, arch, lambda item: shared_bytes(item, arch) <= limit)
    if not fix and is_async(config):
        fix = {"pipeline": "qr"} if config.family is Family.FWD else {}
    reason = f"the tile needs {need} bytes of shared memory, and {limit} may be used"
    yield Violation(rule, "tile", config.tile, reason, fix)


def _other_cut(config: FmhaConfig, arch: ArchSpec, fits: Callable[[FmhaConfig], bool]) -> dict[str, Any]:
    """The first of the arch's tiles, with as few other waves and warp tiles as may be, that ``fits``."""
    spec = attention_of(arch)
    own = tuple(config.warp_tile[:3])
    warps = [own, *(item for item in (spec.warp_tiles.get(config.dtype.value, ()) if spec else ()) if item != own)]
    counts = [config.waves, *(item for item in (spec.waves if spec else ()) if item != config.waves)]
    rows = forms_of(config, arch).get("async_m0" if is_async(config) else "m0", ())
    tiles = [tile for tile in (config.tile, *tiles_for(config, arch)) if not rows or tile[0] in rows]
    for warp, tile in itertools.product(warps, tiles):
        third = warp if _is_gradient(config) else (16, 16, 16)
        plain = config.replace(tile=tile, warp_tile=(*warp, *warp, *third))
        waves = gradient_waves(plain, arch) if _is_gradient(config) else (_waves(config, count) for count in counts)
        for other in (plain.replace(wave=wave) for wave in waves):
            if fits(other) and not any(True for _ in warp_divides_tile(other, arch)):
                fields = ("tile", "wave", "warp_tile")
                return {name: getattr(other, name) for name in fields if getattr(config, name) != getattr(other, name)}
    return {}


@of_products
def accumulators_fit_registers(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Results of products fit into a thread's registers."""
    if is_specialised(config):
        return
    need, have = registers_estimate(config, arch), arch.registers_per_thread(threads_of(config, arch))
    if need <= have:
        return
    fix = _other_cut(
        config, arch, lambda item: registers_estimate(item, arch) <= arch.registers_per_thread(threads_of(item, arch))
    )
    reason = f"a thread would need about {need} registers and has {have}"
    yield Violation("accumulators_fit_registers", "tile", config.tile, reason, fix)


def cuda_padding(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CUDA: kernels handle every size; there is none without."""
    if arch.kind != "cuda":
        return
    for name in ("pad_s", "pad_sk", "pad_d", "pad_dv"):
        yield from must_be("cuda_padding", config, name, True, "kernels of CUDA devices handle every size")


GPU_RULES = (
    softmax_rows, wave_table, warp_tile_table, hdim_tile_table, k0_divides_hdim, k0max_table,
    warp_divides_tile, k1_divides_tile, workgroup_threads, cuda_padding, lds_budget, lds_budget_async,
    accumulators_fit_registers,
)  # fmt: skip
