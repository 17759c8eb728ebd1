"""A GPU whose process is killed every second under load: no wrong result, no call that hangs, memory stays flat."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_servers import DEVICE, KINDS, SIDE, GpuServer, bystander_computes, gpu_server
from rpc_harness import eventually

import tilewright as tw

EXPECTED = ("device_lost", "device_starting", "device_worker", "session_owner", "buffer_alive", "outcome_unknown")
"""Rules of errors that say that the device went, or that what it held has to be made again."""


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path, kernel_cache: Path) -> Iterator[GpuServer]:
    # A kernel that was there at two deaths is refused for ten minutes, which is not what is looked at here.
    with gpu_server(request.param, tmp_path, kernel_cache, quarantined=False) as running:
        yield running


class Load:
    """Threads that launch in different ways, look at every result, and make again what was lost."""

    def __init__(self, server: GpuServer) -> None:
        self.server = server
        self.counts: Counter[str] = Counter()
        self.wrong: list[BaseException] = []
        self.over = threading.Event()
        self.slowest_s = 0.0
        self.client = tw.connect(server.addresses[0], launch="server", timeout=30.0)
        self.threads = [threading.Thread(target=self._run, args=(kind,)) for kind in range(4)]
        for thread in self.threads:
            thread.start()

    def _run(self, kind: int) -> None:
        try:
            while not self.over.is_set():
                begin = time.monotonic()
                try:
                    call, out, wanted = self._made(kind)
                    self._launched(call, out, wanted)
                except tw.TilewrightError as error:
                    self.counts[error.rule] += 1
                    if error.rule not in EXPECTED:
                        raise
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin - 1.0)
        except BaseException as error:
            self.wrong.append(error)
            raise

    def _made(self, kind: int) -> tuple[Callable[[], Any], tw.Buffer, np.ndarray]:
        """A call, where its result lies, and what that must be."""
        client, shape = self.client, (SIDE, SIDE)
        a, b = np.random.default_rng(kind).integers(-4, 5, (2, *shape)).astype(np.float32)  # sums are exact
        buffers = [client.buffer(a.nbytes, DEVICE) for _ in range(3)]
        buffers[0].write(a)
        buffers[1].write(b)
        x, y, out = (buffer.tensor(shape, "fp32") for buffer in buffers)
        plan = client.plan_gemm(x, y, out=out)
        bound = plan.bind(x, y, out=out)
        calls = (
            bound,
            lambda: client.gemm(x, y, out=out),
            lambda: plan(x, y, out=out),
            lambda: plan.run_many([bound] * 5),
        )
        return calls[kind], buffers[2], a @ b

    def _launched(self, call: Callable[[], Any], out: tw.Buffer, wanted: np.ndarray) -> None:
        """Launches for a second. Simulated kernels write nothing: there the output is what was written to it."""
        until = time.monotonic() + 1.0
        poison = np.full((SIDE, SIDE), -1.0, np.float32)
        while time.monotonic() < until and not self.over.is_set():
            out.write(poison)
            call()
            found = out.read().view(np.float32).reshape(SIDE, SIDE)
            np.testing.assert_array_equal(found, wanted if self.server.real else poison)
            self.counts["done"] += 1

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a call hangs"
        self.client.close()


def replaced_again_and_again(server: GpuServer, seconds: float) -> None:
    warm = Load(server)  # threads, connections to the device's process, heaps of both
    assert eventually(lambda: warm.counts["done"] > 200 or warm.wrong)
    warm.end()
    before = at_rest(server)
    load = Load(server)
    assert eventually(lambda: load.counts["done"] > 20 or load.wrong)
    begin, killed = time.monotonic(), 0
    while time.monotonic() < begin + seconds and not load.wrong:
        done = load.counts["done"]
        for worker in server.workers:
            os.kill(worker, signal.SIGKILL)
            killed += 1
        assert eventually(lambda done=done: load.counts["done"] > done or load.wrong), "launches go on"
        time.sleep(1.0)
    took_s = time.monotonic() - begin
    load.end()
    assert not load.wrong, load.wrong
    bystander_computes(server)
    after = at_rest(server)
    print(  # noqa: T201
        f"{killed} times in {took_s:.0f} s; {dict(load.counts)}; slowest {load.slowest_s:.1f} s; memory in MiB, "
        f"descriptors, mappings and threads of the server: {before}, {after}"
    )
    assert killed >= 3
    assert all(b - a <= most for a, b, most in zip(before, after, (16, 8, 64, 16), strict=True)), (before, after)


def at_rest(server: GpuServer) -> tuple[int, int, int, int]:
    """Memory in MiB, descriptors, mappings and threads, when nobody has asked for anything for a while."""
    time.sleep(2.0)
    own = Path(f"/proc/{server.pid}")
    memory = int((own / "status").read_text().split("RssAnon:")[1].split()[0]) // 1024
    mappings = (own / "maps").read_text().count("\n")
    return memory, len(server.descriptors()), mappings, len(list((own / "task").iterdir()))


@pytest.mark.extended
def test_a_gpu_that_is_killed_again_and_again_spoils_no_result(server: GpuServer) -> None:
    replaced_again_and_again(server, 4)


@pytest.mark.exhaustive
def test_a_minute_of_replaced_gpus_leaves_memory_flat(server: GpuServer) -> None:
    replaced_again_and_again(server, 60)
