"""Opened plans need no server: it may end, and the process may fork."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw

A, B = np.arange(40, dtype=np.float32).reshape(5, 8), np.arange(56, dtype=np.float32).reshape(8, 7)
CHILD_S = 60.0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def in_child(work: Callable[[], Any]) -> int:
    """Exit status of a forked child that does ``work``: 0 if it returned."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def test_what_was_opened_goes_on_when_the_server_is_killed(own_real_server) -> None:
    with tw.connect(own_real_server.target) as client:
        plan = client.plan_gemm(A, B)
        bound = plan.bind(A, B)
        out = np.empty((5, 7), np.float32)
        client.gemm(A, B)
        client.gemm(A, B, out=out)
        client.run("gemm", {"a": A, "b": B})
        own_real_server.kill()
        deadline = time.monotonic() + 10
        while not client._subject.session.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(3):
            for call in (
                lambda: client.gemm(A, B),
                lambda: client.gemm(A, B, out=out),
                lambda: client.run("gemm", {"a": A, "b": B})["out"],
                lambda: plan(A, B),
                lambda: plan(A, B, repeat=3),
                bound,
                lambda: bound.launch().synchronize(),
                lambda: plan.bind(A, B)(),
                lambda: plan.run_many([(A, B), bound])[0],
            ):
                assert (call() == A @ B).all()
                assert client.report is not None
                assert client.report.placement == "caller"


@pytest.mark.extended
def test_a_new_problem_says_that_the_server_is_gone(own_real_server) -> None:
    with tw.connect(own_real_server.target, timeout=0.5) as client:
        client.gemm(A, B)
        own_real_server.kill()
        for _ in range(2):
            with pytest.raises(tw.UnavailableError) as caught:
                client.gemm(A[:3], B)
            assert caught.value.fix
            assert (client.gemm(A, B) == A @ B).all()


@pytest.mark.extended
def test_a_forked_child_launches_what_its_parent_opened(own_real_server) -> None:
    client = tw.connect(own_real_server.target)
    plan = client.plan_gemm(A, B)
    bound = plan.bind(A, B)
    client.gemm(A, B)

    def work() -> None:
        for _ in range(3):
            assert (client.gemm(A, B) == A @ B).all()
            assert (plan(A, B) == A @ B).all()
            assert (bound() == A @ B).all()
            assert client.report.placement == "caller"  # type: ignore[union-attr]
        assert (client.gemm(A[:4], B) == A[:4] @ B).all()  # opens a session of its own

    for _ in range(2):
        assert in_child(work) == 0
        assert (bound() == A @ B).all()
        assert (client.gemm(A, B) == A @ B).all()
    own_real_server.kill()
    assert in_child(lambda: bound()) == 0
    client.close()


@pytest.mark.extended
def test_reconnecting_keeps_what_is_bound_and_plans_anew(own_real_server) -> None:
    with tw.connect(own_real_server.target) as client:
        plan = client.plan_gemm(A, B)
        bound = plan.bind(A, B)
        own_real_server.kill()
        own_real_server.start()
        client.reconnect()
        assert (bound() == A @ B).all()
        assert (plan(A, B) == A @ B).all()
        assert (client.gemm(A, B) == A @ B).all()
        assert (client.gemm(A[:2], B) == A[:2] @ B).all()
        assert client.report is not None
        assert client.report.placement == "caller"
