"""The worker process seen from outside: started when needed, ended when it hangs, started again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright_kit.types.errors import DeviceError
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["WorkerEndedError", "WorkerProcess"]

_STOP_S = 5.0
_TAIL = 2000


class WorkerEndedError(Exception):
    """The worker died or was ended. ``how`` is ``hung`` or ``crashed``."""

    def __init__(self, how: str, reason: str) -> None:
        super().__init__(reason)
        self.how = how
        self.reason = reason


class WorkerProcess:
    """One worker at a time; not thread-safe. ``greeting`` is sent to every new one before anything else."""

    def __init__(
        self, greeting: Mapping[str, Any], *, start_timeout_s: float = 180.0, command: Sequence[str] = ()
    ) -> None:
        self._greeting = dict(greeting)
        self._timeout_s = start_timeout_s
        self._command = tuple(command) or tuple(run_module("tilewright_tools.tuning.measure.worker"))
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._buffer = b""
        self.starts = 0
        """How many workers there have been."""
        self.opened: dict[str, Any] = {}
        """The answer to the greeting."""

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Have a worker that has answered the greeting. Raises ``DeviceError``, with what it printed, if none does."""
        if self._process is not None:
            return
        if self._log is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by ``close``)
        # A session of its own: ending it takes along the processes that hold devices on its behalf.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self._buffer = b""
        self.starts += 1
        try:
            reply = self._ask(self._greeting, self._timeout_s)
        except WorkerEndedError as error:
            raise DeviceError(
                f"the measuring process did not start: {error.reason}",
                rule="tuning_worker",
                fix="see `tilewright doctor`",
                log_tail=self.log_tail(),
            ) from error
        if not reply["ok"]:
            self.stop()
            told = reply["error"]
            raise DeviceError(told["reason"], rule=told["rule"], fix=told["fix"])
        self.opened = reply

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The worker's answer. Raises ``WorkerEndedError`` after which there is no worker until ``start``."""
        if self._process is None:
            self.start()
        reply = self._ask(request, timeout_s)
        if reply.get("lost"):
            self.stop()
            raise WorkerEndedError("crashed", reply["error"]["reason"])
        return reply

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise self._ended() from None
        line = self._line(process, time.monotonic() + timeout_s)
        if line is None:
            self.kill()
            raise WorkerEndedError("hung", f"no answer within {timeout_s:g} s")
        if not line:
            raise self._ended()
        found: dict[str, Any] = json.loads(line)
        return found

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """The next line; empty at the end of the stream, None when the time is over."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = os.read(descriptor, 1 << 16)
            if not part:
                return b""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> WorkerEndedError:
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        code = process.returncode
        if code is None:
            reason = "it closed its output"
        else:
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.kill()
        return WorkerEndedError("crashed", reason)

    def log_tail(self) -> str:
        """The end of what the present or last worker printed."""
        if self._log is None:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL))
        return str(self._log.read().decode("utf-8", "replace"))

    def kill(self) -> None:
        """End the worker and what it started, at once."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def stop(self) -> None:
        """Let the worker end by itself; end it if it does not."""
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            self.kill()

    def close(self) -> None:
        """``stop``, and forget what was printed. Idempotent."""
        self.stop()
        if self._log is not None:
            self._log.close()
            self._log = None
