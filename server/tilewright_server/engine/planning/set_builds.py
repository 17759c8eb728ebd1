"""Builds of many kernels for one caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.build.pool import Build, BuildEvent
from tilewright_server.clients.client import Priority
from tilewright_server.engine.call import Call
from tilewright_server.engine.kernels.store import KernelStore
from tilewright_server.engine.planning.computing import Computing

__all__ = ["BuildResult", "SetBuilds"]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The end of one build. ``error`` is None if the kernel is in the cache now."""

    config: KernelConfig
    key: str
    cached: bool = False
    build_ns: int = 0
    error: TilewrightError | None = None


class SetBuilds:
    """Thread-safe."""

    def __init__(self, kernels: KernelStore, computing: Computing) -> None:
        self._store = kernels
        self._computing = computing

    def build(
        self,
        configs: Sequence[KernelConfig],
        arch: ArchSpec,
        progress: Callable[[BuildEvent], None],
        call: Call,
        *,
        retry_failed: bool = False,
    ) -> list[BuildResult]:
        """Build kernels, in parallel, and return one result for each in order. A failed build is a result.

        ``progress`` is called from several threads, one call at a time. Raises ``DeadlineError`` or ``CancelledError``
        when the caller stops waiting; builds that had begun go on for the cache's sake, the others are cancelled. They
        are of the priority ``BATCH`` at most: what a call waits for overtakes them.
        """
        watch = _Progress(progress, len(configs))
        batch = Call(call.deadline, call.cancellation, call.client.at_most(Priority.BATCH))
        started: list[Build | TilewrightError] = []
        try:
            started += (self._start(config, arch, watch, retry_failed, batch) for config in configs)
            return [self._result(config, build, call) for config, build in zip(configs, started, strict=True)]
        finally:
            for build in started:
                if isinstance(build, Build):
                    self._store.release(build)

    def _start(
        self, config: KernelConfig, arch: ArchSpec, watch: _Progress, retry_failed: bool, call: Call
    ) -> Build | TilewrightError:
        try:
            with self._computing.turn(call):
                unit = self._store.unit(config, arch)
            build = self._store.submit(unit, arch, call.client, retry_failed=retry_failed, held=True)
        except TilewrightError as error:
            watch.heard(BuildEvent(config.name, "", "failed", error=error))
            return error
        build.listen(watch.heard)
        return build

    @staticmethod
    def _result(config: KernelConfig, build: Build | TilewrightError, call: Call) -> BuildResult:
        if isinstance(build, TilewrightError):
            return BuildResult(config, "", error=build)
        try:
            build.wait(call)
        except TilewrightError as error:
            if not build.done:  # the caller's own end, not the build's
                raise
            return BuildResult(config, build.key, error=error)
        return BuildResult(config, build.key, build.state == "cached", build.build_ns)


class _Progress:
    """Counts the kernels of one call that are done, and passes events on one at a time."""

    def __init__(self, progress: Callable[[BuildEvent], None], total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def heard(self, event: BuildEvent) -> None:
        with self._lock:
            self._done += event.state in ("built", "cached", "failed")
            self._progress(replace(event, done=self._done, total=self._total))
