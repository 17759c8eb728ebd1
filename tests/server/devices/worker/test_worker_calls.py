"""Devices in a process of their own: what travels there and back."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from worker_harness import (
    Bench,
    N,
)

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, I64, Pointer
from tilewright_kit.types.errors import (
    DeviceError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from tilewright_server.devices.contract import (
    MemoryHandle,
)
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.devices.worker.device import WorkerProgram
from tilewright_server.devices.worker.exchange import channel as wire


def test_device_travels_whole(registry: DeviceRegistry) -> None:
    import json

    from tilewright_server.devices.worker.exchange.serialise import info_from, info_record

    (info,) = (item for item in registry.infos() if item.kind == "cpu")
    copied: DeviceInfo = info_from(json.loads(json.dumps(info_record(info))))
    assert copied.arch == info.arch
    assert (copied.id, copied.units, copied.memory_bytes) == (info.id, info.units, info.memory_bytes)


# Requests


def test_more_threads_than_connections_wait_their_turn(bench: Bench) -> None:
    program = bench.add()
    x = bench.put(np.arange(N, dtype=np.float32))

    def work(_: int) -> bool:
        out = bench.device.allocate(4 * N)
        for _ in range(20):
            program.run([x.address, x.address, out.address], 0)
        good = bool((bench.get(out) == 2 * np.arange(N)).all())
        bench.device.free(out)
        return good

    with ThreadPoolExecutor(40) as threads:
        assert all(threads.map(work, range(40)))


def test_copies_of_any_size_arrive(bench: Bench) -> None:
    for nbytes in (0, 1, 2 << 20, (2 << 20) + 1, 9_000_001):
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        buffer = bench.put(data)
        assert (bench.get(buffer, np.uint8) == data).all()
        bench.device.free(buffer)


def test_program_with_more_operands_than_a_packet_holds(bench: Bench) -> None:
    names = [f"o{index}" for index in range(6000)]
    fields = (Pointer("o0"), Pointer("o1"), Pointer("o5999"), I64(N))
    program = bench.program("add", *fields, *(Pointer(name) for name in names), operands=tuple(names))
    x = bench.put(np.ones(N, np.float32))
    out = bench.device.allocate(4 * N)
    program.run([x.address] * 5999 + [out.address], 0)
    assert (bench.get(out) == 2).all()


def test_what_cannot_be_sent_is_an_error_and_not_the_end_of_the_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, pid = tuple(f"operand{index}" * 100 for index in range(100)), bench.device.pid

    def large() -> WorkerProgram:
        return bench.program("add", *map(Pointer, names), operands=names)

    def no_file(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(wire, "SPILLED_BYTES", 1000)
        with pytest.raises(InvalidArgumentError) as invalid:
            large()
        assert invalid.value.rule == "worker_message"
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", no_file)
        with pytest.raises(ResourceExhaustedError) as exhausted:
            large()
        assert exhausted.value.retry_after_s
    with monkeypatch.context() as patch:
        patch.setattr(bench.device.life(), "_idle", deque())
        patch.setattr(socket, "socketpair", no_file)
        with pytest.raises(ResourceExhaustedError):
            bench.device.allocate(1)
    assert large().weight
    assert time.monotonic() - began < 20
    assert bench.device.pid == pid
    assert bench.losses == []


def test_programs_bring_their_counters(bench: Bench) -> None:
    program = bench.program("count", Pointer(COUNTERS), Pointer("out"), operands=("out",), counter_bytes=64)
    out = bench.put(np.zeros(1, np.int32))
    for _ in range(3):
        program.run([out.address], 0)
        assert bench.get(out, np.int32)[0] == 1


def test_programs_that_nobody_uses_are_dropped_in_the_worker(bench: Bench) -> None:
    for _ in range(50):
        bench.add()
    bench.device.allocate(1)
    assert len(bench.device.life().programs) <= 1
    assert not bench.device.life().dropped


def test_repeats_add_up(bench: Bench) -> None:
    x = bench.put(np.ones(N, np.float32))
    once = bench.add().run([x.address, x.address, bench.device.allocate(4 * N).address], 0)
    many = bench.add().run([x.address, x.address, bench.device.allocate(4 * N).address], 0, repeat=1000)
    assert len(once) == len(many) == 1
    assert many[0] > once[0]


# Memory of others


def test_memory_of_another_process_is_mapped_not_copied(bench: Bench) -> None:
    fd = os.memfd_create("tilewright-test")
    os.ftruncate(fd, 3 * 4096)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        file.write(np.full(2 * N, 5, np.float32).tobytes()[:8192])
        imported = bench.device.import_memory(MemoryHandle("fd", b"", 4 * N, fd, 64))
        out = bench.device.allocate(4 * N)
        bench.add().run([imported.address, imported.address, out.address], 0)
        assert (bench.get(out) == 10).all()
        bench.add().run([out.address, out.address, imported.address], 0)
        file.seek(64)
        assert (np.frombuffer(file.read(4 * N), np.float32) == 20).all()
        bench.device.release_memory(imported)
        with pytest.raises(DeviceError):
            bench.device.read(imported, 0, memoryview(bytearray(4)))
        with pytest.raises(InvalidArgumentError):
            bench.device.import_memory(MemoryHandle("fd", b"", 4096, fd, 3 * 4096 - 1))
