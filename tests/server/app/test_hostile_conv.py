"""Requests for convolutions that cannot be meant: each comes back through the service with field, value, rule and fix,
and the server is as good as new.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conv_messages as cm
import grpc
import numpy as np
import pytest
from hostile import CODES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of, floats, in_region, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import tensor_pb2 as tp

COMMAND = [sys.executable, str(Path(__file__).with_name("operation_server.py")), "grouped_conv"]
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
DIMENSIONS = st.sampled_from([0, 1, 2, 3, 7, 64, -1, 2**31, 2**48, 2**62, 2**63 - 1])

X, W, DY = cm.spec(2, 6, 9, 8), cm.spec(8, 6, 3, 3), cm.spec(2, 8, 7, 6)
GOOD: dict[str, Any] = {
    "conv": ({"x": X, "w": W}, {}),
    "conv_backward_data": ({"dy": DY, "w": W}, {"input_size": (9, 8)}),
    "conv_backward_weight": ({"x": X, "dy": DY}, {"filter_size": (3, 3)}),
}
FWD, DATA, WEIGHT = GOOD
INT8 = {"x": cm.spec(2, 6, 9, 8, dtype=tp.INT8), "w": cm.spec(8, 6, 3, 3, dtype=tp.INT8)}
FP8 = {"x": cm.spec(2, 6, 9, 8, dtype=tp.FP8), "dy": cm.spec(2, 8, 7, 6, dtype=tp.FP8)}
HUGE = 2**40

BAD: list[Any] = [
    # operation, changed tensors, attributes, field, value, rule
    (FWD, {"x": floats(6, 9)}, {}, "x.shape", "[6, 9]", "tensor_rank_3_to_5"),
    (FWD, {"x": floats(1, 1, 6, 9, 8, 2)}, {}, "x.shape", "[1, 1, 6, 9, 8, 2]", "tensor_rank_3_to_5"),
    (FWD, {"w": floats(8, 6, 3)}, {}, "w.shape", "[8, 6, 3]", "ranks_agree"),
    (FWD, {"x": floats(2, 0, 9, 8)}, {}, "x.shape", "0", "sizes_positive"),
    (FWD, {"w": floats(8, 6, 3, 0)}, {}, "w.shape", "0", "sizes_positive"),
    (FWD, {}, {"groups": 0}, "attributes.groups", "0", "groups_positive"),
    (FWD, {}, {"groups": 4}, "attributes.groups", "4", "groups_divide_channels"),
    (FWD, {"w": floats(8, 2, 3, 3)}, {"groups": 3}, "attributes.groups", "3", "groups_divide_outputs"),
    (FWD, {}, {"groups": 2}, "w.shape", "[8, 6, 3, 3]", "weight_shape"),
    (FWD, {}, {"stride": 0}, "attributes.stride", "0", "positive"),
    (FWD, {}, {"dilation": (1, -1)}, "attributes.dilation", "-1", "positive"),
    (FWD, {}, {"stride": (1, 1, 1)}, "attributes.stride", "1, 1, 1", "one_or_ndim"),
    (FWD, {}, {"padding": -1}, "attributes.padding", "-1", "non_negative"),
    (FWD, {}, {"padding": (1, 1, 1)}, "attributes.padding", "1, 1, 1", "padding_form"),
    (FWD, {}, {"padding": "around"}, "attributes.padding", "around", "padding_form"),
    (FWD, {"w": floats(8, 6, 12, 3)}, {}, "attributes.padding", "", "filter_fits"),
    (FWD, {}, {"dilation": 5}, "attributes.padding", "", "filter_fits"),
    (FWD, {"x": floats(HUGE, 6, 900, 800)}, {}, "", "", "size_overflow|tensor_overflow"),
    (FWD, {"x": floats(2, 6, 2**20, 2**20)}, {"padding": 2**30}, "", "", "size_overflow|tensor_overflow"),
    (FWD, {}, {"layout": "nhwc"}, "attributes.layout", "nhwc", "layout_word"),
    (FWD, {}, {"split_k": 256}, "attributes.split_k", "256", "attribute_range"),
    (FWD, {}, {"split_k": 4}, "attributes.split_k", "4", "split_k_direction"),
    (FWD, {}, {"strides": 2}, "attributes.strides", "2", "attribute_known"),
    (FWD, {}, {"unary": "Rilu"}, "attributes.unary", "Rilu", "attribute_choice"),
    (FWD, {"w": cm.spec(8, 6, 3, 3, dtype=tp.FP16)}, {}, "w.dtype", "fp16", "dtype_pair"),
    (FWD, {}, {"out_dtype": "int32"}, "attributes.out_dtype", "int32", "output_dtype"),
    (FWD, INT8, {"out_dtype": "int8"}, "attributes.out_dtype", "int8", "int8_output_scaled"),
    (FWD, {"bias": floats(6)}, {}, "bias.shape", "[6]", "bias_shape"),
    (FWD, {"scale": floats(2, 8)}, {}, "scale.shape", "[2, 8]", "scale_shape"),
    (FWD, {"d[0]": floats(2, 8, 9, 8)}, {}, "d[0].shape", "[2, 8, 9, 8]", "operand_shape"),
    (FWD, {"y": floats(2, 8, 9, 8)}, {}, "y.shape", "[2, 8, 9, 8]", "output_shape"),
    (FWD, {"weight": W}, {}, "weight", "weight", "operand_known"),
    (
        FWD,
        {"y": tp.TensorSpec(dtype=tp.FP32, shape=(2, 8, 7, 6), strides=(336, 1, 24, 4))},
        {},
        "y.strides",
        "336",
        "output_overlap",
    ),
    (DATA, {}, {"input_size": None}, "attributes.input_size", "", "needed"),
    (DATA, {}, {"input_size": (8, 8)}, "dy.shape", "[2, 8, 7, 6]", "gradient_shape"),
    (DATA, {"dy": floats(2, 4, 7, 6)}, {}, "w.shape", "[8, 6, 3, 3]", "weight_shape"),
    (DATA, {"dx": floats(2, 5, 9, 8)}, {"input_size": None}, "dx.shape", "[2, 5, 9, 8]", "output_shape"),
    (DATA, {"dx": floats(3, 6, 9, 8)}, {}, "dy.shape", "[2, 8, 7, 6]", "gradient_shape"),
    (DATA, {}, {"accumulate": True}, "acc", "", "operand_missing"),
    (DATA, {"acc": floats(2, 6, 9, 8)}, {}, "acc", "", "acc_without_accumulate"),
    (DATA, {"acc": floats(2, 6, 9, 8), "dx": X}, {"accumulate": True}, "acc.strides", "432", "acc_strides"),
    (DATA, {"d[0]": floats(2, 6, 9, 8)}, {}, "d[0]", "d[0]", "operand_known"),
    (WEIGHT, {}, {"filter_size": None}, "attributes.filter_size", "", "needed"),
    (WEIGHT, {}, {"filter_size": (3, 4)}, "dy.shape", "[2, 8, 7, 6]", "gradient_shape"),
    (WEIGHT, {"dy": floats(3, 8, 7, 6)}, {}, "dy.shape", "[3, 8, 7, 6]", "gradient_shape"),
    (WEIGHT, {"dw": floats(8, 5, 3, 3)}, {}, "dw.shape", "[8, 5, 3, 3]", "output_shape"),
    (WEIGHT, {}, {"unary": "Relu"}, "attributes.unary", "Relu", "epilogue_direction"),
    (WEIGHT, FP8, {}, "x.dtype", "fp8", "dtype_direction"),
]
OUTPUTS = frozenset(cm.OUTPUTS.values())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("hostile"), COMMAND, cache_dir=kernel_cache) as process:
        yield process
        assert process.alive
        assert process.stop() == 0
        assert "internal error" not in process.log(), process.log()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.addresses[0]) as made:
        yield made


def plan_request(client: Client, operation: str, change: dict[str, Any], words: dict[str, Any]) -> dp.PlanRequest:
    tensors, attributes = GOOD[operation]
    tensors = {**tensors, **change}
    attributes = {name: value for name, value in {**attributes, **words}.items() if value is not None}
    return dp.PlanRequest(
        session=client.token,
        operation=operation,
        inputs=[cm.operand(name, item) for name, item in tensors.items() if name not in OUTPUTS],
        outputs=[cm.operand(name, item) for name, item in tensors.items() if name in OUTPUTS],
        attributes=cm.attributes(**attributes),
    )


def plain(text: str) -> str:
    """Numbers without the brackets that they are told in."""
    return "".join(letter for letter in text if letter not in "[](), ")


@pytest.mark.parametrize("operation", GOOD)
@pytest.mark.extended
def test_the_requests_that_are_broken_below_are_good(client: Client, operation: str) -> None:
    plan = client.dispatch.Plan(plan_request(client, operation, {}, {}))
    client.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=client.token, plan=plan.plan))


@pytest.mark.parametrize(
    ("operation", "change", "words", "field", "value", "rule"),
    BAD,
    ids=[f"{place}-{row[5]}" for place, row in enumerate(BAD)],
)
def test_a_bad_request_names_field_value_rule_and_fix(
    client: Client, operation: str, change: Any, words: Any, field: str, value: str, rule: str
) -> None:
    request = plan_request(client, operation, change, words)
    details = []
    for _ in range(2):  # the second answer comes from the memory of refusals
        with pytest.raises(grpc.RpcError) as caught:
            client.dispatch.Plan(request)
        details.append(detail_of(caught.value))
    detail = details[0]
    assert details[0].request != details[1].request, "each answer says which request it is of"
    details[1].request = detail.request
    assert details[1] == detail
    assert detail.code in ("invalid_argument", "unsupported")
    assert detail.rule in rule.split("|"), detail
    assert field in detail.field, detail
    assert plain(value) in plain(detail.value), detail
    assert detail.message
    assert detail.fix, "every error says what would mend it"


@settings(SETTINGS, max_examples=80)
@given(
    operation=st.sampled_from(list(GOOD)),
    shapes=st.tuples(*[st.lists(DIMENSIONS, min_size=2, max_size=6)] * 2),
    strides=st.tuples(*[st.lists(DIMENSIONS, max_size=4)] * 2),
    dtypes=st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    offset=st.sampled_from([0, 4, 3, 65532, 2**63, 2**64 - 4]),
    words=st.dictionaries(
        st.sampled_from(
            ["stride", "padding", "dilation", "groups", "input_size", "filter_size", "alpha", "accumulate", "layout",
             "split_k", "unary", "out_dtype", "alignment", "deterministic"]
        ),
        st.sampled_from(
            [
                tp.Attribute(),
                tp.Attribute(integer=0),
                tp.Attribute(integer=-1),
                tp.Attribute(integer=3),
                tp.Attribute(integer=2**31),
                tp.Attribute(integer=2**63 - 1),
                tp.Attribute(number=float("nan")),
                tp.Attribute(text="same_upper"),
                tp.Attribute(text="x" * 300),
                tp.Attribute(flag=True),
                tp.Attribute(integers=tp.Attribute.Ints(values=[1, 2])),
                tp.Attribute(integers=tp.Attribute.Ints(values=[2**62, 2**62])),
                tp.Attribute(integers=tp.Attribute.Ints(values=[1] * 1000)),
            ]
        ),
        max_size=3,
    ),
)  # fmt: skip
@pytest.mark.extended
def test_impossible_problems_get_typed_errors(
    client: Client, operation: str, shapes: Any, strides: Any, dtypes: Any, offset: int, words: Any
) -> None:
    file = MemoryFile(1 << 16)
    region = client.register(file).region
    inputs = [
        tp.Operand(
            name=name,
            spec=tp.TensorSpec(dtype=dtype, shape=shape, strides=stride),
            location=in_region(region, offset),
        )
        for name, shape, stride, dtype in zip(GOOD[operation][0], shapes, strides, dtypes, strict=True)
    ]
    request = dp.RunRequest(session=client.token, operation=operation, inputs=inputs, attributes=words)
    try:
        client.dispatch.Run(request, timeout=60)
    except grpc.RpcError as error:
        assert detail_of(error).code in CODES, detail_of(error)
    finally:
        client.unregister(region)
        file.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e-45])
def test_extreme_values_are_only_numbers(client: Client, value: float) -> None:
    x, w = np.full((1, 4, 5, 5), value, np.float32), np.full((4, 4, 3, 3), value, np.float32)
    operands = [
        cm.operand(name, cm.spec(*array.shape), inline(array.tobytes())) for name, array in (("x", x), ("w", w))
    ]
    output = client.dispatch.Run(dp.RunRequest(operation="conv", inputs=operands)).outputs[0]
    with np.errstate(all="ignore"):
        expected = np.full((1, 4, 3, 3), np.float32(value) * np.float32(value) * 36, np.float32)
    np.testing.assert_array_equal(np.frombuffer(output.inline, np.float32).reshape(1, 4, 3, 3), expected)


def test_padding_never_turns_zeros_and_infinities_into_numbers_that_are_none(client: Client) -> None:
    x, w = np.ones((1, 4, 2, 2), np.float32), np.full((4, 4, 3, 3), np.inf, np.float32)
    operands = [
        cm.operand(name, cm.spec(*array.shape), inline(array.tobytes())) for name, array in (("x", x), ("w", w))
    ]
    request = dp.RunRequest(operation="conv", inputs=operands, attributes=cm.attributes(padding=1))
    found = np.frombuffer(client.dispatch.Run(request).outputs[0].inline, np.float32)
    assert not np.isfinite(found).any(), "0 * inf of the padding is NaN, as in every other library"


def test_the_server_is_as_good_as_new(client: Client) -> None:
    operands = [
        cm.operand(name, cm.spec(*shape), inline(np.ones(shape, np.float32).tobytes()))
        for name, shape in (("x", (1, 2, 3, 3)), ("w", (2, 2, 3, 3)))
    ]
    output = client.dispatch.Run(dp.RunRequest(operation="conv", inputs=operands)).outputs[0]
    np.testing.assert_array_equal(np.frombuffer(output.inline, np.float32), [18.0, 18.0])
    assert client.kernels.Statistics(kp.StatisticsRequest()).queue_depth == 0
    assert all(item.in_use == 0 for item in client.status().regions)
