"""GPU kernels of convolutions, generated and planned as for a device, run on the CPU: what a plan says is what a kernel
reads. ``tests/native/test_conv_gpu.py`` tests the kernels themselves.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from conv_cases import FIRST, LAST, SMALL, Case
from conv_emulated import ConvEmulated
from conv_runner import draw
from conv_truth import CONVS, planned, require_right
from sampling import partly

import tilewright_arch
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.strided_copy.operation import TransformOperation
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

COPY = TransformOperation()
FWD, DATA, WEIGHT = Direction
of = TensorDesc.of
EVEN = Case(2, 16, 24, 1, (9, 7), (3, 3), padding=(1, 1, 1, 1), name="even")
GROUPS = Case(2, 32, 32, 4, (6, 9), (3, 3), stride=(2, 1), padding=(1, 1, 1, 1), name="groups")
DEPTHWISE = Case(2, 16, 16, 16, (9, 8), (3, 3), padding=(1, 1, 1, 1), name="depthwise")
STRIDED = Case(1, 16, 16, 16, (9, 8), (3, 3), stride=(2, 2), padding=(1, 0, 1, 1), name="depthwise-strided")


@pytest.fixture(scope="module")
def hopper() -> DeviceInfo:
    # A CPU has no copy engine, and kernels that want one are executed on GPUs alone.
    arch = dataclasses.replace(tilewright_arch.load("sm_90a"), bulk_copy=None)
    return DeviceInfo("cuda:0", "cuda", "imagined", arch, 4, 1 << 34)


@pytest.fixture(scope="module")
def emulated(kernel_folder: Path) -> ConvEmulated:
    return ConvEmulated(kernel_folder)


def check(
    emulated: ConvEmulated, device: DeviceInfo, request: OperationRequest, config: ConvConfig | None = None
) -> None:
    item = planned(request, device, config)
    inputs = item.draw(1)
    memory = emulated.run(item.plan, inputs, device)
    require_right(item, inputs, memory[item.output].view)


SELECTED = partly(
    itertools.product(Direction, (EVEN, GROUPS, DEPTHWISE, STRIDED, SMALL[0], SMALL[3], SMALL[10]), (LAST, FIRST)),
    lambda case: {case[:2], case[1:], (case[0], case[2])},
)


@pytest.fixture(scope="module")
def selected(emulated: ConvEmulated, hopper: DeviceInfo) -> None:
    """What every run has is built together."""
    usual = [item.values for item in SELECTED if not item.marks]
    requests = [case.request(direction, "fp16", order) for direction, case, order in usual]
    emulated.prepare([planned(request, hopper).plan for request in requests], hopper)


@pytest.mark.parametrize(("direction", "case", "order"), SELECTED, ids=str)
def test_what_is_selected_is_right(
    emulated: ConvEmulated, selected: None, hopper: DeviceInfo, direction: Direction, case: Case, order: Order
) -> None:
    check(emulated, hopper, case.request(direction, "fp16", order))


@pytest.mark.parametrize("case", [EVEN, GROUPS, DEPTHWISE, STRIDED], ids=str)
@pytest.mark.parametrize("direction", Direction, ids=str)
@pytest.mark.some(4)
@pytest.mark.extended
def test_one_kernel_of_every_kind_is_right(
    emulated: ConvEmulated, hopper: DeviceInfo, direction: Direction, case: Case
) -> None:
    request = case.request(direction, "bf16")
    operation = CONVS[request.operation]
    kinds: dict[object, ConvConfig] = {}
    for config in operation.candidates(operation.parse(request), hopper):
        merged = (config.num_groups_to_merge > 1, config.epilogue)
        kinds.setdefault((config.kind, config.pipeline, config.split_k > 1, *merged), config)
    assert kinds
    emulated.prepare([planned(request, hopper, config).plan for config in kinds.values()], hopper)
    for config in kinds.values():
        check(emulated, hopper, request, config)


@pytest.mark.parametrize("direction", [DATA, WEIGHT], ids=str)
@pytest.mark.extended
def test_gradients_are_added_to_what_is_there(emulated: ConvEmulated, hopper: DeviceInfo, direction: Direction) -> None:
    name = "dx" if direction is DATA else "dw"

    def request(case: Case, order: Order) -> OperationRequest:
        old = case.tensor(name, "fp16", order)
        return case.request(
            direction, "fp16", order, more={"acc": old}, outputs={name: old}, accumulate=True, alpha=0.5
        )

    requests = [request(*each) for each in itertools.product((EVEN, GROUPS, DEPTHWISE), (LAST, FIRST))]
    emulated.prepare([planned(request, hopper).plan for request in requests], hopper)
    for each in requests:
        check(emulated, hopper, each)


@pytest.mark.extended
def test_slices_of_pixels_are_added(emulated: ConvEmulated, hopper: DeviceInfo) -> None:
    for case in (EVEN, GROUPS, DEPTHWISE):
        check(emulated, hopper, case.request(WEIGHT, "fp16", split_k=3, out_dtype="fp32"))


PAIRS = [("fp32", "bf16"), ("bf16", "bf16"), ("fp16", "fp32"), ("int32", "int32"), ("int8", "int8"), ("fp8", "fp8")]


@pytest.mark.parametrize(("source", "target"), [*PAIRS, ("fp32", "fp32")])
@pytest.mark.some(3)
def test_copies_arrive_between_any_two_orders(
    emulated: ConvEmulated, hopper: DeviceInfo, source: str, target: str
) -> None:
    rng = np.random.default_rng(5)
    for shape, wide in [((2, 5, 7), (2, 8, 7)), ((2, 33, 4, 9), (2, 33, 4, 9)), ((1, 40, 2, 3, 37), (2, 40, 2, 3, 38))]:
        for start, goal in itertools.product((LAST, FIRST), repeat=2):
            x, out = of(source, shape, strides_in(start, shape)), of(target, wide, strides_in(goal, wide))
            problem = COPY.parse(OperationRequest("conv_transform", {"x": x}, {"out": out}))
            plan = COPY.plan(problem, COPY.candidates(problem, hopper)[0], hopper)
            values = draw(rng, x)
            expected = np.zeros(wide)
            expected[tuple(map(slice, shape))] = values.astype(out.dtype.numpy).astype(np.float64)
            result = emulated.run(plan, {"x": values}, hopper)["out"].view
            assert np.array_equal(result.astype(np.float64), expected)
