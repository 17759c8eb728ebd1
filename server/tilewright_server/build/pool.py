"""Builds in parallel, each key once: for any number of callers in this process, and across processes that share the
cache.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Literal, Protocol

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import (
    BuildFailedError,
    InternalError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
    UnsupportedError,
)
from tilewright_server.build.cache.artifacts import ArtifactCache, ArtifactMeta, artifact_key
from tilewright_server.build.cache.files import Lock
from tilewright_server.build.cache.maintenance import Budget
from tilewright_server.build.toolchains.toolchain import Compiled, Toolchain

__all__ = ["Build", "BuildEvent", "BuildPool", "BuildState", "PoolOptions", "Waiter"]

BuildState = Literal["queued", "building", "built", "cached", "failed"]
log = logging.getLogger(__name__)

_FAILURES_KEPT = 1024
_OTHER_PROCESS_POLL_S = 0.02
_BACKOFF_S = (0.2, 1.0)
"""Pauses before a build that failed from outside is tried again."""
_RETRY_AFTER_S = 5.0
"""Advice to a caller whose build failed from outside each time."""
_SIGNALS_FROM_OUTSIDE = tuple(
    f"signal {number.value}" for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
)
_WORDS_FROM_OUTSIDE = ("Killed signal terminated program", "Terminated signal terminated program", "out of memory")
"""Reports of GCC's and Clang's drivers that a child was killed, and of compilers that got no memory."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    workers: int = 1
    budget_bytes: int = 0
    """Memory that builds together may be expected to use; 0: no limit."""
    failure_ttl_s: float = 300.0
    """For how long a failure is answered from memory.

    A changed source, flag or compiler has another key and is tried at once.
    """


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Progress of one kernel. ``done`` and ``total`` count kernels where several are built in one call."""

    name: str
    key: str
    state: BuildState
    build_ns: int = 0
    error: TilewrightError | None = None
    done: int = 0
    total: int = 0


class Waiter(Protocol):
    """Interface of a caller that waits for a build (``engine.Call`` fits)."""

    def check(self) -> None: ...

    def remaining(self) -> float | None: ...

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]: ...


class Build:
    """One build, shared by all who want it.

    Nobody's deadline ends it: the others, and the cache, still want the result.
    """

    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.name = name
        self.state: BuildState = "queued"
        self.build_ns = 0
        self.error: TilewrightError | None = None
        self._listeners: list[Callable[[BuildEvent], None]] = []
        self._waiting: set[threading.Event] = set()
        self._lock = threading.Lock()
        self._delivery = threading.RLock()
        """Held while listeners are called, so that each hears the states in their order."""

    @property
    def done(self) -> bool:
        return self.state in ("built", "cached", "failed")

    def event(self) -> BuildEvent:
        return BuildEvent(self.name, self.key, self.state, self.build_ns, self.error)

    def listen(self, listener: Callable[[BuildEvent], None]) -> None:
        """Call ``listener`` with the present state and every later one."""
        with self._delivery:
            self._listeners.append(listener)
            _tell(listener, self.event())

    def wait(self, call: Waiter) -> None:
        """Wait for the end. Raises the build's error, ``DeadlineError`` or ``CancelledError``."""
        woken = threading.Event()
        forget = call.on_cancel(woken.set)
        with self._lock:
            self._waiting.add(woken)
        try:
            while not self.done:
                call.check()
                woken.wait(call.remaining())
        finally:
            forget()
            with self._lock:
                self._waiting.discard(woken)
        if self.error is not None:
            raise copy(self.error)

    def enter(self, state: BuildState, *, build_ns: int = 0, error: TilewrightError | None = None) -> None:
        """For the pool: move on, wake those who wait, tell those who listen."""
        with self._delivery:
            with self._lock:
                self.build_ns, self.error = build_ns, error
                self.state = state
                waiting = tuple(self._waiting) if self.done else ()
            for woken in waiting:
                woken.set()
            event = self.event()
            for listener in tuple(self._listeners):
                _tell(listener, event)


def _tell(listener: Callable[[BuildEvent], None], event: BuildEvent) -> None:
    """A listener that fails concerns neither the build nor the others."""
    try:
        listener(event)
    except Exception:
        log.exception("a listener of the build of %s failed", event.name)


class BuildPool:
    """Owns the workers. Starts no thread before the first build."""

    def __init__(
        self, cache: ArtifactCache, toolchains: Mapping[str, Toolchain], options: PoolOptions | None = None
    ) -> None:
        self.cache = cache
        self.options = options or PoolOptions()
        self.built = self.cached = self.failed = 0
        self._toolchains = toolchains
        self._budget = Budget(cache)
        self._active: dict[str, Build] = {}
        self._failures: OrderedDict[str, tuple[TilewrightError, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._abort = threading.Event()
        self._workers: ThreadPoolExecutor | None = None

    @property
    def workers(self) -> int:
        """Builds at a time: as configured, fewer if the memory budget does not allow that many."""
        wanted = max(1, self.options.workers)
        if not self.options.budget_bytes or not self._toolchains:
            return wanted
        per_job = max(toolchain.job_bytes for toolchain in self._toolchains.values())
        return max(1, min(wanted, self.options.budget_bytes // per_job))

    def toolchain(self, language: str) -> Toolchain:
        """Raises ``UnsupportedError`` for a language that this server does not compile."""
        try:
            return self._toolchains[language]
        except KeyError:
            raise UnsupportedError(
                f"this server has no toolchain for {language}",
                field="language",
                value=language,
                rule="toolchain_language",
                fix=f"use a device whose kernels are in {', '.join(sorted(self._toolchains)) or 'a known language'}",
            ) from None

    def key(self, unit: SourceUnit, arch: ArchSpec) -> str:
        """The artifact key of a unit. Raises ``ToolchainMissingError`` or ``UnsupportedError``."""
        return artifact_key(unit, arch, self.toolchain(unit.language))

    def submit(self, unit: SourceUnit, arch: ArchSpec, *, key: str = "", retry_failed: bool = False) -> Build:
        """Have a unit built, or join the build that is under way.

        A recent failure is answered at once, unless ``retry_failed``.
        """
        key = key or self.key(unit, arch)
        with self._lock:
            if self._abort.is_set():
                raise UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")
            active = self._active.get(key)
            if active is not None:
                return active
            build = Build(key, unit.name)
            failure = None if retry_failed else self._recent_failure(key)
            if failure is None:
                self._active[key] = build
                if self._workers is None:
                    self._workers = ThreadPoolExecutor(self.workers, thread_name_prefix="tilewright-build")
                self._workers.submit(self._run, build, unit, arch)
                return build
        build.enter("failed", error=failure)
        return build

    def close(self) -> None:
        """Kill the compilers, fail what waits, end the workers. Idempotent."""
        self._abort.set()
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True)
        for toolchain in self._toolchains.values():
            toolchain.close()

    def _recent_failure(self, key: str) -> TilewrightError | None:
        known = self._failures.get(key)
        if known is None:
            return None
        if time.monotonic() >= known[1]:
            del self._failures[key]
            return None
        return known[0]

    def _run(self, build: Build, unit: SourceUnit, arch: ArchSpec) -> None:
        try:
            state, build_ns = self._build(build, unit, arch)
            error: TilewrightError | None = None
        except TilewrightError as raised:
            state, build_ns, error = "failed", 0, raised
        except Exception as raised:
            state, build_ns = "failed", 0
            error = InternalError(
                f"building {unit.name} failed inside the server: {type(raised).__name__}",
                rule="build",
                fix="look for the reason in the server's log",
            )
            error.__cause__ = raised
        with self._lock:
            del self._active[build.key]
            self._failures.pop(build.key, None)
            # Only what the compiler said of the source will be the same next time.
            if isinstance(error, BuildFailedError) and error.rule != "compiler_aborted":
                self._failures[build.key] = (error, time.monotonic() + self.options.failure_ttl_s)
                while len(self._failures) > _FAILURES_KEPT:
                    self._failures.popitem(last=False)
            self.built += state == "built"
            self.cached += state == "cached"
            self.failed += state == "failed"
        build.enter(state, build_ns=build_ns, error=error)

    def _build(self, build: Build, unit: SourceUnit, arch: ArchSpec) -> tuple[BuildState, int]:
        if self._found(build.key):
            return "cached", 0
        lock = self._build_lock(build.key)
        try:
            if self._found(build.key):  # another process was faster
                return "cached", 0
            if self._abort.is_set():
                raise UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")
            build.enter("building")
            begin = time.monotonic_ns()
            self._compile_patiently(build.key, unit, arch)
            return "built", time.monotonic_ns() - begin
        finally:
            self.cache.end_build(build.key, lock)

    def _found(self, key: str) -> bool:
        artifact = self.cache.get(key)
        if artifact is None:
            return False
        artifact.release()
        return True

    def _build_lock(self, key: str) -> Lock:
        while (lock := self.cache.try_build_lock(key)) is None:
            if self._abort.wait(_OTHER_PROCESS_POLL_S):
                raise UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")
        return lock

    def _compile_patiently(self, key: str, unit: SourceUnit, arch: ArchSpec) -> None:
        """Compile; again, after a pause, if the failure came from outside.

        Raises what the compiler said of the source, or ``UnavailableError`` or ``ResourceExhaustedError`` if something
        outside failed it each time. A compiler that took too long is not tried again: it has had its time.
        """
        pauses = iter(_BACKOFF_S)
        while True:
            try:
                self._compile(key, unit, arch)
                return
            except (BuildFailedError, ResourceExhaustedError, OSError) as raised:
                error = _from_outside(unit.name, raised)
                if error is None:
                    raise
                pause = next(pauses, None)
                if self._abort.is_set() or pause is None or error.rule == "compiler_hung":
                    raise error from raised
                log.warning("building %s again in %g s: %s", unit.name, pause, error)
            self._abort.wait(pause)

    def _compile(self, key: str, unit: SourceUnit, arch: ArchSpec) -> None:
        toolchain = self.toolchain(unit.language)
        with self.cache.staging() as staging:
            work = staging / "work"
            self.cache.files.make_dir(work)
            compiled = toolchain.compile(unit, work, arch, self._abort)
            binary = compiled.binary.read_bytes()
            meta = _meta(key, unit, arch, toolchain, compiled, binary)
            # The source or a header may have been edited, or the compiler replaced, while it ran: then the binary is
            # not what the key says.
            if artifact_key(unit, arch, toolchain) != key:
                raise BuildFailedError(
                    f"the compiler or a header changed while {unit.name} was built",
                    rule="compiler_aborted",
                    fix="try again",
                )
            self.cache.publish(unit, meta, binary, compiled.log, staging)
        self._budget.added(len(binary) + len(unit.text) + len(compiled.log))


def _from_outside(name: str, error: BuildFailedError | ResourceExhaustedError | OSError) -> TilewrightError | None:
    """The error of a failure that says nothing about the source; None if it was the compiler's word on it."""
    if isinstance(error, ResourceExhaustedError):
        return error
    if isinstance(error, OSError):
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE):
            return None
        return ResourceExhaustedError(
            f"the server ran out of something while it built {name}: {error.strerror}",
            value=errno.errorcode[error.errno],
            rule="build_resources",
            fix="free disk space, memory, processes or descriptors on the server's machine, and try again",
            retry_after_s=_RETRY_AFTER_S,
        )
    killed = error.rule == "compiler_killed" and error.value in _SIGNALS_FROM_OUTSIDE
    starved = error.rule == "compiler_failed" and any(words in error.log_tail for words in _WORDS_FROM_OUTSIDE)
    if not (killed or starved or error.rule == "compiler_hung"):
        return None
    return UnavailableError(
        error.reason if not starved else f"the compiler was killed or got no memory while it built {name}",
        value=error.value,
        rule="compiler_hung" if error.rule == "compiler_hung" else "compiler_killed",
        fix="try again; if it stays so, give the machine more memory, build with fewer workers, or allow more time",
        log_tail=error.log_tail,
        retry_after_s=_RETRY_AFTER_S,
    )


def _meta(
    key: str, unit: SourceUnit, arch: ArchSpec, toolchain: Toolchain, compiled: Compiled, binary: bytes
) -> ArtifactMeta:

    return ArtifactMeta(
        key=key,
        name=unit.name,
        language=unit.language,
        arch=arch.id,
        compiler=toolchain.identity(),
        flags=toolchain.flags(unit, arch),
        plugin_version=unit.plugin_version,
        entries=dict(unit.entries),
        source=f"kernel{toolchain.source_suffix}",
        binary=f"kernel{toolchain.binary_suffix}",
        binary_sha256=hashlib.sha256(binary).hexdigest(),
        binary_bytes=len(binary),
        build_ns=int(compiled.seconds * 1e9),
        created=time.time(),
    )
