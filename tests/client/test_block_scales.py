"""Products with block scales against a server in another process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"scale_block": (1, 128)}, "attribute_type"),
        ({"scale_block": ((1, 32), (1, 32))}, "attribute_choice"),
        ({"scale_b": np.ones((3, 3), np.float32)}, "block_scale_shape"),
        ({"scale_a": 2.0}, "block_scale_shape"),
        ({"scale_a": np.full((5, 3), 127, np.uint8)}, "block_scale_dtype"),
    ],
    ids=["one_block", "unknown", "shape", "number", "exponents"],
)
def test_scales_that_do_not_fit_are_rejected_with_what_would_do(
    client: tw.Client, changes: dict[str, Any], rule: str
) -> None:
    a, b, scales, _ = operands(client)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(a, b, **{"scale_block": SQUARES, **scales, **changes})
    assert caught.value.rule == rule and caught.value.fix
