"""Copies that plans make where no kernel takes a tensor as it lies, and the strided copy as an operation of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conv_cases import FIRST, LAST, SMALL, Case
from conv_runner import ConvRunner, draw
from conv_truth import CONVS, check, planned

from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.strided_copy.operation import TransformOperation
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import WORKSPACE, ExecutionPlan, Pointer
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

COPY = TransformOperation()
FWD, DATA, WEIGHT = Direction
of = TensorDesc.of
CASE = Case(2, 10, 14, 2, (9, 7), (3, 3), padding=(1, 1, 1, 1))


def mixed(dtype: str, shape: tuple[int, ...]) -> TensorDesc:
    """Neither channels nor pixels are neighbours: there is a gap between any two elements."""
    return of(dtype, shape, tuple(3 * step for step in strides_in(LAST, shape)))


def copy_plan(device: DeviceInfo, x: TensorDesc, out: TensorDesc) -> ExecutionPlan:
    problem = COPY.parse(OperationRequest("conv_transform", {"x": x}, {"out": out}))
    (config,) = COPY.candidates(problem, device)
    assert not COPY.mismatches(problem, config, device)
    return COPY.plan(problem, config, device)


def copies_of(plan: ExecutionPlan) -> list[str]:
    return [stage.name for stage in plan.stages if stage.config.operation == "conv_transform"]


# ---- stages of plans ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("direction", Direction, ids=str)
def test_tensors_without_any_order_are_copied_and_the_plan_says_which(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction, dtype: str
) -> None:
    request = CASE.request(direction, dtype)
    output = {FWD: "y", DATA: "dx", WEIGHT: "dw"}[direction]
    inputs = {name: desc if name == "w" else mixed(dtype, desc.shape) for name, desc in request.inputs.items()}
    outputs = {output: mixed(dtype, CASE.shapes()[output])}
    item = check(conv_runner, device, OperationRequest(request.operation, inputs, outputs, request.attributes))
    copies = copies_of(item.plan)
    assert copies
    assert len(item.plan.notes) == len(copies)
    for name in copies:
        operand = name.removeprefix("transform_")
        assert any(note.startswith(f"{operand} is copied") for note in item.plan.notes)
    names = [stage.name for stage in item.plan.stages]
    main = names.index("main" if "main" in names else "partial")
    for name in copies:
        assert (names.index(name) > main) == (name == f"transform_{output}")


def test_a_copied_result_is_added_to_what_was_there(conv_runner: ConvRunner, device: DeviceInfo) -> None:
    old = mixed("fp32", CASE.shapes()["dx"])
    for in_place in (False, True):
        request = CASE.request(DATA, "fp32", more={"acc": old}, outputs={"dx": old}, accumulate=True)
        item = check(conv_runner, device, request, in_place=in_place)
        names = [stage.name for stage in item.plan.stages]
        assert names.count("transform_acc") == names.count("transform_dx") == 1


def test_every_order_has_a_kernel_that_needs_no_copy(device: DeviceInfo) -> None:
    """Which is taken is for the model to say: a copy may be worth its time."""
    for case, direction, order in itertools.product((SMALL[2], SMALL[5]), Direction, (LAST, FIRST)):
        if direction is WEIGHT and order is FIRST and case.groups == 1:
            continue
        request = case.request(direction, "fp32", order)
        operation = CONVS[request.operation]
        candidates = operation.candidates(operation.parse(request), device)
        assert any(not copies_of(planned(request, device, config).plan) for config in candidates)


def test_channels_last_images_are_never_copied(device: DeviceInfo) -> None:
    for case, direction in itertools.product(SMALL, Direction):
        assert not copies_of(planned(case.request(direction, "fp32"), device).plan), (case, direction)


def test_channels_first_gradients_of_weights_copy_both_images(conv_runner: ConvRunner, device: DeviceInfo) -> None:
    plan = check(conv_runner, device, SMALL[2].request(WEIGHT, "fp32", FIRST)).plan
    assert {"transform_x", "transform_dy"} <= {stage.name for stage in plan.stages}


def test_copies_lie_apart_in_the_workspace(device: DeviceInfo) -> None:
    request = CASE.request(WEIGHT, "fp32", FIRST, split_k=2)
    plan = planned(request, device).plan
    starts = []
    for stage in plan.stages:
        target = stage.args.fields[1] if stage.config.operation == "conv_transform" else stage.args.fields[2]
        assert isinstance(target, Pointer) and target.operand == WORKSPACE and target.offset % 64 == 0
        starts.append(target.offset)
    # Both stages of the split share their scratch.
    assert len(set(starts)) == len(starts) - 1


def test_candidates_with_copies_stay_candidates(device: DeviceInfo) -> None:
    shape = CASE.shapes()["x"]
    request = CASE.request(FWD, "fp32")
    request = OperationRequest("conv", {**request.inputs, "x": mixed("fp32", shape)}, {}, request.attributes)
    operation = CONVS["conv"]
    assert operation.candidates(operation.parse(request), device)


# ---- the operation ----

SHAPES = [(2, 5, 7), (3, 33, 4, 9), (1, 20, 2, 5, 17), (2, 1, 40, 3), (4, 64, 1, 1)]
PAIRS = [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("fp8", "fp8"), ("int32", "int32")]
CONVERSIONS = [("fp32", "bf16"), ("fp16", "fp32"), ("bf16", "fp16")]


@pytest.mark.parametrize(("source", "target"), PAIRS + CONVERSIONS)
def test_elements_arrive_converted_between_any_two_orders(
    conv_runner: ConvRunner, device: DeviceInfo, source: str, target: str
) -> None:
    rng = np.random.default_rng(5)
    for shape in SHAPES:
        for start, goal in itertools.product((LAST, FIRST), repeat=2):
            x = of(source, shape, strides_in(start, shape))
            out = of(target, shape, strides_in(goal, shape))
            plan = copy_plan(device, x, out)
            values = draw(rng, x)
            for team in (1, 2):
                result = conv_runner.run(plan, {"x": values}, team)["out"].view
                assert np.array_equal(result.astype(np.float64), values.astype(out.dtype.numpy).astype(np.float64))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_what_the_source_lacks_is_zero(conv_runner: ConvRunner, device: DeviceInfo, dtype: str) -> None:
    rng = np.random.default_rng(6)
    for shape, wide in [((2, 3, 9, 5), (2, 8, 9, 5)), ((1, 19, 6), (3, 24, 8)), ((2, 3, 2, 4, 35), (2, 3, 3, 5, 36))]:
        for start, goal in itertools.product((LAST, FIRST), repeat=2):
            x, out = of(dtype, shape, strides_in(start, shape)), of(dtype, wide, strides_in(goal, wide))
            values = draw(rng, x)
            expected = np.zeros(wide)
            expected[tuple(map(slice, shape))] = values.astype(np.float64)
            result = conv_runner.run(copy_plan(device, x, out), {"x": values})["out"].view
            assert np.array_equal(result.astype(np.float64), expected)


def test_gaps_are_neither_read_nor_written(conv_runner: ConvRunner, device: DeviceInfo) -> None:
    rng = np.random.default_rng(7)
    shape = (2, 21, 6, 19)
    for x, out in [
        (mixed("fp32", shape), of("fp32", shape, strides_in(LAST, shape))),
        (of("fp32", shape), mixed("fp32", shape)),
        (of("fp32", shape, (6000, 130, 21, 1)), of("fp32", shape, (7000, 1, 1000, 25))),
    ]:
        values = draw(rng, x)
        result = conv_runner.run(copy_plan(device, x, out), {"x": values})["out"].view
        assert np.array_equal(result, values)


def test_an_empty_copy_has_no_stages(device: DeviceInfo) -> None:
    empty = of("fp32", (0, 3, 4, 5))
    assert not copy_plan(device, empty, empty).stages
