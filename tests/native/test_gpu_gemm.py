"""Whole portable GPU kernels on the CPU, thread by thread, against float64 (int8: exactly), between guard pages.

The kernels are the ones that NVRTC compiles; only the platform under them differs (tilewright/gpu/host). Sizes, leading
dimensions, batches, values and the order of the workgroups are drawn anew in every run; the seed is shown when a test
fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest
from gpu_config import GpuConfig
from gpu_emulation import Emulator
from grouping import wanted
from native_case import UNARY, Call, Sizes
from sampling import fields_of, partly

SIZES = (1, 2, 3, 5, 8, 13, 16, 31, 33, 63, 64, 65, 96, 100, 129, 130)
TYPES = [
    ("fp16", "fp16", "bf16"),
    ("bf16", "bf16", "fp32"),
    ("fp8", "fp8", "fp16"),
    ("fp8", "bf8", "bf16"),
    ("bf8", "fp8", "fp32"),
    ("bf8", "bf8", "fp16"),
    ("int8", "int8", "int32"),
    ("int8", "int8", "bf16"),
    ("fp32", "fp32", "fp32"),
    ("fp32", "fp32", "fp16"),
]
LAYOUTS = list(itertools.product((False, True), repeat=2))
TILES: tuple[tuple[tuple[int, int, int], tuple[int, int]], ...] = (
    ((64, 64, 32), (2, 2)),
    ((32, 64, 64), (1, 2)),
    ((64, 32, 64), (2, 1)),
    ((16, 128, 32), (1, 4)),
    ((96, 48, 96), (2, 1)),
)


def letters(config: GpuConfig) -> str:
    return f"{config.a}_{config.b}_{config.c}_{'rc'[config.a_col]}{'rc'[config.b_col]}"


def products() -> dict[str, GpuConfig]:
    """Every type with every layout; pipelines, epilogues, tiles, stages and persistence take turns."""
    configs = {}
    for n, ((a, b, c), (a_col, b_col)) in enumerate(itertools.product(TYPES, LAYOUTS)):
        tile, wave = TILES[n % len(TILES)]
        config = GpuConfig(
            a=a,
            b=b,
            c=c,
            a_col=a_col,
            b_col=b_col,
            tile=tile,
            wave=wave,
            pipeline=("compv4", "compv3", "mem")[n // 2 % 3],
            epilogue=("cshuffle", "default")[(n + n // 4) % 2],
            stages=2 + n % 4,
            persistent=n % 3 == 1,
            split_k=4 if n % 2 else 1,
        )
        configs[f"{letters(config)}_{n}"] = config
    for n, (a, layout) in enumerate(itertools.product(("bf16", "fp8", "fp32"), LAYOUTS[1:])):  # the other pipelines
        config = GpuConfig(a=a, b=a, c="fp32", a_col=layout[0], b_col=layout[1], tile=(32, 64, 32), wave=(1, 2))
        config = config.replace(pipeline=("compv3", "compv4")[n % 2], epilogue=("default", "cshuffle")[n // 2 % 2])
        configs[f"{letters(config)}_{config.pipeline}"] = config
    return configs


PRODUCTS = products()


def shown(config: GpuConfig) -> set[Hashable]:
    """What every run has: each value of each field, each type with each layout of A, and with each of B, each layout in
    each pipeline with each epilogue."""
    fields = fields_of(config)
    types, layout = (config.a, config.b, config.c), (config.a_col, config.b_col)
    found: set[Hashable] = {*fields.items(), (types, "a", config.a_col), (types, "b", config.b_col)}
    return found | {(layout, config.pipeline), (layout, config.epilogue), (config.pipeline, config.epilogue)}


ORDERED = partly(PRODUCTS, lambda name: shown(PRODUCTS[name]))

WIDE_WAVES = {  # as AMD's compute GPUs have
    letters(config): config.replace(pipeline="compv3", wave_size=64, epilogue=epilogue, wave=(2, 1), tile=(64, 64, 16))
    for (a_col, b_col), epilogue in zip(LAYOUTS, ("cshuffle", "default") * 2, strict=True)
    for config in [GpuConfig(a="fp32", b="fp32", c="fp32", a_col=a_col, b_col=b_col)]
}

GROUPED = {
    f"{name}_grouped": config.replace(grouped=True, persistent=n % 2 == 0)
    for n, (name, config) in enumerate(itertools.islice(PRODUCTS.items(), 0, None, 5))
}

EPILOGUES = {
    **{
        f"unary_{u}": GpuConfig(unary=u, bias="fp32", c="fp32", d=("fp32",), binary="Add", epilogue=e)
        for u, e in zip(UNARY, itertools.cycle(("cshuffle", "default")))
    },
    "multiply": GpuConfig(d=("fp16",), binary="Multiply"),
    "multi_d_add": GpuConfig(d=("fp16", "fp32", "bf16"), binary="MultiDAdd", epilogue="default"),
    "many_d": GpuConfig(a="fp32", b="fp32", c="fp32", d=("fp16",) * 6, binary="MultiDAdd", tile=(32, 32, 16)),
    "multi_d_multiply": GpuConfig(a="bf16", b="bf16", d=("fp32", "bf16"), binary="MultiDMultiply"),
    "int8_scaled": GpuConfig(
        a="int8", b="int8", c="bf16", scale_a="row", scale_b="column", bias="fp32", unary="Silu", b_col=False
    ),
    "int8_tensor_scales": GpuConfig(
        a="int8", b="int8", c="fp32", scale_a="tensor", scale_b="tensor", epilogue="default", a_col=True, b_col=False
    ),
    "fp8_scaled": GpuConfig(a="fp8", b="fp8", c="bf16", scale_a="tensor", scale_b="column", tile=(64, 48, 32)),
    "fp32_column_run": GpuConfig(a="fp32", b="fp32", c="fp16", bias="bf16", b_col=False, epilogue="default"),
    "fp32_strided": GpuConfig(a="fp32", b="fp32", c="bf16", d=("fp32",), binary="Add", epilogue="default"),
}
D_LAYOUTS = ("full", "row", "column", "scalar", "transposed", "row_batch")


@pytest.fixture(scope="module")
def emulator(build_folder: Path, request: pytest.FixtureRequest) -> Emulator:
    every = {**GROUPED, **EPILOGUES, **WIDE_WAVES, **PRODUCTS}
    return Emulator(build_folder, list(every.values()), wanted(request, every))


def sizes(rng: np.random.Generator, **fixed: int) -> Sizes:
    m, n, k = (int(x) for x in rng.choice(SIZES, 3))
    pads = {name: int(rng.integers(0, 4)) * int(rng.choice([1, 8])) for name in ("pad_a", "pad_b", "pad_c")}
    values = {"m": m, "n": n, "k": k, "batch": int(rng.integers(1, 4)), **pads, **fixed}
    return Sizes(**values, broadcast_a=bool(rng.integers(0, 2)), broadcast_b=bool(rng.integers(0, 2)))


def run(emulator: Emulator, call: Call) -> None:
    emulator.launch(call, grid=int(call.rng.integers(1, 7)), seed=int(call.rng.integers(1, 1 << 30)))
    call.check()


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.some(5)
@pytest.mark.extended
def test_products_are_right_at_odd_sizes(emulator: Emulator, name: str, rng: np.random.Generator) -> None:
    config = PRODUCTS[name]
    for at_end in (True, False):
        run(emulator, Call(config, [sizes(rng)], rng, alpha=float(rng.choice([1.0, 0.5])), at_end=at_end))
    m, n, k = config.tile  # whole tiles, every address aligned
    run(emulator, Call(config, [Sizes(2 * m, n, 3 * k)], rng))
    run(emulator, Call(config, [Sizes(m - 1, n + 8, k + 16, 1, 0, 0, 8)], rng, at_end=False))


@pytest.mark.parametrize("name", WIDE_WAVES)
def test_waves_of_64_lanes_compute_the_same(emulator: Emulator, name: str, rng: np.random.Generator) -> None:
    run(emulator, Call(WIDE_WAVES[name], [sizes(rng)], rng))
    run(emulator, Call(WIDE_WAVES[name], [Sizes(128, 64, 48)], rng))


@pytest.mark.parametrize("name", [item for item in ORDERED if PRODUCTS[item.values[0]].split_k > 1])
def test_split_k_adds_up_and_never_varies(emulator: Emulator, name: str, rng: np.random.Generator) -> None:
    call = Call(PRODUCTS[name], [sizes(rng, k=257)], rng, alpha=0.5, split_k=int(rng.integers(2, 5)))
    results = []
    for _ in range(2):
        run(emulator, call)
        results.append(call.views[0]["c"].tobytes())
    assert results[0] == results[1], "the sum does not depend on who comes last"
    run(emulator, Call(PRODUCTS[name], [sizes(rng, k=0)], rng, split_k=2))


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.some(3)
@pytest.mark.extended
def test_groups_of_different_sizes_in_one_launch(emulator: Emulator, name: str, rng: np.random.Generator) -> None:
    config = GROUPED[name]
    split = int(rng.integers(1, config.split_k + 1))
    table = [sizes(rng) for _ in range(int(rng.integers(2, 6)))]
    run(emulator, Call(config, [*table, sizes(rng, m=0), sizes(rng, n=0), sizes(rng, k=0)], rng, split_k=split))
    run(emulator, Call(config, [sizes(rng, batch=0), sizes(rng)], rng, split_k=split))


def test_a_group_of_many_tasks_finds_each(emulator: Emulator, rng: np.random.Generator) -> None:
    config = next(config for config in GROUPED.values() if not config.persistent)
    for count in (31, 32, 33, 70):
        table = [Sizes(int(rng.integers(0, 40)), int(rng.integers(1, 40)), 3) for _ in range(count)]
        run(emulator, Call(config, [*table, Sizes(5, 5, 5)], rng))


@pytest.mark.parametrize("name", ORDERED)
def test_no_steps_along_k_give_the_epilogue_of_zero(emulator: Emulator, name: str, rng: np.random.Generator) -> None:
    run(emulator, Call(PRODUCTS[name], [sizes(rng, k=0)], rng))


EPILOGUE_CASES = [
    (name, layout)
    for name, config in EPILOGUES.items()
    for layout in (D_LAYOUTS if config.d and not name.startswith("unary") else D_LAYOUTS[:1])
]


@pytest.mark.parametrize(("name", "d_layout"), EPILOGUE_CASES)
@pytest.mark.some(8)
def test_epilogues_match_float64(emulator: Emulator, name: str, d_layout: str, rng: np.random.Generator) -> None:
    config = EPILOGUES[name]
    run(emulator, Call(config, [sizes(rng)], rng, alpha=0.25, d_layout=d_layout))
    run(emulator, Call(config, [sizes(rng, k=0)], rng, alpha=0.25, d_layout=d_layout))
    run(emulator, Call(config, [Sizes(64, 64, 64)], rng, alpha=0.25, d_layout=d_layout))


@pytest.mark.extended
def test_long_sums_of_fp32_are_put_aside_in_parts(emulator: Emulator, rng: np.random.Generator) -> None:
    plain = [config for config in PRODUCTS.values() if (config.a, config.c, config.split_k) == ("fp32", "fp32", 1)]
    # Threads that have many sums have no registers for it.
    kernels = [c for c in plain if c.tile[0] * c.tile[1] <= 32 * 32 * c.wave[0] * c.wave[1]]
    assert kernels
    for config in kernels:
        call = Call(config, [Sizes(24, 40, 4096)], rng)
        emulator.launch(call, grid=2)
        view = call.views[0]
        want = view["a"][0].astype(np.float64) @ view["b"][0].astype(np.float64)
        error = np.linalg.norm(view["c"][0] - want) / np.linalg.norm(want)
        # One sum after the other would be off by 1e-6; parts of 128 and their sum by a third of that.
        assert error < 4e-7, config


@pytest.mark.extended
def test_nan_and_infinity_propagate_and_stay_in_their_place(emulator: Emulator, rng: np.random.Generator) -> None:
    floats = [c for c in PRODUCTS.values() if c.a not in ("int8", "fp8") and c.b != "fp8"]
    for config in floats:
        call = Call(config, [Sizes(19, 35, 33)], rng)
        view = call.views[0]
        view["a"][0, 3, 5] = np.nan
        view["b"][0, 7, 11] = np.inf
        emulator.launch(call, grid=2)
        got = view["c"][0].astype(np.float64)
        with np.errstate(invalid="ignore"):  # NumPy warns of the very NaN that is wanted
            want = view["a"][0].astype(np.float64) @ view["b"][0].astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(want)), config
        assert np.array_equal(np.isinf(got), np.isinf(want)), config


def test_nan_passes_through_every_unary_step(emulator: Emulator, rng: np.random.Generator) -> None:
    for name in UNARY:
        call = Call(EPILOGUES[f"unary_{name}"], [Sizes(5, 7, 3)], rng)
        call.views[0]["a"][0, 2, 1] = np.nan
        emulator.launch(call)
        got = call.views[0]["c"][0]
        assert np.all(np.isnan(got[2])) and np.all(np.isfinite(got[[0, 1, 3, 4]])), name


def test_an_operand_may_be_the_output_itself(emulator: Emulator, rng: np.random.Generator) -> None:
    for name, config in EPILOGUES.items():
        if len(config.d) != 1 or config.d[0] != config.c or not name.startswith("unary_Re"):
            continue
        call = Call(config, [Sizes(70, 77, 33)], rng)
        want, magnitude = call.truth(0)
        args, view = call.table[0], call.views[0]
        view["c"][...] = view["d"][0]
        operand = args.d[0]
        operand.ptr, operand.row_stride, operand.batch_stride = args.c, args.ldc, args.stride_c
        emulator.launch(call, seed=7)
        np.testing.assert_allclose(view["c"].astype(np.float64), want, atol=1e-4 * float(magnitude.max()))
