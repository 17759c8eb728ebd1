"""The bound of a cache that grows."""

from __future__ import annotations

import logging
import threading

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.build.cache.artifacts import ArtifactCache

__all__ = ["Budget"]

log = logging.getLogger(__name__)

_RESCAN_EVERY = 64


class Budget:
    """Keeps a cache within its budget while entries are added, without reading the whole of it each time."""

    def __init__(self, cache: ArtifactCache) -> None:
        self._cache = cache
        self._bytes = 0
        self._until_scan = 0
        self._lock = threading.Lock()

    def added(self, nbytes: int) -> None:
        """An entry of about ``nbytes`` was published. Other processes' entries count from the next scan on."""
        # Takes archives with it: a server is ready without them.
        from tilewright_server.build.cache.maintenance import prune, total_bytes

        with self._lock:
            self._bytes += nbytes
            if self._until_scan == 0:
                self._bytes, self._until_scan = total_bytes(self._cache), _RESCAN_EVERY
            self._until_scan -= 1
            if self._bytes > self._cache.max_bytes:
                try:
                    # Some room is made at once, or every publication would prune.
                    self._bytes = prune(self._cache, max_bytes=self._cache.max_bytes * 9 // 10).kept_bytes
                except (OSError, TilewrightError) as error:  # what was published is there all the same
                    log.warning("the kernel cache could not be kept to its size: %s", error)
