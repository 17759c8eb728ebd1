"""The first process of a container: it ends what nobody else waits for.

Compilers leave processes behind, which the kernel gives to process 1. A server there that reaped any child would take
statuses from those who wait for them, so process 1 does nothing but that, and the server is a child of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tilewright_server.hosting.settings import inherited_sockets

__all__ = ["below_first_process"]

_KILLED = 128
"""Added to the number of a signal that ended a process, as shells do."""


def below_first_process(serve: Callable[[], int]) -> int:
    """Exit status of ``serve``, which runs in a child if this process is the first one of its namespace.

    Call it before threads are started. Sockets that a service manager passed are named for one process id, so with
    them ``serve`` runs here.
    """
    if os.getpid() != 1 or inherited_sockets():
        return serve()
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child:
        return _reap_until(child, signals)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return serve()


def _reap_until(server: int, signals: set[signal.Signals]) -> int:
    """Pass signals on to the server, and reap every process that ends, until it is the server: its exit status."""
    while True:
        received = signal.sigwaitinfo(signals).si_signo
        if received != signal.SIGCHLD:
            os.kill(server, received)
            continue
        ended = 1
        while ended:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return _KILLED
            if ended == server:
                return _KILLED + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
