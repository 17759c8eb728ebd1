"""A successor: a server that is started with the sockets of this one, serves beside it, and then alone."""

from __future__ import annotations

import contextlib
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
tell, hold, count, names = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
numbers, command = [int(number) for number in sys.argv[5:5 + count]], sys.argv[5 + count:]
child = os.fork()
if child:
    for number in numbers:
        os.close(number)
    os.write(tell, str(child).encode())
    os.close(tell)
    if os.read(hold, 1):
        os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os._exit(0)
for number in (tell, hold, *numbers):
    os.set_inheritable(number, False)
high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3 + count) for number in numbers]
for place, number in enumerate(high):
    os.dup2(number, 3 + place)
own = str(os.getpid())
os.environ |= {"LISTEN_PID": own, "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}
if "WATCHDOG_PID" in os.environ:
    os.environ["WATCHDOG_PID"] = own
os.execv(command[0], command)
"""
"""Puts descriptors where a service manager would (``sd_listen_fds``), and becomes the command in a child of its own.
The parent says the child's number, and ends when ``hold`` is closed: the child is then the service manager's, which
waits for its end as for that of any main process. (It does not for a grandchild, and would kill it at once instead of
letting it drain.) A byte asks for the child's exit status."""


class _Successor:
    """A process on its way, whose parent stays until it serves or has ended."""

    def __init__(self, shared: Sequence[tuple[int, str]]) -> None:
        """Start it with descriptors. Raises ``OSError``."""
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        (self._ready, writer), (told, tell), (hold, self._held) = pipes
        numbers = [*(number for number, _ in shared), writer]
        names = ":".join([*(name for _, name in shared), READY])
        launch = [sys.executable, "-I", "-S", "-c", LAUNCH, str(tell), str(hold), str(len(numbers)), names]
        command = [*launch, *map(str, numbers), sys.executable, *sys.orig_argv[1:]]
        try:
            self._parent = subprocess.Popen(command, pass_fds=[*numbers, tell, hold])
        except BaseException:
            os.close(self._ready)
            os.close(self._held)
            os.close(told)
            raise
        finally:
            for number in (writer, tell, hold):
                os.close(number)
        with os.fdopen(told, "rb") as answer:
            self.pid = int(answer.read() or b"0")

    def serves(self) -> bool:
        """Wait until it says so; False if it has ended, or takes too long."""
        try:
            return bool(select.select([self._ready], [], [], START_S)[0]) and os.read(self._ready, 1) == b"1"
        finally:
            os.close(self._ready)

    def release(self) -> None:
        """Leave it to the service manager."""
        os.close(self._held)
        self._parent.wait()

    def end(self) -> int:
        """End it, if it has not ended; returns its exit status."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # its parent has not waited for it: the number is its own
        with contextlib.suppress(BrokenPipeError):
            os.write(self._held, b"w")
        os.close(self._held)
        return self._parent.wait()


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
        successor = _Successor(self._shared())
        log.info("process %d is to succeed this one", successor.pid)
        if successor.serves():
            successor.release()
            self._serves(successor.pid)
            return
        log.error("the successor ended with status %d before it served; this server goes on", successor.end())
