"""Fixtures of devices in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.devices.worker.device import WorkerDevice

sys.path.insert(0, str(Path(__file__).parent))  # for the harness beside the tests

from worker_harness import Bench, Build, Client, _others, children, open_with


@pytest.fixture(autouse=True)
def others() -> None:
    """Processes that other tests of this interpreter keep, compilers for example, are none of ours."""
    _others.clear()
    _others.update(children())


@pytest.fixture
def bench(registry: DeviceRegistry, build: Build) -> Bench:
    return Bench(registry, build)


@pytest.fixture
def hosted(bench: Bench, build: Build) -> Iterator[Callable[[str], Bench]]:
    """Benches whose device is made by a function of ``hosted_devices``."""
    made: list[WorkerDevice] = []

    def host(name: str) -> Bench:
        made.append(open_with(bench, name))
        bench.device = made[-1]
        return bench

    yield host
    for device in made:
        device.close()


@pytest.fixture
def client(bench: Bench) -> Iterator[Client]:
    client = Client(bench)
    yield client
    client.socket.close()
