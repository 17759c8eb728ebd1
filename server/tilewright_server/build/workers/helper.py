"""Compile helpers: processes that run a compiler which is a library (NVRTC, hiprtc), kept for the next source, killed
when they take too long."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from tilewright_server.build.workers.lifeline import lifeline
from tilewright_server.build.workers.process import Limits
from tilewright_server.build.workers.standing_back import further_niceness
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["Helper", "HelperEndedError", "HelperPool"]

_POLL_S = 0.2
_IDLE_S = 120.0
_LAST_COMPILE = 256
"""A helper is replaced after so many: libraries leak."""
_LOG_BYTES = 16 * 1024
_LENGTHS = struct.Struct("<II")

Outcome = Literal["hung", "killed", "aborted", "failed"]


class HelperEndedError(Exception):
    """A helper did not live to answer: ``outcome`` and ``code`` as in ``process.Finished``."""

    def __init__(self, outcome: Outcome, code: int, log: str, started: bool) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.code = code
        self.log = log
        self.started = started
        """True if it had begun with the request; if not, another helper may be asked."""


class Helper:
    """One process. Of one thread at a time."""

    def __init__(self, module: str, limits: Limits) -> None:
        """``module`` is run, and serves with ``worker_loop.serve``. Raises ``OSError`` if it cannot be started."""
        self._limits = limits
        self.further = further_niceness()
        # No file of a folder: in a container /tmp may be read-only.
        self._errors = os.fdopen(os.memfd_create("helper errors"), "w+b")
        alive = lifeline()
        arguments = (str(limits.memory_bytes), str(limits.niceness + self.further), str(_IDLE_S), str(alive))
        try:
            self._process = subprocess.Popen(
                run_module(module, *arguments),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                pass_fds=(alive,),
            )
        except OSError:
            self._errors.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        self.compiled = 0

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, record: Mapping[str, Any], data: bytes = b"", abort: threading.Event | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and wait for the answer. Raises ``HelperEndedError``, after which the helper is of no use."""
        deadline = time.monotonic() + self._limits.timeout_s
        text = json.dumps(record).encode()
        started = False
        try:
            self._send(_LENGTHS.pack(len(text), len(data)) + text + data, deadline, abort)
            while True:
                answer, binary = self._receive(deadline, abort)
                if answer.get("state") != "started":
                    return answer, binary
                started = True
        except TimeoutError:
            outcome: Outcome = "aborted" if abort is not None and abort.is_set() else "hung"
            self.end()
            raise HelperEndedError(outcome, signal.SIGKILL, "", started) from None
        except (OSError, EOFError, ValueError):
            code, log = self.end(_POLL_S)  # it has closed its pipes, and is about to have a status
            killed = code < 0 and started
            raise HelperEndedError("killed" if killed else "failed", abs(code), log, started) from None

    def end(self, grace_s: float = 0.0) -> tuple[int, str]:
        """Kill it, unless it ends by itself within ``grace_s``. Returns its status and what it printed. Idempotent."""
        process = self._process
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        log = ""
        if not self._errors.closed:
            with self._errors as errors:
                size = errors.seek(0, os.SEEK_END)
                errors.seek(max(0, size - _LOG_BYTES))
                log = errors.read().decode("utf-8", "replace")
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return code, log

    def _send(self, data: bytes, deadline: float, abort: threading.Event | None) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._to, select.POLLOUT, deadline, abort)
            with suppress(BlockingIOError):
                rest = rest[os.write(self._to, rest) :]

    def _receive(self, deadline: float, abort: threading.Event | None) -> tuple[dict[str, Any], bytes]:
        lengths = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline, abort))
        text, data = (self._read(length, deadline, abort) for length in lengths)
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("not an answer")
        return record, data

    def _read(self, length: int, deadline: float, abort: threading.Event | None) -> bytes:
        data = bytearray()
        while len(data) < length:
            self._wait(self._from, select.POLLIN, deadline, abort)
            part = os.read(self._from, length - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    @staticmethod
    def _wait(handle: int, event: int, deadline: float, abort: threading.Event | None) -> None:
        """Until the pipe is ready, or has lost its other end. Raises ``TimeoutError``."""
        poller = select.poll()
        poller.register(handle, event)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or (abort is not None and abort.is_set()):
                raise TimeoutError
            if poller.poll(min(left, _POLL_S) * 1000):
                return


class HelperPool:
    """Helpers of one module that wait for work. Thread-safe; as many run at a time as callers ask."""

    def __init__(self, module: str, limits: Limits) -> None:
        self._module = module
        self._limits = limits
        self._idle: list[Helper] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._idle)

    def ask(
        self, record: Mapping[str, Any], data: bytes = b"", abort: threading.Event | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Have one of them answer. Raises ``HelperEndedError``, or ``OSError`` if none can be started."""
        while True:
            helper, fresh = self._take()
            try:
                answer = helper.ask(record, data, abort)
            except HelperEndedError as error:
                # One that had waited long may have left just before it was asked.
                if fresh or error.started or error.outcome != "failed":
                    raise
                continue
            helper.compiled += 1
            if helper.compiled < _LAST_COMPILE:
                with self._lock:
                    self._idle.append(helper)
            else:
                helper.end()
            return answer

    def _take(self) -> tuple[Helper, bool]:
        """One as nice as this thread wants it, the last that was used: none can become less nice."""
        while True:
            with self._lock:
                fits = (helper for helper in reversed(self._idle) if helper.further == further_niceness())
                helper = next(fits, None)
                if helper is not None:
                    self._idle.remove(helper)
            if helper is None:
                return Helper(self._module, self._limits), True
            if helper.alive:
                return helper, False
            helper.end()

    @property
    def idle(self) -> int:
        """Helpers that wait for work."""
        return len(self._idle)

    def close(self) -> None:
        """End those that wait. The pool can be used again."""
        _end_all(self._idle)


def _end_all(helpers: list[Helper]) -> None:
    while True:
        try:
            helper = helpers.pop()
        except IndexError:
            return
        helper.end()
