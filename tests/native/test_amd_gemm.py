"""Whole GEMM kernels for AMD GPUs, executed in the project's emulator, against float64 (int8: exactly).

Every matrix atom is run, on one arch of each kind of wave at least; the marker ``exhaustive`` has those of every arch
spec. Operands end where allocations end; LDS, registers, outputs and workspace begin poisoned; the emulator refuses
races and reads of what has not arrived. Sizes and values are drawn anew in every run; the seed is shown when a test
fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from amd_cases import ALL, ARCHS, COMMON, EPILOGUES, GROUPED, PRODUCTS, drop_subnormals, shown
from amd_config import missing_tools
from grouping import wanted
from native_case import DTYPES, UNARY, Array, Call, Sizes
from sampling import covering, partly

from tilewright_emulator import Checks

if TYPE_CHECKING:
    from amd_emulation import AmdKernels

SIZES = (1, 3, 8, 17, 31, 40, 64, 65)


@pytest.fixture(scope="module")
def kernels(build_folder: Path, request: pytest.FixtureRequest) -> AmdKernels:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")
    from amd_emulation import AmdKernels

    return AmdKernels(build_folder, ALL, wanted(request, PRODUCTS | GROUPED | EPILOGUES))


def sizes(rng: np.random.Generator, **fixed: int) -> Sizes:
    m, n, k = (int(x) for x in rng.choice(SIZES, 3))
    n = n if m * n >= 24 else 31  # the norm of fewer results may be of numbers that cancelled
    pads = {name: int(rng.integers(0, 4)) * int(rng.choice([1, 8])) for name in ("pad_a", "pad_b", "pad_c")}
    return Sizes(**{"m": m, "n": n, "k": k, "batch": int(rng.integers(1, 3)), **pads, **fixed})


def run(kernels: AmdKernels, call: Call, order: int = 0, waves: int = 0) -> None:
    """``order``: of all workgroups, see ``Checks``; 0: few of them, as they are numbered. ``waves``: the order of
    waves; with one, memory is weak."""
    drop_subnormals(call)
    checks = Checks(order=order, waves=waves, weak=bool(waves))
    grid = int(call.rng.integers(1, 4)) if not order or call.config.persistent else 0
    kernels.launch(call, grid=grid, checks=checks)
    call.check()


LOOPS = {
    [*PRODUCTS][place]
    for place in covering(
        [*PRODUCTS.values()],
        lambda c: {
            (c.arch, c.pipeline),
            (c.arch, "split", c.split_k > 1),
            (c.pipeline, c.epilogue),
            (c.a, c.wave_size),
        },
    )
}
"""Products that show every main loop on every arch, with slices of k and without."""


@pytest.mark.parametrize("waves", [1, -1, "drawn"])
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name in LOOPS])
@pytest.mark.some(2)
def test_waves_may_come_in_any_order_and_see_stores_late(
    kernels: AmdKernels, name: str, waves: int | str, rng: np.random.Generator
) -> None:
    config = PRODUCTS[name]
    seed = int(rng.integers(2, 1000)) if isinstance(waves, str) else waves
    m, n, k = config.tile
    split = {"split_k": 3} if config.split_k > 1 else {}
    call = Call(config, [Sizes(m + 3, n - 1, (5 if split else 2) * k + 3)], rng, **split)
    run(kernels, call, 1 + int(rng.integers(1000)), seed)


@pytest.mark.parametrize("name", partly(PRODUCTS, lambda name: shown(PRODUCTS[name])))
@pytest.mark.extended
def test_products_are_right(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    config = PRODUCTS[name]
    run(kernels, Call(config, [sizes(rng)], rng, alpha=0.5, at_end=bool(rng.integers(0, 2))))
    m, n, k = config.tile  # every address aligned; whole steps along k, and a rest
    run(kernels, Call(config, [Sizes(m + 8, n, 3 * k + 16)], rng))


@pytest.mark.parametrize("name", [name for name, config in COMMON.items() if config.split_k > 1])
@pytest.mark.some(4)
@pytest.mark.extended
def test_split_k_adds_up_and_never_varies_in_any_order(
    kernels: AmdKernels, name: str, rng: np.random.Generator
) -> None:
    config = PRODUCTS[name]
    call = Call(config, [Sizes(config.tile[0], config.tile[1] - 1, 5 * config.tile[2] + 3)], rng, split_k=3)
    run(kernels, call)
    first = call.views[0]["c"].tobytes()
    for order in (-1, 1 + int(rng.integers(1000))):
        run(kernels, call, order)
        assert call.views[0]["c"].tobytes() == first


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.some(3)
@pytest.mark.extended
def test_groups_of_different_sizes_in_one_launch(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    config = GROUPED[name]
    split = int(rng.integers(1, config.split_k + 1))
    table = [sizes(rng), sizes(rng, m=0), sizes(rng, k=0), sizes(rng)]
    run(kernels, Call(config, table, rng, split_k=split))


@pytest.mark.extended
def test_no_steps_along_k_give_the_epilogue_of_zero(kernels: AmdKernels, rng: np.random.Generator) -> None:
    for config in list(COMMON.values())[::4]:
        run(kernels, Call(config, [sizes(rng, k=0)], rng))


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.some(4)
def test_epilogues_match_float64(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    config = EPILOGUES[name]
    layouts = ("full", "row", "column", "scalar", "transposed", "row_batch")
    for layout in (layouts if name.startswith("mu") else layouts[:1]) if config.d else layouts[:1]:
        run(kernels, Call(config, [sizes(rng)], rng, alpha=0.25, d_layout=layout))
    run(kernels, Call(config, [Sizes(32, 64, 64)], rng, alpha=0.25))


@pytest.mark.parametrize("arch", ARCHS)
def test_nan_and_infinity_stay_in_their_place(kernels: AmdKernels, arch: str, rng: np.random.Generator) -> None:
    plain = [c for c in COMMON.values() if c.arch == arch and c.a in ("fp32", "fp16", "bf16")]
    for config in plain[::2]:
        call = Call(config, [Sizes(19, 35, 33)], rng)
        view = call.views[0]
        view["a"][0, 3, 5] = np.nan
        view["b"][0, 7, 11] = np.inf
        kernels.launch(call, grid=2)
        got = view["c"][0].astype(np.float64)
        with np.errstate(invalid="ignore"):  # NumPy warns of the very NaN that is wanted
            want = view["a"][0].astype(np.float64) @ view["b"][0].astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(want)), config
        assert np.array_equal(np.isinf(got), np.isinf(want)), config


SMALL_FLOATS = {name: config for name, config in COMMON.items() if config.a in ("fp8", "bf8") and config.c == "fp32"}


def set_bits(view: Array, codes: Array) -> None:
    view.view(np.uint8)[...] = codes


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_code_of_an_8_bit_float_is_its_value(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    """OCP codes, whatever the matrix unit takes: -0, subnormals and the largest values too."""
    config = SMALL_FLOATS[name]
    call = Call(config, [Sizes(256, 8, 16)], rng)
    view = call.views[0]
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[np.isfinite(codes.view(DTYPES[config.a]).astype(np.float32))]
    set_bits(view["a"], np.zeros((1, 256, 16), np.uint8))
    set_bits(view["a"][0, : codes.size, 3], codes)
    one = np.array(1, DTYPES[config.b]).view(np.uint8)
    set_bits(view["b"], np.full((1, 16, 8), one))
    kernels.launch(call, grid=2)
    got = view["c"][0, : codes.size]
    want = codes.view(DTYPES[config.a]).astype(np.float32)
    np.testing.assert_array_equal(got, np.repeat(want[:, None], 8, axis=1))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_nan_of_8_bit_floats_is_nan(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    """On gfx942, whose 8-bit floats have no infinity, an infinity is a NaN."""
    config = SMALL_FLOATS[name]
    call = Call(config, [Sizes(8, 16, 16)], rng)
    view = call.views[0]
    view["a"][0, 2, 1] = np.nan
    if config.b == "bf8":
        view["b"][0, 3, 4] = np.inf
    kernels.launch(call, grid=2)
    with np.errstate(invalid="ignore"):
        want = view["a"][0].astype(np.float64) @ view["b"][0].astype(np.float64)
    if config.arch == "gfx942":
        want[np.isinf(want)] = np.nan
    got = view["c"][0].astype(np.float64)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.array_equal(np.isinf(got), np.isinf(want))


@pytest.mark.parametrize("name", [f"unary_{name}" for name in UNARY])
@pytest.mark.some(4)
def test_nan_passes_through_every_unary_step(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    call = Call(EPILOGUES[name], [Sizes(5, 7, 3)], rng)
    call.views[0]["a"][0, 2, 1] = np.nan
    kernels.launch(call)
    got = call.views[0]["c"][0]
    assert np.all(np.isnan(got[2])) and np.all(np.isfinite(got[[0, 1, 3, 4]]))
