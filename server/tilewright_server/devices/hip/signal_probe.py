"""Probe of signals: do numbers in memory of the host order the streams of two processes with this very runtime?

    python -m tilewright_server.devices.hip.signal_probe ORDINAL

prints one JSON object: ``problem``, empty if signals may be used. Two processes lock one page of shared memory for the
device; a stream of one writes numbers there, a stream of the other waits for them, and back.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
import time
from typing import Any

from tilewright_server.devices.hip.driver.api import HipApi
from tilewright_server.devices.hip.event_probe import (
    HOST_FUNCTION,
    LIMIT_S,
    LOOK_S,
    START_S,
    STEP_S,
    Borrower,
    ProbeError,
    checked,
    open_api,
    probed,
    run_probe,
    say,
)
from tilewright_server.devices.hip.signals import PAGE_BYTES

__all__ = ["main", "signal_problem"]

_PROBE = "tilewright_server.devices.hip.signal_probe"
_OURS, _THEIRS, _DATA = 0, 64, 2048
"""Places in the page: numbers of the first and of the second process, and what the first writes before its own."""
_DATA_BYTES, _CONTENT = 64, 7
_ROUNDS = 70


@functools.cache
def signal_problem(ordinal: int) -> str:
    """Why launches are not tied by signals on a device of this process' numbering; empty if signals keep order. Starts
    two processes the first time, which takes a second or two."""
    return probed(_PROBE, ordinal, "signals")


def _locked(api: HipApi, file: int) -> tuple[memoryview, int]:
    """The page, and its address on the device."""
    page = memoryview(mmap.mmap(file, PAGE_BYTES))
    checked(api.lock_host(page), "locking a page of shared memory")
    return page, int(checked(api.device_address(page), "the address of a locked page"))


def _settle(api: HipApi, stream: Any, late: str) -> None:
    """Wait for a stream. Raises ``ProbeError`` if that takes long."""
    end = time.monotonic() + STEP_S
    while api.query_stream(stream)[0]:
        if time.monotonic() > end:
            raise ProbeError(late)
        time.sleep(LOOK_S / 10)


def _lend(ordinal: int) -> None:
    """The first process. Raises ``ProbeError``."""
    api = open_api(ordinal)
    file = os.memfd_create("tilewright-probe")
    os.ftruncate(file, PAGE_BYTES)
    _, address = _locked(api, file)
    released = threading.Event()
    hold = HOST_FUNCTION(lambda _: (released.wait(LIMIT_S), None)[1])
    stream = checked(api.new_stream(), "a stream")
    checked(api.raw.hipLaunchHostFunc(stream, ctypes.cast(hold, ctypes.c_void_p).value, None), "a host function")
    filled = api.raw.hipMemsetD8Async(address + _DATA, _CONTENT, _DATA_BYTES, stream)
    checked(filled, "filling a locked page")
    checked(api.write_value(stream, address + _OURS, 1), "a stream's write of a number")
    borrower = Borrower(_PROBE, ordinal, str(file), (file,))
    try:
        borrower.expect("opened", START_S, "locking a page in a second process does not return")
        borrower.expect("queued", STEP_S, "a wait for a number blocks the caller")
        borrower.expect("ordered", STEP_S, "a stream that waits for a number cannot be asked")
        released.set()
        borrower.expect("passed", STEP_S, "a wait for a number does not end when it is written")
        for turn in range(2, _ROUNDS):
            checked(api.write_value(stream, address + _OURS, turn), "a stream's write of a number")
            checked(api.wait_value(stream, address + _THEIRS, turn), "a wait for a number")
        borrower.expect("turned", START_S, "two streams that wait for each other's numbers do not end")
        _settle(api, stream, "a stream does not see the last number of another process")
    finally:
        released.set()
        borrower.process.kill()
        borrower.process.wait()


def _borrow(ordinal: int, file: str) -> None:
    """The second process. Raises ``ProbeError``, for the line that it says last."""
    api = open_api(ordinal)
    page, address = _locked(api, int(file))
    stream = checked(api.new_stream(), "a stream")
    say("opened")
    checked(api.wait_value(stream, address + _OURS, 1), "a wait for a number")
    say("queued")
    time.sleep(LOOK_S)
    if not api.query_stream(stream)[0]:
        raise ProbeError("a stream does not wait for a number")
    say("ordered")
    _settle(api, stream, "a wait for a number does not end when it is written")
    if bytes(page[_DATA : _DATA + _DATA_BYTES]) != bytes([_CONTENT]) * _DATA_BYTES:
        raise ProbeError("what a stream wrote before a number is not seen behind the wait for it")
    say("passed")
    for turn in range(2, _ROUNDS):
        checked(api.wait_value(stream, address + _OURS, turn), "a wait for a number")
        checked(api.write_value(stream, address + _THEIRS, turn), "a stream's write of a number")
    _settle(api, stream, "two streams that wait for each other's numbers do not end")
    say("turned")


def main() -> int:
    """Probe signals, or be the second process."""
    return run_probe(_lend, _borrow)


if __name__ == "__main__":
    sys.exit(main())
