"""The server's side of one worker process: start it, talk to it over several connections, notice its end.

A worker that has ended is never used again: everything that was made in it says so, and ``WorkerDevice.life`` (in
``device``) starts another one.
"""

from __future__ import annotations

import errno
import json
import logging
import queue
import signal
import socket
import struct
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import ResourceExhaustedError, TilewrightError, UnavailableError
from tilewright_server.devices.contract import DeviceLostError, WorkerSpec
from tilewright_server.devices.lifetime import Lifetime
from tilewright_server.devices.tracing import PacketTimes, TracedSink
from tilewright_server.devices.worker.exchange.channel import FAILED, TIMES, Channel, Op, Packet, unpack_error
from tilewright_server.devices.worker.exchange.serialise import info_record, spec_record
from tilewright_server.devices.worker.exchange.shared_area import CONNECTIONS, Area
from tilewright_server.protocol.frames import HEADER
from tilewright_server.protocol.log_lines import chosen
from tilewright_server.protocol.request_ids import current
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["Loss", "WorkerProcess"]

log = logging.getLogger(__name__)

START_S = 120.0
"""How long a device may take to open: a GPU's driver loads and makes a context."""
END_S = 5.0
"""How long a worker may take to give everything back."""
ANSWER_S = 120.0
"""How long it may take over a request. A kernel that runs for longer is taken to hang, and ended with its process."""

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.ETOOMANYREFS})
"""Errors of this process, which is short of something; no fault of the worker."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a worker that nobody wanted."""

    device: str
    suspects: tuple[object, ...]
    """Programs that were being run."""
    how: str
    """For the log: exit status or signal."""


class WorkerProcess(Lifetime):
    """One worker. Thread-safe. Its end raises ``DeviceLostError`` in all who use it."""

    def __init__(self, info: DeviceInfo, spec: WorkerSpec, lost: Callable[[Loss], None]) -> None:
        """Start it and wait until the device is open. Raises what opening raises, ``UnavailableError`` if the process
        cannot be started or ends. ``lost`` is called, from a thread of this object, if it ends unasked."""
        self.info = info
        try:
            self.area = Area()
        except OSError as error:
            raise _not_started(info, error) from error
        self.connections: dict[int, Callable[[], None]] = {}
        """Clients' connections, with what is to be called at their end."""
        self.traced: dict[int, TracedSink] = {}
        """Those of them whose traced packets somebody wants to know."""
        self.programs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.dropped: deque[int] = deque()
        """Programs that nobody uses any more, until the worker is told."""
        self.buried = threading.Event()
        """Set when the process is gone and everybody has been told."""
        self._spec = spec
        self._told = lost
        self._wanted = False
        """Its end is."""
        self._idle: deque[Channel] = deque()
        self._opened = 0
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._root: Channel
        self._start()
        self.abilities = self._open(self._root)

    @property
    def pid(self) -> int:
        """Process id, for logs and tests."""
        return self._process.pid if self._process is not None else 0

    # Start and end

    def _start(self) -> None:
        ends: list[socket.socket] = []
        try:
            for _ in range(2):
                ends += socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            control, theirs, events, their_events = ends
            self._root = Channel(control)
            given = (theirs.fileno(), their_events.fileno(), self.area.fd)
            outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
            watch = threading.Thread(
                target=self._watch, args=(given, Channel(events), outcome), name=self.info.id, daemon=True
            )
            watch.start()
            error = outcome.get()
        except (OSError, RuntimeError) as raised:  # there is no descriptor, or no thread, to be had
            error = raised
        if error is None:
            theirs.close()
            their_events.close()
            self.area.close_fd()
            return
        for end in ends:
            end.close()
        self.lost = True
        self.area.close()
        self.buried.set()
        raise _not_started(self.info, error) from error

    def _watch(self, fds: Sequence[int], events: Channel, outcome: queue.SimpleQueue[Exception | None]) -> None:
        """Start the process, hear what it says, bury it. The process asks for its own end with that of the thread that
        started it, so this thread stays for as long as it lives."""
        try:
            command = run_module("tilewright_server.devices.worker", *map(str, fds), chosen())
            # What it prints belongs to the log; stdout may be a pipe that somebody reads the server's address from.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=fds)
        except Exception as error:  # whatever it is: somebody waits for the outcome
            outcome.put(error)
            return
        outcome.put(None)
        with suppress(OSError):
            while packet := events.receive():
                packet.close()
                if packet.kind == Op.TRACED:
                    self._trace(packet)
                    continue
                ended = self.connections.pop(packet.value, None) if packet.kind == Op.ENDED else None
                self.traced.pop(packet.value, None)
                if ended is not None:
                    _call(ended)
        self._bury(self._process.wait(), events)

    def _trace(self, packet: Packet) -> None:
        told = self.traced.get(packet.value)
        if told is not None:
            times = PacketTimes(*TIMES.unpack_from(packet.payload))
            _call(partial(told, packet.payload[TIMES.size :], times))

    def _bury(self, status: int, events: Channel) -> None:
        self.lost = True
        suspects = tuple(filter(None, (self.programs.get(number) for number in self.area.running())))
        how = f"signal {_signal_name(-status)}" if status < 0 else f"status {status}"
        for ended in self._take_connections():
            _call(ended)
        if not self._wanted:
            log.error("the process of %s ended: %s; %d programs were running", self.info.id, how, len(suspects))
            _call(lambda: self._told(Loss(self.info.id, suspects, how)))
        self._close_idle()
        with self._lock:
            self._root.close()
            self._returned.notify_all()
        events.close()
        self.area.close()
        self.buried.set()

    def _take_connections(self) -> list[Callable[[], None]]:
        with self._lock:
            connections, self.connections = self.connections, {}
        return list(connections.values())

    def _open(self, root: Channel) -> dict[str, Any]:
        root.socket.settimeout(START_S)
        try:
            request = {"info": info_record(self.info), "spec": spec_record(self._spec)}
            with self._lock:  # a process that says why it cannot open the device ends: the answer is read before that
                root.send(Op.CALL, payload=json.dumps(request, default=str).encode())
                reply = root.receive()
            if reply is None:
                raise ConnectionResetError
            if reply.flags & FAILED:
                raise unpack_error(reply.payload)
            root.socket.settimeout(None)
            _answer_within(root.socket, ANSWER_S)
            return reply.json()
        except OSError as error:
            self._give_up()
            raise UnavailableError(
                "the process for this device ended, or hung, while it opened the device",
                field="device",
                value=self.info.id,
                rule="device_worker",
                fix="see the server's log, and `tilewright doctor`",
                retry_after_s=5.0,
            ) from error
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._wanted = True
        self.kill()
        self.buried.wait(END_S)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and not self.buried.is_set():
            self._process.kill()

    def close(self) -> None:
        """Have the device closed and the process end; by force if that takes too long. Idempotent."""
        self._wanted = True
        if not self.lost:
            if self._lock.acquire(timeout=END_S):
                try:
                    self._say_close()
                finally:
                    self._lock.release()
            self.lost = True
            if not self.buried.wait(END_S):
                self.kill()
        self.buried.wait(END_S)

    def _say_close(self) -> None:
        """Ask for the end, and wait until the device is closed. Lock held."""
        with suppress(OSError):
            self._root.socket.settimeout(END_S)
            self._root.send(Op.CALL, payload=b'{"method": "close"}')
            self._root.receive()

    def _close_idle(self) -> None:
        """Free the descriptors of connections. Those in use get an end of file, and are closed when they come back: a
        descriptor that is closed under a thread that waits on it could be somebody else's by then."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    # Requests

    def gone(self, what: str = "") -> DeviceLostError:
        """Error for everything that belonged to it."""
        self.lost = True
        reason = what or "the device was lost while this was under way: a kernel failed on it, or its process ended"
        return DeviceLostError(reason, device=self.info.id)

    def stale(self, what: str) -> DeviceLostError:
        """For something of a worker that had ended before."""
        return DeviceLostError(f"{what} was on the device when it was lost", device=self.info.id, retry_after_s=None)

    def call(self, method: str, fds: Sequence[int] = (), **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        """Call a method of ``Hosted``; descriptors of the answer are the caller's to close. Raises what it raises."""
        payload = json.dumps({"method": method, "request": current(), **arguments}).encode()
        with self.channel() as channel:
            channel.send(Op.CALL, payload=payload, fds=fds)
            reply = self.reply(channel)
        return reply.json(), reply.fds

    def exchange(self, data: bytes) -> bytearray:
        """Send a packet that is short enough and return the answer, header included. Raises what the answer says."""
        channel = self.take()
        try:
            return self.ask(channel, data)
        finally:
            self.give_back(channel)

    def ask(self, channel: Channel, data: bytes) -> bytearray:
        """``exchange`` over a connection that was taken."""
        try:
            channel.socket.send(data)
            reply = channel.buffer[: channel.socket.recv_into(channel.buffer)]
        except OSError as error:
            raise self._gone_because(error) from error
        if len(reply) < HEADER.size:
            raise self.gone()
        if reply[1] & FAILED:
            raise self._failure(bytes(reply[HEADER.size :]))
        return reply

    @contextmanager
    def channel(self) -> Iterator[Channel]:
        channel = self.take()
        try:
            yield channel
        except OSError as error:
            raise self._gone_because(error) from error
        finally:
            if channel.pending:
                _drain(channel)
            self.give_back(channel)

    def _gone_because(self, error: OSError) -> TilewrightError:
        if error.errno in _OURS:  # before anything was sent: the worker is well
            return _short_of(error)
        if not isinstance(error, BlockingIOError):
            return self.gone()
        self.kill()
        return self.gone(f"the device did not answer within {ANSWER_S:g} s: a kernel that hangs was ended")

    def reply(self, channel: Channel) -> Packet:
        """The answer to what was sent. Raises what it says."""
        reply = channel.receive()
        if reply is None:
            raise self.gone()
        if reply.flags & FAILED:
            reply.close()
            raise self._failure(reply.payload)
        return reply

    def _failure(self, payload: bytes) -> Exception:
        error = unpack_error(payload)
        if isinstance(error, DeviceLostError):
            self.lost = True  # it ends now
        return error

    def take(self) -> Channel:
        """A connection that nobody uses: an idle one, a new one, or the next to come back."""
        try:
            channel = self._idle.pop()
        except IndexError:
            channel = self._more()
        if self.dropped:
            self._drop(channel)
        return channel

    def give_back(self, channel: Channel) -> None:
        """Somebody else may use it now."""
        self._idle.append(channel)
        if self.lost:
            self._close_idle()
        elif self._waiting:
            with self._lock:
                self._returned.notify()

    def _more(self) -> Channel:
        with self._lock:
            self._waiting += 1
            try:
                while not self.lost:
                    if self._idle:
                        return self._idle.pop()
                    if self._opened < CONNECTIONS - 1:  # the first is for making the others
                        return self._connect()
                    # The timeout makes good for a connection that came back before this counted as waiting.
                    self._returned.wait(0.01)
            finally:
                self._waiting -= 1
        raise self.gone()

    def _connect(self) -> Channel:
        """Make another connection. Lock held."""
        slot = self._opened + 1
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _short_of(error) from error
        try:
            with theirs:
                request = json.dumps({"method": "connect", "slot": slot}).encode()
                self._root.send(Op.CALL, payload=request, fds=[theirs.fileno()])
                self.reply(self._root)
        except OSError as error:
            ours.close()
            raise self._gone_because(error) from error
        except BaseException:
            ours.close()
            raise
        self._opened = slot
        _answer_within(ours, ANSWER_S)
        return Channel(ours, slot)

    def _drop(self, channel: Channel) -> None:
        numbers: list[int] = []
        with suppress(IndexError):
            while len(numbers) < 1024:
                numbers.append(self.dropped.popleft())
        with suppress(OSError):
            channel.send(Op.DROP, payload=b"".join(number.to_bytes(8, "little") for number in numbers))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return str(number)


def _answer_within(connection: socket.socket, seconds: float) -> None:
    """Unlike Python's own timeouts, this costs nothing."""
    whole, rest = divmod(seconds, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(whole), int(rest * 1e6)))


def _not_started(info: DeviceInfo, error: Exception) -> UnavailableError:
    log.warning("the process of %s cannot be started: %s", info.id, error)
    return UnavailableError(
        "the process for this device cannot be started",
        field="device",
        value=info.id,
        rule="device_worker",
        fix="the machine is short of memory, processes or descriptors: try again, or free some",
        retry_after_s=1.0,
    )


def _short_of(error: OSError) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the server is short of descriptors or memory ({errno.errorcode.get(error.errno or 0, 'unknown')})",
        field="server",
        rule="server_resources",
        fix="try again later; unregister regions and close connections, or raise the server's limits (ulimit -n)",
        retry_after_s=1.0,
    )


def _drain(channel: Channel) -> None:
    """Read answers that nobody waited for, so that the next who uses the connection gets their own."""
    with suppress(OSError):
        while channel.pending:
            packet = channel.receive()
            if packet is None:
                return
            packet.close()


def _call(function: Callable[[], None]) -> None:
    """A listener that fails must not keep the others from hearing."""
    try:
        function()
    except Exception:
        log.exception("telling of the end of a device failed")
