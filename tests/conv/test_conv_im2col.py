"""Products whose pixels a copy engine gathers: figures are the header's, walks visit the pixels of the product, plans
describe the maps, problems that maps cannot hold are refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest
from conv_requests import backward_data, backward_weight, forward, last
from conv_rule_cases import IM2COL, IM2COL_DATA, IM2COL_WEIGHT
from nvrtc_programs import compiled

import tilewright_arch
from tilewright_grouped_conv.candidates.applicability.tensors import with_signature
from tilewright_grouped_conv.candidates.im2col import COLUMN_SHAPES, ROW_SHAPES
from tilewright_grouped_conv.codegen import generate, header_of
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.config.pipelines import IM2COL as IM2COL_FORM
from tilewright_grouped_conv.footprint.im2col import pixel_walk, walk_axis
from tilewright_grouped_conv.pipelines.candidates import conv_candidates, conv_mismatches
from tilewright_grouped_conv.plan.plan import plan_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, layout_of
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.plan import Stage, Struct, TensorMap, pack
from tilewright_kit.tiles.footprint.workgroup import shared_bytes
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Unary

HOPPER, AMPERE = tilewright_arch.load("sm_90a"), tilewright_arch.load("sm_80")
DEVICE = device_of(HOPPER)


def asked(direction: Direction, *sizes: int, c: int = 64, k: int = 128, n: int = 2, **attributes: Any) -> ConvProblem:
    """A problem of filters of three taps on every axis."""
    given = {"padding": 1, "stride": 1, "groups": 1, **attributes}
    taps = given.pop("taps", 3)
    reach = (taps - 1) * given.get("dilation", 1)
    out = [(size + 2 * given["padding"] - reach - 1) // given["stride"] + 1 for size in sizes]
    x, y = last("fp16", n, c, *sizes), last("fp16", n, k, *out)
    w = last("fp16", k, c // given["groups"], *[taps] * len(sizes))
    if direction is Direction.FORWARD:
        return forward({"x": x, "w": w, "y": y}, **given)
    if direction is Direction.BACKWARD_DATA:
        return backward_data({"dy": y, "w": w, "dx": x}, **given)
    return backward_weight({"dy": y, "x": x, "dw": w}, **given)


def kernel(problem: ConvProblem, **fields: Any) -> ConvConfig:
    """The kernel of a problem with a tile of 128 x 128."""
    base = {Direction.FORWARD: IM2COL, Direction.BACKWARD_DATA: IM2COL_DATA, Direction.BACKWARD_WEIGHT: IM2COL_WEIGHT}
    return with_signature(problem, base[problem.direction].replace(**fields), DEVICE)


def stage_of(problem: ConvProblem, config: ConvConfig) -> Stage:
    (stage,) = plan_conv(problem, config, DEVICE).stages
    return stage


def maps_of(stage: Stage) -> list[TensorMap]:
    task = next(item for item in stage.args.fields if isinstance(item, Struct))
    return [item for item in task.fields if isinstance(item, TensorMap)]


def reasons(problem: ConvProblem, config: ConvConfig) -> list[str]:
    return [f"{item.rule}: {item.reason}" for item in conv_mismatches(problem, config, DEVICE)]


# ---- kernels ----


def kernels() -> dict[str, ConvConfig]:
    """A kernel of every shape, one of every number of axes, and fused ones."""
    found = {}
    for direction in Direction:
        weights = direction is Direction.BACKWARD_WEIGHT
        for shape in COLUMN_SHAPES if weights else ROW_SHAPES:
            fields = shape.fields(DType.BF16, DType.BF16)
            config = CONFIGS[direction](**fields)
            found[config.name] = config
            if weights and RULES.allows(config.replace(split_k=4), HOPPER):
                found[config.name + "_split"] = config.replace(split_k=4)
        for ndim in (1, 3):
            config = CONFIGS[direction](**COLUMN_SHAPES[0].fields(DType.FP16, DType.FP16), ndim=ndim)
            found[f"{config.name}"] = config.replace(layout=layout_of(ndim))
    plain = CONFIGS[Direction.FORWARD](**ROW_SHAPES[0].fields(DType.FP16, DType.FP16))
    found["bias"] = plain.replace(bias="fp32", unary=Unary.RELU)
    found["sum"] = plain.replace(binary=Binary.MULTI_D_ADD, num_d_tensors=1)
    found["wide"] = plain.replace(dtype_out="fp32", vector_sizes=(8, 8, 4))
    found["by_threads"] = plain.replace(epilogue=Epilogue.DEFAULT)
    return found


KERNELS = kernels()


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs the packages of the extra `cuda`")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.some(5)
def test_kernels_compile_without_spills_and_state_the_shared_memory_that_plans_ask_for(name: str) -> None:
    config = KERNELS[name]
    text = generate(config, HOPPER).text
    figures = f"static_assert(tw::sm90::Conv<Config>::Plan::shared_bytes == {shared_bytes(config, HOPPER)});\n"
    log, ptx = compiled(HOPPER, text.replace("TW_CONV_KERNEL(", f"{figures}TW_CONV_KERNEL("))
    assert "0 bytes spill stores" in log and "warning" not in log and "C75" not in log, log
    for instruction in (f"cp.async.bulk.tensor.{config.ndim + 2}d.shared::cluster.global.im2col", "wgmma"):
        assert instruction in ptx, instruction
    assert header_of(config) == "conv.hpp"


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs the packages of the extra `cuda`")
@pytest.mark.parametrize("operands", [0, 1])
def test_plans_pack_the_parameter_that_the_header_declares(operands: int) -> None:
    problem = asked(Direction.FORWARD, 9, 11)
    if operands:
        tensors = {"x": last("fp16", 2, 64, 9, 11), "w": last("fp16", 128, 64, 3, 3)}
        problem = forward(tensors | {"d[0]": last("fp16", 2, 128, 9, 11)}, padding=1, binary="MultiDAdd")
    config = kernel(problem)
    assert config.num_d_tensors == operands
    packed = pack(stage_of(problem, config).args)
    struct = f"sizeof(tw::Sm90ConvParams<Config>) == {packed.root_bytes}"
    text = generate(config, HOPPER).text
    figures = f"static_assert({struct});\n"
    walk = next(
        at
        for at in range(0, packed.root_bytes - 8, 8)
        if _numbers(packed.template, at, 6) == (1, 1, 1, 0, 0, 1)
        and _numbers(packed.template, at + 48, 6) == (9, 3, 1, -1, 0, 1)
    )
    figures += f"static_assert(sizeof(tw::GemmParams<Config>) == {walk});\n"
    compiled(HOPPER, text.replace("TW_CONV_KERNEL(", f"{figures}TW_CONV_KERNEL("))
    assert _numbers(packed.template, walk + 144, 4) == (64, 1, 0, 0)


def _numbers(block: bytes, at: int, count: int) -> tuple[int, ...]:
    return tuple(int.from_bytes(block[at + 8 * i : at + 8 * i + 8], "little", signed=True) for i in range(count))


# ---- walks ----


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("sizes", "attributes"),
    [
        ((17,), {}),
        ((10, 13), {"stride": 1, "dilation": 2, "padding": 2}),
        ((10, 13), {"stride": 3, "padding": 0}),
        ((14, 9), {"stride": 2, "padding": 2}),
        ((5, 6, 7), {"padding": 1}),
        ((8, 8), {"taps": 5, "padding": 1}),
    ],
)
def test_walks_visit_the_pixels_of_the_product(
    direction: Direction, sizes: tuple[int, ...], attributes: dict[str, int]
) -> None:
    for phase in asked(direction, *sizes, **attributes).phases(False):
        ndim = len(sizes)
        walk = pixel_walk(phase, ndim)
        for axis, low, up, step in zip(phase.axes[3 - ndim :][::-1], walk.lower, walk.upper, walk.step, strict=True):
            visited = range(low, axis.size + up, step)
            rows, taps, row_step, origin, first, apart = walk_axis(axis)
            assert len(visited) == rows == axis.rows and row_step == step and origin == low
            for row, tap in itertools.product(range(rows), range(taps)):
                assert first + tap * apart >= 0
                wanted = axis.origin + row * axis.row_step + tap * axis.tap_step
                assert visited[row] + first + tap * apart == wanted


# ---- plans ----


def test_forward_gathers_x_and_reads_weights_by_taps() -> None:
    problem = asked(Direction.FORWARD, 15, 17, c=72)
    x, w, y = maps_of(stage_of(problem, kernel(problem)))
    assert (x.operand, x.sizes, x.strides) == ("x", (72, 17, 15, 2), (144, 144 * 17, 144 * 17 * 15))
    assert x.box == (64, 128) and x.walk is not None and (x.walk.lower, x.walk.upper) == ((-1, -1), (-1, -1))
    assert (w.sizes, w.strides, w.box) == ((72, 128, 9), (9 * 144, 144), (64, 64, 1)) and w.walk is None
    assert (y.sizes, y.strides[0], y.box) == ((128, 2 * 15 * 17, 1), 256, (64, 64, 1))


def test_the_gradient_of_the_image_gathers_dy_and_reads_weights_across() -> None:
    problem = asked(Direction.BACKWARD_DATA, 15, 17, taps=5, padding=1)
    dy, w, dx = maps_of(stage_of(problem, kernel(problem)))
    assert (dy.operand, dx.operand) == ("dy", "dx") and w.box == (64, 64, 1)
    assert dy.walk is not None and (dy.walk.lower, dy.walk.upper) == ((-3, -3), (-1, -1))
    assert dy.sizes == (128, 15, 13, 2) and dx.sizes == (64, 2 * 15 * 17, 1)


@pytest.mark.parametrize(("channels", "items"), [(128, 1), (72, 9)])
def test_taps_of_the_weights_gradient_are_items_unless_channels_fill_lines(channels: int, items: int) -> None:
    problem = asked(Direction.BACKWARD_WEIGHT, 15, 17, c=channels)
    dy, x, dw = maps_of(stage_of(problem, kernel(problem)))
    assert (dy.sizes, dy.box) == ((128, 2 * 15 * 17, 1), (64, 64, 1)) and x.box == (64, 64) and x.walk is not None
    assert dw.sizes == (channels * 9 // items, 128, items) and dw.strides[0] == channels * 9 * 2
    assert items == 1 or dw.strides[1] == channels * 2


def test_slices_have_a_workspace_and_none_is_empty() -> None:
    problem = asked(Direction.BACKWARD_WEIGHT, 15, 17)
    plan = plan_conv(problem, kernel(problem, split_k=200), DEVICE)
    steps = -(-2 * 15 * 17 // 64)
    tiles = -(-64 * 9 // 128)
    assert plan.stages[0].geometry.grid == (min(132, tiles * steps), 1, 1)
    assert plan.workspace_bytes == tiles * steps * 128 * 128 * 4 and plan.counter_bytes == tiles * 4


def test_groups_follow_each_other_in_one_launch() -> None:
    problem = asked(Direction.FORWARD, 8, 8, c=128, k=192, groups=2)
    config = kernel(problem)
    assert reasons(problem, config) == []
    x, w, y = maps_of(stage_of(problem, config))
    assert x.sizes[0] == 128 and w.sizes == (64, 192, 9) and y.sizes == (96, 128, 2) and y.strides == (384, 192)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (asked(Direction.BACKWARD_DATA, 16, 16, stride=2), "one product"),
        (asked(Direction.FORWARD, 40, 40, 40, padding=17), "16 to 15"),
        (asked(Direction.FORWARD, 300, 300, dilation=130, padding=64), "128 to 127"),
        (asked(Direction.FORWARD, 400, 1, taps=1, padding=0, stride=9), "stride is at most 8"),
        (asked(Direction.FORWARD, 8, 8, c=192, k=192, groups=2), "several groups"),
    ],
)
def test_what_maps_cannot_hold_is_refused_and_left_to_portable_kernels(problem: ConvProblem, reason: str) -> None:
    base = IM2COL_DATA if problem.direction is Direction.BACKWARD_DATA else IM2COL
    fitted = base.replace(dtype_in=DType.FP16, ndim=problem.ndim, layout=layout_of(problem.ndim))
    assert any(reason in text for text in reasons(problem, fitted)), reasons(problem, fitted)
    assert not any(IM2COL_FORM.makes(config) for config in conv_candidates(problem, DEVICE))
    assert conv_candidates(problem, DEVICE)


def test_results_whose_rows_are_not_aligned_are_stored_by_threads() -> None:
    problem = asked(Direction.FORWARD, 9, 9, k=68)
    offered = [config for config in conv_candidates(problem, DEVICE) if IM2COL_FORM.makes(config)]
    assert offered and {config.epilogue for config in offered} == {Epilogue.DEFAULT}
    stored = offered[0].replace(epilogue=Epilogue.CSHUFFLE)
    assert [item.rule for item in conv_mismatches(problem, stored, DEVICE)] == ["im2col_store"]
    assert maps_of(stage_of(problem, offered[0]))[2].operand == ""


def test_images_that_share_memory_are_refused() -> None:
    problem = asked(Direction.FORWARD, 9, 9)
    shared = replace(problem, image=replace(problem.image, n=0))
    assert any("share memory" in text for text in reasons(shared, kernel(problem)))


def test_only_hopper_is_offered_them_and_dense_layers_prefer_them() -> None:
    for direction in Direction:
        problem = asked(direction, 64, 64, c=320, k=320)
        assert not any(map(IM2COL_FORM.makes, conv_candidates(problem, device_of(AMPERE))))
        found = conv_candidates(problem, DEVICE)
        assert sum(map(IM2COL_FORM.makes, found)) >= 6 and not IM2COL_FORM.makes(found[-1])
        for config in filter(IM2COL_FORM.makes, found):
            assert RULES.check(config, HOPPER) == ()
