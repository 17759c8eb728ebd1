"""Hopper's specialised kernels of gradients: what they take, what plans hand them, that all compile as declared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.config.gradients import GRADIENT_HEADS, gradient_algorithm
from tilewright_fmha.footprint.gpu import shared_bytes
from tilewright_fmha.footprint.tile_products import threads_of
from tilewright_fmha.pipelines.candidates import fmha_candidates, fmha_mismatches, predict_fmha
from tilewright_fmha.pipelines.kernel_sets import KERNEL_SETS
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.backward import parse_backward
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import ATTENTION_BACKWARD, BiasKind, Family, FmhaDType, MaskKind, Mode, Scheduling
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import TensorMap
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain

ARCH = tilewright_arch.load("sm_90a")
DEVICE = DeviceInfo("cuda:0", "cuda", "one of them", ARCH, 132, 140 << 30)
FEATURES: tuple[dict[str, Any], ...] = (
    {"deterministic": True},
    {"mask": MaskKind.CAUSAL},
    {"mask": MaskKind.WINDOW, "deterministic": True, "dtype": FmhaDType.FP16, "learned_sinks": True},
)


def described(
    q: tuple[int, ...] = (2, 8, 700, 128),
    k: tuple[int, ...] = (2, 2, 900, 128),
    dtype: str = "bf16",
    strides: dict[str, tuple[int, ...]] | None = None,
    more: dict[str, TensorDesc] | None = None,
    **attributes: Any,
) -> FmhaProblem:
    shapes = {"do": q, "q": q, "k": k, "v": k, "o": q}
    found = {name: TensorDesc.of(dtype, shape, (strides or {}).get(name)) for name, shape in shapes.items()}
    found["lse"] = TensorDesc.of("fp32", q[:3])
    return parse_backward(OperationRequest(ATTENTION_BACKWARD, found | (more or {}), {}, attributes))


def best(problem: FmhaProblem) -> FmhaConfig:
    return min(fmha_candidates(problem, DEVICE), key=lambda item: predict_fmha(problem, item, DEVICE).seconds)


def specialised(problem: FmhaProblem) -> FmhaConfig:
    return next(item for item in fmha_candidates(problem, DEVICE) if item.pipeline == "ws")


def cut(hdim: tuple[int, int] = (128, 128), **fields: Any) -> FmhaConfig:
    given = {"dtype": FmhaDType.BF16, "hdim": hdim, **gradient_algorithm(hdim), **fields}
    return config_of(Family.DQ_DK_DV)(**given)


@pytest.mark.parametrize("hdim", GRADIENT_HEADS, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=lambda item: "-".join(item))
@pytest.mark.some(2)
@pytest.mark.extended
def test_every_kernel_compiles_and_is_what_the_planner_says(
    features: dict[str, Any], hdim: tuple[int, int], tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: extra cuda")
    config = cut(hdim, **features)
    assert not RULES.check(config, ARCH)
    source = generate(config, ARCH)
    kind = "tw::sm90::FmhaBackwardPlan<Config>"
    wanted = {"shared_bytes": shared_bytes(config, ARCH), "threads": threads_of(config, ARCH)}
    asserts = "".join(f'static_assert({kind}::{name} == {size}, "{name}");\n' for name, size in wanted.items())
    toolchain = NvrtcToolchain([include_dir()])
    try:
        toolchain.compile(replace(source, text=source.text + asserts), tmp_path, ARCH)
    finally:
        toolchain.close()


@pytest.mark.parametrize("heads", [40, 64, 96, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"mask": "bottom_right"}, {"window_left": 999, "window_right": 3}, {"deterministic": False}],
    ids=lambda item: "-".join(item) or "plain",
)
def test_the_planner_takes_them_for_16_bits_and_masks(heads: int, options: dict[str, Any]) -> None:
    for dtype in ("bf16", "fp16"):
        found = best(described((2, 16, 2048, heads), (2, 4, 2048, heads), dtype, **options))
        assert found.pipeline == "ws" and found.hdim == ((64, 64) if heads <= 64 else (128, 128))


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("copy_strides", {"strides": {"do": (8 * 700 * 132, 700 * 132, 132, 1)}}),
        ("copy_strides", {"strides": {"k": (2 * 900 * 132, 900 * 132, 132, 1)}}),
        ("alignment", {"alignment": 4}),
        ("positive_scale", {"scale": -0.5}),
        ("lengths", {"more": {"seqlens_k": TensorDesc.of("int32", (2,))}}),
        ("empty_keys", {"k": (2, 2, 0, 128)}),
        ("empty_queries", {"q": (2, 8, 0, 128)}),
    ],
)
def test_problems_beyond_them_have_portable_kernels(rule: str, change: dict[str, Any]) -> None:
    config, problem = specialised(described()), described(**change)
    assert rule in {found.rule for found in fmha_mismatches(problem, config, DEVICE)}
    found = fmha_candidates(problem, DEVICE)
    assert found and all(item.pipeline == "bwd" for item in found)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dtype": FmhaDType.FP32}, "dtype_template"),
        ({"mode": Mode.GROUP}, "template_exists"),
        ({"bias": BiasKind.ALIBI}, "template_exists"),
        ({"softcap": True}, "template_exists"),
        ({"dropout": True}, "template_exists"),
        ({"mask": MaskKind.WINDOW, "sink": True}, "template_exists"),
        ({"hdim": (96, 96)}, "ws_form"),
        ({"tile": (128, 128, 64, 128, 64, 128, 128, 64, 64), "hdim": (64, 64)}, "ws_form"),
        ({"wave": (1, 3, 1, 3, 1, 1, 1, 3, 1)}, "ws_form"),
        ({"scheduler": Scheduling.PINGPONG}, "ws_form"),
    ],
    ids=lambda item: "-".join(item) if isinstance(item, dict) else item,
)
def test_what_none_of_them_does_is_refused_and_mended(change: dict[str, Any], rule: str) -> None:
    config = cut(deterministic=True).replace(**change)
    assert rule in {found.rule for found in RULES.check(config, ARCH)}
    assert not RULES.check(RULES.correct(config, ARCH).config, ARCH)


def test_the_default_set_has_every_cut() -> None:
    found = [item for item in KERNEL_SETS[ATTENTION_BACKWARD]["default"].expand(ARCH, RULES) if item.pipeline == "ws"]
    assert {(item.hdim, item.deterministic) for item in found} == {(h, d) for h in GRADIENT_HEADS for d in (0, 1)}
    assert {item.mask for item in found} == set(MaskKind) and {item.dtype.value for item in found} == {"bf16", "fp16"}


def test_plans_hand_on_maps_of_what_products_read() -> None:
    problem = described()
    dot, products, convert = plan_fmha(problem, specialised(problem), DEVICE).stages
    maps = [item for item in products.args.fields if isinstance(item, TensorMap)]
    assert [item.operand for item in maps] == ["q", "k", "v", "do"]
    assert [item.box for item in maps] == [(64, rows, 1, 1) for rows in (64, 128, 128, 64)]
    assert maps[3].sizes == (128, 700, 8, 2) and maps[2].sizes == (128, 900, 2, 2)
    assert products.geometry.dependent and products.geometry.block == (384, 1, 1)
    assert dot.args == convert.args == products.args.fields[4]


@pytest.mark.parametrize("fixed", [False, True], ids=["any", "fixed"])
def test_a_fixed_order_takes_a_counter_for_each_block_of_queries_and_no_more_sums(fixed: bool) -> None:
    problem = described(deterministic=fixed)
    plan = plan_fmha(problem, specialised(problem), DEVICE)
    assert plan.stages[1].geometry.grid == (2 * 2 * 8, 1, 1)
    assert plan.counter_bytes == (64 + 4 * 2 * 8 * 11 if fixed else 0)
    sums = 2 * 8 * 700 * 4 * (128 + 1)
    assert sums <= plan.workspace_bytes < sums + 1024
