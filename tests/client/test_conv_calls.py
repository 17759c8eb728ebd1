"""Convolution, its gradients and transposed convolution, through the service and back."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import conv_by_hand as by_hand
import numpy as np
import pytest
from client_helpers import close, random
from sampling import partly

import tilewright as tw

SHAPES: dict[str, Any] = {
    # x, w, and the rest of the geometry
    "2d": ((2, 6, 9, 7), (10, 3, 3, 3), {"padding": 1, "groups": 2}),
    "1d": ((2, 5, 11), (4, 5, 3), {"stride": 2, "padding": (2, 0), "dilation": 2}),
    "3d": ((1, 4, 5, 6, 7), (6, 2, 3, 1, 2), {"padding": (1, 0, 1), "groups": 2}),
    "depthwise": ((3, 8, 7, 8), (8, 1, 3, 3), {"padding": 1, "groups": 8, "stride": (2, 1)}),
    "pointwise": ((2, 7, 6, 5), (9, 7, 1, 1), {}),
}
MEMORIES = ("shared last", "shared first", "private last", "private first")
PLACED = partly(
    itertools.product(SHAPES, MEMORIES),
    lambda case: {*case, (len(SHAPES[case[0]][0]), case[1].endswith("last"))},
)
"""Every shape and memory, and each number of dimensions in both orders: all shapes in both orders are in tests/conv."""


@pytest.fixture(scope="module")
def client(real_server: Any) -> Iterator[tw.Client]:
    with tw.connect(real_server.target, launch="server") as opened:
        yield opened


def channels_last(client: tw.Client | None, array: np.ndarray) -> np.ndarray:
    """The array as it is, in channels-last memory."""
    stored = np.ascontiguousarray(np.moveaxis(array, 1, -1))
    return np.moveaxis(stored if client is None else client.asarray(stored), -1, 1)


def is_channels_last(array: np.ndarray) -> bool:
    return bool(np.moveaxis(array, 1, -1).flags.c_contiguous) and not array.flags.c_contiguous


@pytest.mark.parametrize(("shape", "memory"), PLACED)
@pytest.mark.some(3)
@pytest.mark.extended
def test_convolution_and_its_gradients_are_what_their_definition_says(
    client: tw.Client, shape: str, memory: str
) -> None:
    x_shape, w_shape, more = SHAPES[shape]
    place = client if "shared" in memory else None
    put = channels_last if "last" in memory else lambda c, a: a if c is None else c.asarray(a)
    x, w = put(place, random(*x_shape)), put(place, random(*w_shape))
    y = client.conv(x, w, **more)
    close(y, by_hand.forward(x, w, **more))
    report = client.report
    assert report is not None
    assert (report.staged_bytes == 0) is (place is not None)
    if "last" in memory and y.shape[1] > 1:
        assert is_channels_last(y)
    elif "first" in memory:
        assert y.flags.c_contiguous
    dy = put(place, random(*y.shape))
    dx = client.conv_backward_data(dy, w, input_size=x_shape[2:], **more)
    close(dx, by_hand.backward_data(dy, w, x_shape, **more))
    dw = client.conv_backward_weight(x, dy, filter_size=w_shape[2:], **more)
    close(dw, by_hand.backward_weight(x, dy, w_shape, **more), 2e-4)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.some(1)
def test_gradients_are_adjoint_to_the_convolution(client: tw.Client, dtype: str) -> None:
    more: Any = {"padding": 1, "stride": 2, "groups": 3}
    x, w = client.asarray(random(2, 6, 9, 8), dtype), client.asarray(random(9, 2, 3, 3), dtype)
    y = client.conv(x, w, **more)
    dy = client.asarray(random(*y.shape), dtype)
    dx = client.conv_backward_data(dy, w, input_size=(9, 8), **more)
    dw = client.conv_backward_weight(x, dy, filter_size=3, out_dtype="fp32", **more)
    pairs = [(y, dy), (x, dx), (w, dw)]
    products = [float(np.vdot(a.astype(np.float64), b.astype(np.float64))) for a, b in pairs]
    size = float(np.linalg.norm(y.astype(np.float64)) * np.linalg.norm(dy.astype(np.float64)))
    limit = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}[dtype] * size
    assert abs(products[0] - products[1]) < limit
    assert abs(products[0] - products[2]) < limit


@pytest.mark.extended
def test_epilogues_are_fused_under_their_names(client: tw.Client) -> None:
    x, w, bias, d = random(2, 4, 6, 5), random(6, 4, 3, 3), random(6), random(2, 6, 6, 5)
    plain = by_hand.forward(x, w, padding=1)
    column = bias[:, None, None]
    close(client.conv(x, w, bias=bias, padding=1, alpha=0.5), 0.5 * plain + column)
    close(client.conv(x, w, bias=bias, padding=1, activation="relu"), np.maximum(plain + column, 0))
    close(client.conv(x, w, padding=1, clamp=(-0.5, 1.0)), np.clip(plain, -0.5, 1.0))
    close(client.conv(x, w, d=[d], padding=1), plain + d)
    close(client.conv(x, w, d=[d, d], binary="multiply", padding=1), plain * d * d, 1e-3)
    close(client.conv(x, w, padding="same"), plain)
    close(client.conv(x, w, padding=(1, 0, 1, 2)), by_hand.forward(x, w, padding=(1, 0, 1, 2)))
    factors = np.arange(1, 7, dtype=np.float32)
    whole = client.conv(np.rint(4 * x).astype(np.int8), np.rint(4 * w).astype(np.int8), padding=1)
    exact = by_hand.forward(np.rint(4 * x), np.rint(4 * w), padding=1)
    assert whole.dtype == np.int32
    np.testing.assert_array_equal(whole, exact)
    scaled = client.conv(
        np.rint(4 * x).astype(np.int8), np.rint(4 * w).astype(np.int8), padding=1, scale=factors, out_dtype="fp32"
    )
    close(scaled, exact * factors[:, None, None])


def test_the_result_lies_as_the_first_operand_or_as_the_caller_says(client: tw.Client) -> None:
    x, w = random(2, 4, 6, 5), random(6, 4, 3, 3)
    first, last = client.conv(x, w, channels_last=True), client.conv(channels_last(None, x), w, channels_last=False)
    assert is_channels_last(first)
    assert last.flags.c_contiguous
    close(first, by_hand.forward(x, w))
    close(last, by_hand.forward(x, w))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_results_go_where_the_caller_said(client: tw.Client, shared: bool, last: bool) -> None:
    x, w = random(2, 4, 6, 5), random(6, 4, 3, 3)
    out = np.full((2, 6, 4, 3), np.nan, np.float32)
    out = channels_last(client if shared else None, out) if last else client.asarray(out) if shared else out
    strides = out.strides
    assert client.conv(x, w, out=out) is out
    assert out.strides == strides
    close(out, by_hand.forward(x, w))
    wide = client.empty((2, 6, 8, 3)) if shared else np.zeros((2, 6, 8, 3), np.float32)
    wide.fill(7)
    client.conv(x, w, out=wide[:, :, ::2])
    close(wide[:, :, ::2], by_hand.forward(x, w))
    assert (wide[:, :, 1::2] == 7).all()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_gradients_are_added_to_older_ones_in_their_own_memory(client: tw.Client, shared: bool, last: bool) -> None:
    place = client if shared else None

    def put(array: np.ndarray) -> np.ndarray:
        return channels_last(place, array) if last else client.asarray(array) if shared else array.copy()

    x, dy, w = put(random(2, 4, 6, 5)), put(random(2, 6, 4, 3)), put(random(6, 4, 3, 3))
    old_w, old_x = random(6, 4, 3, 3), random(2, 4, 6, 5)
    dw, dx = put(old_w), put(old_x)
    for _ in range(2):
        assert client.conv_backward_weight(x, dy, out=dw, accumulate=True) is dw
        assert client.conv_backward_data(dy, w, out=dx, accumulate=True) is dx
        if shared:
            assert client.report is not None
            assert client.report.staged_bytes == client.report.bytes_copied == 0
    close(dw, old_w + 2 * by_hand.backward_weight(x, dy, (6, 4, 3, 3)), 3e-4)
    close(dx, old_x + 2 * by_hand.backward_data(dy, w, (2, 4, 6, 5)), 3e-4)


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "more", "size"),
    [
        ((2, 6, 5, 4), (6, 2, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 3}, (10, 8)),
        ((1, 3, 7), (3, 4, 4), {"stride": 3, "dilation": 2}, (25,)),
        ((1, 2, 3, 4, 3), (2, 3, 2, 3, 2), {"stride": (2, 1, 2), "padding": (0, 1, 1)}, (6, 4, 4)),
        ((1, 2, 4, 4), (2, 3, 3, 3), {"padding": (1, 0, 0, 1)}, (5, 5)),
    ],
    ids=["2d", "1d", "3d", "asymmetric"],
)
@pytest.mark.some(1)
@pytest.mark.extended
def test_transposed_convolution_is_the_gradient_of_the_image_by_name(
    client: tw.Client, x_shape: Any, w_shape: Any, more: Any, size: Any
) -> None:
    x, w = random(*x_shape), random(*w_shape)
    groups = more.get("groups", 1)
    bias = random(w_shape[1] * groups)
    y = client.conv_transpose(x, w, bias=bias, activation="relu", **more)
    assert y.shape == (x_shape[0], w_shape[1] * groups, *size)
    rest = {name: value for name, value in more.items() if name != "output_padding"}
    truth = by_hand.backward_data(x, w, y.shape, **rest) + bias.reshape(-1, *[1] * len(size))
    close(y, np.maximum(truth, 0))
    close(client.plan_conv_transpose(x, w, bias=bias, **more)(x, w, bias), truth)


@pytest.mark.parametrize("padding", [[1, 0, 0, 1], np.array([1, 0, 0, 1])], ids=["list", "numpy"])
def test_transposed_convolution_takes_uneven_padding_from_any_sequence(client: tw.Client, padding: Any) -> None:
    x, w = random(1, 2, 4, 4), random(2, 3, 3, 3)
    y = client.conv_transpose(x, w, padding=padding, stride=np.int64(1))
    close(y, by_hand.backward_data(x, w, (1, 3, 5, 5), padding=(1, 0, 0, 1)))


def test_prepared_plans_plan_nothing_when_they_run(client: tw.Client) -> None:
    x, w, bias = (client.asarray(item) for item in (random(2, 4, 6, 5), random(6, 4, 3, 3), random(6)))
    plan = client.plan_conv(x, w, bias=bias, padding=1)
    out = client.empty((2, 6, 6, 5))
    for _ in range(2):
        out.fill(np.nan)
        assert plan(x, w, bias, out=out) is out
        assert client.report is not None
        assert client.report.plan_cached
        close(out, by_hand.forward(x, w, padding=1) + bias[:, None, None])
    out.fill(np.nan)
    plan.bind(x, w, bias, out=out)()
    close(out, by_hand.forward(x, w, padding=1) + bias[:, None, None])
    dy, dw = client.asarray(random(2, 6, 6, 5)), client.zeros((6, 4, 3, 3))
    weight = client.plan_conv_backward_weight(x, dy, padding=1, out=dw, accumulate=True)
    for _ in range(3):
        weight(x, dy, dw, out=dw)
    close(dw, 3 * by_hand.backward_weight(x, dy, (6, 4, 3, 3), padding=1), 3e-4)
    data = client.plan_conv_backward_data(((2, 6, 6, 5), "fp32"), ((6, 4, 3, 3), "fp32"), input_size=(6, 5), padding=1)
    close(data(dy, w), by_hand.backward_data(dy, w, (2, 4, 6, 5), padding=1))
    assert data.flops == 2 * 2 * 6 * 30 * 4 * 9


def test_plans_give_channels_last_results_for_channels_last_operands(client: tw.Client) -> None:
    x, w = channels_last(client, random(2, 4, 6, 5)), channels_last(client, random(6, 4, 3, 3))
    plan = client.plan_conv(x, w)
    y = plan(x, w)
    assert is_channels_last(y)
    close(y, by_hand.forward(x, w))
    close(plan(np.array(x), np.array(w)), by_hand.forward(x, w))  # other strides: copied


def test_a_second_identical_call_is_planned_already(client: tw.Client) -> None:
    x, w = client.asarray(random(3, 5, 8, 9)), client.asarray(random(7, 5, 3, 2))
    client.conv(x, w, padding=1)
    client.conv(x, w, padding=1)
    assert client.report is not None
    assert client.report.plan_cached
    assert client.report.timing.build_ns == 0


def test_no_images_are_an_empty_result(client: tw.Client) -> None:
    assert client.conv(client.empty((0, 4, 6, 5)), random(6, 4, 3, 3)).shape == (0, 6, 4, 3)
    dw = client.conv_backward_weight(client.empty((0, 4, 6, 5)), client.empty((0, 6, 4, 3)), filter_size=3)
    np.testing.assert_array_equal(dw, np.zeros((6, 4, 3, 3), np.float32))


def test_weights_that_the_server_keeps_are_operands(client: tw.Client) -> None:
    x, w = random(2, 4, 6, 5), random(6, 4, 3, 3)
    with client.buffer(w.nbytes) as buffer:
        buffer.write(w)
        close(client.conv(x, buffer.tensor(w.shape, "fp32")), by_hand.forward(x, w))


def test_the_asyncio_client_has_the_same(real_server: Any) -> None:
    x, w, dy = random(2, 4, 6, 5), random(6, 4, 3, 3), random(2, 6, 4, 3)

    async def main() -> list[np.ndarray]:
        async with tw.aio.connect(real_server.target) as client:
            plan = await client.plan_conv(x, w)
            return [
                await client.conv(x, w),
                await plan(x, w),
                await client.conv_backward_data(dy, w, input_size=(6, 5)),
                await client.conv_backward_weight(x, dy, filter_size=(3, 3)),
                await client.conv_transpose(dy, w),
            ]

    y, planned, dx, dw, transposed = asyncio.run(main())
    for found in (y, planned):
        close(found, by_hand.forward(x, w))
    for found in (dx, transposed):
        close(found, by_hand.backward_data(dy, w, (2, 4, 6, 5)))
    close(dw, by_hand.backward_weight(x, dy, (6, 4, 3, 3)), 2e-4)


@pytest.mark.extended
def test_without_shared_memory_results_keep_their_layout(remote_target: str) -> None:
    with tw.connect(remote_target) as client:
        x, w = channels_last(None, random(2, 4, 6, 5)), random(6, 4, 3, 3)
        y = client.conv(x, w)
        assert is_channels_last(y)
        close(y, by_hand.forward(x, w))
        close(client.plan_conv(x, w)(x, w), by_hand.forward(x, w))
        grad = channels_last(None, random(6, 4, 3, 3))
        old, dy = grad.copy(), random(2, 6, 4, 3)
        client.conv_backward_weight(x, dy, out=grad, accumulate=True)
        close(grad, old + by_hand.backward_weight(x, dy, (6, 4, 3, 3)), 3e-4)
        big = channels_last(None, random(2, 64, 80, 80))  # beyond what a reply carries
        large = client.conv(big, np.eye(64, dtype=np.float32)[:, :, None, None])
        assert is_channels_last(large)
        close(large, big)


@pytest.mark.parametrize(
    ("call", "field", "rule"),
    [
        (lambda c, x, w: c.conv(x, w, activation="soft"), "activation", "attribute_choice"),
        (lambda c, x, w: c.conv(x, w, d=x), "d", "operand_list"),
        (lambda c, x, w: c.conv(x, w, alpha="1"), "alpha", "attribute_type"),
        (lambda c, x, w: c.conv(x, w, alpha=10**400), "alpha", "attribute_type"),
        (lambda c, x, w: c.conv(x, w, scale=[10**400] * 4), "scale", "array_like"),
        (lambda c, x, w: c.conv_backward_weight(x, x, filter_size=3, accumulate=True), "out", "accumulate_output"),
        (lambda c, x, w: c.conv_transpose(x, w, output_padding=1), "output_padding", "output_padding"),
        (lambda c, x, w: c.conv_transpose(x, w, padding=(1, 2, 3)), "padding", "one_or_ndim"),
        (lambda c, x, w: c.conv_transpose(x, w, stride=(1, 2, 3)), "stride", "one_or_ndim"),
        (lambda c, x, w: c.conv(x, w, stride=1.5), "stride", ""),
        (lambda c, x, w: c.conv(x, w, groups=3), "groups", "groups_divide_channels"),
        (lambda c, x, w: c.conv(x, w, padding="full"), "padding", "padding_form"),
        (lambda c, x, w: c.conv(x[0], w), "", "ranks_agree"),
    ],
)
def test_what_cannot_be_meant_names_field_rule_and_fix(client: tw.Client, call: Any, field: str, rule: str) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        call(client, random(2, 4, 6, 5), random(4, 4, 3, 3))
    error = caught.value
    assert field in error.field
    assert rule in error.rule
    assert error.fix


@pytest.mark.parametrize(
    ("x", "w", "more", "field"),
    [
        ((2, 3, 6, 5), (4, 2, 3, 3), {}, "w.shape"),  # weights of other channels
        ((2, 4, 6), (4, 2, 3, 3), {}, ""),  # of another rank
        ((2, 4, 6, 5), (4, 2, 3, 3), {"groups": 3}, "groups"),
        ((2, 4, 6, 5), (4, 2, 3, 3), {"out": np.zeros((1, 2, 8, 7), np.float32)}, "x.shape"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "plan_"])
def test_errors_of_transposed_convolution_name_its_own_arguments(
    client: tw.Client, prefix: str, x: tuple[int, ...], w: tuple[int, ...], more: dict[str, Any], field: str
) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        getattr(client, f"{prefix}conv_transpose")(random(*x), random(*w), **more)
    error = caught.value
    assert field in error.field
    assert error.fix
    told = f"{error} {error.field} {error.fix}".replace("_", " ").replace(".", " ").split()
    assert not {"dy", "dx", "dy's", "dx's"} & set(told)


@pytest.mark.parametrize("name", ["conv", "conv_backward_data", "conv_backward_weight", "conv_transpose"])
@pytest.mark.parametrize("prefix", ["", "plan_"])
def test_an_unknown_argument_is_told_with_the_name_that_was_called(client: tw.Client, prefix: str, name: str) -> None:
    one = np.ones((1, 1, 1), np.float32)
    for unknown in ("strides", "core"):  # what the library itself passes on has no name
        with pytest.raises(TypeError, match=rf"^{prefix}{name}\(\) got an unexpected keyword argument '{unknown}'"):
            getattr(client, prefix + name)(one, one, **{unknown: 2})


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_torch_tensors_are_read_in_their_own_memory_format(client: tw.Client) -> None:
    import torch

    x = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last)
    w = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    y = client.conv(x, w, padding=1)
    assert is_channels_last(y)
    close(y, torch.nn.functional.conv2d(x, w, padding=1).numpy())
    half = client.conv(x.bfloat16(), w.bfloat16(), padding=1)
    assert half.dtype == tw.DTYPES["bf16"]
    assert is_channels_last(half)
    close(half, y, 0.15)
