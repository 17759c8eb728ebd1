"""Products with 4-bit weights against a server in another process, and how weights are quantised and read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from client_helpers import close, random

import tilewright as tw

if TYPE_CHECKING:
    from conftest import Server


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


def dequantised(weights: tw.Int4Weights, k: int) -> Any:
    """[N, K] in float32."""
    values = tw.unpack_int4(np.asarray(weights.b).T, k).astype(np.float32)
    zero = 8 if weights.zero_b is None else np.repeat(weights.zero_b, 128, 1)[:, :k]
    return (values - zero) * np.repeat(weights.scale_b.astype(np.float32), 128, 1)[:, :k]


# ---- quantising ----


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16", "fp32"])
def test_weights_are_as_near_as_half_a_step(zeros: bool, scale_dtype: str) -> None:
    weights = random(24, 301) + (0.7 if zeros else 0.0)
    made = tw.quantize_int4(weights, zeros=zeros, scale_dtype=scale_dtype)
    assert made.b.shape == (151, 24) and made.b.strides == (1, 151) and made.scale_b.shape == (24, 3)
    steps = np.repeat(made.scale_b.astype(np.float32), 128, 1)[:, :301]
    # The factor is rounded too, and a zero point to a whole number: the ends of the range are a little farther off.
    assert np.all(np.abs(dequantised(made, 301) - weights) <= steps * (1.05 if zeros else 0.55))


def test_a_group_of_zeros_stays_zero() -> None:
    for zeros in (False, True):
        made = tw.quantize_int4(np.zeros((3, 130), np.float32), zeros=zeros)
        assert not dequantised(made, 130).any()


def test_values_are_packed_even_first_and_come_back() -> None:
    values = np.arange(15).reshape(1, 15)
    packed = tw.pack_int4(values)
    assert packed.dtype == np.int8 and packed[0, 1] == 2 | 3 << 4
    np.testing.assert_array_equal(tw.unpack_int4(packed, 15), values)
    for wrong in (values + 1.5, values + 2, values - 1):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            tw.pack_int4(wrong)
        assert caught.value.fix


def test_layers_of_gptq_and_awq_are_read() -> None:
    rng = np.random.default_rng(3)
    k, n = 256, 16
    values, zero = rng.integers(0, 16, (n, k)), rng.integers(1, 16, (n, 2))
    scales = rng.uniform(0.5, 1, (2, n)).astype(np.float16)
    shifts = np.arange(0, 32, 4)

    def words(fields: Any) -> Any:  # [.., 8]
        return np.bitwise_or.reduce(fields.astype(np.uint32) << shifts.astype(np.uint32), -1).view(np.int32)

    gptq = tw.int4_from_gptq(
        words(values.T.reshape(k // 8, 8, n).transpose(0, 2, 1)), words((zero - 1).T.reshape(2, n // 8, 8)), scales
    )
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    awq = tw.int4_from_awq(
        words(values.T.reshape(k, n // 8, 8)[..., order]), words(zero.T.reshape(2, n // 8, 8)[..., order]), scales
    )
    wide = (values - np.repeat(zero, 128, 1)) * np.repeat(scales.T.astype(np.float32), 128, 1)
    for made in (gptq, awq):
        np.testing.assert_allclose(dequantised(made, k), wide, rtol=1e-6)
    with pytest.raises(tw.InvalidArgumentError, match="activation order"):
        tw.int4_from_gptq(np.zeros((32, n), np.int32), np.zeros((2, 2), np.int32), scales, np.zeros(k, int))


# ---- products ----


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.some(1)
def test_quantised_weights_are_a_second_factor_in_calls_plans_and_groups(client: tw.Client, dtype: str) -> None:
    a = client.asarray(np.rint(random(5, 260) * 20), dtype)
    made = tw.quantize_int4(random(72, 260), zeros=True)
    truth = np.array(a, np.float32) @ dequantised(made, 260).T
    close(client.gemm(a, made, out_dtype="fp32"), truth, 1e-3)
    there = made.to(client.asarray)
    scale = np.full((5, 1), 0.5, np.float32)
    got = client.gemm(a, there, out_dtype="fp32", scale_a=scale, activation="relu")
    close(got, np.maximum(truth / 2, 0), 1e-3)
    arrays = {"scale_b": there.scale_b, "zero_b": there.zero_b}
    plan = client.plan_gemm(a, there.b, b_format="int4_128", out_dtype="fp32", **arrays)
    close(plan(a, there.b, **arrays), truth, 1e-3)
    close(client.grouped_gemm([a, a], [made, there], out_dtype="fp32")[1], truth, 1e-3)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"b_format": "int4_32"}, "attribute_choice"),
        ({"scale_b": np.ones((72, 2), np.float32)}, "int4_scale_shape"),
        ({"scale_b": None}, "int4_operands"),
        ({"zero_b": np.ones((72, 3), np.float32)}, "int4_scale_dtype"),
        ({"b": np.ones((130, 72), np.int8)}, "int4_layout"),
        ({"b": np.ones((71, 130), np.int8).T}, "int4_scale_shape"),
    ],
    ids=["format", "shape", "missing", "zeros", "layout", "columns"],
)
def test_what_does_not_fit_is_rejected_with_what_would_do(
    client: tw.Client, changes: dict[str, Any], rule: str
) -> None:
    a, made = random(5, 260).astype(np.float16), tw.quantize_int4(random(72, 260))
    given = {"b": made.b, "scale_b": made.scale_b, "b_format": "int4_128", **changes}
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(a, given.pop("b"), **given)
    assert caught.value.rule == rule and caught.value.fix
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(a, made, scale_b=made.scale_b)
    assert caught.value.rule == "int4_weights" and caught.value.field == "scale_b"
