"""Plans that this process may launch by itself, or leave to the server. No I/O; see ``rpc``."""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any

from tilewright.dispatch.bindings.binding import Launched
from tilewright.dispatch.bindings.fast_path import launch_report
from tilewright.dispatch.bindings.in_place import BoundInPlace, InPlace, opened_plan
from tilewright.dispatch.operands.slots import Slot
from tilewright.errors import (
    CancelledError,
    DeadlineError,
    TilewrightError,
    UnavailableError,
)
from tilewright.launch.library import load_library
from tilewright.launch.opened import falls_back, is_lasting
from tilewright.launch.page import LaunchPage
from tilewright.session.state import Core, Session
from tilewright.transport.drive import SHORT_FLOPS
from tilewright.transport.rpc import MISSED, Flow, Work
from tilewright.types.arguments import Placement, check_placement
from tilewright.types.report import Report
from tilewright_proto.v1 import dispatch_pb2

__all__ = ["PlacedPlan", "placement_of"]

RENEW_S = 1.0
"""How often a better kernel is asked for that is being built."""
_NEVER = math.inf
_UNCHANGED = SimpleNamespace(value=0)
"""A number of changes that stays."""


class PlacedPlan(ABC):
    """A plan of one session that can be opened in this process."""

    def __init__(self, core: Core, placement: Placement) -> None:
        self.core = core
        self.placement = placement
        self.closed = False
        self.session: Session | None = None
        self.plan = 0
        """Its id in that session."""
        self.inputs: tuple[Slot, ...] = ()
        self.outputs: tuple[Slot, ...] = ()
        self.report = Report()
        self.here: InPlace | None = None
        """The plan in this process, if it can be launched here."""
        self.refused: TilewrightError | None = None
        """Why it cannot."""
        self.renew_at = _NEVER
        """When to ask again for the better kernel that is being built."""
        self._page: LaunchPage | None = None
        """Where the server tells that its choices have changed."""
        self._changes: Any = _UNCHANGED
        """Its number of changes, with a ``value``."""
        self._choices = 0
        """Their number when the plan was made."""

    @abstractmethod
    def live(self) -> Flow[Session]:
        """The session in which the plan is valid, preparing it there if need be."""

    @abstractmethod
    def made(self, session: Session) -> Flow[None]:
        """Prepare it in a session."""

    @abstractmethod
    def operands(self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any]) -> list[Any]:
        """Operands in the plan's order; ``None`` for an output that is to be made."""

    def note_choices(self, session: Session) -> None:
        """To be called before the plan is asked for: whatever changes from then on calls for another."""
        page: LaunchPage | None = session.launch_page or None
        self._page = page
        self._changes = session.told if page is None else page.changes
        self._choices = self._changes.value

    def open_here(self, session: Session, reply: dispatch_pb2.PlanReply) -> Flow[None]:
        """Open the launch plan of a reply, if this process may launch it."""
        self.renew_at = time.monotonic() + RENEW_S if reply.fallback else _NEVER
        if self.placement == "server":
            return
        names = tuple(slot.name for slot in (*self.inputs, *self.outputs))
        uuid = next((item.uuid for item in session.devices if item.id == self.report.device), "")
        try:
            opened = yield from opened_plan(self.core, session, self.plan, reply, names)
        except TilewrightError as error:
            if isinstance(error, (CancelledError, DeadlineError, UnavailableError)):
                raise
            self.here, self.refused = None, copy(error)  # the error itself holds on to the operands
        else:
            self.here, self.refused = InPlace(self.core, opened, self.inputs, self.outputs, uuid), None
            if self._page is None and session.launch_page:  # the first plan of the session brought it
                self.note_choices(session)
            elif self._page is None:
                session.listen()

    @property
    def is_due(self) -> bool:
        """True if it is time to ask for a better kernel. None is taken while a graph is captured."""
        # Every call asks.
        if self._changes.value == self._choices and (self.renew_at is _NEVER or time.monotonic() < self.renew_at):
            return False
        return self.here is None or not self.here.is_capturing

    def renewed(self) -> Flow[None]:
        """Take the better kernel, if it has been built. What is bound already stays with its own."""
        session = self.core.session
        if session is None or session.lost or self.closed:
            self.renew_at = time.monotonic() + RENEW_S
            self._page, self._changes, self._choices = None, _UNCHANGED, 0
            return
        old = (session, self.plan)
        yield from self.made(session)
        self.core.release_plan(*old)

    # ---- launching in this process ----

    def attempt(self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any]) -> Any:
        """The result of a launch in this process that needs nothing else; ``MISSED`` if there is more to be done."""
        here = self.here
        if here is None or self.closed or self.core.closed or self.is_due:
            return MISSED
        try:
            count = len(self.inputs)
            if named or len(inputs) != count or len(self.outputs) != 1 or isinstance(out, Mapping):
                values = self.operands(inputs, out, named)
            else:
                values = [*inputs, out]
            launched, result = here.launch(values)
        except TilewrightError as error:
            if falls_back(error):  # the long way says what is wrong
                return MISSED
            raise
        self.core.report = functools.partial(launch_report, self.report, launched.device_ns, "caller")
        return result

    def launch_here(
        self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any], stream: int | None, repeat: int = 1
    ) -> Flow[tuple[Launched, Any] | None]:
        """Launch it in this process; ``None`` if that is the server's to do."""
        here = yield from self.opened_here()
        if here is None:
            return None
        try:
            values = self.operands(inputs, out, named)
            if repeat > 1:
                launched, result = yield Work(functools.partial(_repeated, here, values, repeat))
            elif here.plan.on_cpu and here.plan.flops > SHORT_FLOPS:
                launched, result = yield Work(functools.partial(here.launch, values, stream))
            else:
                launched, result = here.launch(values, stream)
        except TilewrightError as error:
            self.fail_here(error)
            return None
        self.core.report = functools.partial(launch_report, self.report, launched.device_ns, "caller")
        return launched, result

    def opened_here(self) -> Flow[InPlace | None]:
        """The plan in this process; ``None`` if it is launched by the server. Raises what refuses it if nobody else may
        launch it.
        """
        if self.placement == "server":
            return None
        if self.closed or self.core.closed or (self.here is None and self.session is not self.core.session):
            yield from self.live()
        elif self.is_due:
            yield from self.renewed()
        if self.here is None and self.placement == "caller" and self.refused is not None:
            raise copy(self.refused)
        return self.here

    def fail_here(self, error: TilewrightError) -> None:
        """Raise the error of a launch in this process, unless the server is to try; remember what would come again."""
        if self.placement == "caller" or not falls_back(error):
            raise error
        if is_lasting(error):
            self.here, self.refused = None, copy(error)


def placement_of(core: Core, session: Session, launch: Placement | None) -> Flow[Placement]:
    """Placement of a new plan: for "auto" only the server, unless it is known to be this user's own, so that its code
    may be run here, and the library is there. Raises ``UnavailableError`` where the caller must launch and cannot.
    """
    wanted = core.launch if launch is None else check_placement(launch)
    if wanted == "server" or (wanted == "auto" and not session.trusted):
        return "server"
    try:
        yield Work(load_library)
    except UnavailableError:
        if wanted == "caller":
            raise
        return "server"
    return wanted


def _repeated(here: InPlace, values: Sequence[Any], repeat: int) -> tuple[Launched, Any]:
    bound = BoundInPlace(here, values)
    taken = 0
    for _ in range(repeat):
        launched = bound()
        taken += launched.device_ns
    launched.device_ns = taken
    return launched, bound.result
