"""A sweep: every chosen kernel on every problem, built ahead, checked, timed, and the fastest timed again.

Successive halving keeps it short: in a heat each kernel gets a quarter of the samples, and is given up when it is
clearly slower than the best so far; the fastest of the heat then get all samples.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright_kit.commands.cases import DTYPES, Case
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.measurements import point_of
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.build.pool import Build
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_tools.tuning.measure.process import WorkerEndedError, WorkerProcess
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import HEAT, TimingOptions
from tilewright_tools.tuning.problems.configs import choose_configs, cross
from tilewright_tools.tuning.problems.prepared import PreparedOperand, prepared_request
from tilewright_tools.tuning.results import TIME_OVER, Result, Stamp

__all__ = ["Event", "Job", "PeerTime", "Sweep", "SweepOptions", "Task"]

PREPARE_S = 600.0
"""How long the operands of a problem and their reference may take."""


_PARENTS = 3
_CHILDREN = 16
_PROGRESS = 0.99


@dataclass(frozen=True, slots=True)
class SweepOptions:
    device: str
    configs: str = "candidates"
    pattern: str = ""
    limit: int = 0
    """Kernels of each problem, the model's favourites first; 0: all."""
    timing: TimingOptions = field(default_factory=TimingOptions)
    check: bool = True
    explore: int = 0
    """Rounds in which the fastest kernels are crossed with others; they end early when one finds nothing faster."""
    finalists: int = 4
    cut_off: float = 1.5
    """A kernel that is slower than this times the best so far is given up early; 0: none is."""
    seconds: float = 0.0
    """Longest time for one problem, its final apart; kernels that are left then are skipped. 0: no limit."""
    budget: float = 0.0
    """Longest time for all problems: afterwards kernels of the present one are skipped, and no other is begun. 0: no
    limit.
    """
    timeout_s: float = 30.0
    """After this a kernel counts as hanging."""
    seed: int | None = None
    """Seed of the operands; None: another for each problem."""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class PeerTime:
    """Another library's time for a problem, or why there is none."""

    case: Case
    name: str
    median_ns: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Progress. ``done`` and ``total`` count kernels of the problem at hand."""

    kind: Literal["case", "result", "final", "peer"]
    case: Case
    cases_done: int
    cases_total: int
    done: int = 0
    total: int = 0
    result: Result | None = None
    peer: PeerTime | None = None


@dataclass(slots=True)
class Task:
    """One problem of the sweep."""

    case: Case
    place: int
    problem: Problem
    configs: list[KernelConfig]
    prepared: Sequence[PreparedOperand] = ()
    known: list[Result] = field(default_factory=list)
    """From an earlier sweep."""
    results: dict[KernelConfig, Result] = field(default_factory=dict)
    seed: int = 0
    begun: float = 0.0
    failed: str = ""
    """Why nothing more is measured for it."""

    @property
    def best_ns(self) -> float:
        times = [item.median_ns for item in (*self.known, *self.results.values()) if item.status == "ok"]
        return min(times, default=0.0)


@dataclass(slots=True)
class Job:
    task: Task
    config: KernelConfig
    place: int
    builds: list[Build] = field(default_factory=list)
    toolchain: str = ""
    error: TilewrightError | None = None


class Sweep:
    """Drives one device. Not thread-safe. ``close`` ends the worker; the engine is the caller's."""

    def __init__(
        self, engine: Engine, setup: Setup, options: SweepOptions, worker: WorkerProcess | None = None
    ) -> None:
        """Raises ``NotFoundError`` for an unknown device."""
        self._engine, self.options = engine, options
        self.device: DeviceInfo = engine.devices.info(options.device)
        greeting = {"do": "open", "setup": setup.to_dict(), "device": self.device.id}
        self._worker = worker or WorkerProcess(greeting)
        self._prepared: tuple[int, Case] | None = None
        self._copies = 1
        self._begun = 0.0
        self._ahead = max(4, 2 * engine.pool.workers)
        self._listen: Callable[[Event], None] = lambda _: None

    def run(
        self,
        cases: Sequence[Case],
        known: Mapping[Case, Sequence[Result]] | None = None,
        listen: Callable[[Event], None] | None = None,
    ) -> Iterator[Result]:
        """Results as they come; of the fastest kernels a second time, with all samples. ``known`` are results that
        need not be found again.

        Raises what a case cannot be meant by (``InvalidArgumentError``), ``NotFoundError`` for an unknown kernel set,
        and ``DeviceError`` if no worker can be started at all.
        """
        self._listen = listen or self._listen
        self._begun = time.monotonic()
        tasks = self._tasks(cases, known or {})
        current: Task | None = None
        for job in self._built_ahead(tasks):
            if job.task is not current:
                if current is not None:
                    yield from self._finish(current, len(cases))
                    current = None
                if self._is_spent():
                    break
                current = job.task
                current.begun = time.monotonic()
                self._tell(Event("case", current.case, current.place, len(cases), 0, len(current.configs)))
            result = self._heat(job)
            current.results[job.config] = result
            yield result
            done, total = len(current.results), len(current.configs)
            self._tell(Event("result", current.case, current.place, len(cases), done, total, result))
        if current is not None:
            yield from self._finish(current, len(cases))

    def close(self) -> None:
        self._worker.close()

    def _tell(self, event: Event) -> None:
        self._listen(event)

    # ---- what is to be done ----

    def _tasks(self, cases: Sequence[Case], known: Mapping[Case, Sequence[Result]]) -> Iterator[Task]:
        options = self.options
        for place, case in enumerate(cases):
            request, prepared = prepared_request(self._engine, self.device, case)
            operation = self._engine.operations[request.operation]
            problem = operation.parse(request)
            chosen = self._configs(operation, problem)
            old = [item for item in known.get(case, ()) if item.status != "skipped"]
            names = {item.kernel for item in old}
            seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
            fresh = [item for item in chosen if item.name not in names]
            yield Task(case, place, problem, fresh, prepared, old, seed=seed)

    def _configs(self, operation: Operation[Any, Any], problem: Problem) -> list[KernelConfig]:
        """Kernels to measure on a problem, in the order in which they are tried."""
        options = self.options
        return choose_configs(
            operation, problem, self.device, options.configs, pattern=options.pattern, limit=options.limit
        )

    def _built_ahead(self, tasks: Iterable[Task]) -> Iterator[Job]:
        """Jobs in order, with the builds of the next ones under way. Not on a CPU: they would slow each other."""
        if self.device.kind == "cpu":
            for task in tasks:
                yield from self._built(task)
            return
        window: deque[Job] = deque()
        for task in tasks:
            for place, config in enumerate(task.configs, 1):
                window.append(self._submitted(Job(task, config, place)))
                if len(window) > self._ahead:
                    yield window.popleft()
        while window:
            yield window.popleft()

    def _built(self, task: Task) -> list[Job]:
        jobs = [self._submitted(Job(task, config, place)) for place, config in enumerate(task.configs, 1)]
        for build in (build for job in jobs for build in job.builds):
            with suppress(TilewrightError):  # told when the kernel's turn comes
                build.wait(Call())
        return jobs

    def _submitted(self, job: Job) -> Job:
        if job.task.failed or self._is_over(job.task):
            return job
        try:
            plan = self._operation(job.task).plan(job.task.problem, job.config, self.device)
            for build, job.toolchain in self._builds(plan):
                job.builds.append(build)
        except TilewrightError as error:
            job.error = error
        return job

    def _builds(self, plan: ExecutionPlan) -> Iterator[tuple[Build, str]]:
        """The builds of a plan's kernels, begun, and the identities of their compilers."""
        arch, pool = self.device.arch, self._engine.pool
        for config in plan.kernels:
            unit = self._engine.operations[config.operation].generate(config, arch)
            yield pool.submit(unit, arch), pool.toolchain(unit.language).identity()

    def _operation(self, task: Task) -> Operation[Any, Any]:
        return self._engine.operations[task.problem.operation]

    def _is_over(self, task: Task) -> bool:
        seconds = self.options.seconds
        return self._is_spent() or bool(seconds and task.begun and time.monotonic() - task.begun > seconds)

    def _is_spent(self) -> bool:
        budget = self.options.budget
        return bool(budget and time.monotonic() - self._begun > budget)

    # ---- one kernel ----

    def _heat(self, job: Job) -> Result:
        task = job.task
        if task.failed:
            return self._result(job, "skipped", task.failed)
        if self._is_over(task):
            seconds = self.options.budget if self._is_spent() else self.options.seconds
            return self._result(job, "skipped", f"its {seconds:g} {TIME_OVER}")
        if job.error is not None:
            return self._result(job, "refused", str(job.error))
        try:
            for build in job.builds:
                build.wait(Call())
        except TilewrightError as error:
            tail = f": {error.log_tail.strip()[-300:]}" if error.log_tail else ""
            return self._result(job, "build_failed", f"{error.reason}{tail}")
        samples = max(HEAT, self.options.timing.repeat // 4)
        return self._measured(job, samples, check=self.options.check, limit_ns=self.options.cut_off * task.best_ns)

    def _measured(self, job: Job, samples: int, *, check: bool, limit_ns: float) -> Result:
        request = {
            "do": "measure",
            "operation": job.config.operation,
            "config": job.config.to_dict(),
            "check": check,
            "limit_ns": limit_ns,
            "samples": samples,
        }
        try:
            if not self._prepare(job.task):
                return self._result(job, "skipped", job.task.failed)
            reply = self._worker.ask(request, self.options.timeout_s + self.options.timing.seconds)
        except WorkerEndedError as error:
            return self._result(job, error.how, error.reason)
        if not reply["ok"]:
            return self._result(job, "refused", reply["error"]["reason"])
        if reply["wrong"]:
            wrong = f"{reply['wrong']} (seed {job.task.seed})"
            return self._result(job, "wrong", wrong, error=reply["error_norm"])
        if reply["throttled"]:
            return self._result(job, "skipped", f"the device's clocks were held down: {reply['throttled']}")
        clock = reply["clock_mhz"]
        return self._result(job, "ok", error=reply["error_norm"], clock_mhz=clock, **reply["timing"])

    def _prepare(self, task: Task) -> bool:
        """Have the operands on the device, in the worker that runs now; False if that is not possible."""
        self._worker.start()
        state = (self._worker.starts, task.case)
        if self._prepared == state:
            return True
        request = {
            "do": "case",
            "family": task.case.family,
            "case": task.case.to_dict(),
            "options": self.options.timing.to_dict(),
            "seed": task.seed,
            "check": self.options.check,
        }
        try:
            for item in task.prepared:
                for build, _ in self._builds(item.plan):
                    build.wait(Call())
            reply = self._worker.ask(request, PREPARE_S)
        except TilewrightError as error:
            task.failed = f"its operands cannot be made: {error.reason}"
            return False
        except WorkerEndedError as error:
            task.failed = f"its operands cannot be made: {error.how}, {error.reason}"
            return False
        if not reply["ok"]:
            task.failed = f"its operands cannot be made: {reply['error']['reason']}"
            return False
        self._copies = int(reply["copies"])
        self._prepared = state
        return True

    def _result(self, job: Job, status: str, reason: str = "", **found: Any) -> Result:
        task, arch = job.task, self.device.arch
        point = point_of(task.problem)
        return Result(
            case=task.case,
            kernel=job.config.name,
            config=job.config.to_dict(),
            status=status,
            reason=reason,
            place=job.place,
            build_ms=sum(build.build_ns for build in job.builds) / 1e6,
            flops=task.problem.flops,
            bytes_moved=task.problem.bytes_moved,
            ideal_ns=_ideal_ns(task, self.device),
            key=str(job.config.key(arch.id)),
            signature=point.signature,
            sizes=dict(point.sizes),
            toolchain=job.toolchain,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            stamp=self._stamp(task),
            **found,
        )

    def _stamp(self, task: Task) -> Stamp:
        timing = self.options.timing
        conditions = {
            "init": timing.init,
            "rotating": self._copies,
            "flush": timing.flush,
            "timer": timing.timer,
            "warmup": timing.warmup,
        }
        operation, opened = self._operation(task), self._worker.opened
        driver = str(opened.get("driver", ""))
        return Stamp(operation.name, self.device.arch.id, self.device.name, driver, operation.version, conditions)

    # ---- the final ----

    def _explore(self, task: Task) -> Iterator[Result]:
        """Kernels that nobody declared, bred from the fastest."""
        for _ in range(self.options.explore):
            good = sorted((item.median_ns, config.name, config) for config, item in task.results.items()
                          if item.status == "ok")  # fmt: skip
            parents, before = [config for _, _, config in good[:_PARENTS]], task.best_ns
            operation = self._operation(task)
            fresh = cross(operation, task.problem, self.device, parents, task.results.keys(), _CHILDREN)
            jobs = [self._submitted(Job(task, config, 0)) for config in fresh]
            for job in jobs:
                result = task.results[job.config] = self._heat(job)
                yield result
            if not jobs or task.best_ns > _PROGRESS * before:
                return

    def _finish(self, task: Task, total: int) -> Iterator[Result]:
        """Look further, time the fastest again, and the peer."""
        yield from self._explore(task)
        yield from self._final(task, total)
        peer = self._peer(task)
        count = len(task.configs)
        self._tell(Event("peer", task.case, task.place + 1, total, count, count, peer=peer))

    def _final(self, task: Task, total: int) -> Iterator[Result]:
        """The fastest once more, with all samples."""
        good = [(config, item) for config, item in task.results.items() if item.status == "ok"]
        good.sort(key=lambda entry: (entry[1].median_ns, entry[1].kernel))
        finalists = good[: self.options.finalists]
        repeat = self.options.timing.repeat
        # Who was alone in the heat, or had all samples there, needs no final.
        if len(good) > 1 and repeat > HEAT:
            for done, (config, old) in enumerate(finalists, 1):
                job = Job(task, config, old.place, toolchain=old.toolchain)
                again = self._measured(job, repeat, check=False, limit_ns=0.0)
                if again.status != "ok":
                    again = again.replace(reason=f"{again.reason} (when it was timed again)")
                result = again.replace(error=old.error, build_ms=old.build_ms)
                task.results[config] = result
                yield result
                self._tell(Event("final", task.case, task.place, total, done, len(finalists), result))

    def _peer(self, task: Task) -> PeerTime | None:
        name = self.options.peer
        if not name or task.failed:
            return None
        try:
            if not self._prepare(task):
                return PeerTime(task.case, name, note=task.failed)
            reply = self._worker.ask({"do": "peer", "name": name}, PREPARE_S)
        except WorkerEndedError as error:
            return PeerTime(task.case, name, note=f"{error.how}: {error.reason}")
        if not reply["ok"]:
            return PeerTime(task.case, name, note=reply["error"]["reason"])
        timing = reply["timing"]
        return PeerTime(task.case, name, timing["median_ns"] if timing else 0.0, reply["note"])


def _ideal_ns(task: Task, device: DeviceInfo) -> float:
    """The time that peak arithmetic and peak memory rates allow; 0 if neither is known."""
    rates, problem = device.arch.throughput, task.problem
    peak = rates.peak_flops(DTYPES[task.case.dtype][0], units=device.units if device.kind == "cpu" else 0)
    arithmetic = problem.flops / peak if peak else 0.0
    memory = problem.bytes_moved / rates.memory_bytes_per_second if rates.memory_bytes_per_second else 0.0
    return max(arithmetic, memory) * 1e9
