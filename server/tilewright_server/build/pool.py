"""Builds in parallel, each key once: for any number of callers in this process, and across processes that share the
cache.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import (
    BuildFailedError,
    InternalError,
    ResourceExhaustedError,
    TilewrightError,
    UnsupportedError,
)
from tilewright_server.build.build import Build, BuildEvent, BuildState, SharedStore, Waiter
from tilewright_server.build.cache.artifacts import ArtifactCache, ArtifactMeta, artifact_key
from tilewright_server.build.cache.budget import Budget
from tilewright_server.build.cache.files import Lock
from tilewright_server.build.failures import from_outside, shutting_down, unwanted
from tilewright_server.build.toolchains.toolchain import Compiled, Toolchain
from tilewright_server.build.workers.standing_back import standing_back
from tilewright_server.clients.fair_queue import FairQueue, Party, Place, is_full
from tilewright_server.protocol.request_ids import serve

__all__ = ["Build", "BuildEvent", "BuildPool", "BuildState", "PoolOptions", "SharedStore", "Waiter"]

log = logging.getLogger(__name__)

_FAILURES_KEPT = 1024
_OTHER_PROCESS_POLL_S = 0.02
_IDLE_S = 60.0
"""Idle time after which a thread ends."""
_FIRST_GUESS_NS = 1_000_000_000
"""Time of a build that is charged in advance before any has ended."""
_RETRY_QUEUE_S = 1.0
"""Advice to a client that has too many builds waiting."""
_FURTHER_NICENESS = 5  # of compilers, for each priority below the most urgent
_BACKOFF_S = (0.2, 1.0)
"""Pauses before a build that failed from outside is tried again."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    workers: int = 1
    budget_bytes: int = 0
    """Memory that builds together may be expected to use; 0: no limit."""
    failure_ttl_s: float = 300.0
    """For how long a failure is answered from memory.

    A changed source, flag or compiler has another key and is tried at once.
    """
    queue_limit: int = 32768
    """Builds that may wait; one process has at most half of them."""


@dataclass(frozen=True, slots=True)
class _Server:
    """The server itself as a client: for what nobody waits for."""

    principal: str = "server"
    process: str = ""
    session: bytes = b""
    priority: int = 2


_SERVER = _Server()


@dataclass(slots=True, eq=False)
class _Job:
    """A build that waits or runs."""

    build: Build
    unit: SourceUnit
    arch: ArchSpec
    places: dict[tuple[str, str, bytes, int], Place[_Job]] = field(default_factory=dict)
    """One for each client that wants it."""
    held: int = 0
    """Callers that say when they no longer want it."""
    lasting: bool = False
    """Somebody wants it who will not say."""
    begun: bool = False


class BuildPool:
    """Owns the workers. Starts no thread before the first build."""

    def __init__(
        self, cache: ArtifactCache, toolchains: Mapping[str, Toolchain], options: PoolOptions | None = None
    ) -> None:
        self.cache = cache
        self.options = options or PoolOptions()
        self.built = self.cached = self.failed = 0
        self.shared: SharedStore | None = None
        """Asked before a compiler is started."""
        self._toolchains = toolchains
        self._budget = Budget(cache)
        self._active: dict[str, _Job] = {}
        self._queue: FairQueue[_Job] = FairQueue()
        self._failures: OrderedDict[str, tuple[TilewrightError, float]] = OrderedDict()
        self._changed = threading.Condition()
        self._abort = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._mean_ns = _FIRST_GUESS_NS

    @property
    def waiting(self) -> int:
        """Places of builds that wait: a build has one for each client that wants it."""
        return len(self._queue)

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

    def submit(
        self,
        unit: SourceUnit,
        arch: ArchSpec,
        *,
        key: str = "",
        retry_failed: bool = False,
        client: Party = _SERVER,
        held: bool = False,
    ) -> Build:
        """Have a unit built, or join the build that is under way.

        Clients take turns, see ``FairQueue``. Whoever sets ``held`` calls ``release`` in the end: a build that nobody
        wants any more is cancelled, unless it has begun. A recent failure is answered at once, unless ``retry_failed``.
        Raises ``ResourceExhaustedError`` if too many builds of the client's process wait.
        """
        key = key or self.key(unit, arch)
        with self._changed:
            if self._abort.is_set():
                raise shutting_down()
            job = self._active.get(key)
            failure = None if retry_failed or job is not None else self._recent_failure(key)
            if failure is None:
                if job is None:
                    job = _Job(Build(key, unit.name), unit, arch)
                    self._line_up(job, client)
                    self._active[key] = job
                    self._hire(job)
                elif not job.begun and not self._crowded(client):
                    self._line_up(job, client)
                job.held += held
                job.lasting |= not held
                return job.build
        build = Build(key, unit.name)
        build.enter("failed", error=failure)
        return build

    def release(self, build: Build) -> None:
        """The end of a caller's interest in a build that it was to hold. The last one cancels it if it waits still."""
        with self._changed:
            job = self._active.get(build.key)
            if job is None or job.build is not build:
                return
            job.held -= 1
            if job.held or job.lasting or job.begun:
                return
            self._drop(job)
        build.enter("failed", error=unwanted(build.name))

    def close(self) -> None:
        """Kill the compilers, fail what waits, end the workers. Idempotent."""
        with self._changed:
            self._abort.set()
            waiting = [job for job in self._active.values() if not job.begun]
            for job in waiting:
                self._drop(job)
            threads = tuple(self._threads)
            self._changed.notify_all()
        for job in waiting:
            job.build.enter("failed", error=shutting_down())
        for thread in threads:
            thread.join()
        for toolchain in self._toolchains.values():
            toolchain.close()

    def refuse(self, key: str, error: BuildFailedError) -> None:
        """Answer builds of ``key`` with ``error`` for a while: what was built turned out to be of no use."""
        with self._changed:
            self._remember(key, error)

    # The queue; lock held

    def _crowded(self, client: Party) -> bool:
        return is_full(self.options.queue_limit, len(self._queue), *self._queue.waiting_of(client))

    def _line_up(self, job: _Job, client: Party) -> None:
        """Have it wait for a client too. Raises ``ResourceExhaustedError``."""
        party = (client.principal, client.process, client.session, int(client.priority))
        if party in job.places:
            return
        if self._crowded(client):
            queued, of_process = len(self._queue), self._queue.waiting_of(client)[1]
            raise ResourceExhaustedError(
                f"{queued} builds wait already, {of_process} of them of this client's process",
                field="queued_builds",
                value=self.options.queue_limit,
                rule="quota",
                fix="ask for fewer kernels at a time, and for the others when those are built",
                retry_after_s=_RETRY_QUEUE_S,
            )
        job.places[party] = self._queue.push(job, client)

    def _drop(self, job: _Job) -> None:
        """Forget a build that waits."""
        for place in job.places.values():
            self._queue.remove(place)
        del self._active[job.build.key]

    def _hire(self, job: _Job) -> None:
        """Wake or start a thread for a build. Raises ``ResourceExhaustedError`` if there is none for it, ever."""
        self._changed.notify()
        if self._idle >= len(self._queue) or len(self._threads) >= self.workers:
            return
        thread = threading.Thread(target=self._work, name="tilewright-build", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._threads.discard(thread)
            if self._threads:
                return
            self._drop(job)
            raise ResourceExhaustedError(
                "the system refuses the server a thread for builds",
                rule="threads",
                fix="raise the limit of processes (ulimit -u) or of the container",
                retry_after_s=_RETRY_QUEUE_S,
            ) from error

    def _next(self) -> tuple[_Job, Place[_Job]] | None:
        """The build whose turn it is, waited for; None if the thread is to end."""
        with self._changed:
            while not self._abort.is_set():
                place = self._queue.first()
                if place is not None:
                    job = place.item
                    job.begun = True
                    for other in job.places.values():
                        if other is not place:
                            self._queue.remove(other)
                    self._queue.take(place, self._mean_ns)
                    return job, place
                self._idle += 1
                notified = self._changed.wait(_IDLE_S)
                self._idle -= 1
                if not notified and not len(self._queue):
                    break
            self._threads.discard(threading.current_thread())
        return None

    # A worker's thread

    def _work(self) -> None:
        while (found := self._next()) is not None:
            begin = time.monotonic_ns()
            job, place = found
            serve(job.build)
            self._run(job)
            serve(None)
            spent = time.monotonic_ns() - begin
            with self._changed:
                self._queue.give_back(place, spent)
                self._mean_ns += (spent - self._mean_ns) // 8
                if not self._active:
                    self._queue.forget()
            del found, job, place  # what they hold is not to live until the next

    def _recent_failure(self, key: str) -> TilewrightError | None:
        known = self._failures.get(key)
        if known is None:
            return None
        if time.monotonic() >= known[1]:
            del self._failures[key]
            return None
        return known[0]

    def _remember(self, key: str, error: TilewrightError) -> None:
        self._failures[key] = (error, time.monotonic() + self.options.failure_ttl_s)
        while len(self._failures) > _FAILURES_KEPT:
            self._failures.popitem(last=False)

    def _run(self, job: _Job) -> None:
        build, unit, arch = job.build, job.unit, job.arch
        # Parties end with their priority; the most urgent of them counts.
        urgency = min(party[3] for party in job.places)
        try:
            with standing_back(_FURTHER_NICENESS * urgency):
                state, build_ns = self._build(build, unit, arch)
            error: TilewrightError | None = None
        except TilewrightError as raised:
            state, build_ns, error = "failed", 0, raised
        except Exception as raised:
            state, build_ns = "failed", 0
            log.exception("building %s failed", unit.name)
            error = InternalError(
                f"building {unit.name} failed inside the server: {type(raised).__name__}",
                rule="build",
                fix="look for the reason in the server's log",
            )
            error.__cause__ = raised
        with self._changed:
            del self._active[build.key]
            self._failures.pop(build.key, None)
            # Only what the compiler said of the source will be the same next time.
            if isinstance(error, BuildFailedError) and error.rule != "compiler_aborted":
                self._remember(build.key, error)
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
                raise shutting_down()
            build.enter("building")
            if self._fetched(build.key, unit, arch):
                return "cached", 0
            begin = time.monotonic_ns()
            self._compile_patiently(build.key, unit, arch)
            spent = time.monotonic_ns() - begin
        finally:
            self.cache.end_build(build.key, lock)
        if self.shared is not None:
            self.shared.built(build.key)
        log.info("built %s", unit.name, extra={"fields": {"arch": arch.id, "ms": round(spent / 1e6)}})
        return "built", spent

    def _found(self, key: str) -> bool:
        artifact = self.cache.get(key)
        if artifact is None:
            return False
        artifact.release()
        return True

    def _fetched(self, key: str, unit: SourceUnit, arch: ArchSpec) -> bool:
        meta = self.shared.fetch(key, unit, arch) if self.shared is not None else None
        if meta is None:
            return False
        self._budget.added(meta.binary_bytes + len(unit.text))
        return True

    def _build_lock(self, key: str) -> Lock:
        while (lock := self.cache.try_build_lock(key)) is None:
            if self._abort.wait(_OTHER_PROCESS_POLL_S):
                raise shutting_down()
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
                error = from_outside(unit.name, raised)
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
