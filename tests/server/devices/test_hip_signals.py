"""Launches that are tied to a client's stream by numbers in a page of shared memory: order, numbers that go on beyond
the bits of a packet, clients that die. Runs as ``test_gpu.py`` does.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gpu_device_harness import GPUS, Gpu, get, put, settled
from test_gpu_packets import Served

from tilewright_kit.types.errors import DeviceError
from tilewright_server.devices.contract import RECORD, REPLY, WAIT
from tilewright_server.devices.hip.device import HipDevice
from tilewright_server.devices.hip.signals import COMPLETION, PAGE_BYTES
from tilewright_server.devices.worker import clients
from tilewright_server.devices.worker.clients import Clients
from tilewright_server.protocol.frames import ERROR, HEADER, REPLY_KIND, TIED, Kind

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kind() -> Gpu:
    return GPUS["hip"]


class Signalled(Served):
    """A loop whose client sees its numbers."""

    numbers: memoryview

    def open(self) -> tuple[int, ...]:
        self.socket.send(HEADER.pack(Kind.OPEN_SIGNALS, 0, 0, 3, 0))
        data, files, _, _ = socket.recv_fds(self.socket, 1 << 16, 1)
        self.payload = data[HEADER.size :]
        for file in files:
            with pytest.raises(PermissionError):
                os.ftruncate(file, 0)
            self.numbers = memoryview(mmap.mmap(file, PAGE_BYTES)).cast("Q")
            os.close(file)
        return HEADER.unpack_from(data)

    @property
    def completed(self) -> int:
        return self.numbers[COMPLETION // 8]


@pytest.fixture
def served(gpu: HipDevice, entry: Callable[[str], int]) -> Iterator[Signalled]:
    made = Signalled(gpu, entry)
    assert made.open()[:4] == (REPLY_KIND | Kind.OPEN_SIGNALS, 0, 0, 3), made.payload
    yield made
    made.end()


def test_a_launch_waits_for_the_clients_number_and_says_its_own(served: Signalled) -> None:
    out = served.bind(1, 4)
    assert served.launch(1, WAIT | RECORD | REPLY, 5)[1] == 0
    served.numbers[0] = 4
    time.sleep(0.05)
    assert served.completed == 0
    assert served.stream.waits
    served.numbers[0] = 5
    assert settled(lambda: served.completed == 9)
    assert not served.stream.waits
    assert (get(served.gpu, out) == 8).all()


def test_numbers_go_on_beyond_the_bits_of_a_packet(served: Signalled) -> None:
    served.bind(1, 4)
    for slot in (40_000, 10_000, 60_000, 1):  # each less than 2**16 behind the one before
        served.send(1, WAIT | REPLY, slot)
        assert served.answer()[1] == 0
    assert served.stream.lock.awaited == 131_073
    served.numbers[0] = 131_072
    for sequence in (0x8000_0000, 0xFFFF_FFFF, 2):
        served.send(1, RECORD | REPLY, 0, sequence)
        served.answer()
    time.sleep(0.05)
    assert served.completed == 0
    served.numbers[0] = 131_073
    assert settled(lambda: served.completed == (1 << 32) + 2)


def test_a_launch_that_fails_says_its_number_all_the_same(served: Signalled) -> None:
    served.bind(1, 4)
    served.send(1, 0, 0, 8)
    served.send(2, WAIT | RECORD | REPLY, 5)
    assert served.answer()[:4] == (REPLY_KIND | Kind.LAUNCH, ERROR | TIED, 5, 9)
    time.sleep(0.05)
    assert served.completed == 0, "it waits as the launch would have"
    served.numbers[0] = 5
    assert settled(lambda: served.completed == 9)


def test_signals_are_opened_once(served: Signalled) -> None:
    assert served.open()[:2] == (REPLY_KIND | Kind.OPEN_SIGNALS, ERROR)
    assert served.rule == "signals_once"


def test_signals_that_keep_no_order_are_refused(gpu: HipDevice, entry: Callable[[str], int]) -> None:
    made = Signalled(gpu, entry)
    made.loop._signals = lambda: "a reason"
    assert made.open()[1] == ERROR
    assert made.rule == "signal_support"
    made.end()


class Dead:
    """A peer that has ended."""

    is_known = is_dead = True

    def close(self) -> None:
        pass


def test_launches_of_a_client_that_died_go_on(served: Signalled, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no new process for it."""
    monkeypatch.setattr(clients, "PATIENCE_S", 60.0)
    served.bind(1, 4)
    peer: Any = Dead()
    known = Clients()
    known.begin(served.stream, peer)
    assert served.launch(1, WAIT | RECORD | REPLY, 5)[1] == 0
    known.check()
    assert settled(lambda: served.completed == 9)


def test_pages_are_unlocked_when_nothing_is_under_way(gpu: HipDevice, entry: Callable[[str], int]) -> None:
    """To unlock one waits for the whole device, and with it for clients."""
    first, second = Signalled(gpu, entry), Signalled(gpu, entry)
    for made in (first, second):
        made.open()
        made.bind(1, 4)
    pages = gpu._pages
    assert second.launch(1, WAIT | REPLY, 1)[1] == 0
    first.end()
    second.numbers[0] = 1
    assert settled(lambda: not second.stream.is_busy)
    assert second.launch(1, WAIT | REPLY, 2)[1] == 0
    third = Signalled(gpu, entry)
    assert settled(lambda: len(pages._retired) == 1)
    third.open()
    assert len(pages._retired) == 1
    second.numbers[0] = 2
    assert settled(lambda: not second.stream.is_busy)
    fourth = Signalled(gpu, entry)
    fourth.open()
    assert not pages._retired
    for made in (second, third, fourth):
        made.end()


def test_memory_that_is_no_pages_cannot_be_addressed(gpu: HipDevice) -> None:
    with pytest.raises(DeviceError):
        gpu._driver.check(gpu._driver.api.device_address(memoryview(bytearray(64))))
    assert get(gpu, put(gpu, np.ones(4, np.float32))).all()
