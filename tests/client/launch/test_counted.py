"""Launches in clients' processes are counted where the server reads: its statistics, its metrics, its journal."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.launch.page import LaunchPage
from tilewright_server.session.launch_page import LaunchPage as ServerPage

A, B = np.ones((6, 8), np.float32), np.ones((8, 5), np.float32)


def counted(client: tw.Client) -> tuple[int, int, int]:
    """Launches, samples and nanoseconds of products by callers."""
    (found,) = [item for item in client.kernels.statistics()["operations"] if item["name"] == "gemm"]
    return found["caller_launches"], found["caller_samples"], found["caller_sampled_ns"]


@pytest.mark.extended
def test_launches_in_this_process_reach_the_statistics(own_real_server) -> None:
    with tw.connect(own_real_server.target, launch="caller") as client:
        plan = client.plan_gemm(A, B)
        bound = plan.bind(A, B)
        for _ in range(20):
            bound()
        for _ in range(5):
            client.gemm(A, B)
        launches, samples, ns = counted(client)
        assert launches == 25 and samples == 1 and ns > 0, "the 16th of the plan was timed"
        (kernel,) = [item for item in client.kernels.statistics()["kernels"] if item["caller_launches"]]
        assert (kernel["device"], kernel["caller_launches"], kernel["launches"]) == ("cpu:0", 25, 0)
        client.gemm(A, B, launch="server")
        assert counted(client)[0] == 25


@pytest.mark.extended
def test_what_a_session_counted_stays_when_it_ends(own_real_server) -> None:
    with tw.connect(own_real_server.target, launch="caller") as client:
        bound = client.plan_gemm(A, B).bind(A, B)
        for _ in range(7):
            bound()
    with tw.connect(own_real_server.target) as other:
        assert counted(other)[0] == 7


@pytest.mark.extended
def test_a_plan_is_counted_before_it_is_released(own_real_server) -> None:
    with tw.connect(own_real_server.target, launch="caller") as client:
        for _ in range(3):
            plan = client.plan_gemm(A, B)
            bound = plan.bind(A, B)
            bound()
            plan.close()
            del plan, bound
            client.gemm(A, B, launch="server")  # takes the release along
        assert counted(client)[0] == 3


@pytest.mark.extended
def test_samples_are_at_most_one_launch_in_a_thousand_behind_the_first(own_real_server) -> None:
    with tw.connect(own_real_server.target, launch="caller") as client:
        bound = client.plan_gemm(A, B).bind(A, B)
        threads = [threading.Thread(target=lambda: [bound() for _ in range(1300)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        launches, samples, _ = counted(client)
        assert launches == 5200 and 1 <= samples <= 1 + 5200 // 1024


def page_and_counts() -> tuple[ServerPage, LaunchPage, list[tuple[Any, int, int, int]]]:
    counts: list[tuple[Any, int, int, int]] = []
    server = ServerPage(lambda *what: counts.append(what))
    fd = server.descriptor()
    client = LaunchPage(fd, 1024)
    os.close(fd)
    return server, client, counts


def write(address: int, *numbers: int) -> None:
    data = struct.pack(f"={len(numbers)}Q", *numbers)
    ctypes.memmove(address, data, len(data))


def test_claims_that_cannot_be_true_are_not_counted() -> None:
    server, client, counts = page_and_counts()
    (_, address) = client.take(7) or (0, 0)
    for numbers in (
        (7, 2**64 - 1, 0, 0),  # more than anybody can launch
        (7, 5, 0, 0),  # fewer than before
        (8, 5, 0, 0),  # no plan of the session
        (0, 9, 9, 9),
    ):
        write(address, *numbers)
        server.collect({7: "plan"}.get)
    assert counts == []
    write(address, 7, 40, 2**63, 2**64 - 1)
    server.collect({7: "plan"}.get)
    assert counts == [("plan", 40, 0, 0)], "its samples are not believed"
    write(address, 7, 50, 2**63 + 1, 2**64 - 1)
    server.collect({7: "plan"}.get)
    assert counts[1:] == [("plan", 10, 1, 0)]


def test_random_pages_break_nothing() -> None:
    server, client, counts = page_and_counts()
    (_, address) = client.take(7) or (0, 0)
    noise = np.random.default_rng(5)
    for _ in range(30):
        ctypes.memmove(address, noise.bytes(65536), 65536)
        server.collect(lambda number: number)
    assert all(0 <= launches < 2**63 and 0 <= ns < 2**63 * samples + 1 for _, launches, samples, ns in counts)


def test_the_page_can_be_neither_shrunk_nor_grown() -> None:
    server, _, _ = page_and_counts()
    fd = server.descriptor()
    for size in (0, 4096, 1 << 20):
        try:
            os.ftruncate(fd, size)
        except PermissionError:
            continue
        raise AssertionError(size)
    os.close(fd)
    server.close()
    server.collect(lambda number: number)


def test_more_plans_than_records_go_uncounted() -> None:
    _, client, _ = page_and_counts()
    taken = [client.take(number + 1) for number in range(1025)]
    assert taken[-1] is None and None not in taken[:-1]
    client.give_back(3)
    assert (client.take(5000) or (0, 0))[0] == 3
