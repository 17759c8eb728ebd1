"""From a request to a prepared plan, remembered under what the request says and under what the problem is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import alias_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.strategies import Explicit, FirstFit, Ranked, Selector
from tilewright_kit.types.errors import BuildFailedError, DeviceError, TilewrightError
from tilewright_server.build.pool import BuildEvent
from tilewright_server.clients.client import Client, Priority
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.engine.call import Call
from tilewright_server.engine.delayed_worker import Later
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.execution.value_check import value_check
from tilewright_server.engine.kernels.names import Catalogs
from tilewright_server.engine.kernels.registered import RegisteredKernels
from tilewright_server.engine.kernels.store import KernelStore
from tilewright_server.engine.lru import Lru
from tilewright_server.engine.planning.alternatives import alternatives
from tilewright_server.engine.planning.assembler import Assembler
from tilewright_server.engine.planning.computing import Computing
from tilewright_server.engine.planning.given_config import given_config
from tilewright_server.engine.planning.plan_cache_entry import Choice, Entry, Question, settled
from tilewright_server.engine.planning.quarantine import Quarantine, refusal
from tilewright_server.engine.planning.request_key import names_kernel, request_bytes, request_key
from tilewright_server.engine.statistics import Statistics
from tilewright_server.engine.types import Selection

__all__ = ["DOES_NOT_FIT", "NEXT_TRIED", "Planner"]

log = logging.getLogger(__name__)

_FALLBACKS_FAILED = 3
"""So many that are built may turn out not to load before it is no use to try another."""
_REFUSAL_BYTES = 2000
_SHARES = 8
_DROPPED_AT_ONCE = 4
"""Plans that are forgotten for a new one when too many kernels are loaded."""
DOES_NOT_FIT = frozenset({"kernel_spills", "compiler_warning"})
"""Rules of builds that fail since a kernel is too much for the machine. Only the compiler knows that for sure."""
NEXT_TRIED = 8
"""Kernels of a problem that may fail so before the caller is told."""
_RETRY_S = 5.0
"""After so long a better kernel than a fallback is tried again; twice as long after every further failure."""
_LONGEST_RETRY_S = 600.0


class Planner:
    """Thread-safe. Concurrent misses for one problem rank and plan once; each caller waits under its own deadline."""

    def __init__(
        self,
        catalogs: Catalogs,
        devices: DeviceRegistry,
        kernels: KernelStore,
        registered: RegisteredKernels,
        assembler: Assembler,
        statistics: Statistics,
        quarantine: Quarantine,
        computing: Computing,
        *,
        limit: int,
        max_bytes: int,
        negative_ttl_s: float,
    ) -> None:
        self._catalogs = catalogs
        self._devices = devices
        self._kernels = kernels
        self._registered = registered
        self._assembler = assembler
        self._statistics = statistics
        self._quarantine = quarantine
        self._computing = computing
        self._negative_ttl_s = negative_ttl_s
        self._later = Later("tilewright-upgrades")
        # A plan weighs in both that may keep it: it stays while one of them does.
        share = max_bytes // _SHARES
        self._requests: Lru[tuple[object, ...], Prepared] = Lru(limit, 3 * share)
        self._entries: Lru[tuple[object, ...], Entry] = Lru(limit, 4 * share)
        self._refused: Lru[tuple[object, ...], tuple[TilewrightError, float]] = Lru(limit, share)

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """End what goes on behind fallbacks. Idempotent. To be called when builds have ended, and before devices do."""
        self._later.close()

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
                self._statistics.planned(
                    prepared.operation_counters, call.client.priority, hit=True, plan_ns=plan_ns, build_ns=0
                )
                return prepared
        try:
            prepared = self._miss(key, request, selection, call)
        except TilewrightError as error:
            if request.operation in self._catalogs.operations:
                self._statistics.failed(request.operation, error.code, call.client.priority)
            raise
        plans = 2 if prepared.is_fallback else 1  # its successor comes on top
        self._requests.put(key, prepared, plans * prepared.nbytes + request_bytes(request))
        call.plan_ns = plan_ns = time.perf_counter_ns() - begin - call.build_ns
        self._statistics.planned(
            prepared.operation_counters,
            call.client.priority,
            hit=call.plan_cached,
            plan_ns=plan_ns,
            build_ns=call.build_ns,
        )
        return prepared

    def question(self, request: OperationRequest, selection: Selection, device: DeviceInfo | None = None) -> Question:
        """Look everything up and parse. A ``device`` that is given takes the place of the selection's.

        Raises ``NotFoundError``, ``InvalidArgumentError``, ``UnsupportedError``.
        """
        operation = self._catalogs.operation(request.operation)
        strategy = FirstFit() if selection.config else self._catalogs.strategy(selection)
        device = device or self._devices.info(selection.device)
        problem = operation.parse(request)
        if selection.config:
            strategy = Explicit(given_config(selection, operation, problem, device))
        elif selection.kernel:
            known = self._registered.find(operation.name, selection.kernel)
            strategy = strategy if known is None else Explicit(known)
        elif problem.is_empty:
            strategy = FirstFit()  # there is no time to predict
        return Question(operation, problem, device, strategy)

    def reconsider(self) -> None:
        """Forget what was refused: there are new kernels."""
        self._refused.clear()

    def forget(self) -> None:
        """Forget all plans; sessions keep theirs."""
        for memory in (self._requests, self._entries, self._refused):
            memory.clear()

    def unnamed(self, kernel: str) -> None:
        """Forget the plans for requests that name a kernel which has no name any more; sessions keep theirs."""
        names = (kernel, alias_of(kernel))
        self._requests.discard_if(lambda key, _: names_kernel(key) in names)
        self._entries.discard_if(lambda key, _: key[4] in names)

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
        with self._remembered(key, request):
            question = self.question(request, selection)
        with self._computing.turn(call), self._remembered(key, request):
            entry = self._entry(question, selection)
            self._rank(entry, question)
        try:
            return self._ready(entry, question, selection, call)
        finally:
            self._entries.weigh(entry.key, entry, entry.nbytes)

    @contextmanager
    def _remembered(self, key: tuple[object, ...], request: OperationRequest) -> Iterator[None]:
        """Refusals inside are repeated from memory for a while."""
        try:
            yield
        except TilewrightError as error:
            # A copy, since the error itself keeps alive all that the request was made of, through its traceback.
            weight = _REFUSAL_BYTES * (1 + len(error.violations)) + request_bytes(request)
            self._refused.put(key, (copy(error), time.monotonic() + self._negative_ttl_s), weight)
            raise

    def _entry(self, question: Question, selection: Selection) -> Entry:
        key = (
            question.device.id,
            question.operation.name,
            question.problem.signature,
            question.strategy.name,
            selection.kernel or question.given,
        )
        entry = self._entries.get_or_make(key, lambda: Entry(key))
        if entry.is_lost:
            self._entries.discard(key)
            entry = self._entries.get_or_make(key, lambda: Entry(key))
        return entry

    def _rank(self, entry: Entry, question: Question) -> None:
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

    def _ready(self, entry: Entry, question: Question, selection: Selection, call: Call) -> Prepared:
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
            choice = self._best(entry, question, call)
            try:
                self._kernels.obtain(choice.units, question.device.id, question.device.arch, call)
                return self._finish(entry, question, choice, call)
            except BuildFailedError as error:
                if not self._passed_over(entry, choice, error):
                    raise

    def _passed_over(self, entry: Entry, choice: Choice, error: TilewrightError | None) -> bool:
        """True if to go on, with the next kernel of the ranking, since this one does not fit the machine; not if there
        is none, or too many did not fit.
        """
        if error is None or error.rule not in DOES_NOT_FIT:
            return False
        with entry.lock:
            if entry.plan is not choice.plan:  # somebody else who waited has done it
                return True
            if len(entry.ranked) < 2 or len(entry.passed_over) >= NEXT_TRIED:
                return False
            entry.passed_over.append(entry.ranked[0].config.name)
            entry.ranked, entry.plan = entry.ranked[1:], None
        log.warning("the next kernel is taken, since this one does not fit: %s", error)
        return True

    def _best(self, entry: Entry, question: Question, call: Call) -> Choice:
        with self._computing.turn(call):
            with entry.lock:
                if entry.plan is None:
                    config = entry.ranked[0].config
                    plan = question.operation.plan(question.problem, config, question.device)
                    entry.plan = settled(question.problem, plan)
            return self._with_units(question, entry.plan)

    def _with_units(self, question: Question, plan: ExecutionPlan) -> Choice:
        return Choice(plan, tuple(self._kernels.unit(item, question.device.arch) for item in plan.kernels))

    def _finish(self, entry: Entry, question: Question, choice: Choice, call: Call) -> Prepared:
        """Load and lay out, once; those who planned with the fallback get this from now on."""
        with entry.assembling.held(call):
            best = entry.best
            if best is None:
                passed_over = ", ".join(entry.passed_over)
                note = f"does not fit the machine: {passed_over}" if passed_over else ""
                best = self._assemble(question, choice, call, note)
                with entry.lock:
                    entry.best = best
                    if entry.fallback is not None:
                        entry.fallback.successor = best
                        entry.fallback = None
                    entry.ranked = ()
        self._entries.weigh(entry.key, entry, entry.nbytes)
        self._make_room()
        return best

    def _make_room(self) -> None:
        """Drop entries that keep more kernels loaded than may be."""
        for _ in range(_DROPPED_AT_ONCE):
            if not self._kernels.trim():
                return
            self._requests.drop_oldest()
            self._entries.drop_oldest()
        self._kernels.trim()

    def _fallback(self, entry: Entry, question: Question, call: Call) -> Prepared | None:
        """The best-ranked plan whose kernels are built, while the best of all is being built; None if that one is built
        already, or nothing is."""
        ranked = entry.ranked
        best = self._best(entry, question, call)
        if not ranked or self._is_ready(best, question.device):
            return None
        note = f"fallback: {ranked[0].config.name} is being built"
        with entry.assembling.held(call):
            if entry.best is not None:
                return entry.best
            if entry.fallback is None:
                entry.fallback = self._assemble_first(question, alternatives(question, ranked), call, note)
            fallback = entry.fallback
        if fallback is None:
            return None
        with entry.lock:
            begin, entry.upgrading = not entry.upgrading, True
        if begin:
            _Upgrade(self, entry, question, call.client).begin(best)
        return fallback

    def _assemble_first(self, question: Question, ranked: Iterable[Ranked], call: Call, note: str) -> Prepared | None:
        """The first whose kernels are built and can be loaded."""
        failed = 0
        for item in ranked:
            choice = self._usable(question, item.config, call)
            if choice is None:
                continue
            try:
                return self._assemble(question, choice, call, note, is_fallback=True)
            except (BuildFailedError, DeviceError) as error:  # of this kernel, or else of the device
                log.warning("a kernel that is built cannot serve as a fallback: %s", error)
                failed += 1
                if failed == _FALLBACKS_FAILED:
                    break
        return None

    def _assemble(
        self, question: Question, choice: Choice, call: Call, note: str, *, is_fallback: bool = False
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

    def _usable(self, question: Question, config: KernelConfig, call: Call) -> Choice | None:
        with self._computing.turn(call):
            try:
                choice = self._with_units(question, question.operation.plan(question.problem, config, question.device))
            except TilewrightError:  # one candidate that cannot be generated must not keep the others from helping
                return None
        return choice if self._is_ready(choice, question.device) else None

    def _knows(self, entry: Entry) -> bool:
        return self._entries.get(entry.key) is entry

    def _is_ready(self, choice: Choice, device: DeviceInfo) -> bool:
        return all(self._kernels.is_ready(device.id, unit) for unit in choice.units)


class _Upgrade:
    """Builds the best kernel behind a fallback and puts it in its place, in the planner's own thread: what is loaded
    may have to be built once more, which a thread that builds must not wait for. What fails is tried again, less and
    less often, for as long as the planner knows the problem.
    """

    def __init__(self, planner: Planner, entry: Entry, question: Question, client: Client, failures: int = 0) -> None:
        """``client`` was the first to ask."""
        self._planner = planner
        self._client = client.at_most(Priority.BATCH)
        self._entry = entry
        self._question = question
        self._failures = failures
        self._left = 0
        self._over = False
        self._lock = threading.Lock()

    def begin(self, choice: Choice) -> None:
        self._left = len(choice.units)
        try:
            for unit in choice.units:
                build = self._planner._kernels.submit(unit, self._question.device.arch, self._client)
                build.listen(lambda event: self._heard(event, choice))
        except TilewrightError as error:
            self._end(partial(self._failed, error))

    def _heard(self, event: BuildEvent, choice: Choice) -> None:
        if event.state == "failed":
            self._end(partial(self._build_failed, event, choice))
        elif event.state in ("built", "cached"):
            with self._lock:
                self._left -= 1
                left = self._left
            if not left:
                self._end(partial(self._swap, choice))

    def _end(self, work: Callable[[], None]) -> None:
        """Do this, and nothing after it: of several builds, more than one may fail."""
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self._planner._later.run(work)

    def _build_failed(self, event: BuildEvent, choice: Choice) -> None:
        """The fallback stays until there is a kernel that fits. Who asks with the policy `wait` is told why not."""
        if self._planner._passed_over(self._entry, choice, event.error):
            self._next(self._failures)
        else:
            self._failed(event.error)

    def _swap(self, choice: Choice) -> None:
        try:
            self._planner._finish(self._entry, self._question, choice, Call())
        except TilewrightError as error:
            self._failed(error)

    def _failed(self, error: TilewrightError | None) -> None:
        log.warning("a better kernel could not take the place of its fallback, and is tried again later: %s", error)
        pause = min(_LONGEST_RETRY_S, _RETRY_S * 2 ** min(self._failures, 30))
        if error is not None and error.retry_after_s is not None:
            pause = max(pause, error.retry_after_s)
        self._planner._later.run(lambda: self._next(self._failures + 1), pause)

    def _next(self, failures: int) -> None:
        """Go on with what is the best kernel now."""
        if self._entry.best is not None or not self._planner._knows(self._entry):
            return
        following = _Upgrade(self._planner, self._entry, self._question, self._client, failures)
        try:
            following.begin(self._planner._best(self._entry, self._question, Call(client=self._client)))
        except TilewrightError as error:
            following._failed(error)
