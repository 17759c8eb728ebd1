"""Compiled kernels through the fleet's storage: read before a compiler is started, written after it has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import TilewrightError, UnavailableError
from tilewright_server.build.cache.artifacts import ArtifactCache, ArtifactMeta
from tilewright_server.build.cache.maintenance import add_entry, pack_entry, unpack_entry
from tilewright_server.hosting.fleet.seal import Seal, refused_object
from tilewright_server.hosting.fleet.store import Store

__all__ = ["KernelCounters", "SharedKernels"]

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
QUEUE = 1024
"""Kernels that may wait to be written."""
ATTEMPTS = 3
PAUSE_S = 1.0
CLOSE_S = 2.0
"""How long the end of the server waits for what is not written yet."""


@dataclass(slots=True)
class KernelCounters:
    hits: int = 0
    misses: int = 0
    refused: int = 0
    """Read, and not what they should have been."""
    unread: int = 0
    """Reads that failed or were not tried because the storage fails."""
    written: int = 0
    unwritten: int = 0
    """Given up after some attempts, or at the end of the server."""
    dropped: int = 0
    """Not taken into the queue, which was full."""


class SharedKernels:
    """Kernels of the storage, for a build pool. ``fetch`` waits for the storage's time limit at most, ``built`` not at
    all; neither raises."""

    def __init__(
        self, cache: ArtifactCache, store: Store, seal: Seal, *, write: bool = True, queue: int = QUEUE
    ) -> None:
        self.counters = KernelCounters()
        self._cache, self._store, self._seal, self._write = cache, store, seal, write
        self._most = queue
        self._keys: deque[str] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._writing = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Kernels that wait to be written."""
        return len(self._keys)

    def fetch(self, key: str, unit: SourceUnit, arch: ArchSpec) -> ArtifactMeta | None:
        """Add the kernel from the storage to the cache; None if it is not there, not reached or not right."""
        counters = self.counters
        try:
            data = self._store.read(name_of(key), MOST_BYTES)
            if data is None:
                self._count("misses")
                return None
            meta, members = unpack_entry(key, self._seal.open(data))
            self._check(meta, members[meta.source], unit, arch)
            add_entry(self._cache, meta, members)
        except UnavailableError as error:
            self._count("unread")
            log.debug("%s is not read from the fleet: %s", unit.name, error)
            return None
        except TilewrightError as error:
            self._count("refused")
            log.warning("%s (%s) is not taken from the fleet: %s", unit.name, key[:12], error)
            return None
        except Exception:  # what others wrote there must not keep a kernel from being compiled
            self._count("refused")
            log.exception("%s (%s) is not taken from the fleet", unit.name, key[:12])
            return None
        self._count("hits")
        log.info("%s came from the fleet (%d so far)", unit.name, counters.hits)
        return meta

    def built(self, key: str) -> None:
        """Have a kernel written, later and by another thread."""
        if not self._write:
            return
        with self._changed:
            if self._closing or len(self._keys) >= self._most:
                self.counters.dropped += 1
                return
            self._keys.append(key)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fleet-kernels", daemon=True)
                try:
                    self._thread.start()
                except (RuntimeError, MemoryError):  # with the next kernel
                    self._thread = None

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is to be written; False if something still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._keys and not self._writing, timeout_s)

    def close(self) -> None:
        """Write what can be written within ``CLOSE_S``; the rest is given up and counted. Idempotent."""
        if not self._store.breaker.is_open:
            self.flush(CLOSE_S)
        with self._changed:
            self._closing = True
            self.counters.unwritten += len(self._keys)
            if self._keys:
                log.warning("%d kernels were not written to the fleet's storage", len(self._keys))
            self._keys.clear()
            self._changed.notify_all()

    def _check(self, meta: ArtifactMeta, source: bytes, unit: SourceUnit, arch: ArchSpec) -> None:
        """The key names it, but only whoever computed it knows that it is the key of this."""
        same = (
            source == unit.text.encode()
            and (meta.language, meta.arch) == (unit.language, arch.id)
            and meta.plugin_version == unit.plugin_version
        )
        if not same:
            raise refused_object("it is another kernel's")
        if self._cache.is_condemned(meta.binary_sha256):
            raise refused_object("its binary could not be loaded before")

    def _count(self, name: str) -> None:
        with self._changed:
            setattr(self.counters, name, getattr(self.counters, name) + 1)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._keys or self._closing)
                if self._closing:
                    return
                key = self._keys.popleft()
                self._writing = True
            try:
                self._put(key)
            except Exception:
                log.exception("writing a kernel to the fleet's storage failed")
                self._count("unwritten")

    def _put(self, key: str) -> None:
        content = pack_entry(self._cache, key)
        if content is None:  # evicted meanwhile
            return
        data = self._seal.close(content)
        error: TilewrightError | None = None
        for _ in range(ATTEMPTS):
            if error is not None and self._wait(max(PAUSE_S, self._store.breaker.left_s())):
                break
            try:
                self._store.write(name_of(key), data)
            except UnavailableError as raised:
                error = raised
                continue
            self._count("written")
            return
        self._count("unwritten")
        log.warning("a kernel was not written to the fleet's storage: %s", error)

    def _wait(self, seconds: float) -> bool:
        """True if the end came meanwhile."""
        deadline = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, max(0.0, deadline - time.monotonic()))


def name_of(key: str) -> str:
    """The object of a kernel."""
    return f"kernels/{key[:2]}/{key}"
