"""The core of the server without its transport: sessions and the engine, brought together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import (
    CancelledError,
    DeadlineError,
    InvalidArgumentError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
)
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.engine.call import Call, Cancellation
from tilewright_server.engine.delayed_worker import Later
from tilewright_server.engine.execution.caller_launch import CallerPlan, CodeObject, caller_plan, code_object
from tilewright_server.engine.types import Outcome, Selection
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.pinned import Pinned
from tilewright_server.memory.staging_pool import StagingPool
from tilewright_server.session.attachments import Attachments
from tilewright_server.session.launch_page import LaunchPage
from tilewright_server.session.objects import AnyRegion
from tilewright_server.session.operands.bindings import BoundExecution, check_in_place
from tilewright_server.session.operands.operand_binding import Binder, Binding, Location, Place, Target
from tilewright_server.session.operands.staged_operands import OutputValue
from tilewright_server.session.region_sources import RegionSource, register
from tilewright_server.session.session import Session
from tilewright_server.session.sessions import Sessions
from tilewright_server.session.transfer import Begin, nothing, read_buffer, write_buffer

if TYPE_CHECKING:
    from tilewright_server.engine.engine import Engine, Prepared

__all__ = ["Batch", "Finished", "Observer", "Result", "RunResult", "Service"]

_OF_THE_WHOLE = (ResourceExhaustedError, DeadlineError, CancelledError, UnavailableError)
"""Errors that reject a request rather than an execution, if it has but one."""
MAX_REPEAT = 1_000_000
COLLECT_S = 5.0
"""How often launches in processes of clients are counted if nobody asks."""


Observer = Callable[[OperationRequest, Selection, "Prepared", int], object]
"""Hears of a problem that was planned, or launched so many times by those who had planned it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An execution that had something to copy."""

    outcome: Outcome
    outputs: tuple[OutputValue, ...]
    bytes_copied: int


Result = Outcome | Finished | TilewrightError
"""Outcome of one execution; a bare ``Outcome`` copied nothing and returns nothing."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of ``run``, with times in nanoseconds."""

    prepared: Prepared
    outcome: Outcome
    outputs: tuple[OutputValue, ...]
    bytes_copied: int
    copy_in_ns: int
    copy_out_ns: int
    total_ns: int


class Batch:
    """Executions of one request, resolved: bindings, or what was wrong with an execution."""

    __slots__ = ("entries", "nbytes", "objects", "plain", "reusable", "session", "timeout_ms")

    def __init__(self, session: Session, entries: Sequence[Binding | TilewrightError]) -> None:
        self.session = session
        self.entries = entries
        self.timeout_ms = 0
        bindings = [entry for entry in entries if isinstance(entry, Binding)]
        self.objects: tuple[Pinned, ...] = tuple(dict.fromkeys(item for entry in bindings for item in entry.objects))
        self.plain: list[tuple[Prepared, Sequence[int], int]] | None = None
        if len(bindings) == len(entries) and not any(entry.staged for entry in bindings):
            self.plain = [(entry.target.prepared, entry.addresses, entry.repeat) for entry in bindings]
        self.nbytes = 1000 + sum(entry.nbytes for entry in bindings)
        """About how much memory it takes to remember this."""
        self.reusable = self.plain is not None and all(entry.reusable for entry in bindings)


class Service:
    """One per server process. Thread-safe; work is done in the calling thread. Errors are ``TilewrightError``."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        inline_limit: int,
        reply_limit: int,
        *,
        allow_caller_launch: bool = True,
        observers: Sequence[Observer] = (),
    ) -> None:
        """``observers`` hear of every problem that is asked for."""
        self.engine = engine
        self._observers = tuple(observers)
        self._allow_caller_launch = allow_caller_launch
        self.sessions = sessions
        self._pools: dict[str, StagingPool] = {}
        self._lock = threading.Lock()
        self._later = Later("caller-launches")
        self._collecting = False
        self.choices_renewed = 0
        self.attachments = Attachments(engine.devices)
        self.binder = Binder(inline_limit, reply_limit, self.staging)

    def session(self, token: bytes) -> Session | None:
        """The session of a request; none for the empty token."""
        return self.sessions.get(token) if token else None

    def staging(self, device_id: str) -> StagingPool:
        pool = self._pools.get(device_id)
        if pool is None:
            device = self.engine.devices.get(device_id)
            with self._lock:
                pool = self._pools.setdefault(device_id, StagingPool(device))
        return pool

    def run(
        self,
        token: bytes,
        request: OperationRequest,
        locations: Mapping[str, Location],
        selection: Selection,
        call: Call,
        settle: Callable[[Prepared], Mapping[str, Location]] | None = None,
    ) -> RunResult:
        """Plan, bind, run, copy out. Outputs without a location travel back in the reply.

        ``settle`` returns the locations for the plan that was found, instead of ``locations``.
        """
        started = time.perf_counter_ns()
        session = call.owner = self.session(token)
        prepared = self._planned(request, placed(session, locations, selection), call)
        return self._run(session, Target(prepared), locations if settle is None else settle(prepared), call, started)

    def run_plan(self, session: Session, plan_id: int, locations: Mapping[str, Location], call: Call) -> RunResult:
        """As ``run``, of a plan that the session keeps: nothing is parsed or looked up by its problem."""
        started = time.perf_counter_ns()
        call.owner = session
        target: Target = session.plan(plan_id)
        if target.asked is not None:
            for observer in self._observers:
                observer(*target.asked, target.prepared, 1)
        return self._run(session, target, locations, call, started)

    def _run(
        self, session: Session | None, target: Target, locations: Mapping[str, Location], call: Call, started: int
    ) -> RunResult:
        none = Location(Place.NONE)
        binding = self.binder.bind(target, [locations.get(slot.name, none) for slot in target.slots], session)
        result, copy_in, copy_out = self._pinned(session, binding, call)
        total = time.perf_counter_ns() - started
        return RunResult(target.prepared, result.outcome, result.outputs, result.bytes_copied, copy_in, copy_out, total)

    def _pinned(self, session: Session | None, binding: Binding, call: Call) -> tuple[Finished, int, int]:
        if session is None:
            return self._through_staging(binding, call)
        objects = tuple(dict.fromkeys(binding.objects))
        session.pin(objects)
        try:
            return self._through_staging(binding, call)
        finally:
            session.unpin(objects)

    def _through_staging(self, binding: Binding, call: Call) -> tuple[Finished, int, int]:
        """Copy in, run, copy out; returns with the times of both copies."""
        clock = time.perf_counter_ns
        prepared = binding.target.prepared
        try:
            start = clock()
            copied = binding.begin()
            copy_in = clock() - start
            if prepared.values is not None and not binding.target.on_host:
                prepared.values.contents(binding.contents(prepared.values.names))
            outcome = self.engine.execute(prepared, binding.addresses, call, binding.repeat)
            start = clock()
            copied_out, outputs = binding.finish()
            copy_out = clock() - start
        finally:
            binding.discard()
        if binding.staged:
            self.engine.statistics.copied(prepared.plan.operation, copied + copied_out, copy_in, copy_out)
        return Finished(outcome, tuple(outputs), copied + copied_out), copy_in, copy_out

    def plan(
        self,
        token: bytes,
        request: OperationRequest,
        selection: Selection,
        call: Call,
        locations: Mapping[str, Location] | None = None,
    ) -> tuple[int, Target]:
        """Prepare a plan that the session keeps; returns its id. ``locations`` help to choose the device."""
        session = call.owner = self.sessions.get(token)
        selection = placed(session, locations or {}, selection)
        target = Target(self._planned(request, selection, call))
        if self._observers:
            target.asked = (request, selection)
        return session.add_plan(target, target.nbytes), target

    def _planned(self, request: OperationRequest, selection: Selection, call: Call) -> Prepared:
        prepared = self.engine.plan(request, selection, call)
        for observer in self._observers:
            observer(request, selection, prepared, 1)
        return prepared

    def launch_plan(self, session: Session, target: Target) -> CallerPlan:
        """The plan for a caller that launches it in its own process. Raises what ``caller_plan`` does."""
        target.caller_plan = found = caller_plan(target.prepared, allowed=self._allow_caller_launch)
        session.caller_launches.begun = True
        self._watch_callers()
        return found

    def code_object(self, session: Session, plan_id: int, sha256: bytes) -> CodeObject:
        """A code object of a plan that the session was given to launch it itself. Raises ``NotFoundError``."""
        target: Target = session.plan(plan_id)
        return code_object(target.caller_plan, sha256)

    def launch_page(self, session: Session) -> LaunchPage:
        """The page into which a session counts its launches in its own process. Raises ``ResourceExhaustedError``."""
        page = session.caller_launches.page(self._launched_by_caller)
        self._watch_callers()
        return page

    def _watch_callers(self) -> None:
        """Collect launches and renew choices every few seconds, as long as a client launches by itself."""
        with self._lock:
            begins, self._collecting = not self._collecting, True
        if begins:
            self._later.run(self._collect_again, COLLECT_S)

    def collect_launches(self) -> None:
        """Bring counters of launches in processes of clients up to date."""
        self.sessions.collect_launches()

    def _collect_again(self) -> None:
        with self._lock:
            self._collecting = self.sessions.collect_launches()
            if self._collecting:
                self._later.run(self._collect_again, COLLECT_S)
        self.renew_choices()

    def renew_choices(self) -> None:
        """Plan anew where measurements have changed, and tell clients that launch by themselves. To be called every few
        seconds."""
        if self.engine.remeasured():
            self.choices_renewed += 1
            self.sessions.announce_choices()

    def _launched_by_caller(self, target: Target, launches: int, samples: int, sampled_ns: int) -> None:
        prepared = target.prepared.current
        self.engine.statistics.launched_by_caller(
            prepared.operation_counters, prepared.kernel_counters, launches, samples, sampled_ns
        )
        if launches and target.asked is not None:
            for observer in self._observers:
                observer(*target.asked, prepared, launches)

    def resolve(self, session: Session, executions: Sequence[tuple[int, Sequence[Location], int] | int]) -> Batch:
        """Bind (plan id, locations, repeat) each, or look up the id of a binding; what is wrong with one does not
        concern the others.
        """
        entries: list[Binding | TilewrightError] = []
        bind = self.binder.bind
        returned = 0
        for execution in executions:
            try:
                if isinstance(execution, int):
                    entries.append(session.binding(execution).entry)
                    continue
                plan_id, locations, repeat = execution
                if repeat > MAX_REPEAT:
                    raise _too_often(repeat)
                binding = bind(session.plan(plan_id), locations, session, repeat or 1, returned)
                returned = binding.returned
                entries.append(binding)
            except TilewrightError as error:
                entries.append(error)
        return Batch(session, entries)

    def execute(self, batch: Batch, call: Call) -> Sequence[Result]:
        """Run a batch in order.

        Raises what concerns all of it; ``NotFoundError`` if one of its objects ended meanwhile: resolve it again.
        """
        session = call.owner = batch.session
        session.pin(batch.objects)
        try:
            if batch.plain is not None:
                return self.engine.execute_many(batch.plain, call)
            return self._mixed(batch.entries, call)
        finally:
            session.unpin(batch.objects)

    def _mixed(self, entries: Sequence[Binding | TilewrightError], call: Call) -> list[Result]:
        """One after the other: an execution may read, through copies, what the one before it wrote."""
        results: list[Result] = []
        for entry in entries:
            if isinstance(entry, TilewrightError):
                results.append(entry)
                continue
            try:
                results.append(self._through_staging(entry, call)[0])
            except TilewrightError as error:
                if len(entries) == 1 and isinstance(error, _OF_THE_WHOLE):
                    raise
                results.append(error)
        return results

    # Bindings

    def bind(
        self,
        session: Session,
        execution: tuple[int, Sequence[Location], int],
        timeout_s: float | None = None,
        owner: object = None,
    ) -> BoundExecution:
        """Settle (plan id, locations, repeat) under an id of the session; it ends with ``owner``, if one is given.

        Raises what ``Binder.bind`` does, ``InvalidArgumentError`` for operands that would have to be copied, and
        ``ResourceExhaustedError``.
        """
        plan_id, locations, repeat = execution
        if repeat > MAX_REPEAT:
            raise _too_often(repeat)
        binding = self.binder.bind(session.plan(plan_id), locations, session, repeat or 1)
        check_in_place(binding)
        prepared = self.engine.current(binding.target.prepared, Call.within(timeout_s, client=session.client))
        prepared.check(binding.addresses)
        bound = BoundExecution(binding, prepared, timeout_s)
        bound.owner = owner
        return session.bind(bound, self.attachments.publisher(session, bound))

    def launch(
        self,
        session: Session,
        binding_id: int,
        cancellation: Cancellation | None = None,
        *,
        patient: bool = True,
    ) -> Outcome:
        """Run a binding, in this thread, to its end. Unless it is ``patient``, ``WouldWaitError`` is raised where that
        would have to wait for others."""
        bound = session.binding(binding_id)
        call = Call.within(bound.timeout_s, cancellation, session.client)
        call.owner, call.patient = session, patient
        session.account.launches += 1
        pins = (bound,)
        session.pin(pins)
        try:
            binding = bound.binding
            return self.engine.execute(binding.target.prepared, binding.addresses, call, binding.repeat)
        finally:
            session.unpin(pins)

    # Memory

    def register(self, session: Session, source: RegionSource, nbytes: int, owner: object = None) -> AnyRegion:
        """See ``memory.sources.register``."""
        return register(session, self.engine.devices, source, nbytes, owner)

    def export_buffer(self, session: Session, buffer_id: int) -> tuple[ResidentBuffer, MemoryHandle]:
        """Name a buffer for the client's process. The caller closes the handle's descriptor, if it has one."""
        buffer = session.buffer(buffer_id)
        session.pin((buffer,))
        try:
            return buffer, buffer.export()
        finally:
            session.unpin((buffer,))

    def write_buffer(
        self, token: bytes, buffer_id: int, offset: int, source: bytes | tuple[int, int], nbytes: int
    ) -> None:
        """Copy bytes, or ``nbytes`` from (region id, offset), into a buffer."""
        write_buffer(self.sessions.get(token), buffer_id, offset, source, nbytes)

    def read_buffer(
        self, token: bytes, buffer: int, offset: int, size: int, target: tuple[int, int] | None, begin: Begin = nothing
    ) -> bytes:
        """Bytes of a buffer, behind those of ``begin``; with ``target`` (region id, offset), copies them there."""
        return read_buffer(self.sessions.get(token), buffer, offset, size, target, self.binder.inline_limit, begin)

    def close(self) -> None:
        """Free staging memory. Sessions and the engine are closed by whoever made them."""
        self._later.close()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def placed(session: Session | None, locations: Mapping[str, Location], selection: Selection) -> Selection:
    """``selection`` with the device whose memory operands lie in, unless it names one.

    ``InvalidArgumentError`` if they lie on two.
    """
    if selection.device or session is None:
        return selection
    device = first = ""
    for name, location in locations.items():
        found = ""
        if location.place is Place.BUFFER:
            found = session.buffer(location.value).device_id
        elif location.place is Place.REGION:
            found = session.region(location.value).device_id
        if not device:
            device, first = found, name
        elif found and found != device:
            raise InvalidArgumentError(
                f"{first} is on {device}, but {name} is on {found}",
                field=name,
                value=found,
                rule="operand_devices",
                fix="put all operands that lie on a device on one and the same",
            )
    return replace(selection, device=device) if device else selection


def _too_often(repeat: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"an execution can be repeated at most {MAX_REPEAT} times",
        field="repeat",
        value=repeat,
        rule="repeat_limit",
        fix="send several executions",
    )
