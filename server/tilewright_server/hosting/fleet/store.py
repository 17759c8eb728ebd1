"""Object storage, by ``fsspec``. Nothing that it says is believed, and nobody waits for it longer than a time limit."""

from __future__ import annotations

import importlib
import logging
import posixpath
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from tilewright_server.hosting.fleet.breaker import Breaker

__all__ = ["Store"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_AT_ONCE = 32
"""Accesses under way, those that hang among them."""
_ERROR_CHARS = 200


class Store:
    """Objects below one URL. Thread-safe.

    Every access has ``timeout_s`` seconds; one that takes longer is given up, and its thread ends when the storage's
    client lets it. A breaker leaves storage alone that fails: errors are ``UnavailableError`` (rule ``fleet_store``).
    """

    def __init__(self, url: str, timeout_s: float = 2.0, breaker: Breaker | None = None) -> None:
        """Raises ``UnsupportedError`` without the packages that the URL needs, ``InvalidArgumentError`` for a URL that
        is none. Does not connect."""
        self.url = url
        self.breaker = breaker or Breaker()
        self._timeout_s = timeout_s
        self._files, self._root = _open(url)
        self._rooms = threading.Semaphore(_AT_ONCE)

    def read(self, name: str, most: int) -> bytes | None:
        """The content of an object; None if there is none. Raises ``UnavailableError``, and ``InvalidArgumentError``
        (rule ``fleet_object``) for more than ``most`` bytes."""

        def read() -> bytes | None:
            try:
                with self._files.open(self._path(name), "rb") as file:
                    return bytes(file.read(most + 1))
            except FileNotFoundError:
                return None

        found = self._within_time("reading", read)
        if found is not None and len(found) > most:
            raise InvalidArgumentError(
                f"an object of the fleet's storage has more than {most} bytes",
                field="fleet",
                value=name,
                rule="fleet_object",
                fix="find out who wrote it, and remove it",
            )
        return found

    def write(self, name: str, content: bytes) -> None:
        """Make or replace an object. Raises ``UnavailableError``."""

        def write() -> None:
            path = self._path(name)
            if not self._is_local:
                self._files.pipe_file(path, content)
                return
            # A file is seen while it is written, which an object is not.
            self._files.makedirs(posixpath.dirname(path), exist_ok=True)
            fresh = f"{path}.{secrets.token_hex(4)}.new"
            try:
                self._files.pipe_file(fresh, content)
                self._files.mv(fresh, path)
            except BaseException:
                with suppress(Exception):
                    self._files.rm_file(fresh)
                raise

        self._within_time("writing", write)

    def remove(self, name: str) -> None:
        """Raises ``UnavailableError``."""
        self._within_time("removing", lambda: self._files.rm_file(self._path(name)))

    def names(self, folder: str) -> list[str]:
        """Names of the objects of a folder, sorted; none if there is no such. Raises ``UnavailableError``."""

        def listed() -> Iterable[str]:
            try:
                found: Iterable[str] = self._files.ls(self._path(folder), detail=False)
                return found
            except FileNotFoundError:
                return ()

        paths = self._within_time("listing", listed)
        return sorted(f"{folder}/{path.rstrip('/').rpartition('/')[2]}" for path in paths if isinstance(path, str))

    @property
    def _is_local(self) -> bool:
        protocols = self._files.protocol
        return "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def _within_time(self, doing: str, access: Callable[[], T]) -> T:
        """The result of an access, in a thread of its own: a client of storage may hang for longer than anybody
        waits."""
        if not self.breaker.allows():
            raise _away(f"it failed before, and is left alone for {self.breaker.left_s():.0f} s")
        if not self._rooms.acquire(timeout=self._timeout_s):
            raise self._failed(f"{_AT_ONCE} accesses hang")
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(access())
            except BaseException as error:
                errors.append(error)
            finally:
                self._rooms.release()
                done.set()

        try:
            threading.Thread(target=run, name="fleet-access", daemon=True).start()
        except (RuntimeError, MemoryError):
            self._rooms.release()
            raise self._failed("the system refuses a thread") from None
        if not done.wait(self._timeout_s):
            raise self._failed(f"{doing} took longer than {self._timeout_s:g} s")
        if errors:
            raise self._failed(f"{doing} failed: {type(errors[0]).__name__}: {errors[0]}"[:_ERROR_CHARS])
        self.breaker.succeeded()
        return results[0]

    def _failed(self, why: str) -> UnavailableError:
        if self.breaker.failed():
            log.warning("the fleet's storage is left alone for a while: %s", why)
        return _away(why)


def _away(why: str) -> UnavailableError:
    return UnavailableError(
        f"the fleet's storage does not serve: {why}",
        field="fleet",
        rule="fleet_store",
        fix="look at the storage, its address and this server's rights there; kernels are compiled here meanwhile",
    )


def _open(url: str) -> tuple[Any, str]:
    """The file system and the root of a URL."""
    try:
        fsspec = importlib.import_module("fsspec")
    except ModuleNotFoundError as error:
        raise _lacking(url, str(error)) from None
    if "://" not in url:
        raise _no_url(url, "it has no protocol")
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise _lacking(url, str(error)) from None
    except Exception as error:
        raise _no_url(url, f"{type(error).__name__}: {error}"[:_ERROR_CHARS]) from error
    return files, str(root)


def _lacking(url: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the fleet's storage needs a package that is not installed: {why}",
        field="fleet",
        value=url.partition("://")[0],
        rule="fleet_package",
        fix="pip install 'tilewright[fleet]', which has S3's; for others what fsspec names",
    )


def _no_url(url: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"this is no URL of object storage: {why}",
        field="fleet",
        value=url,
        rule="fleet_url",
        fix="write s3://BUCKET/FOLDER, file:///FOLDER, or another URL of fsspec",
    )
