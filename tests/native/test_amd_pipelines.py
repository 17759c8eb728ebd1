"""The main loops of the AMD kernels: every pipeline on every arch that has it, executed in the emulator; where tiles
lie in LDS, and what meets there; the schedule of the kernel that is to be fast.

Bank conflicts are counted twice: here, by the groups of lanes that the headers state, from the layouts alone; and by
the emulator, in whole main loops.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Hashable, Iterator
from pathlib import Path

import numpy as np
import pytest
from amd_cases import ARCHS, LAYOUTS, drop_subnormals
from amd_config import WAVE, AmdConfig, compile_kernels
from gpu_emulation import FLAGS
from grouping import wanted
from native_case import DTYPES, Call, Sizes
from native_harness import Guarded, build_once
from sampling import partly

import tilewright_arch
from tilewright_emulator.code.compiler import MISSING, WITHOUT_OBJDUMP, compiler, have_objdump
from tilewright_kit.contract.abilities import Product
from tilewright_kit.tiles.work_share import tile_share
from tilewright_kit.types.dtypes import DType
from tilewright_tools.analysis.roofline import Problem as BoundProblem
from tilewright_tools.analysis.roofline import analyze, bound_of

PIPELINES = ("compv3", "compv4", "mem", "comp_async", "preshufflev2")


def configs() -> Iterator[tuple[str, AmdConfig]]:
    """Every pipeline with every layout it is for, on every arch; types, schedulers and stages take turns."""
    for arch, pipeline in itertools.product(ARCHS, PIPELINES):
        if pipeline not in tilewright_arch.load(arch).pipelines and (pipeline, arch) != ("comp_async", "gfx942"):
            continue
        for n, (a_col, b_col) in enumerate(LAYOUTS if pipeline != "preshufflev2" else ((False, True),) * 3):
            packed = pipeline == "preshufflev2"
            dtype = ("fp16", "int8", "bf16", "fp16")[n]
            small = n == 2 and arch.startswith("gfx9")
            warp_tile = (16, 16, 16) if not arch.startswith("gfx9") or small else (32, 32, 16 if dtype == "int8" else 8)
            if small and dtype == "int8":
                warp_tile = (16, 16, 32)
            yield (
                f"{arch}_{pipeline}_{dtype}_{'rc'[a_col]}{'rc'[b_col]}",
                AmdConfig(
                    arch=arch,
                    wave_size=WAVE[arch],
                    a=dtype,
                    b=dtype,
                    c={"int8": "int32"}.get(dtype, dtype),
                    a_col=a_col,
                    b_col=b_col,
                    tile=(
                        *((64, 128), (128, 64), (64, 64), (32, 128))[n],
                        128 // DTYPES[dtype].itemsize if packed or n % 2 else 32,
                    ),
                    wave=((2, 2), (4, 1), (2, 2), (1, 4))[n],
                    warp_tile=warp_tile,
                    pipeline=pipeline,
                    scheduler="interwave" if pipeline == "mem" and n % 2 else "intrawave",
                    stages=(2, 3)[n % 2] if pipeline == "mem" else 2,
                    epilogue="default",
                    split_k=2 if packed and n == 1 else 1,
                ),
            )


CONFIGS = dict(configs())


def shown(name: str) -> set[Hashable]:
    """What every run has: each pipeline on each arch, each type and layout in each pipeline and on each arch."""
    config = CONFIGS[name]
    operands = (config.a, config.a_col, config.b_col)
    schedule = (config.pipeline, config.scheduler, config.stages, config.split_k)
    return {(config.arch, config.pipeline), (config.pipeline, operands), (config.arch, operands), schedule}


LOOPS = partly(CONFIGS, shown)
FAST = AmdConfig(
    arch="gfx942", wave_size=64, tile=(224, 256, 32), wave=(1, 4), warp_tile=(32, 32, 8), a_col=False, b_col=True,
    pipeline="compv4", epilogue="cshuffle",
)  # fmt: skip

# Where fragments are read when they are due: registers have no room for two slices of them.
CROWDED = {
    f"{pipeline}_{tile[0]}x{tile[1]}x{tile[2]}": AmdConfig(
        arch="gfx950", wave_size=64, a="fp8", b="fp8", c="bf16", a_col=False, b_col=pipeline == "comp_async",
        tile=tile, wave=wave, warp_tile=(32, 32, 64), pipeline=pipeline, epilogue="default",
    )
    for pipeline, tile, wave in (
        ("comp_async", (256, 256, 64), (4, 4)), ("comp_async", (256, 256, 128), (4, 4)),
        ("compv3", (256, 224, 128), (4, 1)), ("compv4", (256, 224, 128), (4, 1)),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels(build_folder: Path, request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    if compiler(build_folder) is None:
        pytest.skip(f"needs {MISSING}")
    from amd_emulation import AmdKernels

    every = {**CROWDED, **CONFIGS}
    return AmdKernels(build_folder, [FAST, *every.values()], wanted(request, every))


def packed_b(config: AmdConfig, b: np.ndarray) -> tuple[np.ndarray, int]:  # type: ignore[type-arg]
    """``packed_index`` of packed_amd.hpp: the packed form of one item's B (k x n), and its leading dimension."""
    size, columns = DTYPES[config.b].itemsize, config.warp_tile[1]
    k, n = b.shape
    stride = -(-k * size // 128) * (128 // size) * columns
    values = 16 // size
    packed = np.zeros(-(-n // columns) * stride, b.dtype)
    i, j = np.indices((k, n))
    packed[j // columns * stride + i // values * (columns * values) + j % columns * values + i % values] = b
    return packed, stride


def pack(call: Call) -> None:
    """Replaces B of every problem by its packed form, in memory of its own."""
    config = call.config
    assert isinstance(config, AmdConfig)
    for args, view in zip(call.table, call.views, strict=True):
        items = [packed_b(config, item) for item in view["b"]]
        args.ldb, args.stride_b = items[0][1], items[0][0].size
        everything = np.concatenate([packed for packed, _ in items])
        memory = Guarded(everything.nbytes, 16)
        memory.array(np.dtype(np.uint8), everything.nbytes)[:] = everything.view(np.uint8)
        args.b = memory.address
        call.keep.append(memory)


def run(kernels, call: Call, **kwargs):  # type: ignore[no-untyped-def]
    config = call.config
    assert isinstance(config, AmdConfig)
    drop_subnormals(call)
    if config.pipeline == "preshufflev2":
        pack(call)
    report = kernels.launch(call, **kwargs)
    call.check()
    return report


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.extended
def test_whole_steps_meet_no_bank_twice(kernels, name: str, rng: np.random.Generator) -> None:  # type: ignore[no-untyped-def]
    """Aligned operands, whole tiles and steps: all accesses of LDS are the main loop's."""
    from amd_emulation import Checks

    config = CONFIGS[name]
    m, n, k = config.tile
    report = run(kernels, Call(config, [Sizes(m, n, 4 * k)], rng), checks=Checks(traffic=True))
    assert report.traffic.lds_accesses > 0 and report.by_class["matrix"] > 0
    assert report.traffic.lds_conflicts == 0


@pytest.mark.parametrize("name", LOOPS)
def test_any_size_and_alignment(kernels, name: str, rng: np.random.Generator) -> None:  # type: ignore[no-untyped-def]
    config = CONFIGS[name]
    m, n, k = config.tile
    whole = int(rng.integers(1, 4)) * k  # a fast loop of so many steps
    pads = {"pad_a": -whole % 16, "pad_b": 16}
    if config.a_col or not config.b_col:
        pads = {"pad_a": 16, "pad_b": 16}
    ragged = Sizes(int(rng.integers(1, 8)) * 16 + 16, int(rng.integers(1, 8)) * 16, whole + 16, batch=2, **pads)
    odd = Sizes(
        *(int(x) for x in rng.integers(1, 150, 3)), pad_a=int(rng.integers(0, 9)), pad_b=int(rng.integers(0, 9))
    )
    for sizes in (ragged, odd, Sizes(m + 1, n - 1, k), Sizes(3, 5, 0), Sizes(1, 1, 1)):
        run(kernels, Call(config, [sizes], rng, at_end=bool(rng.integers(0, 2)), split_k=config.split_k))


def test_the_fast_kernel_is_right(kernels, rng: np.random.Generator) -> None:  # type: ignore[no-untyped-def]
    """With an odd number of warp tiles, and more lines than whole rounds of its threads."""
    run(kernels, Call(FAST, [Sizes(230, 256, 104)], rng))


@pytest.mark.parametrize("name", CROWDED)
@pytest.mark.extended
def test_crowded_kernels_are_right(kernels, name: str, rng: np.random.Generator) -> None:  # type: ignore[no-untyped-def]
    config = CROWDED[name]
    m, n, k = config.tile
    run(kernels, Call(config, [Sizes(m - 3, n, 3 * k + 16)], rng))


# ---- the layout of tiles ----

TILES = [  # element, k contiguous in memory, lines, depth
    *itertools.product(("fp16",), (True, False), (64, 224), (32, 64, 128)),
    *itertools.product(("int8",), (True, False), (128,), (64, 128)),
    *itertools.product(("fp32",), (True, False), (128,), (32,)),
]
LAYOUT_TEXT = """
#include "tilewright/gpu/amd/layout.hpp"
using namespace tw::gpu;
#define API extern "C" __attribute__((visibility("default")))
#define TILE(NAME, E, K, LINES, DEPTH, BANKS) API void NAME(int* out) { \\
    using Tile = LdsTile<tw::E, K, LINES, DEPTH, BANKS>; \\
    for (int l = 0; l < LINES; l++) for (int c = 0; c < Tile::chunks; c++) *out++ = (int)Tile::offset(l, c); }
"""
NAMES = {
    f"{e}_{'k' if k else 'mn'}_{lines}x{depth}_{banks}": (e, k, lines, depth, banks)
    for (e, k, lines, depth), banks in itertools.product(TILES, (32, 64))
}


@pytest.fixture(scope="module")
def layouts(build_folder: Path) -> ctypes.CDLL:
    text = LAYOUT_TEXT
    for name, (e, k, lines, depth, banks) in NAMES.items():
        text += f"TILE({name}, {e}, {str(k).lower()}, {lines}, {depth}, {banks})\n"
    return ctypes.CDLL(str(build_once(build_folder, text, FLAGS)))


def offsets(layouts: ctypes.CDLL, name: str) -> np.ndarray:  # type: ignore[type-arg]
    e, _, lines, depth, _ = NAMES[name]
    chunks = depth * DTYPES[e].itemsize // 16
    out = (ctypes.c_int * (lines * chunks))()
    getattr(layouts, name)(out)
    return np.array(out).reshape(lines, chunks)


def write_groups(banks: int) -> list[list[int]]:
    """Lanes of a wave of 64 whose 16 bytes are written, or read in order, together."""
    return [list(range(first, first + banks // 4)) for first in range(0, 64, banks // 4)]


def read_groups(banks: int) -> list[list[int]]:
    """Lanes of a wave of 64 whose ds_read_b128 are served together: see layout_amd.hpp."""
    if banks == 64:
        half = [[*range(4), *range(12, 16), *range(20, 28)], [*range(4, 12), *range(16, 20), *range(28, 32)]]
    else:
        half = [
            [*range(first, first + 4), *range(second, second + 4)]
            for first, second in ((0, 20), (4, 16), (8, 28), (12, 24))
        ]
    return half + [[lane + 32 for lane in group] for group in half]


def ways(addresses: np.ndarray, groups: list[list[int]], banks: int) -> int:  # type: ignore[type-arg]
    """The most chunks that one group asks of the same banks."""
    units = banks // 4
    return max(int(np.bincount(np.unique(addresses[group]) // 16 % units).max()) for group in groups)


@pytest.mark.parametrize("name", NAMES)
def test_every_chunk_has_a_place_of_its_own(layouts: ctypes.CDLL, name: str) -> None:
    places = offsets(layouts, name)
    assert sorted(places.ravel().tolist()) == list(range(0, places.size * 16, 16))


@pytest.mark.parametrize("name", NAMES)
def test_fragments_are_read_without_conflicts(layouts: ctypes.CDLL, name: str) -> None:
    """32 or 16 lines, at two or four neighbouring chunks."""
    at, banks = offsets(layouts, name), NAMES[name][4]
    lanes = np.arange(64)
    for lines in (32, 16):
        chunks = 64 // lines
        for first, chunk in itertools.product(
            range(0, at.shape[0], lines), range(0, at.shape[1] // chunks * chunks, chunks)
        ):
            addresses = at[first + lanes % lines, chunk + lanes // lines]
            for groups in (read_groups(banks), write_groups(banks)):
                assert ways(addresses, groups, banks) == 1, (lines, first, chunk)


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_written_without_conflicts(layouts: ctypes.CDLL, name: str) -> None:
    """Whole lines; of transposed blocks one chunk of every 4th, 8th or 16th line."""
    at, (_, k_major, lines, _, banks) = offsets(layouts, name), NAMES[name]
    units = banks // 4
    if k_major:
        for first in range(0, at.size - 63, 64):
            assert ways(at.ravel()[first : first + 64], write_groups(banks), banks) == 1
        return
    for step, chunk in itertools.product((4, 8, 16), range(at.shape[1])):
        for first in range(0, lines - step * (units - 1), step * units):
            for line in range(first, first + step):
                assert ways(at[line + step * np.arange(units), chunk], [list(range(units))], banks) == 1


# ---- the schedule ----


@pytest.mark.skipif(not have_objdump(), reason=WITHOUT_OBJDUMP)
@pytest.mark.extended
def test_the_fast_kernel_keeps_the_matrix_units_busy(kernels, build_folder: Path) -> None:  # type: ignore[no-untyped-def]
    """304 tiles of 4096 x 4096, one for every compute unit, and a main loop that the matrix unit limits."""
    del kernels  # its fixture skips without tools
    built = compile_kernels(build_folder, {"fast": FAST})
    found = built.resources("fast")
    threads, shared = built.facts("fast")
    assert found.vgprs <= 512 and found.scratch_bytes == 0 and found.vgpr_spills == 0 and shared <= 65536
    spec = tilewright_arch.load("gfx942")
    analysis = analyze(built.path.read_bytes(), spec, waves=threads // 64, lds_bytes=shared, name="fast")
    assert analysis.matrix_share > 0.95, analysis.cycles
    tiles = -(-4096 // 224) * 16
    size = 4096 * 4096 * 2
    product = Product(4096, 4096, 4096, 1, DType.FP16, DType.FP16, 2 * size, size)
    problem = BoundProblem(product, tile_share(product, FAST.tile), tiles)
    assert tiles == 304 and bound_of(analysis, problem).share_of_peak > 0.85
