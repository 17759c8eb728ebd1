"""Products of experts against a server in another process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from client_helpers import close, random

import tilewright as tw

if TYPE_CHECKING:
    from conftest import Server


def truth(x: np.ndarray, w: np.ndarray, counts: list[int]) -> np.ndarray:
    parts = np.split(x, np.cumsum(counts)[:-1])
    return np.concatenate([part @ w[expert].T for expert, part in enumerate(parts)])


@pytest.fixture(params=["server", "auto"])
def client(real_server: Server, request: pytest.FixtureRequest) -> Iterator[tw.Client]:
    """A client of the service, which launches in the server or in this process."""
    with tw.connect(real_server.target, launch=request.param) as opened:
        yield opened


def test_rows_are_multiplied_with_the_weights_of_their_expert(client: tw.Client) -> None:
    x, w, counts = random(40, 24), random(4, 16, 24), [7, 0, 30, 3]
    y = client.moe_gemm(x, w, np.array(counts, np.int32))
    close(y, truth(x, w, counts))
    shared = client.asarray(x), client.asarray(w), client.asarray(np.array(counts, np.int32))
    out = client.empty((40, 16))
    assert client.moe_gemm(*shared, out=out) is out
    close(out, truth(x, w, counts))
    assert client.report is not None and client.report.staged_bytes == 0


def test_one_plan_serves_any_routing(client: tw.Client) -> None:
    x, w = client.asarray(random(40, 24)), client.asarray(random(4, 16, 24))
    plan = client.plan_moe_gemm(x, w, tw.Spec.of((4,), np.int32))
    for counts in ([10, 10, 10, 10], [40, 0, 0, 0], [0, 1, 2, 37]):
        close(plan(x, w, np.array(counts, np.int32)), truth(np.array(x), np.array(w), counts))


def test_rows_of_no_expert_stay_as_they_were(client: tw.Client) -> None:
    x, w, counts = random(3, 8, 24), random(3, 16, 24), np.array([2, 0, 8], np.int32)
    out = client.zeros((3, 8, 16))
    out.fill(5)
    client.moe_gemm(x, w, counts, out=out, expected_rows=4)
    for expert, count in enumerate(counts):
        close(out[expert, :count], x[expert, :count] @ w[expert].T)
        assert np.all(out[expert, count:] == 5)


def test_a_reply_has_nothing_of_other_calls_in_rows_of_no_expert(remote_target: str) -> None:
    with tw.connect(remote_target) as client:  # results come from the server's own memory
        x, w, out = random(3, 8, 24), random(3, 16, 24), np.full((3, 8, 16), 6.0, np.float32)
        client.moe_gemm(x, w, np.full(3, 8, np.int32), out=out)
        assert np.all(out != 0)
        client.moe_gemm(x, w, np.array([2, 0, 8], np.int32), out=out)
        close(out[0, :2], x[0, :2] @ w[0].T)
        assert np.all(out[0, 2:] == 0) and np.all(out[1] == 0)


def test_factors_and_types(client: tw.Client) -> None:
    x, w = (random(*shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((20, 32), (2, 16, 32)))
    counts, each = [12, 8], np.array([0.5, 2.0], np.float32)
    y = client.moe_gemm(
        x, w, np.array(counts, np.int32), scale_x=0.25, scale_w=each, alpha=2.0, out_dtype="fp32", return_status=True
    )
    assert isinstance(y, tuple) and y[1].tolist() == [0, 0, 0, 0]
    scaled = w.astype(np.float32) * each[:, None, None]
    close(y[0], 0.5 * truth(x.astype(np.float32), scaled, counts))


def test_factors_of_blocks(client: tw.Client) -> None:
    x, w = (random(*shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((20, 200), (2, 16, 200)))
    counts, of_x, of_w = [12, 8], np.abs(random(20, 2)) + 0.1, np.abs(random(2, 1, 2)) + 0.1
    y = client.moe_gemm(
        x, w, np.array(counts, np.int32), scale_x=of_x, scale_w=of_w, scale_block=((1, 128), (128, 128)),
        out_dtype="fp32",
    )  # fmt: skip
    wide_x = x.astype(np.float32) * np.repeat(of_x, 128, -1)[:, :200]
    wide_w = w.astype(np.float32) * np.repeat(of_w, 128, -1)[..., :200]
    close(y, truth(wide_x, wide_w, counts))
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.moe_gemm(x, w, np.array(counts, np.int32), scale_x=of_x[:19], scale_w=of_w, scale_block="1x128_128x128")
    assert (caught.value.field, caught.value.rule) == ("scale_x.shape", "block_scale_shape") and caught.value.fix


def test_a_gate_and_results_in_8_bits_that_are_the_next_operands(client: tw.Client) -> None:
    x, gate, up, down = random(20, 64), random(2, 144, 64), random(2, 144, 64), random(2, 16, 144)
    counts = np.array([12, 8], np.int32)
    w, own = tw.join_gate_up(gate, up), [12, 8]
    a, b = truth(x, gate, own), truth(x, up, own)
    hidden = a / (1 + np.exp(-a)) * b
    close(client.moe_gemm(x, w, counts, activation="swiglu"), hidden)
    found = client.moe_gemm(x, w, counts, activation="swiglu", out_scale_block=(1, 128))
    assert isinstance(found, tuple) and found[0].dtype == ml_dtypes.float8_e4m3fn and found[1].shape == (20, 2)
    wide = np.array(found[0]).astype(np.float32) * np.repeat(np.array(found[1]), 128, 1)[:, :144]
    assert np.linalg.norm(wide - hidden) < 0.04 * np.linalg.norm(hidden)
    eight = down.astype(ml_dtypes.float8_e4m3fn)
    y = client.moe_gemm(
        found[0], eight, counts, scale_x=found[1], scale_w=np.ones((2, 1, 2), np.float32),
        scale_block="1x128_128x128", out_dtype="fp32",
    )  # fmt: skip
    close(y, truth(wide, eight.astype(np.float32), own))
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.moe_gemm(x, gate[:, :24], counts, activation="swiglu")
    assert (caught.value.field, caught.value.rule) == ("w.shape", "swiglu_columns") and caught.value.fix
    with pytest.raises(tw.InvalidArgumentError) as caught:
        tw.join_gate_up(gate, up[:1])
    assert caught.value.rule == "swiglu_weights"


@pytest.mark.parametrize(
    ("counts", "rule"), [([5, -1], "count_range"), ([15, 6], "count_sum"), ([21, 0], "count_range")]
)
def test_wrong_counts_are_an_error(client: tw.Client, counts: list[int], rule: str) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.moe_gemm(random(20, 8), random(2, 8, 8), np.array(counts, np.int32))
    assert caught.value.rule == rule and caught.value.fix


def test_rows_with_gaps_are_no_target(client: tw.Client) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.moe_gemm(
            random(4, 8), random(1, 8, 8), np.array([4], np.int32), out=np.zeros((4, 16), np.float32)[:, ::2]
        )
    assert caught.value.rule == "row_layout"
