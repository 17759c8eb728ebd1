"""Kernels compiled and run on this machine, compared with the reference: what is planned is what is computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conv_cases import FIRST, LAST, SMALL, Case
from conv_runner import ConvRunner
from conv_truth import CONVS, check, check_all, planned, require_right
from sampling import partly

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.vocabulary import Direction, Specialization
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.numerics.compare import relative_error, unit_roundoff
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

pytestmark = pytest.mark.slow

FWD, DATA, WEIGHT = Direction
GRADIENTS = [DATA, WEIGHT]
FLOATS = ["fp32", "fp16", "bf16"]
PLAIN = Case(2, 10, 14, 2, (9, 7), (3, 3), padding=(1, 1, 1, 1))
of = TensorDesc.of


@pytest.mark.parametrize(
    ("direction", "dtype", "order"),
    partly(
        itertools.product(Direction, FLOATS, (LAST, FIRST)),
        lambda case: {case} if case[1] == "fp32" else {case[:2], case[1:]},
    ),
    ids=str,
)
@pytest.mark.some(4)
@pytest.mark.extended
def test_every_direction_type_and_order_is_right_for_all_sizes(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction, dtype: str, order: Order
) -> None:
    """fp32 has every case in both orders, the others every case in one."""
    half = SMALL[(order == FIRST) ^ (dtype == "bf16") :: 2]
    requests = [case.request(direction, dtype, order) for case in (SMALL if dtype == "fp32" else half)]
    check_all(conv_runner, device, requests)


SQUARE = {"filter": (3, 3), "padding": (1, 1, 1, 1)}
VECTORS = (
    Case(2, 48, 48, 48, (9, 17), **SQUARE),
    Case(1, 70, 70, 70, (8, 15), stride=(2, 2), **SQUARE),
    Case(3, 33, 33, 33, (7, 7), filter=(3, 3), padding=(2, 0, 0, 3)),
    Case(1, 32, 32, 32, (11, 9), dilation=(2, 1), filter=(3, 3), padding=(2, 1, 2, 1)),
    Case(1, 64, 64, 64, (10, 9), dilation=(1, 2), stride=(1, 2), filter=(3, 3), padding=(1, 2, 1, 2)),
    Case(2, 40, 40, 40, (5, 3, 2), filter=(3, 3, 3), padding=(1, 1, 1, 1, 1, 1)),
    Case(1, 36, 36, 36, (8, 19), filter=(5, 5), stride=(2, 2), padding=(2, 2, 2, 2)),
)
"""Depthwise, with whole vectors of channels."""
SMALL_GROUPS = (
    Case(2, 32, 32, 2, (9, 17), **SQUARE),
    Case(1, 96, 96, 3, (7, 8), stride=(2, 2), **SQUARE),
    Case(2, 32, 32, 4, (5, 6), filter=(3, 3), padding=(2, 0, 0, 3)),
    Case(1, 24, 24, 3, (6, 9), dilation=(2, 1), **SQUARE),
    Case(3, 32, 32, 8, (8, 7), dilation=(1, 2), stride=(1, 2), filter=(2, 3), padding=(1, 2, 0, 2)),
    Case(1, 64, 32, 4, (11, 10), stride=(2, 2), filter=(3, 3), padding=(0, 1, 1, 0)),
    Case(1, 32, 32, 2, (3, 5, 2), filter=(3, 3, 3), padding=(1, 1, 1, 1, 1, 1)),
    Case(2, 48, 48, 3, (140,), filter=(3,), padding=(1, 1)),
)
"""Groups of as many channels as a vector holds, of parts and of multiples of that."""


@pytest.mark.parametrize(
    ("cases", "direction", "dtype"),
    partly(
        itertools.product((VECTORS, SMALL_GROUPS), Direction, FLOATS),
        lambda case: {case[:2], case[1:], (len(case[0]), case[2])},
    ),
    ids=lambda value: str(value) if not isinstance(value, tuple) else "depthwise" if value is VECTORS else "groups",
)
@pytest.mark.some(3)
@pytest.mark.extended
def test_whole_vectors_of_channels_are_right(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction, dtype: str, cases: tuple[Case, ...]
) -> None:
    check_all(conv_runner, device, [case.request(direction, dtype) for case in cases])


@pytest.mark.parametrize("direction", Direction, ids=str)
@pytest.mark.some(1)
@pytest.mark.extended
def test_every_candidate_of_a_problem_is_right(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction
) -> None:
    for case, order in ((SMALL[2], LAST), (SMALL[2], FIRST), (SMALL[5], LAST), (SMALL[7], FIRST)):
        request = case.request(direction, "fp32", order)
        operation = CONVS[request.operation]
        candidates = operation.candidates(operation.parse(request), device)
        assert candidates
        conv_runner.prepare([planned(request, device, config).plan for config in candidates])
        for config in candidates:
            check(conv_runner, device, request, config)


@pytest.mark.parametrize(("first", "second"), [("fp8", "fp8"), ("bf8", "fp8"), ("fp8", "bf8"), ("bf8", "bf8")])
@pytest.mark.parametrize("order", [LAST, FIRST], ids=str)
@pytest.mark.some(3)
@pytest.mark.extended
def test_forward_takes_floats_of_8_bits_in_any_pair(
    conv_runner: ConvRunner, device: DeviceInfo, first: str, second: str, order: Order
) -> None:
    more = {"scale": of("fp32", (PLAIN.k,))}
    plain = PLAIN.request(FWD, first, order, other=second)
    scaled = PLAIN.request(FWD, first, order, other=second, more=more, out_dtype="fp32")
    check_all(conv_runner, device, [plain, scaled])


@pytest.mark.parametrize("out", ["int32", "fp32", "int8"])
@pytest.mark.parametrize("order", [LAST, FIRST], ids=str)
@pytest.mark.some(3)
def test_forward_takes_integers(conv_runner: ConvRunner, device: DeviceInfo, order: Order, out: str) -> None:
    more = {} if out == "int32" else {"scale": of("fp32", ())}
    alpha = {} if out == "int32" else {"alpha": 0.002}
    check(conv_runner, device, PLAIN.request(FWD, "int8", order, more=more, out_dtype=out, **alpha))


@pytest.mark.parametrize("order", [LAST, FIRST], ids=str)
@pytest.mark.extended
def test_the_epilogue_of_forward_is_that_of_products(conv_runner: ConvRunner, device: DeviceInfo, order: Order) -> None:
    one = {"bias": of("fp32", (PLAIN.k,)), "d[0]": PLAIN.tensor("y", "fp32", order)}
    two = {**one, "d[1]": PLAIN.tensor("y", "bf16", order)}
    clamp = {"unary": "Clamp", "clamp_lo": -1.0, "clamp_hi": 0.5}
    requests = [
        PLAIN.request(FWD, "fp32", order, more=one, unary="Silu", alpha=0.5),
        PLAIN.request(FWD, "bf16", order, more=two, binary="MultiDAdd", unary="Relu"),
        PLAIN.request(FWD, "fp16", order, more={"bias": of("fp16", (PLAIN.k,))}, **clamp),
        PLAIN.request(FWD, "fp32", order, more=one, unary="LeakyRelu", slope=0.3),
        PLAIN.request(FWD, "bf16", order, unary="Mish"),
    ]
    check_all(conv_runner, device, requests)


@pytest.mark.parametrize("order", [LAST, FIRST], ids=str)
def test_transposed_convolution_takes_a_bias_and_an_activation(
    conv_runner: ConvRunner, device: DeviceInfo, order: Order
) -> None:
    def request(case: Case) -> OperationRequest:
        return case.request(DATA, "fp32", order, more={"bias": of("fp32", (case.c,))}, unary="Relu", alpha=2.0)

    check_all(conv_runner, device, [request(case) for case in (SMALL[1], SMALL[2], SMALL[5])])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("order", [LAST, FIRST], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("direction", GRADIENTS, ids=str)
@pytest.mark.some(5)
@pytest.mark.extended
def test_gradients_are_added_to_what_is_there(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction, dtype: str, order: Order, in_place: bool
) -> None:
    name = "dx" if direction is DATA else "dw"

    def request(case: Case) -> OperationRequest:
        old = case.tensor(name, dtype, order)
        return case.request(direction, dtype, order, more={"acc": old}, outputs={name: old}, accumulate=True, alpha=0.5)

    requests = [request(case) for case in (SMALL[1], SMALL[2], SMALL[5], SMALL[8])]
    for item in check_all(conv_runner, device, requests, in_place):
        assert [name, "acc"] in item.plan.details["in_place"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.extended
def test_gradients_of_weights_come_in_fp32_too(conv_runner: ConvRunner, device: DeviceInfo, dtype: str) -> None:
    requests = [case.request(WEIGHT, dtype, out_dtype="fp32") for case in (SMALL[3], SMALL[5])]
    for item in check_all(conv_runner, device, requests):
        assert item.problem.dtype_out == "fp32"


@pytest.mark.parametrize("direction", Direction, ids=str)
def test_no_images_give_nothing_or_no_gradient(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction
) -> None:
    for case in (SMALL[2].with_(n=0), SMALL[5].with_(n=0)):
        item = check(conv_runner, device, case.request(direction, "fp32"))
        assert bool(item.plan.stages) == (direction is WEIGHT)


@pytest.mark.parametrize("direction", Direction, ids=str)
@pytest.mark.extended
def test_tensors_may_be_parts_of_larger_ones(conv_runner: ConvRunner, device: DeviceInfo, direction: Direction) -> None:
    """Rows with a gap behind them, every second image, channels of a wider tensor."""
    for case in (SMALL[2], SMALL[4], SMALL[5]):
        request = case.request(direction, "fp32")
        inputs = {}
        for name, desc in request.inputs.items():
            if name == "w":
                inputs[name] = desc
                continue
            _, c, h, w = desc.shape
            wide = c + 3
            inputs[name] = of("fp32", desc.shape, (2 * wide * (w + 2) * h, 1, wide * (w + 2), wide))
        check(conv_runner, device, type(request)(request.operation, inputs, {}, request.attributes))


@pytest.mark.parametrize("direction", Direction, ids=str)
def test_broadcast_inputs_are_read_as_they_are(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction
) -> None:
    """A stride of zero: all images are one."""
    request = SMALL[2].request(direction, "fp32")
    inputs = {
        name: desc if name == "w" else of("fp32", desc.shape, (0, *desc.strides[1:]))
        for name, desc in request.inputs.items()
    }
    check(conv_runner, device, type(request)(request.operation, inputs, {}, request.attributes))


@pytest.mark.parametrize("direction", Direction, ids=str)
@pytest.mark.some(1)
@pytest.mark.extended
def test_threads_of_a_team_agree_with_one_alone(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction
) -> None:
    case = Case(4, 24, 40, 1, (30, 31), (3, 3), padding=(1, 1, 1, 1))
    request = case.request(direction, "fp32")
    operation = CONVS[request.operation]
    teams = [config for config in operation.candidates(operation.parse(request), device) if config.waves == 2]
    assert teams
    for config in teams[:3]:
        for team in (1, 2):
            check(conv_runner, device, request, config, team)


def test_nan_and_infinity_reach_the_results_that_they_belong_to(conv_runner: ConvRunner, device: DeviceInfo) -> None:
    item = planned(SMALL[2].request(FWD, "fp32"), device)
    inputs = item.draw(3)
    inputs["x"][1, 2, 3, 4], inputs["x"][0, 7, 0, 0] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        result = conv_runner.run(item.plan, inputs)["y"].view
        assert np.isnan(result).any() and np.isfinite(result).any()
        require_right(item, inputs, result)


@pytest.mark.parametrize("groups", [1, 2, 8], ids=["dense", "groups", "depthwise"])
def test_long_sums_of_weights_keep_their_precision(conv_runner: ConvRunner, device: DeviceInfo, groups: int) -> None:
    """One chain of additions over all pixels would be off by some thirty units of roundoff."""
    case = Case(4, 8, 8, groups, (64, 60), (3, 3), padding=(1, 1, 1, 1))
    item = planned(case.request(WEIGHT, "fp32"), device)
    inputs = item.draw(4)
    result = conv_runner.run(item.plan, inputs)["dw"].view
    truth = CONVS[item.problem.operation].reference(item.problem, inputs)["dw"]
    assert relative_error(result, truth) < 5 * unit_roundoff(DType.FP32)


def test_long_sums_of_images_gradients_keep_their_precision(conv_runner: ConvRunner, device: DeviceInfo) -> None:
    """Of a first layer, which is computed without a product: 1728 terms each."""
    request = Case(1, 3, 64, 1, (6, 14, 18), (3, 3, 3), padding=(1,) * 6).request(DATA, "fp32")
    operation = CONVS[request.operation]
    offered = operation.candidates(operation.parse(request), device)
    direct = next(config for config in offered if config.specialization is Specialization.DIRECT)
    item = planned(request, device, direct)
    inputs = item.draw(5)
    result = conv_runner.run(item.plan, inputs)["dx"].view
    truth = CONVS[item.problem.operation].reference(item.problem, inputs)["dx"]
    assert relative_error(result, truth) < 5 * unit_roundoff(DType.FP32)
