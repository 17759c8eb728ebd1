"""Devices for workers to host, made from the CPU: one whose launches are not waited for, and ways to fail."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import DeviceError, InvalidArgumentError
from tilewright_server.devices.contract import RECORD, TIME, WAIT, DeviceLostError, Program
from tilewright_server.devices.cpu.isolated import HostedCpu
from tilewright_server.devices.cpu.runtime import Runtime
from tilewright_server.devices.worker import clients
from tilewright_server.devices.worker.launches import SynchronousStream


class QueueStream:
    """Launches in a thread of its own, in order; events are bytes that name their slot."""

    gives_back_later = False

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._slots: set[int] = set()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            program, addresses, workspace = item
            try:
                program.run(addresses, workspace)
            except DeviceError as error:
                self._error = error

    def open_event(self, slot: int, handle: bytes) -> bytes:
        self._slots.add(slot)
        return b"done" + handle[4:]

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        if flags & (WAIT | RECORD) and slot not in self._slots:
            raise InvalidArgumentError("the slot was not opened", field="slot", value=slot, rule="event_slot")
        if flags & TIME:
            self.synchronize()
            return sum(program.run(addresses, workspace))
        self._work.put((program, addresses, workspace))
        return 0

    def synchronize(self) -> None:
        done = threading.Event()
        self._work.put(done)
        done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class StreamCpu(HostedCpu):
    def open_stream(self) -> QueueStream:
        return QueueStream()


class LostProgram:
    weight = 1

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        raise DeviceLostError("an uncorrectable error was found in the memory of the device")


class LostCpu(HostedCpu):
    """Finds out that it is broken when a program is run."""

    def program(self, stages: Any, operands: Sequence[str], *, counter_bytes: int = 0) -> Any:
        return LostProgram()


class SilentlyLostCpu(HostedCpu):
    """Is broken from the second time on that it is asked."""

    asked = 0

    def check(self) -> None:
        self.asked += 1
        if self.asked > 1:
            raise DeviceLostError("a launch has faulted")


class EndlessStream(SynchronousStream):
    """As if its launches never ended."""

    is_busy = True


class StuckStream(SynchronousStream):
    """A launch with ``TIME`` never comes back."""

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        if flags & TIME:
            threading.Event().wait()
        return super().launch(program, addresses, flags, slot, workspace) or 0


class EndlessCpu(HostedCpu):
    def check(self) -> None:
        """Is well."""

    def open_stream(self) -> EndlessStream:
        return EndlessStream()


def open_endless(info: DeviceInfo, options: Mapping[str, Any]) -> EndlessCpu:
    clients.PATIENCE_S, clients.MAX_LEFT = 0.3, 3
    return EndlessCpu(info, _runtime(info, options))


class StuckCpu(EndlessCpu):
    def open_stream(self) -> EndlessStream:
        return StuckStream()  # type: ignore[return-value]


def open_stuck(info: DeviceInfo, options: Mapping[str, Any]) -> StuckCpu:
    clients.PATIENCE_S = 0.3
    return StuckCpu(info, _runtime(info, options))


def open_silently_lost(info: DeviceInfo, options: Mapping[str, Any]) -> SilentlyLostCpu:
    return SilentlyLostCpu(info, _runtime(info, options))


def _runtime(info: DeviceInfo, options: Mapping[str, Any]) -> Any:
    from pathlib import Path

    return Runtime(Path(options["runtime"])).open(info.attributes["cpus"])


def open_streams(info: DeviceInfo, options: Mapping[str, Any]) -> StreamCpu:
    return StreamCpu(info, _runtime(info, options))


def open_lost(info: DeviceInfo, options: Mapping[str, Any]) -> LostCpu:
    return LostCpu(info, _runtime(info, options))


def open_slowly(info: DeviceInfo, options: Mapping[str, Any]) -> HostedCpu:
    time.sleep(2)
    return HostedCpu(info, _runtime(info, options))


def refuse(info: DeviceInfo, options: Mapping[str, Any]) -> HostedCpu:
    raise DeviceError("the driver is too old", field="driver", value="1.0", rule="driver_version", fix="update it")


def die(info: DeviceInfo, options: Mapping[str, Any]) -> HostedCpu:
    import os

    os._exit(3)
