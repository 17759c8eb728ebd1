"""Bad requests are refused with the field, the value, the rule that they break, and what would mend them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from conv_requests import first, last, request

from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.strided_copy.request import parse_transform
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

FWD, DATA, WEIGHT = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT
VECTOR = TensorDesc.of("fp32", (8,))
FORWARD = {"x": last("fp32", 2, 6, 9, 8), "w": last("fp32", 8, 6, 3, 3)}
BACKWARD_DATA = {"dy": last("fp32", 2, 8, 7, 6), "w": last("fp32", 8, 6, 3, 3)}
BACKWARD_WEIGHT = {"x": last("fp32", 2, 6, 9, 8), "dy": last("fp32", 2, 8, 7, 6)}
SIZE: dict[str, Any] = {"input_size": (9, 8)}
FILTER: dict[str, Any] = {"filter_size": (3, 3)}


def refused(direction: Direction, tensors: Mapping[str, TensorDesc], **attributes: Any) -> TilewrightError:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_conv(request(direction, dict(tensors), **attributes), direction)
    assert caught.value.reason and caught.value.fix, "every error says what is wrong and what would do"
    return caught.value


def test_the_requests_that_are_broken_below_are_good() -> None:
    parse_conv(request(FWD, FORWARD), FWD)
    parse_conv(request(DATA, BACKWARD_DATA, **SIZE), DATA)
    parse_conv(request(WEIGHT, BACKWARD_WEIGHT, **FILTER), WEIGHT)


@pytest.mark.parametrize(
    "change, attributes, field, rule",
    [
        ({"x": first("fp32", 6, 9)}, {}, "x.shape", "tensor_rank_3_to_5"),
        ({"x": first("fp32", 1, 1, 6, 9, 8, 2)}, {}, "x.shape", "tensor_rank_3_to_5"),
        ({"w": first("fp32", 8, 6, 3)}, {}, "w.shape", "ranks_agree"),
        ({"x": last("fp32", 2, 0, 9, 8)}, {}, "x.shape", "sizes_positive"),
        ({"x": last("fp32", 2, 6, 0, 8)}, {}, "x.shape", "sizes_positive"),
        ({"w": last("fp32", 0, 6, 3, 3)}, {}, "w.shape", "sizes_positive"),
        ({"w": last("fp32", 8, 6, 3, 0)}, {}, "w.shape", "sizes_positive"),
        ({}, {"groups": 0}, "attributes.groups", "groups_positive"),
        ({}, {"groups": -2}, "attributes.groups", "groups_positive"),
        ({}, {"groups": 4}, "attributes.groups", "groups_divide_channels"),
        ({"w": last("fp32", 8, 2, 3, 3)}, {"groups": 3}, "attributes.groups", "groups_divide_outputs"),
        ({}, {"groups": 2}, "w.shape", "weight_shape"),
        ({"w": last("fp32", 8, 3, 3, 3)}, {}, "w.shape", "weight_shape"),
        ({"w": last("fp32", 8, 6, 12, 3)}, {}, "attributes.padding", "filter_fits"),
        ({}, {"dilation": 5}, "attributes.padding", "filter_fits"),
        ({}, {"stride": 0}, "attributes.stride", "positive"),
        ({}, {"dilation": (1, -1)}, "attributes.dilation", "positive"),
        ({}, {"stride": (1, 1, 1)}, "attributes.stride", "one_or_ndim"),
        ({}, {"stride": ()}, "attributes.stride", "one_or_ndim"),
        ({}, {"stride": 2**40}, "attributes.stride", "attribute_range"),
        ({}, {"stride": 1.5}, "attributes.stride", "attribute_type"),
        ({}, {"stride": True}, "attributes.stride", "attribute_type"),
        ({}, {"padding": -1}, "attributes.padding", "non_negative"),
        ({}, {"padding": (1, 1, 1)}, "attributes.padding", "padding_form"),
        ({}, {"padding": "same"}, "attributes.padding", "padding_form"),
        ({}, {"layout": "nhwc"}, "attributes.layout", "layout_word"),
        ({}, {"accumulate": True}, "attributes.accumulate", "accumulate_direction"),
        ({}, {"split_k": 4}, "attributes.split_k", "split_k_direction"),
        ({}, {"split_k": 256}, "attributes.split_k", "attribute_range"),
        ({}, {"input_size": (9, 8)}, "attributes.input_size", "attribute_known"),
        ({}, {"strides": 2}, "attributes.strides", "attribute_known"),
        ({}, {"clamp_lo": 0.0}, "attributes.clamp_lo", "clamp_bounds"),
        ({}, {"unary": "Rilu"}, "attributes.unary", "attribute_choice"),
        ({}, {"binary": "Add"}, "attributes.binary", "d_count"),
        ({}, {"out_dtype": "int32"}, "attributes.out_dtype", "output_dtype"),
        ({}, {"out_dtype": "fp8"}, "attributes.out_dtype", "output_dtype"),
        ({"w": last("fp16", 8, 6, 3, 3)}, {}, "w.dtype", "dtype_pair"),
        ({"x": last("int32", 2, 6, 9, 8), "w": last("int32", 8, 6, 3, 3)}, {}, "w.dtype", "dtype_pair"),
        ({"bias": TensorDesc.of("fp32", (6,))}, {}, "bias.shape", "bias_shape"),
        ({"bias": TensorDesc.of("fp8", (8,))}, {}, "bias.dtype", "epilogue_dtype"),
        ({"scale": TensorDesc.of("fp32", (2, 8))}, {}, "scale.shape", "scale_shape"),
        ({"scale": TensorDesc.of("fp16", (8,))}, {}, "scale.dtype", "epilogue_dtype"),
        ({"d[0]": last("fp32", 2, 8, 9, 8)}, {}, "d[0].shape", "operand_shape"),
        ({"d[1]": last("fp32", 2, 8, 7, 6)}, {}, "d", "d_numbering"),
        ({"y": last("fp32", 2, 8, 9, 8)}, {}, "y.shape", "output_shape"),
        ({"y": last("fp16", 2, 8, 7, 6)}, {"out_dtype": "fp32"}, "attributes.out_dtype", "output_dtype"),
        ({"y": TensorDesc.of("fp32", (2, 8, 7, 6), (336, 1, 24, 4))}, {}, "y.strides", "output_overlap"),
        ({"acc": last("fp32", 2, 8, 7, 6)}, {}, "acc", "operand_known"),
        ({"weight": last("fp32", 8, 6, 3, 3)}, {}, "weight", "operand_known"),
    ],
)
def test_forward_refuses(change: dict[str, TensorDesc], attributes: dict[str, Any], field: str, rule: str) -> None:
    error = refused(FWD, {**FORWARD, **change}, **attributes)
    assert (error.field, error.rule) == (field, rule)
    given = attributes.get(field.removeprefix("attributes."))
    if field.startswith("attributes.") and given is not None and rule != "filter_fits":
        assert error.value == str(given)


@pytest.mark.parametrize(
    "change, attributes, field, rule",
    [
        ({}, {}, "attributes.input_size", "needed"),
        ({}, {"input_size": (8, 8)}, "dy.shape", "gradient_shape"),
        ({}, {"input_size": (9, 9)}, "dy.shape", "gradient_shape"),
        ({}, {"input_size": 9}, "attributes.input_size", "ndim_numbers"),
        ({}, {"input_size": (9, 0)}, "attributes.input_size", "sizes_positive"),
        ({}, {"input_size": (2, 8)}, "attributes.padding", "filter_fits"),
        ({"dy": last("fp32", 2, 4, 7, 6)}, SIZE, "w.shape", "weight_shape"),
        ({}, {"groups": 3, **SIZE}, "attributes.groups", "groups_divide_outputs"),
        ({"dx": last("fp32", 2, 6, 9, 8)}, {"input_size": (9, 7)}, "dx.shape", "output_shape"),
        ({"dx": last("fp32", 2, 5, 9, 8)}, {}, "dx.shape", "output_shape"),
        ({"dx": last("fp32", 3, 6, 9, 8)}, {}, "dy.shape", "gradient_shape"),
        ({}, {"accumulate": True, **SIZE}, "acc", "operand_missing"),
        ({"acc": last("fp32", 2, 6, 9, 8)}, SIZE, "acc", "acc_without_accumulate"),
        ({"acc": last("fp32", 2, 6, 9, 7)}, {"accumulate": True, **SIZE}, "acc.shape", "operand_shape"),
        ({"acc": last("fp16", 2, 6, 9, 8)}, {"accumulate": True, **SIZE}, "acc.dtype", "epilogue_dtype"),
        ({"bias": VECTOR}, SIZE, "bias.shape", "bias_shape"),
        ({}, {"binary": "MultiDAdd", **SIZE}, "attributes.binary", "epilogue_direction"),
        ({}, {"stride": 9000, "padding": 4500, **SIZE}, "dy.shape", "gradient_shape"),
        ({"d[0]": last("fp32", 2, 6, 9, 8)}, SIZE, "d[0]", "operand_known"),
    ],
)
def test_gradient_of_the_image_refuses(
    change: dict[str, TensorDesc], attributes: dict[str, Any], field: str, rule: str
) -> None:
    error = refused(DATA, {**BACKWARD_DATA, **change}, **attributes)
    assert (error.field, error.rule) == (field, rule)


@pytest.mark.parametrize(
    "change, attributes, field, rule",
    [
        ({}, {}, "attributes.filter_size", "needed"),
        ({}, {"filter_size": (3, 4)}, "dy.shape", "gradient_shape"),
        ({"dy": last("fp32", 3, 8, 7, 6)}, FILTER, "dy.shape", "gradient_shape"),
        ({}, {"filter_size": (10, 3)}, "attributes.padding", "filter_fits"),
        ({"dw": last("fp32", 8, 5, 3, 3)}, {}, "dw.shape", "output_shape"),
        ({"dw": last("fp32", 8, 6, 3, 3)}, {"filter_size": (3, 2)}, "dw.shape", "output_shape"),
        ({"dw": last("fp16", 8, 6, 3, 3)}, {}, "dw.dtype", "output_dtype"),
        ({}, {"unary": "Relu", **FILTER}, "attributes.unary", "epilogue_direction"),
        ({"bias": VECTOR}, FILTER, "bias", "operand_known"),
        ({}, {"groups": 4, **FILTER}, "attributes.groups", "groups_divide_channels"),
    ],
)
def test_gradient_of_the_weights_refuses(
    change: dict[str, TensorDesc], attributes: dict[str, Any], field: str, rule: str
) -> None:
    error = refused(WEIGHT, {**BACKWARD_WEIGHT, **change}, **attributes)
    assert (error.field, error.rule) == (field, rule)


def test_what_is_added_lies_as_the_output_does() -> None:
    tensors = {
        **BACKWARD_WEIGHT, "acc": first("fp32", 8, 6, 3, 3), "dw": last("fp32", 8, 6, 3, 3)
    }  # fmt: skip
    error = refused(WEIGHT, tensors, accumulate=True)
    assert (error.field, error.rule) == ("acc.strides", "acc_strides")


@pytest.mark.parametrize("dtype", ["fp8", "bf8", "int8"])
@pytest.mark.parametrize("direction, tensors", [(DATA, BACKWARD_DATA), (WEIGHT, BACKWARD_WEIGHT)])
def test_gradients_of_eight_bits_are_meaningful_but_not_there(
    dtype: str, direction: Direction, tensors: dict[str, TensorDesc]
) -> None:
    narrow = {name: last(dtype, *desc.shape) for name, desc in tensors.items()}
    more = SIZE if direction is DATA else FILTER
    with pytest.raises(UnsupportedError) as caught:
        parse_conv(request(direction, narrow, **more), direction)
    assert (caught.value.rule, caught.value.value) == ("dtype_direction", dtype)


def test_int8_results_need_a_scale() -> None:
    tensors = {"x": last("int8", 1, 4, 3, 3), "w": last("int8", 8, 4, 1, 1)}
    error = refused(FWD, tensors, out_dtype="int8")
    assert (error.field, error.rule) == ("attributes.out_dtype", "int8_output_scaled")
    assert refused(FWD, {**tensors, "scale": VECTOR}).rule == "integer_output"
    parse_conv(request(FWD, {**tensors, "scale": VECTOR}, out_dtype="int8"), FWD)


def test_sizes_that_overflow_are_refused_before_anything_is_packed() -> None:
    huge = TensorDesc.of("fp32", (2**20, 2**20, 3, 3), (0, 0, 0, 0))
    error = refused(FWD, {"x": huge, "w": TensorDesc.of("fp32", (2**20, 2**20, 1, 1), (0, 0, 0, 0))})
    assert error.rule == "size_overflow"
    image = TensorDesc.of("fp32", (1, 2**16, 2**30), (0, 0, 0))
    assert refused(FWD, {"x": image, "w": TensorDesc.of("fp32", (2**20, 2**16, 1), (0, 0, 0))}).rule == "size_overflow"
    dy = TensorDesc.of("fp32", (1, 1, 1), (0, 0, 0))
    one = TensorDesc.of("fp32", (1, 1, 1))
    error = refused(DATA, {"dy": dy, "w": one}, stride=2**31 - 1, input_size=2**20)
    assert error.rule == "phase_count"


def test_fixes_name_what_would_do() -> None:
    assert "groups=2" in refused(FWD, {**FORWARD, "w": last("fp32", 8, 3, 3, 3)}).fix
    assert "[8, 3, *filter]" in refused(FWD, FORWARD, groups=2).fix
    assert "pad height by 3 more" in refused(FWD, {**FORWARD, "w": last("fp32", 8, 6, 12, 3)}).fix
    assert "2 or one of its divisors" in refused(FWD, FORWARD, groups=4).fix
    assert (
        "images of 13 to 14 give 7"
        in refused(
            DATA, {**BACKWARD_DATA, "dy": last("fp32", 2, 8, 7, 7)}, stride=2, padding=1, input_size=(12, 13)
        ).fix
    )
    assert "did you mean stride?" in refused(FWD, FORWARD, strides=2).fix


def test_packed_tensors_are_refused() -> None:
    packed = TensorDesc(FORWARD["w"].dtype, (8, 6, 3, 3), (), "some packing", 512)
    assert refused(FWD, {**FORWARD, "w": packed}).rule == "packed_operand"


@pytest.mark.parametrize(
    "inputs, outputs, rule",
    [
        ({}, {}, "operand_missing"),
        ({"x": first("fp32", 2, 3, 4)}, {}, "operand_missing"),
        ({"x": first("fp32", 2, 3, 4)}, {"out": first("fp32", 2, 2, 4)}, "output_shape"),
        ({"x": first("fp32", 2, 3, 4)}, {"out": first("fp32", 2, 3, 4, 1)}, "output_shape"),
        ({"x": first("fp32", 2, 3, 4)}, {"out": TensorDesc.of("fp32", (2, 3, 4), (4, 4, 1))}, "output_overlap"),
        ({"x": first("fp32", 2, 3)}, {"out": first("fp32", 2, 3)}, "tensor_rank_3_to_5"),
        ({"x": first("fp32", 2, 3, 4), "z": first("fp32", 1)}, {"out": first("fp32", 2, 3, 4)}, "operand_known"),
    ],
)
def test_copies_refuse(inputs: dict[str, TensorDesc], outputs: dict[str, TensorDesc], rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_transform(OperationRequest("conv_transform", inputs, outputs))
    assert caught.value.rule == rule
