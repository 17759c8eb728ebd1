"""The heap of the server's process gives pages back that nothing uses."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or later"
)

SCATTERED = textwrap.dedent("""
    import ctypes, os, sys, threading, time
    from types import SimpleNamespace
    from tilewright_server.hosting.lifecycle.heap import HeapTrimmer, bound_heap
    from tilewright_server.hosting.lifecycle.warm import load_the_rest

    MIB = 1 << 20
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def fill(block, count, kept):
        blocks = [libc.malloc(block) for _ in range(count)]
        for place in blocks:
            ctypes.memset(place, 1, block)
        for number, place in enumerate(blocks):
            if (number + 1) % kept:
                libc.free(place)

    if sys.argv[1] == "bound":
        bound_heap()
    trimmer = HeapTrimmer(0.02, 8 * MIB)
    before = resident_bytes()
    if sys.argv[2] == "trimmed":
        trimmer.start()
    fill(24 * MIB, 1, 2)
    block, count, kept = map(int, sys.argv[3:])
    thread = threading.Thread(target=fill, args=(block, count, kept))
    thread.start()
    thread.join()
    if sys.argv[2] == "started":
        load_the_rest(SimpleNamespace(plugins=SimpleNamespace(finish=lambda: None), strategies={}))
    end = time.monotonic() + (0.2 if sys.argv[2] == "untouched" else 20)
    while resident_bytes() - before > 16 * MIB and time.monotonic() < end:
        time.sleep(0.02)
    print((resident_bytes() - before) // MIB)
""")


def left_mib(bound: str, trimmed: str, block: int, count: int, kept: int) -> int:
    """Growth of a process that took ``count`` blocks and freed all but each ``kept``-th."""
    arguments = [bound, trimmed, str(block), str(count), str(kept)]
    done = subprocess.run(
        [sys.executable, "-c", SCATTERED, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@needs_glibc
def test_pages_between_blocks_that_stay_are_given_back() -> None:
    assert left_mib("bound", "untouched", 64 << 10, 1000, 100) > 40
    assert left_mib("bound", "trimmed", 64 << 10, 1000, 100) < 16


@needs_glibc
def test_what_a_start_took_and_freed_is_given_back() -> None:
    assert left_mib("bound", "started", 64 << 10, 1000, 100) < 16


@needs_glibc
def test_the_end_of_a_heap_is_given_back_even_after_a_large_block() -> None:
    assert left_mib("free", "untouched", 1 << 20, 40, 41) > 16
    assert left_mib("bound", "untouched", 1 << 20, 40, 41) < 16


LOADED = textwrap.dedent("""
    import gc, os, signal, sys, threading, time
    from tilewright_server.app import Application
    from tilewright_server.settings import load

    def end():
        while "tilewright_moe.plugin" not in sys.modules or "plugins" in [item.name for item in threading.enumerate()]:
            time.sleep(0.01)
        print(gc.get_freeze_count(), gc.isenabled(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    class Watched(Application):
        def _say_ready(self):
            print(gc.get_freeze_count(), flush=True)
            threading.Thread(target=end, daemon=True).start()

    Watched(load({"listen": [f"unix:{sys.argv[1]}/s"], "cache_dir": sys.argv[1]})).run()
""")


def test_collections_do_not_visit_what_is_imported_after_the_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], check=True, capture_output=True, text=True, timeout=120
    )
    before, after, collecting = done.stdout.split()
    assert collecting == "True" and int(after) > int(before) + 10_000


def test_a_process_of_the_servers_own_divides_the_interpreter_in_steps_of_a_millisecond() -> None:
    script = (
        "import sys; from tilewright_server.hosting.lifecycle.interpreter import set_up_interpreter; "
        "set_up_interpreter(); print(sys.getswitchinterval())"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < float(answer.stdout) <= 0.001
