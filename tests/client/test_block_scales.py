"""Products with block scales against a server in another process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from client_helpers import close, random

import tilewright as tw

if TYPE_CHECKING:
    from conftest import Server

SQUARES = ((1, 128), (128, 128))


@pytest.fixture
def client(real_server: Server) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


def operands(client: tw.Client) -> tuple[Any, Any, dict[str, Any], Any]:
    """A, B as columns, the scales, and the truth."""
    a, w = (client.asarray(random(rows, 260), "fp8") for rows in (5, 140))
    scale_a, scale_b = random(5, 3), random(2, 3)
    left = np.array(a, np.float32) * np.repeat(scale_a, 128, 1)[:, :260]
    right = np.array(w, np.float32) * np.repeat(np.repeat(scale_b, 128, 0), 128, 1)[:140, :260]
    return a, w.T, {"scale_a": scale_a, "scale_b": scale_b}, left @ right.T


def test_blocks_are_a_pair_or_a_name_in_calls_plans_and_groups(client: tw.Client) -> None:
    a, b, scales, truth = operands(client)
    for block in (SQUARES, "1x128_128x128"):
        close(client.gemm(a, b, scale_block=block, out_dtype="fp32", **scales), truth, 1e-3)
    plan = client.plan_gemm(a, b, scale_block=SQUARES, out_dtype="fp32", **scales)
    close(plan(a, b, **scales), truth, 1e-3)
    lists = {name: [value] for name, value in scales.items()}
    close(client.grouped_gemm([a], [b], scale_block=SQUARES, out_dtype="fp32", **lists)[0], truth, 1e-3)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e8m0fnu"])
def test_exponents_of_blocks_of_32_come_as_bytes_or_as_their_own_type(client: tw.Client, dtype: str) -> None:
    a, w = (client.asarray(random(rows, 70), "fp8") for rows in (5, 40))
    exponents = [np.random.default_rng(rows).integers(122, 132, (rows, 3)).astype(np.uint8) for rows in (5, 40)]
    wide = [np.ldexp(np.float32(1), np.repeat(bytes_.astype(int), 32, 1)[:, :70] - 127) for bytes_ in exponents]
    truth = (np.array(a, np.float32) * wide[0]) @ (np.array(w, np.float32) * wide[1]).T
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    scales = {f"scale_{side}": bytes_.view(kind) for side, bytes_ in zip("ab", exponents, strict=True)}
    blocks = {"scale_block": ((1, 32), (1, 32)), "out_dtype": "fp32"}
    close(client.gemm(a, w.T, **blocks, **scales), truth, 1e-3)
    lists = {name: [value] for name, value in scales.items()}
    close(client.grouped_gemm([a], [w.T], **blocks, **lists)[0], truth, 1e-3)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"scale_block": (1, 128)}, "attribute_type"),
        ({"scale_block": ((1, 64), (1, 64))}, "attribute_choice"),
        ({"scale_block": ((1, 32), (1, 32))}, "block_scale_dtype"),
        ({"scale_b": np.ones((3, 3), np.float32)}, "block_scale_shape"),
        ({"scale_a": 2.0}, "block_scale_shape"),
        ({"scale_a": np.full((5, 3), 127, np.uint8)}, "block_scale_dtype"),
    ],
    ids=["one_block", "unknown", "fp32", "shape", "number", "exponents"],
)
def test_scales_that_do_not_fit_are_rejected_with_what_would_do(
    client: tw.Client, changes: dict[str, Any], rule: str
) -> None:
    a, b, scales, _ = operands(client)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(a, b, **{"scale_block": SQUARES, **scales, **changes})
    assert caught.value.rule == rule and caught.value.fix


@pytest.mark.parametrize(("left", "right"), [("fp4", "fp4"), ("bf6", "fp6"), ("fp8", "fp4")])
def test_values_of_fewer_than_8_bits_come_as_ml_dtypes_or_as_packed_bytes(
    client: tw.Client, left: str, right: str
) -> None:
    types = {"fp4": "float4_e2m1fn", "fp6": "float6_e2m3fn", "bf6": "float6_e3m2fn", "fp8": "float8_e4m3fn"}
    a, w = (random(rows, 70).astype(getattr(ml_dtypes, types[form])) for rows, form in ((5, left), (40, right)))
    exponents = [np.random.default_rng(rows).integers(122, 132, (rows, 3)).astype(np.uint8) for rows in (5, 40)]
    wide = [np.ldexp(np.float32(1), np.repeat(bytes_.astype(int), 32, 1)[:, :70] - 127) for bytes_ in exponents]
    truth = (a.astype(np.float32) * wide[0]) @ (w.astype(np.float32) * wide[1]).T
    scales = {"scale_a": exponents[0], "scale_b": exponents[1]}
    blocks = {"scale_block": ((1, 32), (1, 32)), "out_dtype": "fp32"}
    seen = client.gemm(a, w.T, **blocks, **scales)
    close(seen, truth, 1e-3)
    forms = {f"{side}_format": form for side, form in (("a", left), ("b", right)) if form != "fp8"}
    packed = [tw.pack_narrow(x).view(np.uint8) if form != "fp8" else x for x, form in ((a, left), (w, right))]
    np.testing.assert_array_equal(client.gemm(packed[0], packed[1].T, **blocks, **forms, **scales), seen)
    lists = {name: [value] for name, value in scales.items()}
    np.testing.assert_array_equal(client.grouped_gemm([a], [w.T], **blocks, **lists)[0], seen)
    if right != "fp8":
        np.testing.assert_array_equal(tw.unpack_narrow(packed[1], right, 70), w)


def test_formats_that_do_not_fit_their_arrays_are_rejected(client: tw.Client) -> None:
    four = np.zeros((4, 32), ml_dtypes.float4_e2m1fn)
    exponents = np.full((4, 1), 127, np.uint8)
    words = {"scale_block": ((1, 32), (1, 32)), "scale_a": exponents, "scale_b": exponents}
    for call in (
        lambda: client.gemm(four, four.T, a_format="fp6", **words),
        lambda: tw.pack_narrow(np.zeros((4, 32), np.float32)),
        lambda: tw.unpack_narrow(tw.pack_narrow(four), "fp4", 16),
        lambda: tw.unpack_narrow(tw.pack_narrow(four), "fp5", 32),
    ):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            call()
        assert caught.value.rule == "narrow_values" and caught.value.fix
