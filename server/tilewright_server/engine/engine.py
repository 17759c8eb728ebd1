"""The engine: plans, builds and runs operations.

Knows operations, devices and memory addresses; knows neither protobuf nor sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config import KernelConfig
from tilewright_kit.device import Device, DeviceInfo
from tilewright_kit.errors import TilewrightError
from tilewright_kit.operation import Operation
from tilewright_kit.plugins import PluginManager
from tilewright_kit.problem import OperationRequest
from tilewright_kit.rules import Correction, Violation
from tilewright_kit.select import Strategy
from tilewright_server.engine.call import Call
from tilewright_server.engine.types import EngineOptions, Outcome, Selection

__all__ = ["Engine"]


class Engine:
    """One per server process. All methods are thread-safe; the calling thread does the work of its own request.

    Errors are ``TilewrightError`` only. Opening the engine starts no thread, opens no device and runs no compiler.
    """

    operations: Mapping[str, Operation[Any, Any]]
    strategies: Mapping[str, Strategy]
    statistics: Any  # Statistics: .snapshot()
    devices: Any  # DeviceRegistry: .infos() -> tuple[DeviceInfo, ...], .get(id) -> Device (opens it), .default -> id
    cache: Any  # ArtifactCache: .list(), .verify(), .prune(), .export(path), .import_(path)
    kernels: Any  # KernelCatalog: .list(...), .describe(...), .source(...), .export(...)

    def __init__(self, options: EngineOptions, plugins: PluginManager) -> None:
        """Raises ``AccessError`` if the cache directory is not ours alone."""
        raise NotImplementedError

    def plan(self, request: OperationRequest, selection: Selection, call: Call) -> Prepared:
        """Everything that can be done before operands have addresses: parse, choose a kernel, build and load it.

        Cached: the second call for an equal request costs microseconds. ``call.plan_ns``, ``call.build_ns`` and
        ``call.plan_cached`` say what was done. Raises ``InvalidArgumentError``, ``UnsupportedError``, ``NotFoundError``
        (unknown operation, device, strategy or kernel, with close matches in ``fix``), ``BuildFailedError``,
        ``ToolchainMissingError``, ``DeadlineError``, ``CancelledError``.
        """
        raise NotImplementedError

    def execute(self, prepared: Prepared, addresses: Sequence[int], call: Call, repeat: int = 1) -> Outcome:
        """Run a prepared plan and return when it is complete.

        ``addresses`` are device addresses of ``prepared.operands``, in that order; the caller has checked that each is
        mapped for ``operand.desc.nbytes`` bytes and keeps it mapped until this returns. Raises ``InvalidArgumentError``
        (null address, an output that overlaps another operand), ``ResourceExhaustedError`` (queue or workspace full;
        ``retry_after_s`` is set), ``DeadlineError``, ``CancelledError``, ``UnavailableError`` (draining),
        ``DeviceError``. After one of these nothing was written, but for ``DeviceError``.
        """
        raise NotImplementedError

    def execute_many(
        self, executions: Sequence[tuple[Prepared, Sequence[int], int]], call: Call
    ) -> list[Outcome | TilewrightError]:
        """Run (prepared, addresses, repeat) in order with one admission per run of equal devices; a failed one does not
        stop the others.

        Raises only what concerns all of them: ``ResourceExhaustedError`` (queue), ``DeadlineError`` or
        ``CancelledError`` before the first launch, ``UnavailableError``.
        """
        raise NotImplementedError

    def explain(self, request: OperationRequest, selection: Selection, call: Call) -> dict[str, Any]:
        """JSON-able: problem, strategy, candidates with predictions, refused kernels with reasons, the decision.

        Builds nothing.
        """
        raise NotImplementedError

    def build(
        self,
        configs: Sequence[KernelConfig],
        arch: ArchSpec,
        progress: Callable[[BuildEvent], None],
        call: Call,
        *,
        retry_failed: bool = False,
    ) -> list[BuildResult]:
        """Build kernels, in parallel, and return one result for each in order.

        A failed build is a result, not an exception.

        ``progress`` is called from several threads, one call at a time. Raises ``DeadlineError`` or ``CancelledError``
        when the caller stops waiting; builds that had begun go on for the cache's sake.
        """
        raise NotImplementedError

    def validate(
        self, operation: str, config: Mapping[str, Any], arch: str
    ) -> tuple[KernelConfig, tuple[Violation, ...]]:
        """The configuration that a JSON record means, and everything that is wrong with it on the arch
        (``ArchSpec.id``).
        """
        raise NotImplementedError

    def correct(self, operation: str, config: Mapping[str, Any], arch: str) -> Correction[Any]:
        """Apply the fixes of the operation's rules until the configuration is valid or none helps."""
        raise NotImplementedError

    def drain(self, timeout: float | None) -> bool:
        """Refuse new work with ``UnavailableError`` and wait for what runs and waits; False if the time was not enough."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop builds, unload kernels, close devices. Idempotent. Call ``drain`` first for a graceful end."""
        raise NotImplementedError


class Prepared:
    """A plan whose kernels are loaded: what ``execute`` needs besides addresses.

    Immutable, shared by all sessions (see ``prepared.py``).
    """

    problem: Any
    plan: Any  # ExecutionPlan
    device: DeviceInfo
    operands: tuple[Any, ...]  # Operand, in the order of ``addresses``
    kernels: tuple[str, ...]  # names of the kernels that run
    workspace_bytes: int
    notes: tuple[str, ...]
    is_fallback: bool  # a better kernel is being built; later executions of this very object use it


class BuildEvent:
    """Progress of one kernel (see ``build/pool.py``)."""

    name: str
    state: str  # queued, building, built, cached, failed
    build_ns: int
    error: TilewrightError | None
    done: int
    total: int


class BuildResult:
    """The end of one build."""

    config: KernelConfig
    key: str
    cached: bool
    build_ns: int
    error: TilewrightError | None


_ = Device
