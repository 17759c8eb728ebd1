"""Requests become problems: what was left out is inferred, and equal requests make equal problems."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
from conv_requests import backward_data, backward_weight, first, forward, last

from tilewright_grouped_conv.problem.implicit_gemm import Axis, phases_of
from tilewright_grouped_conv.problem.layout import ImageView, Order, collapses, image_view
from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.problem.resize import resized_conv
from tilewright_grouped_conv.problem.sizes import ConvGeometry, output_size
from tilewright_grouped_conv.references.samples import conv_samples
from tilewright_grouped_conv.vocabulary import Direction, Scale
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Binary, Unary


def test_forward_infers_the_result_in_the_order_of_the_image() -> None:
    problem = forward({"x": last("fp32", 2, 6, 9, 7), "w": last("fp32", 8, 6, 3, 3)}, padding=1)
    y = problem.operands[-1].desc
    assert (y.shape, y.strides, problem.layout) == ((2, 8, 9, 7), strides_in(Order.LAST, (2, 8, 9, 7)), "nhwgc")
    planes = forward({"x": first("fp32", 2, 6, 9, 7), "w": first("fp32", 8, 6, 3, 3)}, padding=1)
    assert (planes.operands[-1].desc.strides, planes.layout, planes.wlayout) == ((504, 63, 7, 1), "ngchw", "gkcyx")


@pytest.mark.parametrize(
    "shape, strides, order",
    [
        ((2, 1, 5, 5), (25, 25, 5, 1), Order.FIRST),
        ((2, 1, 5, 5), (25, 1, 5, 1), Order.LAST),
        ((2, 8, 1, 1), (8, 1, 1, 1), Order.LAST),
        ((2, 8, 5, 5), (400, 1, 80, 16), Order.LAST),
        ((2, 8, 5, 5), (400, 50, 10, 2), Order.LAST),
    ],
)
def test_order_of_the_result_where_the_image_leaves_it_open(
    shape: tuple[int, ...], strides: tuple[int, ...], order: Order
) -> None:
    problem = forward({"x": TensorDesc.of("fp32", shape, strides), "w": first("fp32", 6, shape[1], 1, 1)})
    assert problem.operands[-1].desc.strides == strides_in(order, (2, 6, *shape[2:]))


def test_layout_attribute_decides_how_the_result_lies() -> None:
    problem = forward(
        {"x": last("fp32", 2, 6, 9, 7), "w": last("fp32", 8, 6, 3, 3)}, padding=1, layout="channels_first"
    )
    assert problem.operands[-1].desc.strides == (504, 63, 7, 1)
    assert problem.layout == "mixed"


@pytest.mark.parametrize("ndim, layouts", [(1, ("nwgc", "ngcw")), (2, ("nhwgc", "ngchw")), (3, ("ndhwgc", "ngcdhw"))])
def test_every_number_of_axes_has_its_layouts(ndim: int, layouts: tuple[str, str]) -> None:
    found = []
    for make in (last, first):
        shape = (2, 6, *range(5, 5 + ndim))
        problem = forward({"x": make("fp32", *shape), "w": make("fp32", 8, 3, *(3,) * ndim)}, groups=2)
        assert problem.ndim == ndim
        assert problem.geometry.input[: 3 - ndim] == (1,) * (3 - ndim)
        found.append(problem.layout)
    assert tuple(found) == layouts


def test_padding_has_all_its_forms() -> None:
    tensors = {"x": last("fp32", 1, 4, 10, 9), "w": last("fp32", 4, 4, 3, 4)}
    forms = {
        2: ((0, 2, 2), (0, 2, 2)),
        (1, 2): ((0, 1, 2), (0, 1, 2)),
        (1, 2, 3, 0): ((0, 1, 2), (0, 3, 0)),
        "valid": ((0, 0, 0), (0, 0, 0)),
        "same_upper": ((0, 1, 1), (0, 1, 2)),
        "same_lower": ((0, 1, 2), (0, 1, 1)),
    }
    for padding, pads in forms.items():
        geometry = forward(tensors, padding=padding).geometry
        assert (geometry.pad_begin, geometry.pad_end) == pads, padding
    strided = forward(tensors, padding="same_upper", stride=(3, 2)).geometry
    assert strided.output == (1, 4, 5), "as many outputs as strides fit, as in ONNX"


def test_output_sizes_are_those_of_the_formula() -> None:
    rng = random.Random(3)
    for _ in range(300):
        size, taps, stride, dilation = (rng.randint(1, top) for top in (30, 5, 4, 3))
        begin, end = rng.randint(0, 4), rng.randint(0, 4)
        starts = [at for at in range(-begin, size + end) if at + (taps - 1) * dilation < size + end]
        expected = len(starts[::stride])
        assert max(output_size(size, taps, stride, dilation, begin, end), 0) == expected


def test_gradients_infer_what_they_write() -> None:
    data = backward_data(
        {"dy": last("bf16", 2, 8, 4, 3), "w": last("bf16", 8, 3, 3, 3)},
        groups=2,
        stride=2,
        padding=1,
        input_size=(8, 6),
    )
    assert data.operands[-1].name == "dx"
    assert data.operands[-1].desc == last("bf16", 2, 6, 8, 6)
    weight = backward_weight(
        {"x": first("bf16", 2, 6, 8, 6), "dy": first("bf16", 2, 8, 4, 3)},
        groups=2,
        stride=2,
        padding=1,
        filter_size=(3, 3),
        out_dtype="fp32",
    )
    assert weight.operands[-1].desc == first("fp32", 8, 3, 3, 3)


def test_described_outputs_stand_for_the_sizes() -> None:
    tensors = {"dy": last("fp32", 1, 4, 5, 5), "w": last("fp32", 4, 3, 3, 3), "dx": last("fp32", 1, 3, 11, 12)}
    problem = backward_data(tensors, stride=2)
    assert problem.geometry.input == (1, 11, 12)
    tensors = {"x": last("fp32", 1, 3, 11, 12), "dy": last("fp32", 1, 4, 5, 5), "dw": last("fp32", 4, 3, 3, 3)}
    assert backward_weight(tensors, stride=2).geometry.filter == (1, 3, 3)


def test_default_outputs_by_type() -> None:
    def out(a: str, b: str, **more: str) -> DType:
        return forward({"x": last(a, 1, 8, 4, 4), "w": last(b, 8, 8, 1, 1)}, **more).dtype_out

    assert [out("fp8", "bf8"), out("int8", "int8"), out("bf16", "bf16")] == [DType.FP16, DType.INT32, DType.BF16]
    assert out("int8", "int8", out_dtype="fp32") == DType.FP32


def test_epilogue_operands_are_read() -> None:
    vector = TensorDesc.of("fp32", (6,))
    image = last("fp16", 2, 6, 5, 5)
    problem = forward(
        {"x": last("fp16", 2, 4, 5, 5), "w": last("fp16", 6, 2, 1, 1), "bias": vector, "scale": vector, "d[0]": image},
        groups=2,
        unary="Swish",
        binary="Multiply",
    )
    assert (problem.unary, problem.binary, problem.scale) == (Unary.SILU, Binary.MULTIPLY, Scale.CHANNEL)
    assert problem.bias is not None and (problem.bias.g, problem.bias.c) == (3, 1)
    assert problem.d == (image_view("d[0]", image.shape, image.strides, 2),)
    assert [item.name for item in problem.operands] == ["x", "w", "bias", "d[0]", "scale", "y"]


def test_one_value_scales_all() -> None:
    for shape in ((), (1,)):
        tensors = {"x": last("fp32", 1, 4, 3, 3), "w": last("fp32", 4, 4, 1, 1), "scale": TensorDesc.of("fp32", shape)}
        problem = forward(tensors)
        assert problem.scale is Scale.TENSOR
        assert problem.scale_view is not None and (problem.scale_view.g, problem.scale_view.c) == (0, 0)


def test_outputs_that_nobody_described_lie_as_what_they_are_added_to() -> None:
    acc = TensorDesc.of("fp32", (4, 3, 3, 3), (64, 1, 16, 4))
    problem = backward_weight(
        {"x": last("fp32", 1, 3, 6, 6), "dy": last("fp32", 1, 4, 4, 4), "acc": acc}, filter_size=(3, 3), accumulate=True
    )
    assert problem.operands[-1].desc.strides == acc.strides
    assert problem.accumulate


def test_no_images_are_a_legal_problem() -> None:
    problem = forward({"x": last("fp32", 0, 4, 5, 5), "w": last("fp32", 8, 4, 3, 3)})
    assert problem.is_empty
    gradient = backward_weight({"x": last("fp32", 0, 4, 5, 5), "dy": last("fp32", 0, 8, 3, 3)}, filter_size=(3, 3))
    assert not gradient.is_empty, "the gradient of nothing is zero, and has to be written"


def test_equal_requests_make_equal_problems_and_others_do_not() -> None:
    tensors = {"x": last("fp32", 2, 4, 5, 5), "w": last("fp32", 8, 4, 3, 3)}
    problem, again = forward(tensors, padding=1), forward(dict(tensors), padding=(1, 1, 1, 1))
    assert problem == again and hash(problem) == hash(again)
    for other in (
        forward(tensors, padding=0),
        forward(tensors, padding=1, alpha=2.0),
        forward({**tensors, "x": first("fp32", 2, 4, 5, 5)}, padding=1),
        forward(tensors, padding=1, unary="Relu"),
    ):
        assert other != problem


def test_strides_of_single_elements_do_not_tell_problems_apart() -> None:
    w = first("fp32", 8, 4, 1, 1)
    one = forward({"x": TensorDesc.of("fp32", (1, 4, 5, 5), (100, 1, 20, 4)), "w": w})
    other = forward({"x": TensorDesc.of("fp32", (1, 4, 5, 5), (7, 1, 20, 4)), "w": w})
    assert one.image == other.image


def test_descriptions_are_json_with_sizes_as_integers_and_kinds_as_text() -> None:
    for direction in Direction:
        for asked in conv_samples(direction):
            problem = parse_conv(asked, direction)
            record = json.loads(json.dumps(problem.describe(), allow_nan=False))
            assert {"m", "n", "k", "batch", "images", "channels", "out_channels", "groups"} <= set(record)
            assert all(isinstance(record[name], str) for name in ("filter", "stride", "dilation", "pads", "ndim"))
            assert resized_conv(problem, record) is not None
            doubled = resized_conv(problem, {**record, "images": 2 * record["images"]})
            assert doubled is not None and doubled.flops == 2 * problem.flops
    clamped = forward({"x": last("fp32", 1, 4, 3, 3), "w": last("fp32", 4, 4, 1, 1)}, unary="Clamp", clamp_lo=0.0)
    json.dumps(clamped.describe(), allow_nan=False)


def test_resizing_refuses_what_makes_no_convolution() -> None:
    problem = forward({"x": last("fp32", 1, 4, 5, 5), "w": last("fp32", 4, 2, 3, 3)}, groups=2)
    sizes = problem.describe()
    assert resized_conv(problem, {"m": 3, "n": 4, "k": 5}) is None
    assert resized_conv(problem, {**sizes, "channels": 5}) is None
    assert resized_conv(problem, {**sizes, "height": 2}) is None


def test_pixels_collapse_exactly_where_one_distance_leads_from_each_to_the_next() -> None:
    rng = random.Random(11)
    for _ in range(400):
        sizes = tuple(rng.randint(1, 3) for _ in range(3))
        images = rng.randint(1, 3)
        depth, height, width = (rng.choice([1, 2, 4, 6, 12, 24]) for _ in range(3))
        view = image_view("x", (images, 1, *sizes), (rng.choice([12, 24, 48]), 1, depth, height, width), 1)
        places = [
            n * view.n + d * view.spatial[0] + h * view.spatial[1] + w * view.spatial[2]
            for n, d, h, w in itertools.product(range(images), *map(range, sizes))
        ]
        steps = {after - before for before, after in itertools.pairwise(places)}
        found = collapses(view, sizes, images)  # type: ignore[arg-type]
        if len(steps) > 1:
            assert found is None
        else:
            assert found == (steps.pop() if steps else 0)


def reach(axis: Axis, row: int) -> set[tuple[int, int]]:
    """(tap, coordinate) pairs inside the image that a row gathers, by the axis' own numbers."""
    return {
        (axis.first_tap + tap * axis.tap_every, axis.origin + row * axis.row_step + tap * axis.tap_step)
        for tap in range(axis.taps)
        if 0 <= axis.origin + row * axis.row_step + tap * axis.tap_step < axis.size
    }


def test_phases_reach_exactly_the_outputs_that_saw_a_pixel() -> None:
    """One axis at a time against the definition: output o sees pixel o*stride - begin + tap*dilation."""
    rng = random.Random(5)
    for _ in range(1500):
        size, taps, stride, dilation = (rng.randint(1, top) for top in (14, 5, 5, 4))
        begin, end = rng.randint(0, 5), rng.randint(0, 5)
        outputs = output_size(size, taps, stride, dilation, begin, end)
        if outputs < 1:
            continue
        one, none = (1, 1), (0, 0)
        geometry = ConvGeometry(
            1, 1, 1, 1, 1, (*one, size), (*one, taps), (*one, outputs), (*one, stride), (*one, dilation),
            (*none, begin), (*none, end),
        )  # fmt: skip
        seen: dict[int, set[tuple[int, int]]] = {pixel: set() for pixel in range(size)}
        for output, tap in itertools.product(range(outputs), range(taps)):
            pixel = output * stride - begin + tap * dilation
            if pixel in seen:
                seen[pixel].add((tap, output))
        found: dict[int, set[tuple[int, int]]] = {}
        for phase in phases_of(geometry, Direction.BACKWARD_DATA, False):
            axis = phase.axes[2]
            for row in range(axis.rows):
                pixel = axis.first_row + row * axis.row_every
                assert pixel not in found
                found[pixel] = reach(axis, row)
        assert found == seen, geometry
        (forward_phase,) = phases_of(geometry, Direction.FORWARD, False)
        for output in range(outputs):
            pairs = {(tap, pixel) for pixel in seen for tap, at in seen[pixel] if at == output}
            assert reach(forward_phase.axes[2], output) == pairs


def test_products_of_a_strided_gradient_cover_every_pixel_once() -> None:
    problem = backward_data(
        {"dy": last("fp32", 2, 6, 4, 3), "w": last("fp32", 6, 2, 3, 3)}, groups=3, stride=(2, 3), padding=1,
        input_size=(8, 8),
    )  # fmt: skip
    found = problem.phases()
    assert len(found) == 6
    assert sum(phase.m for phase in found) == 2 * 8 * 8
    assert {phase.batch for phase in found} == {3}
    assert {phase.n for phase in found} == {2}
    assert sum(phase.taps for phase in found) == 9, "every tap serves one product"


def test_channels_first_products_run_pixels_along_columns() -> None:
    problem = forward({"x": first("fp32", 2, 6, 9, 7), "w": first("fp32", 8, 3, 3, 3)}, groups=2, padding=1)
    (phase,) = problem.phases()
    assert (phase.m, phase.n, phase.k, phase.batch) == (4, 63, 27, 4)
    (lowered,) = problem.phases(channels_first=False)
    assert (lowered.m, lowered.n, lowered.k, lowered.batch) == (126, 4, 27, 2)
    assert problem.flops == 2 * phase.m * phase.n * phase.k * phase.batch


def test_views_state_no_stride_for_single_elements() -> None:
    view = image_view("x", (1, 6, 1, 5), (999, 1, 777, 6), 3)
    assert view == ImageView("x", 0, 2, 1, (0, 0, 6))
    assert replace(view, g=0) == image_view("x", (1, 2, 1, 5), (999, 1, 777, 6), 1)
