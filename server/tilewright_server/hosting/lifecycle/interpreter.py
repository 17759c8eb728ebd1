"""The interpreter of a process that is the server's own: its heap, its lock, its collections."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tilewright_server.hosting.lifecycle.heap import bound_heap

__all__ = ["INTERVAL_S", "collecting_later", "set_up_interpreter"]

INTERVAL_S = 0.001
"""Time after which a thread that computes gives the interpreter's lock to one that waits for it.

A call by gRPC passes through three threads or more, and waits so long at each while another plans or lists kernels;
with the interpreter's own 5 ms these waits alone are longer than a slice. A change of threads costs some microseconds.
"""


def set_up_interpreter() -> None:
    """For a process of its own, before it has threads."""
    sys.setswitchinterval(INTERVAL_S)
    bound_heap()


@contextmanager
def collecting_later() -> Iterator[None]:
    """Collect no garbage while a process starts: its modules and tables are not garbage. They are not looked through
    in later collections either."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
