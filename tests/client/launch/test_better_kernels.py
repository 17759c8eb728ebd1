"""Kernels that measurements found to be better come between launches, to clients that launch by themselves."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.launch.page import LaunchPage
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.measurements import Measurement, point_of
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.engine.types import EngineOptions
from tilewright_server.session.launch_page import CallerLaunches
from tilewright_server.session.launch_page import LaunchPage as ServerPage

A, B = np.ones((96, 80), np.float32), np.ones((80, 64), np.float32)


def kernel_of(client: tw.Client) -> str:
    assert client.report is not None and client.report.placement == "caller"
    return client.report.kernels[0]


def test_changes_of_choices_reach_the_client_and_its_records_leave_them_alone() -> None:
    server = ServerPage(lambda *what: None)
    fd = server.descriptor()
    client = LaunchPage(fd, 1024)
    os.close(fd)
    assert client.choices == 0
    server.announce()
    assert client.choices == 1
    assert client.take(7) is not None
    assert client.choices == 1, "the first record shares its place"
    server.announce()
    assert client.choices == 2
    server.close()
    server.announce()
    assert client.choices == 2


def test_clients_without_a_page_are_told_of_changes() -> None:
    told: list[int] = []
    launches = CallerLaunches({})
    launches.tell_by(told.append)
    launches.announce()
    assert not told, "it has no plan to launch"
    launches.begun = True
    launches.announce()
    launches.announce()
    assert told == [1, 2]
    launches.page(lambda *what: None)
    launches.announce()
    assert told == [1, 2], "its page says so"
    launches.close()


def test_a_client_hears_of_changes_over_its_lease(server: Any) -> None:
    async def main() -> None:
        async with tw.aio.connect(server.target, name="to be told") as client:
            session = client._connected().session
            session.listen()
            while session.told.value != 3:
                await asyncio.sleep(0.01)

    with tw.connect(server.target, name="to be told") as client:
        session = client._connected().session
        for _ in range(2):
            session.listen()
        assert settled(lambda: session.told.value == 3)
        listening = [thread for thread in threading.enumerate() if thread.name == "tilewright-lease"]
        assert len(listening) == 1
    listening[0].join(10)
    assert not listening[0].is_alive()
    asyncio.run(asyncio.wait_for(main(), 20))


def settled(done: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return done()


@pytest.mark.extended
@pytest.mark.parametrize("way", ["local", "tcp"])
def test_a_kernel_that_measurements_favour_is_taken_between_launches(
    tmp_path: Path, measured_server: Any, way: str
) -> None:
    server, database = measured_server
    tcp = next(word for word in server.ready.split() if word.startswith("127.0.0.1:"))
    with tw.connect(tcp if way == "tcp" else server.target, launch="caller") as client:
        plan = client.plan_gemm(A, B)
        bound = plan.bind(A, B)
        plan(A, B)
        first = kernel_of(client)
        for _ in range(3):
            client.gemm(A, B)
        assert kernel_of(client) == first
        PerfDatabase(database).record(measurements(tmp_path, first))
        end = time.monotonic() + 120
        while kernel_of(client) == first and time.monotonic() < end:
            time.sleep(0.2)
            assert (client.gemm(A, B) == A @ B).all()
        better = kernel_of(client)
        assert better != first
        assert (plan(A, B) == A @ B).all()
        assert kernel_of(client) == better
        assert (bound() == A @ B).all()
        assert kernel_of(client) == first, "what is bound keeps its kernel"


def measurements(folder: Path, slow: str) -> list[Measurement]:
    """The kernel that was chosen was slower than the others that might have been."""
    plugins = PluginManager()
    plugins.load_entry_points()
    engine = Engine(EngineOptions(folder / "cache"), plugins)
    device = engine.devices.info("cpu:0")
    operation = engine.operations["gemm"]
    inputs = {"a": TensorDesc.of("fp32", A.shape), "b": TensorDesc.of("fp32", B.shape)}
    problem = operation.parse(OperationRequest("gemm", inputs))
    point = point_of(problem)
    rows = []
    for config in operation.candidates(problem, device):
        ns = 9e6 if config.name == slow else 2e3 + len(rows)
        rows.append(
            Measurement("gemm", point.signature, dict(point.sizes), device.arch.id, device.name, config.to_dict(), ns)
        )
    engine.close()
    return rows
