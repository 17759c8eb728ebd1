"""Connections that a device serves by itself, and the bindings that it knows for them.

A binding of a session can be launched over every connection of the session. A device that serves connections itself
therefore hears of each binding once for each connection of the session that is attached to it: of those that are there
when a connection is attached, and of those that are made later.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError, UnsupportedError
from tilewright_server.devices.contract import ConnectedDevice
from tilewright_server.devices.tracing import TracedSink
from tilewright_server.session.operands.bindings import BoundExecution

if TYPE_CHECKING:
    from tilewright_server.devices.registry import DeviceRegistry
    from tilewright_server.engine.execution.prepared import PlanExecutor
    from tilewright_server.session.session import Session

__all__ = ["Attachment", "Attachments"]

log = logging.getLogger("tilewright.session.regions")

_numbers = itertools.count(1)


class Attachment:
    """One connection of a session on one device."""

    __slots__ = ("_claimed", "_executor", "_lock", "_needs", "device", "device_id", "number", "over", "session")

    def __init__(self, session: Session, device: ConnectedDevice, device_id: str) -> None:
        self.session = session
        self.device = device
        self.device_id = device_id
        self.number = next(_numbers)
        """Number by which the device knows it."""
        self.over = False
        """Nothing of it runs any more, and nothing will."""
        self._lock = threading.Lock()
        self._needs: dict[int, int] = {}
        """Bytes of workspace by binding, of those that need any."""
        self._claimed = 0
        self._executor: PlanExecutor | None = None

    def publish(self, bound: BoundExecution) -> None:
        """Raises ``ResourceExhaustedError`` as well if its workspace would go beyond the device's limit."""
        prepared = bound.prepared
        program = prepared.program
        if program is None:
            return
        workspace, before = prepared.workspace_bytes, self._claimed
        if workspace and prepared.executor is not None:
            self._claim(prepared.executor, bound.id, workspace)
        try:
            with contextlib.suppress(NotFoundError):  # it has just ended
                self.device.bind(self.number, bound.id, program, bound.binding.addresses, workspace)
        except BaseException:
            self._disclaim(bound.id, before)
            raise

    def withdraw(self, bound: BoundExecution) -> None:
        """When this returns, what the binding uses may be given back."""
        self.device.unbind(self.number, bound.id)
        self._disclaim(bound.id, self._claimed)

    def end(self) -> None:
        """Nothing of it runs any more."""
        with self._lock:
            self.over = True
            self._needs.clear()
            self._shrink(0)

    def _claim(self, executor: PlanExecutor, binding: int, nbytes: int) -> None:
        """A connection has one workspace, as large as the largest that its bindings need, until none needs any."""
        with self._lock:
            if self.over:
                return
            if nbytes > self._claimed:
                executor.claim_workspace(nbytes - self._claimed)
                self._executor, self._claimed = executor, nbytes
            self._needs[binding] = nbytes

    def _disclaim(self, binding: int, keep: int) -> None:
        with self._lock:
            if self._needs.pop(binding, 0):
                self._shrink(keep if self._needs else 0)

    def _shrink(self, keep: int) -> None:
        """Lock held."""
        if self._executor is not None and self._claimed > keep:
            self._executor.disclaim_workspace(self._claimed - keep)
            self._claimed = keep

    def close(self) -> None:
        """Have the connection end soon. Idempotent. Raises nothing: whoever ends things has more of them to end.

        Until the device says that nothing of it runs any more, the end of a binding still waits for its launches.
        """
        try:
            self.device.detach(self.number)
        except TilewrightError as error:
            log.warning("%s could not be told of the end of a connection: %s", self.device_id, error)


class Attachments:
    """Brings bindings and attached connections together. Thread-safe."""

    def __init__(self, devices: DeviceRegistry) -> None:
        self._devices = devices

    def connected(self, device_id: str) -> ConnectedDevice | None:
        """The device, if it serves connections by itself."""
        device = self._devices.get(device_id)
        return device if isinstance(device, ConnectedDevice) else None

    def publisher(self, session: Session, bound: BoundExecution) -> Callable[[BoundExecution], None] | None:
        """How to make a new binding known to its device, for ``Session.bind``; None if nobody else has to know it."""
        if self.connected(bound.device_id) is None:
            return None
        if bound.binding.repeat > 1:
            raise InvalidArgumentError(
                f"{bound.device_id} launches a binding once at a time",
                field="repeat",
                value=bound.binding.repeat,
                rule="binding_repeat",
                fix="bind without repeat, and launch it as often: up to 64 launches travel in one packet",
            )
        return lambda bound: self._publish(session, bound)

    def _publish(self, session: Session, bound: BoundExecution) -> None:
        """``session.attaching`` is held."""
        bound.on_release = lambda: self._withdraw(session, bound)
        for attachment in tuple(session.attachments):
            if attachment.device_id == bound.device_id:
                attachment.publish(bound)

    def _withdraw(self, session: Session, bound: BoundExecution) -> None:
        with session.attaching:
            for attachment in tuple(session.attachments):
                if attachment.device_id == bound.device_id:
                    attachment.withdraw(bound)

    def attach(
        self,
        session: Session,
        device_id: str,
        fd: int,
        ended: Callable[[], None],
        traced: TracedSink | None = None,
    ) -> Attachment:
        """Hand the connection ``fd`` (which stays the caller's to close) to a device.

        ``ended`` is called once, in any thread, when the device serves it no longer, and ``traced`` for packets that
        the client wants traced; ``publish`` what it may launch.
        Raises ``UnsupportedError`` if the device leaves launches to the server, ``NotFoundError``,
        ``UnavailableError``, ``DeviceError``.
        """
        device = self.connected(device_id)
        if device is None:
            raise UnsupportedError(
                f"{device_id} has no connections of its own: the server runs its launches",
                field="device",
                value=device_id,
                rule="attach",
                fix="launch over a connection that is not attached",
            )
        attachment = Attachment(session, device, device_id)

        def over() -> None:  # without the lock, which may be held by one who waits for the device
            attachment.end()
            session.attachments.discard(attachment)
            ended()

        device.attach(fd, attachment.number, over, traced)
        return attachment

    def publish(self, attachment: Attachment) -> None:
        """Make what its session has bound known to a new attachment, and from now on what it binds.

        What was bound before the device was lost is left out: it says so to whoever launches it elsewhere. Raises
        ``DeviceLostError``, ``ResourceExhaustedError``, ``DeviceError``.
        """
        session = attachment.session
        with session.attaching:
            session.attachments.add(attachment)
            if attachment.over:
                session.attachments.discard(attachment)
            for bound in session.bindings():
                if bound.device_id == attachment.device_id and not bound.is_lost:
                    attachment.publish(bound)
