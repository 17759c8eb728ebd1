"""The state that a client's calls share: its session, shared memory, and what is to be released. No I/O."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from google.protobuf.message import Message

from tilewright.errors import InvalidArgumentError, NotFoundError, UnavailableError, unbegun
from tilewright.session import settings
from tilewright.session.background import ensure_server
from tilewright.session.mps import join as join_mps
from tilewright.session.regions import Pool
from tilewright.session.tls import Tls, tls_for
from tilewright.transport import rpc
from tilewright.transport.launch_connections import Lanes
from tilewright.transport.local import Control, open_control
from tilewright.transport.rpc import Rpc
from tilewright.types.arguments import Placement, Priority, check_placement, check_priority, flag
from tilewright.types.report import Report
from tilewright.types.spec import Spec
from tilewright_proto.v1 import dispatch_pb2, memory_pb2

__all__ = ["Core", "Session", "check_timeout", "opening"]

MAX_RETRIES = 1000

MESSAGE_MARGIN = 64 << 10
"""Bytes of a message that are left for everything but operands."""
QUARANTINE_S = 60.0
"""How long the arrays of a call that was given up are kept: the server may still be writing to them."""
CACHE_ENTRIES = 4096
MAX_TIMEOUT_S = 4_000_000
"""About 46 days: as milliseconds it fits the protocol's 32 bits."""


def _nobody() -> None:
    """Listens to nothing."""


class Session:
    """One session on the server. Compared by identity."""

    __slots__ = (
        "__weakref__",
        "control",
        "device",
        "devices",
        "epoch",
        "exports",
        "gpus",
        "inline_limit",
        "lanes",
        "launch_page",
        "listen",
        "local_socket",
        "lost",
        "message_limit",
        "operations",
        "server_version",
        "shared_memory",
        "token",
        "told",
        "trusted",
    )

    def __init__(self, opened: memory_pb2.SessionEvent.Opened) -> None:
        self.token = opened.session
        self.server_version = opened.server_version
        self.inline_limit = opened.inline_limit
        self.message_limit = opened.message_limit
        self.shared_memory = opened.shared_memory
        self.device = opened.device
        self.operations = tuple(opened.operations)
        self.devices = tuple(opened.devices)
        """All devices of the server: id, kind, name, uuid, arch."""
        self.gpus = {uuid_digits(item.uuid): item for item in self.devices if item.uuid}
        """Devices that this machine's processes can name, by the hexadecimal digits of their UUID."""
        self.local_socket = opened.local_socket
        join_mps(opened.mps_pipe_directory)
        self.control: Control | None = None
        """The local socket's connection for calls, where there is one; the connections for launches are ``lanes``."""
        self.lanes: Lanes | None = None
        self.launch_page: Any = None
        """Where launches in this process are counted; ``False`` if there is no such page."""
        self.told = SimpleNamespace(value=0)
        """Number of changes of the server's choices of kernels, as far as it was heard: see ``listen``."""
        self.listen: Callable[[], None] = _nobody
        """Begins to hear what the server tells of its own accord. For sessions without a launch page. Idempotent."""
        self.trusted = False
        """True if the server is known to be a process of this user, or of root, on this machine."""
        self.exports: dict[tuple[int, int], Any] = {}
        """Allocations on devices that the server knows, by base and size."""
        self.epoch = 0
        """Changes whenever all of them are given back."""
        self.lost = ""
        """Why the session is over; empty while it lives."""

    def hear(self, event: memory_pb2.SessionEvent) -> None:
        """Note what the server has told."""
        if event.WhichOneof("event") == "choices":
            self.told.value = event.choices

    def open_local(self, target: str, timeout: float | None) -> None:
        """Connect to the local socket, if the server has one that can be reached from here."""
        if not self.local_socket:
            return
        # In a container the path may be another one than the server knows.
        beside = target.removeprefix("unix:") + ".local" if target.startswith("unix:/") else ""
        self.control = open_control((self.local_socket, beside), self.token, timeout)
        if self.control is not None:
            self.lanes = Lanes(self.control.path, self.token, timeout)
            self.trusted = self.control.is_own()

    def close_local(self) -> None:
        for part in (self.control, self.lanes):
            if part is not None:
                part.close()

    def after_fork(self) -> None:
        """Close this process' descriptors, so that the server notices the parent's end when it comes."""
        if self.control is not None:
            self.control.close()
        if self.lanes is not None:
            self.lanes.after_fork()

    @property
    def message_room(self) -> int:
        """Bytes of operands that fit one message, either way."""
        return self.message_limit - MESSAGE_MARGIN if self.message_limit else 1 << 62


class KnownArray(NamedTuple):
    """An array in shared memory that is alive: its serialised location in one session, and how it lay then."""

    alive: Callable[[], Any]
    session: Session
    data: bytes
    spec: Spec
    strides: tuple[int, ...]
    """In bytes."""


class Core:
    """Thread-safe: its containers are only touched by operations that are atomic."""

    def __init__(
        self,
        target: str,
        name: str,
        timeout: float | None,
        launch: Placement = "auto",
        reconnects: bool = True,
        retries: int = 5,
        priority: Priority = "interactive",
        tls: Tls | None = None,
    ) -> None:
        self.target = target
        self.name = name
        self.timeout = timeout
        self.launch = launch
        """Placement of launches, unless a call says otherwise."""
        self.reconnects = reconnects
        """True if a new session may be opened when this one is over."""
        self.retries = retries
        """How often a call is made again that the server refuses for the moment."""
        self.priority = priority
        """Named when a session is opened."""
        self.tls = tls
        """None: the connection is not encrypted."""
        self.pool = Pool()
        self.session: Session | None = None
        self.closed = False
        self.known_arrays: dict[int, KnownArray] = {}
        self.plans: dict[Any, Any] = {}
        """Plans of generic calls, by what was asked for."""
        self.direct: dict[Any, Any] = {}
        """Calls that were launched in this process, by what was asked for."""
        self.mapped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Arrays in memory of the server that this process maps, by their address."""
        self.maps = False
        """True once there was one: the quick answer."""
        self._releases: deque[tuple[Session, rpc.Method, Message]] = deque()
        self._quarantine: deque[tuple[float, object]] = deque()
        self._local = threading.local()

    # ---- session ----

    def adopt(self, session: Session) -> None:
        """Begin with a new session. What another server inferred does not count."""
        old, self.session = self.session, session
        self.plans.clear()
        self.known_arrays.clear()
        if old is not None:
            old.close_local()
            old.exports.clear()
            self.pool.forget(old)

    def require(self) -> Session:
        """The live session. Raises ``UnavailableError`` if there is none any more."""
        session = self.session
        if session is not None and not session.lost:
            return session
        if self.closed:
            raise UnavailableError(
                "this client is closed", field="client", rule="client_open", fix="make another: tilewright.connect()"
            )
        raise self.over(session.lost if session is not None else "no session is open")

    def over(self, reason: str) -> UnavailableError:
        """The error of a call that had not begun when its session was over."""
        return unbegun(
            UnavailableError(
                f"the session at {self.target} is over: {reason}",
                field="session",
                rule="session_alive",
                fix="start the server again if it is gone, then call reconnect() or make a new client; "
                "plans and resident buffers went with the session",
            )
        )

    def own(self, session: Session, what: str) -> None:
        """Raise ``NotFoundError`` unless ``session`` is the current one."""
        if session is not self.require():
            raise NotFoundError(
                f"the {what} belongs to an earlier session of this client, or to the process that it forked from: "
                "what it held is gone",
                field=what,
                rule="session_owner",
                fix=f"make the {what} again and fill it anew",
            )

    # ---- reports ----

    @property
    def report(self) -> Report | None:
        """Report of the last call that finished in this thread."""
        found = getattr(self._local, "report", None)
        return found() if callable(found) else found

    @report.setter
    def report(self, report: Report | Callable[[], Report] | None) -> None:
        """A report, or what makes it when it is asked for."""
        self._local.report = report

    # ---- releases: finalizers run anywhere, so they only leave a note that the next call takes along ----

    def release_plan(self, session: Session, plan: int) -> None:
        self._releases.append(
            (session, rpc.RELEASE_PLAN, dispatch_pb2.ReleasePlanRequest(session=session.token, plan=plan))
        )

    def release_buffer(self, session: Session, buffer: int) -> None:
        self._releases.append(
            (session, rpc.FREE_BUFFER, memory_pb2.FreeBufferRequest(session=session.token, buffer=buffer))
        )

    def release_region(self, session: Session, region: int) -> None:
        self._releases.append(
            (session, rpc.UNREGISTER, memory_pb2.UnregisterRegionRequest(session=session.token, region=region))
        )

    def note(self, error: BaseException) -> None:
        """Forget what went with a device: its process ended, and the mappings of our memory with it. What is used again
        is exported again.
        """
        session = self.session
        if session is None or getattr(error, "rule", "") not in ("device_lost", "local_socket", "outcome_unknown"):
            return
        self.plans.clear()
        session.epoch += 1
        while session.exports:
            _, known = session.exports.popitem()
            self.release_region(session, known.region)

    def release_binding(self, session: Session, binding: int) -> None:
        self._releases.append((session, rpc.UNBIND, dispatch_pb2.UnbindRequest(session=session.token, binding=binding)))

    @property
    def idle(self) -> bool:
        """True if nothing waits to be released."""
        return not self._releases

    def take_releases(self) -> list[Rpc]:
        """Calls to send whose replies nobody waits for."""
        for segment in self.pool.take_retired():
            for session, region in list(segment.regions.items()):
                if isinstance(session, Session):
                    self.release_region(session, region)
            segment.close()
        now = time.monotonic()
        while self._quarantine and self._quarantine[0][0] < now:
            self._quarantine.popleft()
        calls = []
        while self._releases:
            session, method, request = self._releases.popleft()
            if session is self.session and not session.lost:
                calls.append(Rpc(method, request, self.timeout))
        return calls

    def quarantine(self, keep: object) -> None:
        """Keep arrays alive for a while."""
        if (
            not self._quarantine
            or self._quarantine[-1][1] is not keep
            or self._quarantine[-1][0] < time.monotonic() + QUARANTINE_S / 2
        ):
            self._quarantine.append((time.monotonic() + QUARANTINE_S, keep))

    def remember(self, cache: dict[Any, Any], key: Any, value: Any) -> None:
        if len(cache) >= CACHE_ENTRIES:
            cache.clear()
        cache[key] = value

    def described(self, array: Any) -> Spec | None:
        """Description of an array in shared memory that was used before and lies as it did; else None."""
        known = self.known_arrays.get(id(array))
        if known is None or known.alive() is not array:
            return None
        spec = known.spec
        same = array.shape == spec.shape and array.strides == known.strides and array.dtype == spec.dtype
        return spec if same else None

    # ---- ends ----

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's session is ours to use or to release."""
        if self.session is not None:
            self.session.after_fork()
        self.session = None
        self.pool.after_fork()
        self._releases.clear()
        self.known_arrays.clear()
        self.plans.clear()
        self._local = threading.local()

    def close(self) -> None:
        self.closed = True
        if self.session is not None:
            self.session.close_local()
        self.session = None
        self.pool.close()
        self._releases.clear()
        self._quarantine.clear()
        self.known_arrays.clear()
        self.plans.clear()
        self.direct.clear()


def uuid_digits(uuid: str) -> str:
    """The hexadecimal digits of a device's UUID, whatever it is decorated with (``GPU-``, ``MIG-``, hyphens).

    >>> uuid_digits("GPU-00112233-4455-6677-8899-AABBCCDDEEFF")
    '00112233445566778899aabbccddeeff'
    """
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")


def check_timeout(timeout: float | None) -> float | None:
    """Seconds, positive, or ``None`` for no limit. Raises ``InvalidArgumentError``."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise InvalidArgumentError(
            f"a timeout is a number of seconds, more than 0 and at most {MAX_TIMEOUT_S}",
            field="timeout",
            value=timeout,
            rule="timeout_range",
            fix="give seconds, or leave it out; connect(call_timeout=None) makes calls without a limit",
        )
    return float(timeout)


def opening(
    target: str | None,
    timeout: float,
    call_timeout: float | None,
    name: str | None,
    launch: str = "auto",
    reconnect: bool = True,
    retries: int = 5,
    priority: str = "interactive",
    start: bool | None = None,
    tls: Tls | None = None,
) -> tuple[Core, float]:
    """Target that ``connect`` opens, and seconds that it waits. Raises ``InvalidArgumentError``."""
    place = settings.default_target() if target is None else settings.normalise_target(target)
    wait = check_timeout(timeout)
    if wait is None:
        raise InvalidArgumentError(
            "waiting for ever is not offered", field="timeout", rule="timeout_range", fix="give seconds"
        )
    if not isinstance(reconnect, bool):
        raise InvalidArgumentError(
            "reconnect is True or False", field="reconnect", value=reconnect, rule="argument_type", fix="give a bool"
        )
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= MAX_RETRIES:
        raise InvalidArgumentError(
            f"retries is a number from 0 to {MAX_RETRIES}",
            field="retries",
            value=retries,
            rule="count_range",
            fix="give an int in that range; 0 makes no call again that the server refused",
        )
    call_limit = check_timeout(call_timeout)
    name = name or f"python-{os.getpid()}"
    placement, urgency = check_placement(launch), check_priority(priority)
    core = Core(place, name, call_limit, placement, reconnect, retries, urgency, tls_for(place, tls))
    if target is None and (settings.may_start() if start is None else flag("start", start)):
        ensure_server(place)
    return core, wait
