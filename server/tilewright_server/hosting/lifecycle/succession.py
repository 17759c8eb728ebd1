"""A successor: a server that is started with the sockets of this one, serves beside it, and then alone."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.protocol.inherited import READY

__all__ = ["Succession"]

log = logging.getLogger("tilewright.succession")

START_S = 600.0
"""Time that a successor may take until it serves; a warm start is part of it."""
LAUNCH = """
import fcntl, os, sys
count = int(sys.argv[1])
names, numbers, command = sys.argv[2], sys.argv[3:3 + count], sys.argv[3 + count:]
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, 3 + 2 * count) for number in numbers]
for place, number in enumerate(high):
    os.dup2(number, 3 + place)
own = str(os.getpid())
os.environ |= {"LISTEN_PID": own, "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}
if "WATCHDOG_PID" in os.environ:
    os.environ["WATCHDOG_PID"] = own
os.execv(command[0], command)
"""
"""Puts descriptors where a service manager would (``sd_listen_fds``), and becomes the command."""


class Succession:
    """Starts one successor at a time."""

    def __init__(self, shared: Callable[[], Sequence[tuple[int, str]]], serves: Callable[[int], None]) -> None:
        """``shared`` returns descriptors for the successor and their names, and raises ``TilewrightError`` if there is
        one that cannot go over. ``serves`` is called with the successor's process number when it serves."""
        self._shared = shared
        self._serves = serves
        self._running = threading.Lock()

    def begin(self) -> None:
        """Start a successor, by the command that started this process. Raises nothing."""
        if not self._running.acquire(blocking=False):
            log.warning("a successor is being started already")
            return
        try:
            threading.Thread(target=self._run, name="successor", daemon=True).start()
        except RuntimeError as error:
            self._running.release()
            log.error("no successor is started, this server goes on: %s", error)

    def _run(self) -> None:
        try:
            self._start()
        except (TilewrightError, OSError) as error:
            log.error("no successor is started, this server goes on: %s", error)
        except Exception:
            log.exception("the successor could not take over, this server goes on")
        finally:
            self._running.release()

    def _start(self) -> None:
        shared = list(self._shared())
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            shared.append((writer, READY))
            numbers = [number for number, _ in shared]
            names = ":".join(name for _, name in shared)
            launch = [sys.executable, "-I", "-S", "-c", LAUNCH, str(len(numbers)), names, *map(str, numbers)]
            process = subprocess.Popen([*launch, sys.executable, *sys.orig_argv[1:]], pass_fds=numbers)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        log.info("process %d is to succeed this one", process.pid)
        try:
            ready = select.select([reader], [], [], START_S)[0] and os.read(reader, 1) == b"1"
        finally:
            os.close(reader)
        if ready:
            self._serves(process.pid)
            return
        process.send_signal(signal.SIGKILL)
        log.error("the successor ended with status %d before it served; this server goes on", process.wait())
