"""The worker process: opens one device, then serves the server's connections until the first of them ends."""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from tilewright_kit.contract.device import Device, DeviceInfo
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.contract import DeviceLostError, LockingDevice, MonitoredDevice, Program, WorkerSpec
from tilewright_server.devices.tracing import PacketTimes
from tilewright_server.devices.worker.dispatcher import Hosted
from tilewright_server.devices.worker.exchange.channel import (
    COPY,
    FAILED,
    NAME_BYTES,
    TIMES,
    Channel,
    Op,
    Packet,
    pack_error,
)
from tilewright_server.devices.worker.exchange.serialise import info_from, spec_from
from tilewright_server.devices.worker.exchange.shared_area import Area
from tilewright_server.protocol.frames import HEADER, HEADER_BYTES, REPLY_KIND
from tilewright_server.protocol.request_ids import Given
from tilewright_server.protocol.request_ids import serve as serve_request

__all__ = ["EXIT_LOST", "serve"]

log = logging.getLogger(__name__)

_WRITTEN, _READ = (HEADER.pack(op | REPLY_KIND, 0, 0, 0, 0) for op in (Op.WRITE, Op.READ))
_CHECK_S = 0.1
EXIT_LOST = 70
"""Exit status of a worker whose device cannot be used any more."""


def serve(control: socket.socket, events: socket.socket, area: Area) -> NoReturn:
    """Never returns: ends the process when ``control`` does, which is the server's end or wish."""
    root = Channel(control)
    try:
        host = _open(root, Channel(events), area)
        if host is not None:
            host.serve(root)
    finally:
        # The device's own threads, and those that serve other connections, would hold up an orderly end.
        _exit(0)


def _open(root: Channel, events: Channel, area: Area) -> Host | None:
    """Answer the first packet, which says what to open; None if that failed, and the server knows why."""
    first = root.receive()
    if first is None:
        return None
    try:
        record = first.json()
        device = _make_device(info_from(record["info"]), spec_from(record["spec"]))
        if isinstance(device, LockingDevice):
            device.lock_host(area.all_slots())
    except Exception as error:
        _log(error, "opening the device")
        root.send(Op.CALL | REPLY_KIND, flags=FAILED, payload=pack_error(error))
        return None
    host = Host(area, events)
    host.hosted = Hosted(device, area, host.tell_ended, host.end_lost, host.tell_traced)
    if isinstance(device, MonitoredDevice):
        threading.Thread(target=host.monitor, args=(device,), name="monitor", daemon=True).start()
    root.send(Op.CALL | REPLY_KIND, payload=_json(host.hosted.describe()))
    return host


class Host:
    """Serves each control connection in a thread of its own."""

    hosted: Hosted

    def __init__(self, area: Area, events: Channel) -> None:
        self._area = area
        self._events = events
        self._events_lock = threading.Lock()
        self._places = area.places()

    def tell_ended(self, connection: int) -> None:
        """Tell the server that a client has hung up."""
        with self._events_lock, suppress(OSError):
            self._events.send(Op.ENDED, value=connection)

    def tell_traced(self, connection: int, context: bytes, times: PacketTimes) -> None:
        """Tell the server how long a packet took that its client wants traced."""
        data = TIMES.pack(times.started_ns, times.queued_ns, times.device_ns, times.launches, times.waits)
        with self._events_lock, suppress(OSError):
            self._events.send(Op.TRACED, value=connection, payload=data + context)

    def end_lost(self, error: DeviceLostError) -> NoReturn:
        """The device is of no use any more; whoever needed an answer has got it."""
        log.error("the device was lost: %s", error.reason)
        _exit(EXIT_LOST)

    def monitor(self, device: MonitoredDevice) -> None:
        """Notice faults of launches that nobody waits for here: clients wait for their events."""
        try:
            while True:
                time.sleep(_CHECK_S)
                device.check()
                self._check_clients()
                self.hosted.poll_traces()
        except DeviceLostError as error:
            self.end_lost(error)
        except TilewrightError as error:  # the device is closed
            log.info("the device is not looked at any more: %s", error)

    def _check_clients(self) -> None:
        try:
            self.hosted.clients.check()
        except DeviceLostError as error:
            self._area.clear()  # no kernel is to blame
            self.end_lost(error)

    def serve(self, channel: Channel) -> None:
        """Until the server closes the connection."""
        with suppress(OSError):
            while packet := channel.receive():
                try:
                    self._answer(channel, packet)
                finally:
                    packet.close()
                    serve_request(None)
        channel.close()

    def _answer(self, channel: Channel, packet: Packet) -> None:
        handler = _HANDLERS.get(packet.kind)
        try:
            if handler is None:
                raise ValueError(f"no packet of kind {packet.kind} is known")
            handler(self, channel, packet)
        except Exception as error:
            _log(error, "a request")
            channel.send(packet.kind | REPLY_KIND, flags=FAILED, payload=pack_error(error))
            if isinstance(error, DeviceLostError):
                self.end_lost(error)

    def _run(self, channel: Channel, packet: Packet) -> None:
        number = packet.value
        program: Program = self.hosted.programs[number]
        _serve_named(packet.payload[:NAME_BYTES])
        workspace, *addresses = memoryview(packet.payload)[NAME_BYTES:].cast("Q").tolist()
        # Left as it is if this is the end of the device: it says who was there.
        place = 2 * (channel.slot + 1)
        self._places[place] = number
        try:
            times = program.run(addresses, workspace, packet.sequence)
        except DeviceLostError:
            raise
        except BaseException:
            self._places[place] = 0
            raise
        self._places[place] = 0
        data = HEADER.pack(Op.RUN | REPLY_KIND, 0, 0, 0, len(times)) + struct.pack(f"<{len(times)}Q", *times)
        if len(data) <= len(channel.buffer):
            channel.socket.send(data)
        else:
            channel.send(Op.RUN | REPLY_KIND, value=len(times), payload=data[HEADER_BYTES:])

    def _write(self, channel: Channel, packet: Packet) -> None:
        offset, start, nbytes = COPY.unpack(packet.payload)
        buffer = self.hosted.buffer(packet.value)
        self.hosted.device.write(buffer, offset, self._area.slot(channel.slot, start, nbytes))
        channel.socket.send(_WRITTEN)

    def _read(self, channel: Channel, packet: Packet) -> None:
        offset, start, nbytes = COPY.unpack(packet.payload)
        buffer = self.hosted.buffer(packet.value)
        self.hosted.device.read(buffer, offset, self._area.slot(channel.slot, start, nbytes))
        channel.socket.send(_READ)

    def _drop(self, channel: Channel, packet: Packet) -> None:  # noqa: ARG002
        for (number,) in struct.iter_unpack("<Q", packet.payload):
            try:
                self.hosted.drop(number)
            except TilewrightError as error:  # noqa: PERF203 - one failure must not end the others
                _log(error, "freeing a program")

    def _call(self, channel: Channel, packet: Packet) -> None:
        arguments = packet.json()
        method = arguments.pop("method")
        _serve_named(arguments.pop("request", "").encode())
        if method == "connect":
            self._connect(packet.fds.pop(0), **arguments)
            channel.send(Op.CALL | REPLY_KIND)
            return
        result, fds = self.hosted.call(method, arguments, packet.fds)
        try:
            channel.send(Op.CALL | REPLY_KIND, payload=_json(result), fds=fds)
        finally:
            for fd in fds:
                os.close(fd)
        if method == "close":
            _exit(0)

    def _connect(self, fd: int, slot: int) -> None:
        channel = Channel(socket.socket(fileno=fd), slot)
        threading.Thread(target=self.serve, args=(channel,), name=f"server {slot}", daemon=True).start()


_HANDLERS: dict[int, Callable[[Host, Channel, Packet], None]] = {
    Op.RUN: Host._run,
    Op.WRITE: Host._write,
    Op.READ: Host._read,
    Op.CALL: Host._call,
    Op.DROP: Host._drop,
}


def _serve_named(name: bytes) -> None:
    """Note that this thread serves the request of that id from now on; empty for none."""
    text = name.rstrip(b"\0").decode("utf-8", "ignore")
    serve_request(Given(text) if text else None)


def _json(record: object) -> bytes:
    return json.dumps(record).encode()


def _log(error: BaseException, what: str) -> None:
    """Errors of the kit are the server's to report; others nobody else sees with their traceback."""
    if not isinstance(error, (TilewrightError, KeyError)):
        log.error("%s failed", what, exc_info=error)


def _exit(status: int) -> NoReturn:
    logging.shutdown()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)


def _make_device(info: DeviceInfo, spec: WorkerSpec) -> Device:
    """Open the device that ``spec`` describes. Raises what its factory raises."""
    module, _, name = spec.factory.partition(":")
    device: Device = getattr(importlib.import_module(module), name)(info, spec.options)
    return device
