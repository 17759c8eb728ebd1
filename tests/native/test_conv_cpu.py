"""Convolution kernels for CPUs on every level this machine runs, against float64 (int8: exactly), between guard pages.

Shapes and values are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conv_native_case import ConvCall, ConvConfig, Shape
from grouping import wanted
from native_harness import LEVELS, Library, Runtime

# (a, b, c, dot depth)
TYPES = [
    ("fp32", "fp32", "fp32", 1),
    ("fp16", "fp16", "fp16", 1),
    ("bf16", "bf16", "bf16", 1),
    ("bf16", "bf16", "fp32", 2),
    ("fp8", "bf8", "bf16", 2),
    ("bf8", "fp8", "fp16", 1),
    ("int8", "int8", "int32", 4),
    ("int8", "int8", "int32", 2),
]


def typed(index: int, **changes: object) -> ConvConfig:
    a, b, c, depth = TYPES[index % len(TYPES)]
    config = ConvConfig(a=a, b=b, c=c, warp_tile=(6, 16, depth), tile=(24, 48, 32))
    return config.replace(**changes)  # type: ignore[return-value]


def implicit() -> dict[str, ConvConfig]:
    configs = {}
    for t, (a, _, _, depth) in enumerate(TYPES):
        configs[f"forward_{a}_x{depth}"] = typed(t)
        if a in ("fp32", "bf16", "fp16"):
            backward = typed(t, direction="backward_data", b_col=False, linear_rows=False)
            configs[f"backward_{a}_x{depth}"] = backward.replace(accumulate=t % 2 == 0)  # type: ignore[assignment]
    for t in (0, 3, 6):
        first = {"channels_first": True, "b_col": False}
        configs[f"forward_first_{TYPES[t][0]}"] = typed(t, **first)
        if t < 6:
            configs[f"backward_first_{TYPES[t][0]}"] = typed(t, **first, direction="backward_data", a_col=True)
    return configs


IMPLICIT = implicit()
SCALED = {"scale_b": "column", "bias": "fp32"}
OTHERS = {
    "split": typed(0, split_k=3, bias="fp32"),
    "split_mapped": typed(3, split_k=2, direction="backward_data", b_col=False, linear_rows=False, accumulate=True),
    "wide": typed(0, warp_tile=(6, 64, 1), tile=(64, 128, 64)),
    "shares_a": typed(3, tile=(96, 48, 32), warp_tile=(12, 32, 2), c="bf16"),
    "epilogue": typed(0, bias="fp32", d=("fp32", "fp16"), binary="MultiDAdd", unary="Relu"),
    "epilogue_bf16": typed(3, c="bf16", bias="bf16", d=("bf16",), binary="Multiply", unary="HardSwish"),
    "epilogue_first": typed(0, channels_first=True, b_col=False, bias="fp32", d=("fp32",), binary="Add", unary="Clamp"),
    "int8_scaled": typed(6, c="bf16", unary="Silu", **SCALED),
    "int8_first": typed(6, c="fp32", channels_first=True, b_col=False, scale_a="row", bias="fp32"),
    "fp8_scaled": typed(4, scale_b="tensor"),
    "backward_biased": typed(0, direction="backward_data", b_col=False, linear_rows=False, bias="fp32", unary="Relu"),
    "interwave": typed(0, scheduler="interwave", persistent=False),
}


def without_product(kind: str, **changes: object) -> ConvConfig:
    plain = ConvConfig(pipeline="direct", scheduler="default_", tile=(1, 1, 1), warp_tile=(1, 1, 1), wave=(2, 1))
    return plain.replace(kind=kind, **changes)  # type: ignore[return-value]


def depthwise() -> dict[str, ConvConfig]:
    configs = {}
    for first in (False, True):
        order = "first" if first else "last"
        for a, b, c, _ in (TYPES[0], TYPES[2], TYPES[5], TYPES[6]):
            configs[f"{order}_{a}"] = without_product("depthwise", a=a, b=b, c=c, channels_first=first)
        backward = without_product("depthwise", direction="backward_data", channels_first=first)
        configs[f"{order}_backward"] = backward
        configs[f"{order}_accumulate"] = backward.replace(accumulate=True, a="fp16", b="fp16", c="fp16")  # type: ignore[assignment]
        configs[f"{order}_epilogue"] = without_product(
            "depthwise", a="int8", b="int8", c="bf16", channels_first=first, bias="fp32", d=("fp32",), binary="Add",
            unary="HardSwish", scale_a="row" if first else "none", scale_b="none" if first else "column",
        )  # fmt: skip
    return configs


def direct() -> dict[str, ConvConfig]:
    configs = {}
    for a, b, c, depth in TYPES[:7]:
        configs[f"forward_{a}_{c}_{depth}"] = without_product("direct", a=a, b=b, c=c)
    backward = without_product("direct", direction="backward_data", b_col=False)
    configs["backward"] = backward
    configs["accumulate"] = backward.replace(accumulate=True, a="bf16", b="bf16", c="fp32")  # type: ignore[assignment]
    configs["epilogue"] = without_product("direct", bias="fp32", d=("fp32", "bf16"), binary="MultiDAdd", unary="Relu")
    configs["int8"] = without_product("direct", a="int8", b="int8", c="bf16", bias="fp32", scale_b="column")
    return configs


DEPTHWISE, DIRECT = depthwise(), direct()
GROUPS = {"implicit": IMPLICIT, "other": OTHERS, "depthwise": DEPTHWISE, "direct": DIRECT}
HEADERS = {
    "implicit": "conv/implicit_gemm.hpp",
    "other": "conv/implicit_gemm.hpp",
    "depthwise": "conv/depthwise/depthwise.hpp",
    "direct": "conv/direct/conv.hpp",
}
LOWER = {"implicit": slice(0, 30, 5), "other": slice(0, 3, 2), "depthwise": slice(0, 20, 6), "direct": slice(0, 12, 4)}


def chosen(level: str, group: str) -> list[str]:
    names = list(GROUPS[group])
    return names if level == "v4_dot" else names[LOWER[group]]


def each(group: str) -> pytest.MarkDecorator:
    """Every configuration of a group that is built for a level, on that level."""
    cases = [(level, name) for level in LEVELS for name in chosen(level, group)]
    return pytest.mark.parametrize(("level", "name"), cases, indirect=["level"])


@pytest.fixture(scope="module")
def libraries(build_folder: Path, level: str, request: pytest.FixtureRequest) -> dict[str, Library]:
    """One for each header: a unit includes a single one."""
    return {
        group: Library(
            build_folder,
            [GROUPS[group][name] for name in chosen(level, group)],
            level,
            None,
            header,
            wanted(request, GROUPS[group]),
        )
        for group, header in HEADERS.items()
    }


FIXED = [
    Shape(),
    Shape(
        n=1, groups=1, cg=3, kg=20, size=(1, 15, 14), filter=(1, 7, 7), stride=(1, 2, 2), begin=(0, 3, 3), end=(0, 3, 3)
    ),
    Shape(n=1, groups=3, cg=5, kg=7, size=(1, 1, 17), filter=(1, 1, 3), begin=(0, 0, 1), end=(0, 0, 0)),
    Shape(n=3, groups=2, cg=16, kg=17, size=(4, 5, 6), filter=(3, 3, 3), begin=(1, 1, 1), end=(1, 1, 1)),
    Shape(n=2, groups=1, cg=33, kg=40, size=(1, 6, 5), filter=(1, 1, 1), begin=(0, 0, 0), end=(0, 0, 0)),
    Shape(
        n=2, groups=1, cg=6, kg=9, size=(1, 9, 8), filter=(1, 2, 2), stride=(1, 3, 3), begin=(0, 0, 0), end=(0, 0, 0)
    ),
    Shape(n=1, groups=4, cg=1, kg=1, size=(1, 9, 9), filter=(1, 3, 3), stride=(1, 2, 2), end=(0, 0, 2)),
    Shape(n=1, groups=1, cg=4, kg=6, size=(1, 11, 12), filter=(1, 3, 3), dilation=(1, 2, 3), stride=(1, 1, 2)),
    Shape(n=1, groups=1, cg=8, kg=5, size=(1, 3, 3), filter=(1, 3, 3), begin=(0, 0, 0), end=(0, 0, 0)),  # one pixel
    Shape(n=2, groups=40, cg=4, kg=4, size=(1, 4, 5)),
    Shape(n=1, groups=1, cg=70, kg=90, size=(1, 12, 13)),
    Shape(n=0, groups=2, cg=3, kg=4),
]


def drawn(rng: np.random.Generator) -> Shape:
    """A shape that leaves at least one pixel."""
    while True:
        absent = int(rng.integers(0, 3))

        def sizes(low: int, high: int, without: int, absent: int = absent) -> tuple[int, int, int]:
            values = [int(rng.integers(low, high)) if axis >= absent else without for axis in range(3)]
            return values[0], values[1], values[2]

        shape = Shape(
            n=int(rng.integers(1, 4)), groups=int(rng.choice([1, 1, 2, 3])), cg=int(rng.choice([1, 3, 5, 8, 16, 24])),
            kg=int(rng.choice([1, 3, 8, 17, 32])), size=sizes(1, 11, 1), filter=sizes(1, 5, 1), stride=sizes(1, 4, 1),
            dilation=sizes(1, 3, 1), begin=sizes(0, 4, 0), end=sizes(0, 4, 0),
        )  # fmt: skip
        if min(shape.out) > 0:
            return shape


def run(library: Library, runtime: Runtime, call: ConvCall, team: int | None = None) -> None:
    call.launch(library, runtime, team)
    call.check()


def fitting(config: ConvConfig, shape: Shape) -> Shape:
    """Channels-first, backward data takes no stride: its pixels are columns, which lie side by side."""
    plain = config.direction == "backward_data" and config.channels_first
    return dataclasses.replace(shape, stride=(1, 1, 1)) if plain else shape


def options(rng: np.random.Generator) -> dict[str, object]:
    return {
        "alpha": float(rng.choice([1.0, 0.5])), "at_end": bool(rng.integers(0, 2)), "gap": int(rng.integers(0, 4)),
        "filter_order": str(rng.choice(["gkyxc", "gkcyx"])),
    }  # fmt: skip


@each("implicit")
@pytest.mark.some(4)
def test_shapes_of_every_kind(
    libraries: dict[str, Library], runtime: Runtime, name: str, rng: np.random.Generator
) -> None:
    for shape in FIXED:
        run(
            libraries["implicit"],
            runtime,
            ConvCall(IMPLICIT[name], fitting(IMPLICIT[name], shape), rng, **options(rng)),
        )


@each("implicit")
def test_drawn_shapes(libraries: dict[str, Library], runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    for _ in range(8):
        run(
            libraries["implicit"],
            runtime,
            ConvCall(IMPLICIT[name], fitting(IMPLICIT[name], drawn(rng)), rng, **options(rng)),
        )


@each("other")
@pytest.mark.some(6)
@pytest.mark.extended
def test_epilogues_slices_and_tiles(
    libraries: dict[str, Library], runtime: Runtime, name: str, rng: np.random.Generator
) -> None:
    for shape in (*FIXED[:5], FIXED[10], drawn(rng)):
        run(libraries["other"], runtime, ConvCall(OTHERS[name], shape, rng, **options(rng)))


@pytest.mark.extended
def test_other_teams_compute_the_same_bits(
    libraries: dict[str, Library], runtime: Runtime, rng: np.random.Generator
) -> None:
    for group, library in libraries.items():
        for config in GROUPS[group].values():
            if config in library.names and not config.accumulate:
                shape = FIXED[9] if group in ("implicit", "other") else VECTORS[3] if group == "depthwise" else FIXED[6]
                call = ConvCall(config, fitting(config, shape), rng)
                run(library, runtime, call)
                first = call.result.view.tobytes()
                run(library, runtime, call, 1)
                assert call.result.view.tobytes() == first


def single(shape: Shape) -> Shape:
    """With as many groups as it has channels."""
    return dataclasses.replace(shape, groups=shape.groups * shape.cg, cg=1, kg=1)


def vectors(groups: int, size: tuple[int, int, int], **more: object) -> Shape:
    return Shape(n=2, groups=groups, cg=1, kg=1, size=size, **more)  # type: ignore[arg-type]


VECTORS = [
    vectors(48, (1, 9, 17)),
    vectors(49, (1, 8, 16), stride=(1, 2, 2)),
    vectors(70, (1, 7, 7), begin=(0, 2, 0), end=(0, 0, 2)),
    vectors(33, (4, 5, 9), filter=(3, 3, 3), begin=(1, 1, 1), end=(1, 1, 1)),
    vectors(64, (1, 7, 23), filter=(1, 5, 5), begin=(0, 2, 2), end=(0, 2, 2)),
    vectors(32, (1, 9, 15), dilation=(1, 2, 1), begin=(0, 2, 1), end=(0, 2, 1)),
    vectors(40, (1, 9, 15), dilation=(1, 1, 2), stride=(1, 2, 1), begin=(0, 1, 2), end=(0, 1, 2)),
]
"""Depthwise, with whole vectors of channels and tiles of pixels that do not meet an edge."""


@each("depthwise")
@pytest.mark.some(3)
def test_depthwise(libraries: dict[str, Library], runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    large = Shape(n=1, groups=1100, cg=1, kg=1, size=(1, 3, 4))
    long = Shape(n=1, groups=2, cg=1, kg=1, size=(1, 1, 2500), filter=(1, 1, 5), begin=(0, 0, 2), end=(0, 0, 2))
    for shape in (*map(single, FIXED), large, long, *VECTORS, *(single(drawn(rng)) for _ in range(8))):
        run(libraries["depthwise"], runtime, ConvCall(DEPTHWISE[name], shape, rng, **options(rng)))


@each("direct")
@pytest.mark.some(5)
@pytest.mark.extended
def test_few_channels(libraries: dict[str, Library], runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    small = [
        Shape(n=2, groups=8, cg=cg, kg=kg, size=(1, 5, 30), stride=(1, stride, stride))
        for cg, kg, stride in (
            (4, 4, 1),
            (4, 4, 2),
            (8, 8, 1),
            (1, 2, 1),
            (3, 5, 1),
            (16, 16, 1),
            (16, 16, 2),
            (32, 32, 2),
            (2, 1, 2),
            (5, 40, 1),
        )
    ]
    small.append(Shape(n=1, groups=2, cg=16, kg=64, size=(3, 10, 8), filter=(3, 3, 3), stride=(2, 2, 2)))
    first = Shape(n=1, groups=1, cg=3, kg=64, size=(1, 20, 21), filter=(1, 7, 7), stride=(1, 2, 2), end=(0, 3, 3))
    long = Shape(n=1, groups=2, cg=2, kg=3, size=(1, 1, 700), filter=(1, 1, 5), begin=(0, 0, 2), end=(0, 0, 2))
    for shape in (*FIXED, *small, first, long, *(drawn(rng) for _ in range(4))):
        run(libraries["direct"], runtime, ConvCall(DIRECT[name], shape, rng, **options(rng)))
