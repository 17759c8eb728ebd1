"""A device that another process has opened, as the server sees it."""

from __future__ import annotations

import base64
import logging
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from tilewright_kit.contract.device import Buffer, DeviceInfo, Launch
from tilewright_kit.types.errors import DeviceError, InternalError, TilewrightError, UnavailableError
from tilewright_server.devices.contract import DeviceLostError, MemoryHandle, Program, ProgramStage, WorkerSpec
from tilewright_server.devices.errors import closed
from tilewright_server.devices.lifetime import DeviceAddress
from tilewright_server.devices.tracing import TracedSink
from tilewright_server.devices.worker.bulk_copy import copy
from tilewright_server.devices.worker.exchange.channel import NAME_BYTES, PACKET_BYTES, Op
from tilewright_server.devices.worker.exchange.serialise import (
    geometry_record,
    handle_from,
    handle_record,
    stages_record,
)
from tilewright_server.devices.worker.process import END_S, Loss, WorkerProcess
from tilewright_server.protocol.frames import HEADER, HEADER_BYTES
from tilewright_server.protocol.request_ids import current

__all__ = ["RemoteStream", "WorkerDevice", "WorkerModule", "WorkerProgram"]

log = logging.getLogger(__name__)

RESTART_S = 10.0
"""How long requests wait for a device that is opened again; a driver in trouble may take minutes."""
RETRY_S = 1.0
"""For how long a device that could not be opened is not tried again."""


class WorkerModule:
    """A binary that was loaded by a worker. Its functions are numbers that mean something to this device only."""

    def __init__(self, life: WorkerProcess, number: int, functions: dict[int, tuple[WorkerProcess, int]]) -> None:
        self.life = life
        self._number = number
        self._all = functions
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()
        self._unloaded = False

    def function(self, symbol: str) -> int:
        with self._lock:
            known = self._known.get(symbol)
            if known is not None:
                return known
            if self.life.lost:
                raise self.life.stale("the kernel")
            remote = self.life.call("function", module=self._number, symbol=symbol)[0]["function"]
            # Unlike the worker's own numbers, these never come again.
            number = self._known[symbol] = _next_function()
            self._all[number] = (self.life, remote)
            return number

    def unload(self) -> None:
        with self._lock:
            if self._unloaded:
                return
            self._unloaded = True
            gone = [self._all.pop(number)[1] for number in self._known.values()]
            if not self.life.lost:
                self.life.call("unload", module=self._number, functions=gone)


class WorkerProgram:
    """Stages that were laid out in a worker. ``life`` is the worker's."""

    def __init__(self, life: WorkerProcess, number: int, weight: int, operands: int, stages: int) -> None:
        self.life = life
        self.weight = weight
        self.number = number
        self._operands = operands
        self._stages = stages
        self._packet = struct.Struct(f"{HEADER.format}{NAME_BYTES}s{operands + 1}Q")
        self._times = struct.Struct(f"<{stages}Q")
        self._is_short = max(self._packet.size, HEADER_BYTES + self._times.size) <= PACKET_BYTES
        life.programs[number] = self
        weakref.finalize(self, life.dropped.append, number).atexit = False

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        life = self.life
        if life.lost:
            raise life.stale("the plan")
        check_addresses(life, addresses)
        if workspace:
            check_addresses(life, (workspace,))
        if len(addresses) != self._operands:
            raise InternalError(
                f"the program takes {self._operands} addresses, not {len(addresses)}",
                rule="operand_count",
                fix="report it as a fault of the server",
            )
        name, repeat = current().encode(), max(1, repeat)
        packet = self._packet.pack(Op.RUN, 0, 0, repeat, self.number, name, workspace, *addresses)
        if self._is_short:
            return self._times.unpack_from(life.exchange(packet), HEADER_BYTES)
        with life.channel() as channel:
            channel.send(Op.RUN, sequence=repeat, value=self.number, payload=packet[HEADER_BYTES:])
            return self._times.unpack(life.reply(channel).payload)


class RemoteStream:
    """A stream in the worker. See ``LaunchStream``."""

    gives_back_later: bool

    def __init__(self, life: WorkerProcess, number: int, *, gives_back_later: bool) -> None:
        self.life = life
        self.gives_back_later = gives_back_later
        self._number = number
        self._closed = False

    def open_event(self, slot: int, handle: bytes) -> bytes:
        text = base64.b64encode(handle).decode()
        answer = self.life.call("open_event", stream=self._number, slot=slot, handle=text)[0]
        return base64.b64decode(answer["handle"])

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        check_addresses(self.life, (*addresses, workspace))
        return int(
            self.life.call(
                "launch",
                stream=self._number,
                program=_number(self.life, program),
                addresses=list(addresses),
                flags=flags,
                slot=slot,
                workspace=workspace,
            )[0]["device_ns"]
        )

    def synchronize(self) -> None:
        self.life.call("synchronize", stream=self._number)

    def close(self) -> None:
        if not self._closed and not self.life.lost:
            self.life.call("close_stream", stream=self._number)
        self._closed = True


class WorkerDevice:
    """See ``Device``, ``ProgramDevice``, ``SharingDevice``, ``StreamDevice`` and ``ConnectedDevice``.

    When the worker ends, everything that was made with it raises ``DeviceLostError``; the next use starts another one.
    Addresses are ``DeviceAddress``: those of an earlier worker are refused.
    """

    def __init__(self, info: DeviceInfo, spec: WorkerSpec, lost: Callable[[Loss], None] | None = None) -> None:
        """Opens the device. Raises what opening it raises, and ``UnavailableError``. ``lost`` is told of workers that
        ended unasked, before another one is started."""
        self.info = info
        self._spec = spec
        self._told = lost or (lambda _: None)
        self._functions: dict[int, tuple[WorkerProcess, int]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._failure: tuple[TilewrightError, float] | None = None
        self._starting: Future[WorkerProcess] | None = None
        self._started = 0.0
        self.generation = 1
        """Counts the workers."""
        self._life = WorkerProcess(info, spec, self._told)
        self.lanes = int(self._life.abilities["lanes"])
        self.uuid = str(self._life.abilities["uuid"])
        self.shared_granule = int(self._life.abilities["shared_granule"])

    @property
    def pid(self) -> int:
        """Process id of the present worker."""
        return self._life.pid

    def life(self) -> WorkerProcess:
        """The worker, started anew if the last one has ended. Raises ``DeviceError`` when the device is closed, what
        opening it raises, and ``UnavailableError`` if that takes long: whoever waits keeps a thread of the server."""
        life = self._life
        if not life.lost and not self._closed:
            return life
        with self._lock:
            if self._closed:
                raise closed()
            if not self._life.lost:
                return self._life
            if self._failure is not None and time.monotonic() < self._failure[1]:
                raise self._failure[0].with_traceback(None)  # else it keeps the frames of all that it was raised to
            starting = self._starting or self._start_again()
        if not wait((starting,), max(0.0, self._started + RESTART_S - time.monotonic())).done:
            raise UnavailableError(
                "the device was lost, and takes long to be opened again",
                field="device",
                value=self.info.id,
                rule="device_starting",
                fix="try again later; see the server's log, and `tilewright doctor`",
                retry_after_s=1.0,
            )
        return starting.result()

    def _start_again(self) -> Future[WorkerProcess]:
        """Have another worker started; lock held."""
        starting = self._starting = Future()
        self._started = time.monotonic()
        threading.Thread(target=self._again, args=(starting,), name=f"{self.info.id} again", daemon=True).start()
        return starting

    def _again(self, starting: Future[WorkerProcess]) -> None:
        old = self._life
        try:
            if not old.buried.wait(END_S):
                old.kill()  # it may have reported a fault, and hang at its end
                old.buried.wait(END_S)
            fresh = WorkerProcess(self.info, self._spec, self._told)
        except BaseException as error:
            with self._lock:
                self._starting = None
                if isinstance(error, TilewrightError):
                    self._failure = (error, time.monotonic() + RETRY_S)
            starting.set_exception(error)
            return
        with self._lock:
            self._starting = None
            was_closed = self._closed
            if not was_closed:
                self._life, self._failure = fresh, None
                self.generation += 1
        if was_closed:
            fresh.close()
            starting.set_exception(closed())
            return
        log.warning("%s was opened again in process %d", self.info.id, fresh.pid)
        starting.set_result(fresh)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._life.close()

    def counters(self) -> dict[str, int]:
        """See ``CountingDevice``. Starts no other worker."""
        life = self._life
        return {} if life.lost or self._closed else dict(life.call("counters")[0]["counters"])

    # Memory

    def allocate(self, nbytes: int) -> Buffer:
        life = self.life()
        return _buffer(life, life.call("allocate", nbytes=nbytes)[0])

    def free(self, buffer: Buffer) -> None:
        """Does nothing for memory that was lost."""
        life, number = _owned(buffer)
        if not life.lost and not self._closed:
            life.call("free", buffer=number)

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        life, number = _owned(buffer)
        copy(Op.WRITE, life, number, buffer.nbytes, offset, data)

    def read(self, buffer: Buffer, offset: int, into: memoryview) -> None:
        life, number = _owned(buffer)
        copy(Op.READ, life, number, buffer.nbytes, offset, into)

    # Code

    def load(self, binary: Path) -> WorkerModule:
        life = self.life()
        return WorkerModule(life, life.call("load", binary=str(binary))[0]["module"], self._functions)

    def run(self, launches: Sequence[Launch], stream: int = 0) -> tuple[int, ...]:
        """The argument blocks hold bare addresses, which nothing can check: prefer programs."""
        life = self.life()
        records = [
            (
                self._function(life, launch.function),
                base64.b64encode(launch.args.cast("B")).decode(),
                geometry_record(launch.geometry),
            )
            for launch in launches
        ]
        return tuple(life.call("run", launches=records, stream=stream)[0]["times"])

    def program(
        self, stages: Sequence[ProgramStage], operands: Sequence[str], *, counter_bytes: int = 0
    ) -> WorkerProgram:
        life = self.life()
        remote = [ProgramStage(self._function(life, stage.function), stage.args, stage.geometry) for stage in stages]
        made = life.call("program", stages=stages_record(remote), operands=list(operands), counter_bytes=counter_bytes)[
            0
        ]
        return WorkerProgram(life, made["program"], made["weight"], len(operands), len(stages))

    def _function(self, life: WorkerProcess, number: int) -> int:
        known = self._functions.get(number)
        if known is None or known[0] is not life:
            raise life.stale("the kernel")
        return known[1]

    # Memory and streams shared with others

    def allocate_shared(self, nbytes: int) -> Buffer:
        life = self.life()
        return _buffer(life, life.call("allocate_shared", nbytes=nbytes)[0])

    def import_memory(self, handle: MemoryHandle) -> Buffer:
        life = self.life()
        return _buffer(life, life.call("import", handle.descriptors, **handle_record(handle))[0])

    def release_memory(self, buffer: Buffer) -> None:
        """Does nothing for memory that was lost."""
        life, number = _owned(buffer)
        if not life.lost and not self._closed:
            life.call("release", buffer=number)

    def export_memory(self, buffer: Buffer) -> MemoryHandle:
        life, number = _owned(buffer)
        if life.lost:
            raise life.stale("the buffer")
        record, fds = life.call("export", buffer=number)
        return handle_from(record, fds)

    def open_stream(self) -> RemoteStream:
        life = self.life()
        made = life.call("open_stream")[0]
        return RemoteStream(life, made["stream"], gives_back_later=made["gives_back_later"])

    # Connections of clients

    def attach(self, fd: int, connection: int, ended: Callable[[], None], traced: TracedSink | None = None) -> None:
        life = self.life()
        if traced is not None:
            life.traced[connection] = traced
        life.connections[connection] = ended
        try:
            life.call("attach", (fd,), connection=connection)
        except BaseException:
            life.connections.pop(connection, None)
            life.traced.pop(connection, None)
            raise

    def bind(
        self, connection: int, binding: int, program: Program, addresses: Sequence[int], workspace_bytes: int
    ) -> None:
        life = self.life()
        check_addresses(life, addresses)
        number = _number(life, program)
        life.call(
            "bind",
            connection=connection,
            binding=binding,
            program=number,
            addresses=list(addresses),
            workspace_bytes=workspace_bytes,
        )

    def unbind(self, connection: int, binding: int) -> None:
        life = self._life
        if not life.lost and connection in life.connections:
            with suppress(DeviceLostError):  # with all that it had
                life.call("unbind", connection=connection, binding=binding)

    def detach(self, connection: int) -> None:
        life = self._life
        if not life.lost and connection in life.connections:
            with suppress(DeviceLostError):
                life.call("detach", connection=connection)


_functions = iter(range(1, 1 << 62))


def _next_function() -> int:
    return next(_functions)


_life_of = attrgetter("life")


def check_addresses(life: WorkerProcess, addresses: Sequence[int]) -> None:
    """Raise ``DeviceLostError`` for an address of an earlier worker, ``InternalError`` for one of no device."""
    with suppress(AttributeError):  # the quick way for the usual case; 0 stands for an operand without memory
        if {life}.issuperset(map(_life_of, addresses)):
            return
    for address in addresses:
        if isinstance(address, DeviceAddress):
            if address.life is not life:
                raise life.stale("an operand") if address.life.lost else life.stale("the plan")
        elif address:
            raise InternalError(
                "an address does not come from this device",
                rule="address_origin",
                fix="report it as a fault of the server",
            )


def _number(life: WorkerProcess, program: Program) -> int:
    if not isinstance(program, WorkerProgram) or program.life is not life:
        raise life.stale("the plan")
    return program.number


def _buffer(life: WorkerProcess, record: dict[str, Any]) -> Buffer:
    return Buffer(DeviceAddress(record["address"], life), record["nbytes"], owner=(life, record["buffer"]))


def _owned(buffer: Buffer) -> tuple[WorkerProcess, int]:
    owner: Any = buffer.owner
    if not isinstance(owner, tuple):
        raise DeviceError("the buffer is not of this device", rule="device_memory", fix="use the device that made it")
    life, number = owner
    return life, number
