"""Every kind of GEMM kernel, on every level this machine runs, against float64 (int8: exactly), between guard pages.

Sizes, leading dimensions, batches and values are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest
from grouping import wanted
from native_case import UNARY, Call, Sizes
from native_harness import LEVELS, Config, GemmArgs, Library, Runtime
from sampling import fields_of, partly, usual

ODD = (1, 2, 3, 5, 7, 13, 17, 31, 63, 65, 127, 129, 257)

# (a, b, c, dot depth)
TYPES = [
    ("fp32", "fp32", "fp32", 1),
    ("fp16", "fp16", "fp16", 1),
    ("bf16", "bf16", "bf16", 1),
    ("bf16", "bf16", "fp32", 2),
    ("fp8", "fp8", "fp16", 1),
    ("fp8", "bf8", "bf16", 2),
    ("bf8", "fp8", "fp32", 2),
    ("int8", "int8", "int32", 1),
    ("int8", "int8", "int32", 2),
    ("int8", "int8", "int32", 4),
]
LAYOUTS = list(itertools.product((False, True), repeat=2))


def typed(index: int) -> Config:
    a, b, c, depth = TYPES[index % len(TYPES)]
    return Config(a=a, b=b, c=c, warp_tile=(6, 16, depth), tile=(48, 96, 64) if index % 2 else (96, 48, 64))


def by_type_and_layout() -> dict[str, Config]:
    """Every type with every layout, the pipelines and schedulers taking turns so that each meets each type."""
    ways = [
        {"pipeline": "compv3"},
        {"pipeline": "compv1"},
        {"pipeline": "mem"},
        {"pipeline": "compv3", "scheduler": "interwave"},
        {"pipeline": "preshufflev2", "preshuffle": True},
    ]
    configs = {}
    for t in range(len(TYPES)):
        for w, way in enumerate(ways):
            a_col, b_col = LAYOUTS[(t + w) % 4]
            config = typed(t + w * len(TYPES)).replace(a_col=a_col, b_col=b_col, persistent=(t + w) % 3 != 0, **way)
            configs[f"{config.a}_{config.b}_{config.c}_x{config.warp_tile[2]}_{way['pipeline']}_{len(configs)}"] = (
                config
            )
    for a_col, b_col in LAYOUTS:  # every layout with every pipeline, once; streaming also with A as the big operand
        for way in [*ways, {"pipeline": "mem", "tile": (96, 48, 64)}]:
            config = (
                typed(1)
                .replace(a="fp32", b="fp32", c="fp32", warp_tile=(6, 16, 1), wave=(2, 1))
                .replace(a_col=a_col, b_col=b_col, **way)
            )
            configs[f"layout_{'cr'[not a_col]}{'cr'[not b_col]}_{way['pipeline']}_{len(configs)}"] = config
    return configs


PRODUCTS = by_type_and_layout()

TILES = {
    f"{mr}x{nr}x{depth}": Config(a=a, b=a, c=c, warp_tile=(mr, nr, depth), tile=(64, 64, 128))
    for (mr, nr), (a, c, depth) in itertools.product(
        ((14, 32), (12, 32), (8, 48), (1, 64), (4, 16)), (("fp32", "fp32", 1), ("int8", "int32", 4))
    )
}

EPILOGUES = {
    **{f"unary_{u}": Config(unary=u, bias="fp32", c="fp32", d=("fp32",), binary="Add") for u in UNARY},
    "bias_bf16": Config(a="bf16", b="bf16", c="bf16", bias="bf16", warp_tile=(6, 16, 2)),
    "multiply": Config(d=("fp16",), binary="Multiply"),
    "multi_d_add": Config(a="fp16", b="fp16", c="fp16", d=("fp16", "fp32", "bf16"), binary="MultiDAdd"),
    "multi_d_multiply": Config(d=("fp32", "bf16"), binary="MultiDMultiply", pipeline="compv1"),
    "int8_scaled": Config(
        a="int8", b="int8", c="bf16", scale_a="row", scale_b="column", bias="fp32", warp_tile=(6, 16, 4), unary="Silu"
    ),
    "int8_tensor_scales": Config(
        a="int8", b="int8", c="fp32", scale_a="tensor", scale_b="tensor", warp_tile=(6, 16, 2)
    ),
    "int8_streamed": Config(a="int8", b="int8", c="bf16", scale_a="row", pipeline="mem", warp_tile=(6, 16, 4)),
    "fp8_scaled": Config(a="fp8", b="fp8", c="bf16", scale_a="tensor", scale_b="column", warp_tile=(6, 16, 2)),
    "int32_biased": Config(a="int8", b="int8", c="int32", bias="int32", warp_tile=(6, 16, 4)),
    "streamed": Config(c="bf16", bias="fp32", d=("fp16",), binary="Add", unary="Relu", pipeline="mem", b_col=False),
}

EXACT_TILES = {
    "no_padding": Config(pad=(False, False, False), warp_tile=(6, 16, 1)),
    "no_padding_bf16": Config(a="bf16", b="bf16", c="bf16", pad=(False, False, False), warp_tile=(4, 32, 2)),
}


def shown(name: str) -> set[Hashable]:
    """What every run has of the products: each value of each field, each type with both layouts of A and of B, each
    layout in each pipeline."""
    config = PRODUCTS[name]
    types = (config.a, config.b, config.c, config.warp_tile)
    schedule = (config.pipeline, config.scheduler, config.preshuffle)
    fields = fields_of(config).items()
    layout = (config.a_col, config.b_col)
    return {*fields, (types, "a", config.a_col), (types, "b", config.b_col), (layout, schedule)}


ORDERED = partly(PRODUCTS, shown)
COMMON = usual(ORDERED)
"""The products of ``make test-all``."""
MARKS = {item.values[0]: item.marks for item in ORDERED}
PRODUCTS = {name: PRODUCTS[name] for name in (*COMMON, *PRODUCTS)}  # what is run together is compiled together

# The highest level gets everything. The lower ones share all code above core/vector.hpp and cpu/blocks/dot.hpp: a
# sample of each type will do.
GROUPS = {"product": PRODUCTS, "tile": TILES, "epilogue": EPILOGUES, "exact": EXACT_TILES}
LOWER = {"product": slice(0, 24, 2), "tile": slice(0, 0), "epilogue": slice(9, 20, 3), "exact": slice(0, 0)}


def chosen(level: str, group: str) -> list[str]:
    names = list(GROUPS[group])
    return names if level == "v4_dot" else names[LOWER[group]]


def each(group: str) -> pytest.MarkDecorator:
    """Every configuration of a group that is built for a level, on that level."""
    cases = [
        pytest.param(level, name, marks=MARKS[name] if group == "product" else ())
        for level in LEVELS
        for name in chosen(level, group)
    ]
    return pytest.mark.parametrize(("level", "name"), cases, indirect=["level"])


@pytest.fixture(scope="module")
def library(build_folder: Path, level: str, request: pytest.FixtureRequest) -> Library:
    every = [GROUPS[group][name] for group in GROUPS for name in chosen(level, group)]
    first = [config for group in GROUPS.values() for config in wanted(request, group)]
    return Library(build_folder, every, level, first=first)


def common(library: Library) -> list[Config]:
    """A library's kernels, but for the products that ``make test-all`` has not: those that other tests of the run have,
    if there are any. So both parts of ``make test-all`` together have all."""
    rest = {config for name, config in PRODUCTS.items() if name not in COMMON}
    found = [config for config in library.names if config not in rest]
    return [config for config in found if config in library.first] or found


def products(library: Library) -> list[Config]:
    every = {*PRODUCTS.values()}
    return [config for config in common(library) if config in every]


def sizes(rng: np.random.Generator, **fixed: int) -> Sizes:
    m, n, k = (int(x) for x in rng.choice(ODD, 3))
    pads = {name: int(rng.integers(0, 4)) for name in ("pad_a", "pad_b", "pad_c")}
    values = {"m": m, "n": n, "k": k, "batch": int(rng.integers(1, 4)), **pads, **fixed}
    return Sizes(**values, broadcast_a=bool(rng.integers(0, 2)), broadcast_b=bool(rng.integers(0, 2)))


def run(library: Library, runtime: Runtime, call: Call, team: int | None = None) -> None:
    call.launch(library, runtime, team)
    call.check()


@each("product")
def test_products_are_right_at_odd_sizes(
    library: Library, runtime: Runtime, name: str, rng: np.random.Generator
) -> None:
    config = PRODUCTS[name]
    for at_end in (True, False, True, False):
        run(library, runtime, Call(config, [sizes(rng)], rng, alpha=float(rng.choice([1.0, 0.5])), at_end=at_end))


@each("product")
def test_split_k_adds_up_and_never_varies(
    library: Library, runtime: Runtime, name: str, rng: np.random.Generator
) -> None:
    config = PRODUCTS[name]
    call = Call(
        config, [sizes(rng, k=257), sizes(rng, k=int(rng.choice(ODD)))], rng, alpha=0.5, split_k=int(rng.integers(2, 6))
    )
    call.launch(library, runtime)
    call.check()
    first = [view["c"].tobytes() for view in call.views]
    if not config.preshuffle:
        call.launch(library, runtime, 1)
        assert [view["c"].tobytes() for view in call.views] == first


@each("product")
def test_groups_of_different_sizes_in_one_launch(
    library: Library, runtime: Runtime, name: str, rng: np.random.Generator
) -> None:
    config = PRODUCTS[name]
    run(library, runtime, Call(config, [sizes(rng) for _ in range(int(rng.integers(2, 6)))], rng))


@each("product")
def test_empty_dimensions_are_no_trouble(
    library: Library, runtime: Runtime, name: str, rng: np.random.Generator
) -> None:
    config = PRODUCTS[name]
    table = [sizes(rng, m=0), sizes(rng, n=0), sizes(rng, k=0, m=17, n=19), sizes(rng, batch=0), sizes(rng)]
    run(library, runtime, Call(config, table, rng))
    run(library, runtime, Call(config, [Sizes(9, 33, 0)], rng))


@each("tile")
def test_every_register_tile_is_right(library: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    config = TILES[name]
    for _ in range(4):
        run(library, runtime, Call(config, [sizes(rng)], rng))


D_LAYOUTS = ("full", "row", "column", "scalar", "transposed", "row_batch")
EPILOGUE_CASES = [
    (level, name, layout)
    for level in LEVELS
    for name in chosen(level, "epilogue")
    for layout in (D_LAYOUTS if EPILOGUES[name].d else D_LAYOUTS[:1])
]


@pytest.mark.parametrize(("level", "name", "d_layout"), EPILOGUE_CASES, indirect=["level"])
@pytest.mark.some(48)
def test_epilogues_match_float64(
    library: Library, runtime: Runtime, name: str, d_layout: str, rng: np.random.Generator
) -> None:
    config, split = EPILOGUES[name], int(rng.choice([1, 3]))
    run(library, runtime, Call(config, [sizes(rng)], rng, alpha=0.25, d_layout=d_layout, split_k=split))
    run(library, runtime, Call(config, [sizes(rng, k=0)], rng, alpha=0.25, d_layout=d_layout))


@each("exact")
def test_unpadded_kernels_are_right_at_multiples_of_their_tile(
    library: Library, runtime: Runtime, name: str, rng: np.random.Generator
) -> None:
    config = EXACT_TILES[name]
    mr, nr, vk = config.warp_tile
    m, n, k = (int(rng.integers(1, 9)) * unit for unit in (mr, nr, vk * 16))
    run(library, runtime, Call(config, [Sizes(m, n, k, batch=2)], rng))


@pytest.mark.extended
def test_nan_and_infinity_propagate_and_stay_in_their_place(
    library: Library, runtime: Runtime, rng: np.random.Generator
) -> None:
    for config in (
        c
        for c in map(PRODUCTS.__getitem__, COMMON)
        if c.a not in ("int8", "fp8") and c.b != "fp8" and c in library.names
    ):
        call = Call(config, [Sizes(19, 35, 33)], rng)
        view = call.views[0]
        view["a"][0, 3, 5] = np.nan
        view["b"][0, 7, 11] = np.inf
        call.launch(library, runtime)
        got = view["c"][0].astype(np.float64)
        with np.errstate(invalid="ignore"):  # NumPy warns of the very NaN that is wanted
            want = view["a"][0].astype(np.float64) @ view["b"][0].astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(want)), config
        assert np.array_equal(np.isinf(got), np.isinf(want)), config


@pytest.mark.some(1)
def test_larger_products_cross_every_block_boundary(
    library: Library, runtime: Runtime, rng: np.random.Generator
) -> None:
    for config in products(library)[::3]:
        run(library, runtime, Call(config, [Sizes(301, 293, 331)], rng))


def test_a_team_of_another_size_computes_the_same(library: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    config = next(config for config in products(library) if config.team == 2)
    call = Call(config, [sizes(rng)], rng)
    run(library, runtime, call, team=1)
    wide = runtime.open(5)
    try:
        call.launch(library, runtime, team=5, pool=wide)
        call.check()
    finally:
        runtime.lib.tw_pool_close(wide)


def packed_bytes(extent: int, k: int, r: int, depth: int, with_sums: bool) -> int:
    panels, groups = -(-extent // r), -(-k // depth)
    return -(-(panels * r * 4 * (groups + with_sums)) // 64) * 64


@pytest.mark.extended
def test_packed_b_has_the_documented_size(library: Library) -> None:
    for config in common(library):
        _, nr, depth = config.warp_tile
        for n, k in itertools.product((1, 17, 96, 257), (0, 1, 33, 256)):
            size = library.entry(config, "_packed_b")(ctypes.c_int64(n), ctypes.c_int64(k))
            assert size == packed_bytes(n, k, nr, depth, depth == 4)


def documented_workspace(config: Config, call: Call) -> int:
    """The formula of cpu/blocks/blocking.hpp, written down once more."""
    (tile_m, tile_n, tile_k), (mr, nr, depth) = config.tile, config.warp_tile

    def up(value: int, unit: int) -> int:
        return -(-value // unit) * unit

    shares_b, block = tile_n >= tile_m, -(-tile_k // depth)
    plain = (
        config.unary == "PassThrough"
        and not config.bias
        and not config.d
        and config.scale_a == config.scale_b == "none"
    )
    in_c = plain and config.c == config.accumulator
    shared = slabs = sums = tiles = member = partials = 0
    for s in call.sizes:
        partials += s.batch * call.split_k * s.m * s.n if call.split_k > 1 else 0
        k = s.k if call.split_k <= 1 else up(-(-s.k // call.split_k), tile_k)
        groups = -(-k // depth)
        if config.pipeline == "mem":
            member = max(member, 8 * 4 * up(groups, 16) + 8 * 4 * 512)
            continue
        if config.pipeline == "compv1":
            member = max(member, packed_bytes(s.m, k, mr, depth, False) + packed_bytes(nr, k, nr, depth, depth == 4))
            continue
        r, slab_r = (nr, mr) if shares_b else (mr, nr)
        extent, slab_extent = (s.n, s.m) if shares_b else (s.m, s.n)
        fitting = max((16 << 20) // (4 * max(groups, 1)) // r, 1) * r
        length = min(up(extent, r), max(tile_n if shares_b else tile_m, r) // r * r, fitting)
        slab = min(up(slab_extent, slab_r), up(tile_m if shares_b else tile_n, slab_r))
        if not (shares_b and config.preshuffle):
            shared = max(shared, packed_bytes(length, k, r, depth, shares_b and depth == 4))
        packed_slab = not shares_b and config.preshuffle
        slabs = max(slabs, 0 if packed_slab else up(slab * min(groups, block) * 4, 64))
        sums = max(sums, up(slab * 4, 64) if not shares_b and depth == 4 and not packed_slab else 0)
        tiles = max(tiles, up(slab * length * 4, 64) if not in_c and groups > block else 0)
    intrawave = config.scheduler == "intrawave"
    copies = (2 if config.team > 1 else 1) if intrawave else config.team
    return up(partials * 4, 64) + copies * shared + config.team * (slabs + sums + tiles + member)


def test_the_workspace_has_the_documented_size(library: Library, rng: np.random.Generator) -> None:
    for config in common(library):
        for split in (1, 3):
            call = Call(config, [sizes(rng), sizes(rng)], rng, split_k=split)
            size = library.entry(config, "_workspace")(ctypes.byref(call.args))
            assert size == documented_workspace(config, call), (config, call.sizes, split)


def test_no_problems_is_no_work(library: Library, runtime: Runtime) -> None:
    for config in common(library)[:6]:
        runtime.launch(library.entry(config), GemmArgs(None, 0, None, 0, 1), config.team)
