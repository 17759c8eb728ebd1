"""Running a compiler that may fail, hang, eat memory or print without end, so that none of it harms the server."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilewright_server.build.workers.lifeline import lifeline
from tilewright_server.build.workers.standing_back import further_niceness

__all__ = ["Finished", "Limits", "run_limited"]

LOG_PART = 64 * 1024
"""Bytes kept of the beginning and of the end of the output."""
_POLL_S = 0.2
_SIGNALLED = range(128 + 1, 128 + 32)
"""Exit statuses by which a shell, or a compiler's driver, reports a child that was killed."""
_SCRIPT = """
exec 3<&0 </dev/null
(read -r _ <&3; kill -9 0) >/dev/null 2>&1 &
watch=$!
exec 3<&-
ulimit -c 0
(ulimit -v "$1"; ulimit -f "$2"; shift 2; exec "$@") &
wait $!
status=$?
kill -PIPE $watch
wait $watch
exit $status
"""
"""The watch is ended by a signal that no shell writes a line about."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a compiler."""

    timeout_s: float = 120.0
    memory_bytes: int = 4 << 30
    """Address space of each process."""
    file_bytes: int = 256 << 20
    """Size of any file that it writes, its output included."""
    niceness: int = 5
    """Added to the server's own, with what ``standing_back`` says."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How it ended: ``code`` is the exit status, or the signal's number if it was killed."""

    outcome: Literal["ok", "failed", "hung", "killed", "aborted"]
    code: int
    log: str
    seconds: float


def run_limited(
    argv: Sequence[str],
    *,
    folder: Path,
    env: Mapping[str, str],
    limits: Limits,
    abort: threading.Event | None = None,
) -> Finished:
    """Run ``argv`` in ``folder`` in a process group of its own, with output to a file and no input, until it ends or
    its time is over.

    The whole group is killed in the end, so nothing that a compiler forked survives it, nor does any of it survive this
    process. Raises ``OSError`` if it cannot be started.
    """
    output = folder / "output"
    begin = time.monotonic()
    with output.open("wb") as sink:
        process = subprocess.Popen(
            _limited(argv, limits),
            cwd=folder,
            env=dict(env),
            stdin=lifeline(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _yield_to_server(process.pid, limits.niceness + further_niceness())
        ended = _wait(process, begin + limits.timeout_s, abort)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log = _read_log(output)
    output.unlink(missing_ok=True)
    seconds = time.monotonic() - begin
    if not ended:
        outcome: Literal["hung", "aborted"] = "aborted" if abort is not None and abort.is_set() else "hung"
        return Finished(outcome, signal.SIGKILL, log, seconds)
    code = process.returncode
    if code < 0:
        return Finished("killed", -code, log, seconds)
    if code in _SIGNALLED:
        return Finished("killed", code - 128, log, seconds)
    return Finished("ok" if code == 0 else "failed", code, log, seconds)


def _limited(argv: Sequence[str], limits: Limits) -> list[str]:
    """``argv`` below a shell that sets the limits, and kills the group when the server, at the other end of its input,
    has ended.

    Code of our own between fork and exec is not safe in a process with threads, and limits that are set from outside
    come too late for a driver that starts its children at once. A limit that is stricter already stays. The shell waits
    for whom it starts: where nobody is there to, orphans would stay as zombies.
    """
    kibibytes, blocks = str(limits.memory_bytes // 1024), str(limits.file_bytes // 512)
    return ["/bin/sh", "-c", _SCRIPT, "sh", kibibytes, blocks, *argv]


def _yield_to_server(pid: int, niceness: int) -> None:
    """Lower the priority of a compiler's group, which has just been started."""
    with suppress(OSError):
        nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        os.setpriority(os.PRIO_PGRP, pid, nice)
        # Where the kernel schedules sessions as groups, niceness counts within the session only.
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def _wait(process: subprocess.Popen[bytes], deadline: float, abort: threading.Event | None) -> bool:
    """True when the process has ended, False when its time was over or ``abort`` was set."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        handle = -1
    poller = select.poll()
    if handle >= 0:
        poller.register(handle, select.POLLIN)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or (abort is not None and abort.is_set()):
                return process.poll() is not None
            if handle >= 0:
                # Wakes at the very moment of exit; Popen.wait(timeout) would sleep up to 50 ms more.
                if poller.poll(min(left, _POLL_S) * 1000):
                    process.wait()
                    return True
            else:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(left, _POLL_S))
                    return True
    finally:
        if handle >= 0:
            os.close(handle)


def _read_log(path: Path) -> str:
    with path.open("rb") as source:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        if size <= 2 * LOG_PART:
            return source.read().decode("utf-8", "replace")
        head = source.read(LOG_PART)
        source.seek(size - LOG_PART)
        tail = source.read()
    middle = f"\n... {size - 2 * LOG_PART} bytes left out ...\n"
    return head.decode("utf-8", "replace") + middle + tail.decode("utf-8", "replace")
