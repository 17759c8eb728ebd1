"""Mistakes are told in the same words, whoever launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw

F = np.float32
A, B = np.ones((5, 6), F), np.ones((6, 7), F)


def read_only() -> Any:
    found = np.empty((5, 7), F)
    found.flags.writeable = False
    return found


CALLS: dict[str, Callable[[tw.Client], Any]] = {
    "shapes": lambda c: c.gemm(A, A),
    "rank": lambda c: c.gemm(np.ones((), F), B),
    "dtypes": lambda c: c.gemm(A, B.astype(np.float16)),
    "unknown dtype": lambda c: c.gemm(A.astype(float), B),
    "objects": lambda c: c.gemm(np.array([[object()]]), B),
    "output's shape": lambda c: c.gemm(A, B, out=np.empty((5, 8), F)),
    "output's dtype": lambda c: c.gemm(A, B, out=np.empty((5, 7), np.float64)),
    "read-only output": lambda c: c.gemm(A, B, out=read_only()),
    "output that is no array": lambda c: c.gemm(A, B, out=[1.0]),
    "bias": lambda c: c.gemm(A, B, bias=np.ones(6, F)),
    "activation": lambda c: c.gemm(A, B, activation="soft"),
    "kernel": lambda c: c.gemm(A, B, kernel="none of these"),
    "strategy": lambda c: c.gemm(A, B, strategy="luck"),
    "device": lambda c: c.gemm(A, B, device="cpu:7"),
    "filter": lambda c: c.conv(np.ones((1, 3, 8, 8), F), np.ones((4, 2, 3, 3), F)),
    "heads": lambda c: c.attention(np.ones((1, 3, 4, 8), F), np.ones((1, 2, 4, 8), F), np.ones((1, 2, 4, 8), F)),
    "operation": lambda c: c.run("juggle", {"a": A}),
    "operand": lambda c: c.run("gemm", {"a": A, "b": B, "z": A}),
    "attribute": lambda c: c.run("gemm", {"a": A, "b": B}, attributes={"weight": 3}),
}


def refusal(call: Callable[[], Any]) -> tuple[Any, ...]:
    with pytest.raises(tw.TilewrightError) as caught:
        call()
    error = caught.value
    return type(error), error.field, error.rule, error.value, error.message, error.fix


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_as_the_server_refuses_it(auto: tw.Client, apart: tw.Client, name: str) -> None:
    wanted = refusal(lambda: CALLS[name](apart))
    assert refusal(lambda: CALLS[name](auto)) == wanted
    auto.gemm(A, B)
    assert refusal(lambda: CALLS[name](auto)) == wanted


PLANNED: dict[str, Callable[[Any], Any]] = {
    "too many": lambda plan: plan(A, B, A),
    "too few": lambda plan: plan(A),
    "twice": lambda plan: plan(A, B, a=A),
    "besides": lambda plan: plan(A, B, z=A),
    "shape": lambda plan: plan(A[:3], B),
    "dtype": lambda plan: plan(A.astype(np.float16), B),
    "output": lambda plan: plan(A, B, out=np.empty((7, 5), F)),
    "read-only": lambda plan: plan(A, B, out=read_only()),
    "bound shape": lambda plan: plan.bind(A[:3], B),
    "bound output": lambda plan: plan.bind(A, B, out=read_only()),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_refuses_what_it_refuses_in_the_server(auto: tw.Client, apart: tw.Client, name: str) -> None:
    there, here = apart.plan_gemm(A, B), auto.plan_gemm(A, B)
    wanted = refusal(lambda: PLANNED[name](there))
    assert refusal(lambda: PLANNED[name](here)) == wanted
    here(A, B)
    assert refusal(lambda: PLANNED[name](here)) == wanted


def test_what_the_library_finds_wrong_is_a_typed_error(caller: tw.Client) -> None:
    plan = caller.plan_gemm(A, B)._state.here.plan
    with pytest.raises(tw.InvalidArgumentError) as caught:
        plan.bind(plan.pack(0, 64, 128))
    assert (caught.value.field, caught.value.rule) == ("a", "operand_address")
    assert caught.value.fix
    with pytest.raises(tw.InternalError) as damaged:
        type(plan)(plan.library, b"no plan", plan.names)
    assert damaged.value.rule == "launch_plan_format"
    with pytest.raises(tw.InternalError) as foreign:
        plan.library.put_object(bytes(32), b"other bytes")
    assert foreign.value.rule == "object_digest"
