"""The engine: plans, builds and runs operations. Knows operations, devices and memory addresses; knows neither protobuf
nor sessions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.records import config_of_record
from tilewright_kit.config.rules import Correction, Violation
from tilewright_kit.contract.device import Device
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.strategies import Strategy
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError, UnavailableError
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.build.pool import BuildEvent, BuildPool, PoolOptions
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain
from tilewright_server.build.toolchains.toolchain import CpuToolchain, Toolchain
from tilewright_server.build.workers.process import Limits
from tilewright_server.devices.contract import DeviceHost
from tilewright_server.devices.cpu.topology import find_topology
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.devices.worker.process import Loss
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.executor import Executor
from tilewright_server.engine.execution.prepared import Execution, Prepared
from tilewright_server.engine.execution.workspace_arena import Arena
from tilewright_server.engine.kernels.catalog import KernelCatalog
from tilewright_server.engine.kernels.names import Catalogs
from tilewright_server.engine.kernels.registered import Owner, RegisteredKernels
from tilewright_server.engine.kernels.store import KernelStore
from tilewright_server.engine.measurements.strategies import Generations, measured_strategies
from tilewright_server.engine.planning.ahead_of_time import AheadOfTime
from tilewright_server.engine.planning.assembler import Assembler
from tilewright_server.engine.planning.computing import Computing
from tilewright_server.engine.planning.planner import Planner
from tilewright_server.engine.planning.quarantine import Quarantine
from tilewright_server.engine.planning.set_builds import BuildResult, SetBuilds
from tilewright_server.engine.statistics import Statistics
from tilewright_server.engine.types import EngineOptions, Outcome, Selection

__all__ = ["BuildEvent", "BuildResult", "Engine", "Prepared"]

log = logging.getLogger(__name__)

_EXPLAIN_LIMIT = 1000


class Engine:
    """One per server process. All methods are thread-safe; the calling thread does the work of its own request.

    Errors are ``TilewrightError`` only. Opening the engine starts no thread, opens no device and runs no compiler.
    """

    def __init__(
        self, options: EngineOptions, plugins: PluginManager, toolchains: Mapping[str, Toolchain] | None = None
    ) -> None:
        """``toolchains`` replaces the compilers, by language. Raises ``AccessError`` if the cache directory is not ours
        alone."""
        self.options = options
        self.plugins = plugins
        self.statistics = Statistics(self._gauges)
        self.cache = ArtifactCache(options.cache_dir, max_bytes=options.cache_bytes, max_age_s=options.cache_age_s)
        self.toolchains: Mapping[str, Toolchain] = toolchains or self._compilers()
        self.pool = BuildPool(self.cache, self.toolchains, self._pool_options())
        by_measurements = measured_strategies(plugins, options.perf_database, options.selection_lock)
        self._generations = Generations(by_measurements)
        strategies = {**by_measurements, **plugins.strategies}
        self.catalogs = Catalogs(plugins.operations, strategies, options.default_strategy)
        self._store = KernelStore(self.catalogs.operations, self.cache, self.pool, options.max_loaded_kernels)
        cpu = {"arch": options.cpu_arch, "threads": options.cpu_threads, "isolated": options.cpu_isolated}
        host = DeviceHost(self._store.pin, {"cpu": cpu})
        self.devices = DeviceRegistry(plugins.devices, host, options.default_device)
        self.registered = RegisteredKernels(options.cache_dir, self.catalogs.operations, options.registered)
        self.kernels = KernelCatalog(
            self.catalogs, self._store, self.registered, self.cache, lambda: self.devices.info().arch
        )
        self.quarantine = Quarantine()
        self.computing = Computing()
        self._assembler = Assembler(self.devices, self._store, self.statistics, self._make_executor, self.quarantine)
        self._planner = Planner(
            self.catalogs,
            self.devices,
            self._store,
            self.registered,
            self._assembler,
            self.statistics,
            self.quarantine,
            self.computing,
            limit=options.plan_cache,
            max_bytes=options.plan_cache_bytes,
            negative_ttl_s=options.negative_ttl_s,
        )
        self._builds = SetBuilds(self._store, self.computing)
        self.ahead = AheadOfTime(self._planner, self._store)
        """Launch plans for devices that need not be there."""
        self.devices.listeners.append(self._device_lost)
        self._draining = False
        self._closed = False

    @property
    def operations(self) -> Mapping[str, Operation[Any, Any]]:
        return self.catalogs.operations

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """By name; ``explicit`` is not among them, it is made for each kernel that a caller names."""
        return self.catalogs.strategies

    # Planning and running

    def remeasured(self) -> bool:
        """True, once, when measurements have changed and are not being written any more: plans are then made anew, and
        may get other kernels. Those that sessions have stay as they are. To be called every few seconds.
        """
        if not self._generations.have_changed():
            return False
        self._planner.forget()
        return True

    def plan(self, request: OperationRequest, selection: Selection, call: Call) -> Prepared:
        """Everything that can be done before operands have addresses: parse, choose a kernel, build and load it.

        Cached: the second call for an equal request costs microseconds. ``call.plan_ns``, ``call.build_ns`` and
        ``call.plan_cached`` say what was done. Raises ``InvalidArgumentError``, ``UnsupportedError``, ``NotFoundError``
        (unknown operation, device, strategy or kernel, with close matches in ``fix``), ``BuildFailedError``,
        ``ToolchainMissingError``, ``ResourceExhaustedError`` (full disk), ``DeadlineError``, ``CancelledError``,
        ``UnavailableError`` (draining).
        """
        self._require_open()
        return self._planner.plan(request, selection, call)

    def execute(self, prepared: Prepared, addresses: Sequence[int], call: Call, repeat: int = 1) -> Outcome:
        """Run a prepared plan and return when it is complete.

        ``addresses`` are device addresses of ``prepared.operands``, in that order; the caller has checked that each is
        mapped for ``operand.desc.nbytes`` bytes and keeps it mapped until this returns. Raises ``InvalidArgumentError``
        (null address, an output that overlaps another operand), ``ResourceExhaustedError`` (queue or workspace full;
        ``retry_after_s`` is set where that helps), ``DeadlineError``, ``CancelledError``, ``UnavailableError``
        (draining), ``DeviceError``. After one of these nothing was written, but for ``DeviceError``, and but for the
        repeats that were done when the time was over or the caller gone: ``value`` says how many.
        """
        try:
            if prepared.successor is not None or prepared.life.lost:
                prepared = self.current(prepared, call)
            executor = prepared.executor
            if executor is None:
                return self._nothing(prepared, addresses, call)
            return executor.run(prepared, addresses, call, repeat)
        except TilewrightError as error:
            self.statistics.failed(prepared.plan.operation, error.code, call.client.priority)
            raise

    def current(self, prepared: Prepared, call: Call) -> Prepared:
        """The plan that is run in place of another now: its successor; after the loss of its device the same plan
        on the device
        opened anew. Whoever launches its program without ``execute`` must ask here first.

        Raises what opening the device raises, ``DeviceLostError`` if it is lost again meanwhile, and ``DeviceError`` if
        a kernel of the plan has ended the device's process too often.
        """
        current = prepared.current
        if current.lost:
            self._require_open()
            current = self._assembler.revive(prepared, call)
        return current

    def execute_many(self, executions: Sequence[Execution], call: Call) -> list[Outcome | TilewrightError]:
        """Run (prepared, addresses, repeat) in order, with one admission for a row of executions on the same device.

        A failed one does not stop the others. Raises only what concerns all of them: ``ResourceExhaustedError``
        (queue), ``DeadlineError`` or ``CancelledError`` before the first launch, ``UnavailableError``.
        """
        current = [(self._living(prepared, call), addresses, repeat) for prepared, addresses, repeat in executions]
        results: list[Outcome | TilewrightError] = []
        for executor, group in groupby(current, lambda item: item[0].executor):
            items = list(group)
            outcomes = self._row(executor, items, call, first=not results)
            results.extend(outcomes)
        for (prepared, _, _), result in zip(current, results, strict=True):
            if isinstance(result, TilewrightError):
                self.statistics.failed(prepared.plan.operation, result.code, call.client.priority)
        return results

    def _living(self, prepared: Prepared, call: Call) -> Prepared:
        """``current``; what cannot be opened again fails when it runs, as one execution of many."""
        if prepared.successor is None and not prepared.life.lost:
            return prepared
        try:
            return self.current(prepared, call)
        except TilewrightError:
            return prepared.current

    def _row(
        self, executor: Executor | None, items: list[Execution], call: Call, *, first: bool
    ) -> Sequence[Outcome | TilewrightError]:
        """A row of executions on one device. What refuses all of it is raised only if nothing ran before."""
        if executor is None:
            return [self._tried(item, call) for item in items]
        try:
            return executor.run_many(items, call)
        except TilewrightError as error:
            if first:
                raise
            return [error] * len(items)

    def _nothing(self, prepared: Prepared, addresses: Sequence[int], call: Call) -> Outcome:
        """An empty problem: checked like any other, and done."""
        self._require_open()
        prepared.check(addresses)
        call.check()
        self.statistics.executed(prepared.operation_counters, (), (), 1, 0, call.client.priority)
        return Outcome()

    def _tried(self, item: Execution, call: Call) -> Outcome | TilewrightError:
        try:
            return self._nothing(item[0], item[1], call)
        except InvalidArgumentError as error:
            return error

    def explain(self, request: OperationRequest, selection: Selection, call: Call) -> dict[str, Any]:
        """JSON-able: problem, strategy, candidates with predictions, refused kernels with reasons, the decision.

        Builds nothing and opens no device. Raises what ``plan`` raises for a request that cannot be meant.
        """
        from tilewright_kit.selection.explain import explain

        self._require_open()
        call.check()
        question = self._planner.question(request, selection)
        self._store.remember(question.operation.candidates(question.problem, question.device))
        return explain(
            question.operation, question.problem, question.device, question.strategy, limit=_EXPLAIN_LIMIT
        ).to_dict()

    # Kernels

    def build(
        self,
        configs: Sequence[KernelConfig],
        arch: ArchSpec,
        progress: Callable[[BuildEvent], None],
        call: Call,
        *,
        retry_failed: bool = False,
    ) -> list[BuildResult]:
        """See ``SetBuilds.build``."""
        self._require_open()
        return self._builds.build(configs, arch, progress, call, retry_failed=retry_failed)

    def validate(
        self, operation: str, config: Mapping[str, Any], arch: str
    ) -> tuple[KernelConfig, tuple[Violation, ...]]:
        """The configuration that a JSON record means, and everything that is wrong with it on the arch (by id).

        Without an operation it is the one that the record's fields tell. Raises ``InvalidArgumentError`` for an unknown
        field or a wrong type, ``NotFoundError``.
        """
        spec = self.kernels.arch(arch)
        parsed = config_of_record(config, self.operations, operation)
        return parsed, self.catalogs.operation(parsed.operation).rules.check(parsed, spec)

    def correct(self, operation: str, config: Mapping[str, Any], arch: str) -> Correction[Any]:
        """Apply the fixes of the operation's rules until the configuration is valid or none helps. Raises as above."""
        spec = self.kernels.arch(arch)
        parsed = config_of_record(config, self.operations, operation)
        return self.catalogs.operation(parsed.operation).rules.correct(parsed, spec)

    def register(
        self, operation: str, config: Mapping[str, Any], arch: str, session: bytes, owner: Owner = ("", "")
    ) -> KernelConfig:
        """Make a valid configuration a kernel that its name stands for: for a session, or for all without one. The
        owner's process is charged.

        Raises as above, ``ConfigInvalidError`` with all violations, ``ResourceExhaustedError``.
        """
        self._require_open()
        parsed = config_of_record(config, self.operations, operation)
        self.catalogs.operation(parsed.operation).rules.require(parsed, self.kernels.arch(arch))
        self.registered.add(parsed, session, owner)
        self._planner.reconsider()
        return parsed

    def unregister(self, operation: str, name: str, session: bytes, *, shared: bool) -> None:
        """Forget a registered kernel: the session's own, or else (if it may) a shared one. Raises ``NotFoundError``."""
        for each in [operation] if operation else list(self.operations):
            known = self.registered.find(self.catalogs.operation(each).name, name)
            if self.registered.remove(self.catalogs.operation(each).name, name, session, shared=shared):
                if known is not None:
                    self._store.forget(known)
                    self._planner.unnamed(known.name)
                return
        raise NotFoundError(
            "there is no registered kernel of that name",
            field="name",
            value=name,
            rule="kernel_name",
            fix="list the kernels of the set `registered`",
        )

    # Life cycle

    def _device_lost(self, loss: Loss) -> None:
        """Drop everything that was made on the device; kernels that ran there may have been the cause."""
        self.statistics.lost(loss.device)
        suspects = {self._assembler.kernels_of(program) for program in loss.suspects}
        kernels = {name for names in suspects for name in names}
        if kernels:
            for name in self.quarantine.blame(loss.device, kernels, 1 / len(suspects)):
                log.error("the kernel %s is not run on %s any more: it ended its process", name, loss.device)
        self._planner.lost(loss.device)
        self._store.drop(loss.device)
        executor = self._assembler.executor_of(loss.device)
        if executor is not None:
            executor.forget()

    def drain(self, timeout: float | None) -> bool:
        """Refuse new work with ``UnavailableError``, wait for what runs and waits; False if the time was not enough."""
        self._draining = True
        deadline = None if timeout is None else time.monotonic() + timeout
        executors = self._assembler.executors()
        for executor in executors:
            executor.refuse()
        return all(executor.drain(deadline) for executor in executors)

    def close(self) -> None:
        """Stop builds, unload kernels, close devices. Idempotent. Call ``drain`` first for a graceful end."""
        if self._closed:
            return
        self._closed = self._draining = True
        self.pool.close()
        self._planner.close()
        for executor in self._assembler.executors():
            executor.drain(None)  # a module must not go while its code runs
            executor.close()
        self.devices.close()
        self._store.close()

    def _require_open(self) -> None:
        if self._draining:
            raise UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")

    def _make_executor(self, device: Device, lanes: int) -> Executor:
        arena = Arena(device, self.options.workspace_bytes)
        executor = Executor(device, lanes, arena, self.statistics, self.options.queue_limit)
        if self._draining:  # a plan that was under way when the end began
            executor.refuse()
        return executor

    def _compilers(self) -> dict[str, Toolchain]:
        """By language. None is looked for before it is used."""
        limits = Limits(timeout_s=self.options.build_timeout_s, memory_bytes=self.options.build_memory_bytes)
        scratch, headers = self.cache.scratch, [include_dir()]
        return {
            "c++": CpuToolchain(headers, compiler=self.options.compiler, limits=limits, scratch=scratch),
            "cuda": NvrtcToolchain(headers, limits=limits),
            "hip": HipToolchain(headers, compiler=self.options.hip_compiler, limits=limits, scratch=scratch),
        }

    def _pool_options(self) -> PoolOptions:
        topology = find_topology()  # knows what the container may use, not only what the machine has
        return PoolOptions(
            workers=self.options.build_workers or len(topology.cpus),
            budget_bytes=self.options.build_budget_bytes or topology.memory_bytes // 2,
            failure_ttl_s=self.options.failure_ttl_s,
            queue_limit=self.options.queued_builds,
        )

    def _gauges(self) -> Mapping[str, int]:
        executors = self._assembler.executors()
        counters = self.cache.counters
        return {
            "artifact_hits": counters.hits,
            "artifact_builds": self.pool.built,
            "artifact_failures": self.pool.failed,
            "artifacts_quarantined": counters.quarantined,
            "artifacts_evicted": counters.evicted,
            "queue_depth": sum(executor.queue_depth for executor in executors),
            "workspace_bytes": sum(executor.workspace_bytes for executor in executors),
            "plans": len(self._planner),
        }
