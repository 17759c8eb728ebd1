"""From a request to a prepared plan, remembered under what the request says and under what the problem is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from tilewright_kit.config import KernelConfig
from tilewright_kit.device import DeviceInfo
from tilewright_kit.errors import BuildFailedError, TilewrightError
from tilewright_kit.operation import Operation
from tilewright_kit.plan import ExecutionPlan
from tilewright_kit.problem import OperationRequest, Problem
from tilewright_kit.select import FirstFit, Ranked, Selector, Strategy
from tilewright_server.build.pool import BuildEvent
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.engine.assembler import Assembler
from tilewright_server.engine.call import Call
from tilewright_server.engine.kernels import KernelStore, Unit
from tilewright_server.engine.lookup import Catalogs
from tilewright_server.engine.lru import Lru
from tilewright_server.engine.prepared import Prepared
from tilewright_server.engine.quarantine import Quarantine, refusal
from tilewright_server.engine.statistics import Statistics
from tilewright_server.engine.types import Selection
from tilewright_server.engine.values import value_check

__all__ = ["Planner", "request_key"]

log = logging.getLogger(__name__)

_FALLBACKS_TRIED = 64
"""Candidates that are looked at for one that is built already."""
_OPERAND_BYTES = 400
_RANKED_BYTES = 1500
_REFUSAL_BYTES = 2000
_SHARES = 8
_DROPPED_AT_ONCE = 4
"""Plans that are forgotten for a new one when too many kernels are loaded."""
_DOES_NOT_FIT = frozenset({"kernel_spills", "compiler_warning"})
"""Rules of builds that fail since a kernel is too much for the machine. Only the compiler knows that for sure."""
_NEXT_TRIED = 8
"""Kernels of a problem that may fail so before the caller is told."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A kernel for a problem, with everything but its binaries."""

    plan: ExecutionPlan
    units: tuple[Unit, ...]


class _Entry:
    """What is known of one problem on one device under one selection. ``lock`` makes planning happen once."""

    __slots__ = ("best", "fallback", "key", "lock", "passed_over", "plan", "ranked", "upgrading")

    def __init__(self, key: tuple[object, ...]) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.ranked: Sequence[Ranked] = ()
        """Empty again once ``best`` is there: then nobody asks."""
        self.plan: ExecutionPlan | None = None
        """Of the best-ranked kernel."""
        self.best: Prepared | None = None
        self.fallback: Prepared | None = None
        self.upgrading = False
        self.passed_over: list[str] = []
        """Better-ranked kernels that turned out not to fit the machine."""

    @property
    def is_lost(self) -> bool:
        """Whether it was made for a device that was lost since."""
        plans = (self.best, self.fallback)
        return any(prepared is not None and prepared.current.lost for prepared in plans)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        plans = sum(plan.nbytes for plan in (self.best, self.fallback) if plan is not None)
        described = _OPERAND_BYTES * len(self.plan.operands) if self.plan is not None else 0
        return described + _RANKED_BYTES * len(self.ranked) + plans


@dataclass(frozen=True, slots=True)
class _Question:
    """A parsed request."""

    operation: Operation[Any, Any]
    problem: Problem
    device: DeviceInfo
    strategy: Strategy


def request_key(request: OperationRequest, selection: Selection) -> tuple[object, ...]:
    """A hashable stand-in for a request, made without parsing it.

    Attributes enter by their text: 1, 1.0 and True are equal to Python, but not to an operation, nor are 0.0 and -0.0.
    The build policy does not enter: it decides when a plan is ready, not which.
    """
    return (
        request.operation,
        tuple(request.inputs.items()),
        tuple(request.outputs.items()),
        repr(request.attributes) if request.attributes else "",
        selection.strategy,
        selection.kernel,
        selection.device,
    )


def _settled(question: _Question, plan: ExecutionPlan) -> ExecutionPlan:
    """``plan``, but without stages for a problem that has nothing to compute.

    Such a problem is planned all the same: the plan may know more of the operands than the problem does, a format for
    example.
    """
    return replace(plan, stages=(), workspace_bytes=0, counter_bytes=0) if question.problem.is_empty else plan


def _request_bytes(request: OperationRequest) -> int:
    """About how much memory it takes to remember a request."""
    return _OPERAND_BYTES * (1 + len(request.inputs) + len(request.outputs)) + len(repr(request.attributes))


class Planner:
    """Thread-safe. Concurrent misses for one problem rank and plan once; each caller waits under its own deadline."""

    def __init__(
        self,
        catalogs: Catalogs,
        devices: DeviceRegistry,
        kernels: KernelStore,
        assembler: Assembler,
        statistics: Statistics,
        quarantine: Quarantine,
        *,
        limit: int,
        max_bytes: int,
        negative_ttl_s: float,
    ) -> None:
        self._catalogs = catalogs
        self._devices = devices
        self._kernels = kernels
        self._assembler = assembler
        self._statistics = statistics
        self._quarantine = quarantine
        self._negative_ttl_s = negative_ttl_s
        # A plan weighs in both that may keep it: it stays while one of them does.
        share = max_bytes // _SHARES
        self._requests: Lru[tuple[object, ...], Prepared] = Lru(limit, 3 * share)
        self._entries: Lru[tuple[object, ...], _Entry] = Lru(limit, 4 * share)
        self._refused: Lru[tuple[object, ...], tuple[TilewrightError, float]] = Lru(limit, share)

    def __len__(self) -> int:
        return len(self._entries)

    def plan(self, request: OperationRequest, selection: Selection, call: Call) -> Prepared:
        """See ``Engine.plan``."""
        begin = time.perf_counter_ns()
        call.plan_cached, call.build_ns = False, 0
        key = request_key(request, selection)
        prepared = self._requests.get(key)
        if prepared is not None:
            prepared = prepared.current
            if (not prepared.is_fallback or selection.build == "fallback") and not prepared.lost:
                call.plan_cached = True
                call.plan_ns = plan_ns = time.perf_counter_ns() - begin
                self._statistics.planned(prepared.operation_counters, hit=True, plan_ns=plan_ns, build_ns=0)
                return prepared
        try:
            prepared = self._miss(key, request, selection, call)
        except TilewrightError:
            if request.operation in self._catalogs.operations:
                self._statistics.failed(request.operation)
            raise
        plans = 2 if prepared.is_fallback else 1  # its successor comes on top
        self._requests.put(key, prepared, plans * prepared.nbytes + _request_bytes(request))
        call.plan_ns = plan_ns = time.perf_counter_ns() - begin - call.build_ns
        self._statistics.planned(
            prepared.operation_counters, hit=call.plan_cached, plan_ns=plan_ns, build_ns=call.build_ns
        )
        return prepared

    def question(self, request: OperationRequest, selection: Selection) -> _Question:
        """Look everything up and parse. Raises ``NotFoundError``, ``InvalidArgumentError``, ``UnsupportedError``."""
        operation = self._catalogs.operation(request.operation)
        strategy = self._catalogs.strategy(selection)
        device = self._devices.info(selection.device)
        problem = operation.parse(request)
        if problem.is_empty and not selection.kernel:
            strategy = FirstFit()  # there is no time to predict
        return _Question(operation, problem, device, strategy)

    def forget(self) -> None:
        """Forget all plans; sessions keep theirs."""
        for memory in (self._requests, self._entries, self._refused):
            memory.clear()

    def lost(self, device: str) -> None:
        """Forget the plans of a device that was lost; it may come back with fewer kernels."""
        self._requests.discard_if(lambda _, prepared: prepared.device.id == device)
        self._entries.discard_if(lambda key, _: key[0] == device)

    def _miss(self, key: tuple[object, ...], request: OperationRequest, selection: Selection, call: Call) -> Prepared:
        refused = self._refused.get(key)
        if refused is not None:
            if time.monotonic() < refused[1]:
                raise copy(refused[0])
            self._refused.discard(key)
        try:
            question = self.question(request, selection)
            entry = self._entry(question, selection)
            self._rank(entry, question)
        except TilewrightError as error:
            # A copy, since the error itself keeps alive all that the request was made of, through its traceback.
            weight = _REFUSAL_BYTES * (1 + len(error.violations)) + _request_bytes(request)
            self._refused.put(key, (copy(error), time.monotonic() + self._negative_ttl_s), weight)
            raise
        try:
            return self._ready(entry, question, selection, call)
        finally:
            self._entries.weigh(entry.key, entry, entry.nbytes)

    def _entry(self, question: _Question, selection: Selection) -> _Entry:
        key = (
            question.device.id,
            question.operation.name,
            question.problem.signature,
            question.strategy.name,
            selection.kernel,
        )
        entry = self._entries.get_or_make(key, lambda: _Entry(key))
        if entry.is_lost:
            self._entries.discard(key)
            entry = self._entries.get_or_make(key, lambda: _Entry(key))
        return entry

    def _rank(self, entry: _Entry, question: _Question) -> None:
        with entry.lock:
            if not entry.ranked and entry.best is None:
                selector = Selector(question.strategy)
                try:
                    ranked = tuple(selector.rank(question.operation, question.problem, question.device))
                except TilewrightError as error:
                    raise self._catalogs.with_close_kernels(error, question.operation, question.device) from error
                self._kernels.remember(item.config for item in ranked)
                entry.ranked = self._trusted(ranked, question.device.id)

    def _trusted(self, ranked: Sequence[Ranked], device: str) -> Sequence[Ranked]:
        """Those that have not ended the device's process too often. Raises ``DeviceError`` if none is left."""
        trusted = tuple(item for item in ranked if not self._quarantine.holds(device, item.config.name))
        if ranked and not trusted:
            raise refusal(ranked[0].config.name)
        return trusted

    def _ready(self, entry: _Entry, question: _Question, selection: Selection, call: Call) -> Prepared:
        if entry.best is not None:
            call.plan_cached = True
            return entry.best
        if selection.build == "fallback":
            if entry.fallback is not None:
                call.plan_cached = True
                return entry.fallback
            fallback = self._fallback(entry, question, call)
            if fallback is not None:
                return fallback
        while True:
            choice = self._best(entry, question)
            try:
                self._kernels.obtain(choice.units, question.device.id, question.device.arch, call)
                return self._finish(entry, question, choice, call)
            except BuildFailedError as error:
                if not self._passed_over(entry, choice, error):
                    raise

    def _passed_over(self, entry: _Entry, choice: _Choice, error: TilewrightError | None) -> bool:
        """Whether to go on, with the next kernel of the ranking, since this one does not fit the machine; not if there
        is none, or too many did not fit.
        """
        if error is None or error.rule not in _DOES_NOT_FIT:
            return False
        with entry.lock:
            if entry.plan is not choice.plan:  # somebody else who waited has done it
                return True
            if len(entry.ranked) < 2 or len(entry.passed_over) >= _NEXT_TRIED:
                return False
            entry.passed_over.append(entry.ranked[0].config.name)
            entry.ranked, entry.plan = entry.ranked[1:], None
        log.warning("the next kernel is taken, since this one does not fit: %s", error)
        return True

    def _best(self, entry: _Entry, question: _Question) -> _Choice:
        with entry.lock:
            if entry.plan is None:
                config = entry.ranked[0].config
                entry.plan = _settled(question, question.operation.plan(question.problem, config, question.device))
        return self._with_units(question, entry.plan)

    def _with_units(self, question: _Question, plan: ExecutionPlan) -> _Choice:
        return _Choice(plan, tuple(self._kernels.unit(item, question.device.arch) for item in plan.kernels))

    def _finish(self, entry: _Entry, question: _Question, choice: _Choice, call: Call) -> Prepared:
        """Load and lay out, once; those who planned with the fallback get this from now on."""
        with entry.lock:
            if entry.best is None:
                note = f"does not fit the machine: {', '.join(entry.passed_over)}" if entry.passed_over else ""
                entry.best = self._assemble(question, choice, call, note)
                if entry.fallback is not None:
                    entry.fallback.successor = entry.best
                    entry.fallback = None
                entry.ranked = ()
            best = entry.best
        self._entries.weigh(entry.key, entry, entry.nbytes)
        self._make_room()
        return best

    def _make_room(self) -> None:
        """What is only remembered must not keep more kernels loaded than may be."""
        for _ in range(_DROPPED_AT_ONCE):
            if not self._kernels.trim():
                return
            self._requests.drop_oldest()
            self._entries.drop_oldest()
        self._kernels.trim()

    def _fallback(self, entry: _Entry, question: _Question, call: Call) -> Prepared | None:
        """The best-ranked plan whose kernels are built, while the best of all is being built; None if that one is built
        already, or nothing is."""
        ranked = entry.ranked
        best = self._best(entry, question)
        if not ranked or self._is_ready(best, question.device):
            return None
        for item in ranked[1:_FALLBACKS_TRIED]:
            choice = self._usable(question, item.config)
            if choice is None:
                continue
            note = f"fallback: {ranked[0].config.name} is being built"
            with entry.lock:
                if entry.best is not None:
                    return entry.best
                if entry.fallback is None:
                    entry.fallback = self._assemble(question, choice, call, note, is_fallback=True)
                fallback = entry.fallback
                begin, entry.upgrading = not entry.upgrading, True
            if begin:
                _Upgrade(self, entry, question, best).begin()
            return fallback
        return None

    def _assemble(
        self, question: _Question, choice: _Choice, call: Call, note: str, *, is_fallback: bool = False
    ) -> Prepared:
        operation, problem, device, plan = question.operation, question.problem, question.device, choice.plan
        values = value_check(operation, problem, plan, device)
        return self._assembler.assemble(
            operation.name,
            problem,
            device,
            plan,
            choice.units,
            call,
            note=note,
            is_fallback=is_fallback,
            values=values,
        )

    def _usable(self, question: _Question, config: KernelConfig) -> _Choice | None:
        try:
            plan = question.operation.plan(question.problem, config, question.device)
            choice = self._with_units(question, plan)
        except TilewrightError:  # one candidate that cannot be generated must not keep the others from helping
            return None
        return choice if self._is_ready(choice, question.device) else None

    def _is_ready(self, choice: _Choice, device: DeviceInfo) -> bool:
        return all(self._kernels.is_ready(device.id, unit) for unit in choice.units)


class _Upgrade:
    """Builds the better kernels behind a fallback and puts them in its place, in the thread of the last build."""

    def __init__(self, planner: Planner, entry: _Entry, question: _Question, choice: _Choice) -> None:
        self._planner = planner
        self._entry = entry
        self._question = question
        self._choice = choice
        self._left = len(choice.units)
        self._failed = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        arch = self._question.device.arch
        for unit in self._choice.units:
            self._planner._kernels.submit(unit, arch).listen(self._heard)

    def _heard(self, event: BuildEvent) -> None:
        if event.state == "failed":
            # The fallback stays until there is a kernel that fits. Who asks with the policy `wait` is told why not.
            with self._lock:
                first, self._failed = not self._failed, True
            if first and not (self._planner._passed_over(self._entry, self._choice, event.error) and self._go_on()):
                self._entry.upgrading = False
            return
        if event.state in ("built", "cached"):
            with self._lock:
                self._left -= 1
                if self._left:
                    return
            self._swap()

    def _go_on(self) -> bool:
        """Build the next kernel of the ranking instead; False if it cannot be planned."""
        try:
            choice = self._planner._best(self._entry, self._question)
        except TilewrightError as error:
            log.warning("a better kernel than the fallback could not be planned: %s", error)
            return False
        _Upgrade(self._planner, self._entry, self._question, choice).begin()
        return True

    def _swap(self) -> None:
        try:
            self._planner._finish(self._entry, self._question, self._choice, Call())
        except TilewrightError as error:
            log.warning("a better kernel could not take the place of its fallback: %s", error)
        except Exception:
            log.exception("a better kernel could not take the place of its fallback")
