"""Servers that go away and come back: what had not begun is made again, what had begun is said to be unknown."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from client_helpers import close, random

import tilewright as tw

KINDS = pytest.mark.parametrize("kind", ["own_server", "own_real_server"])


def counted(client: tw.Client) -> dict[str, int]:
    return {item["name"]: item["success"] for item in client.kernels.statistics()["operations"]}


def restart(server: Any) -> None:
    server.kill()
    server.start()


@KINDS
@pytest.mark.extended
def test_after_a_restart_everything_goes_on_by_itself(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(kind)
    with tw.connect(server.target, launch="server") as client:
        a = client.asarray(random(8, 8))
        plan = client.plan_gemm(a, a)
        bound = plan.bind(a, a, out=client.zeros((8, 8)))
        buffer = client.buffer(256)
        packed = client.pack_b(a)
        kept = a.copy()
        calls = [
            bound,
            lambda: client.gemm(a, a),
            lambda: plan(a, a),
            lambda: plan(a, a, repeat=2),
            lambda: bound.launch().synchronize(),
            lambda: plan.run_many([bound, (a, a)])[1],
            lambda: plan.bind(a, a, out=client.zeros((8, 8)))(),
            lambda: client.gemm(client.asarray(kept), a),
        ]
        for call in calls if kind == "own_server" else calls[:2]:
            restart(server)
            bound.out[...] = 0
            close(call(), kept @ kept)
        close(a, kept, 0)
        restart(server)
        for gone in (lambda: buffer.read(), lambda: buffer.write(b"x"), lambda: client.gemm(a, packed)):
            with pytest.raises(tw.NotFoundError, match="earlier session") as caught:
                gone()
            assert caught.value.rule == "session_owner"
            assert caught.value.fix == "make the buffer again and fill it anew"
        buffer = client.buffer(256)
        buffer.write(kept)
        assert (buffer.read().view(np.float32).reshape(8, 8) == kept).all()
        close(client.gemm(a, client.pack_b(a)), kept @ kept)


@KINDS
@pytest.mark.extended
def test_the_asyncio_client_goes_on_too(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(kind)

    async def main() -> None:
        async with tw.aio.connect(server.target, launch="server") as client:
            a = await client.asarray(random(8, 8))
            plan = await client.plan_gemm(a, a)
            bound = await plan.bind(a, a, out=await client.zeros((8, 8)))
            buffer = await client.buffer(64)
            for _ in range(2):
                await asyncio.to_thread(restart, server)
                results = await asyncio.gather(client.gemm(a, a), plan(a, a), bound(), plan.run_many([bound]))
                for result in results[:3]:
                    close(result, a @ a)
            with pytest.raises(tw.NotFoundError, match="earlier session"):
                await buffer.read()
            async with plan.stream() as stream:
                close(await (await stream.submit(a, a)), a @ a)
            assert not client._retired or all(not item._users for item in client._retired)

    asyncio.run(main())


def test_who_opts_out_opens_the_session_himself(own_server: Any) -> None:
    with tw.connect(own_server.target, reconnect=False) as client:
        a = client.asarray(random(4, 4))
        restart(own_server)
        for _ in range(2):
            with pytest.raises(tw.UnavailableError, match="reconnect") as caught:
                client.gemm(a, a)
            assert not isinstance(caught.value, tw.UnknownOutcomeError)
        client.reconnect()
        close(client.gemm(a, a), a @ a)
    with pytest.raises(tw.InvalidArgumentError, match="reconnect"):
        tw.connect(own_server.target, reconnect=1)
    with pytest.raises(tw.InvalidArgumentError, match="retries"):
        tw.connect(own_server.target, retries=-1)


def test_a_server_that_stays_away_is_waited_for_as_long_as_was_said(own_server: Any) -> None:
    with tw.connect(own_server.target, timeout=1.5) as client:
        a = client.asarray(random(4, 4))
        own_server.kill()
        with pytest.raises(tw.UnavailableError, match="no Tilewright server") as caught:
            client.gemm(a, a)
        assert "tilewright serve" in caught.value.fix
        own_server.start()
        close(client.gemm(a, a), a @ a)


def test_a_server_that_comes_back_late_is_met(own_server: Any) -> None:
    with tw.connect(own_server.target, timeout=30) as client:
        a = client.asarray(random(4, 4))
        own_server.kill()
        later = threading.Timer(0.5, own_server.start)
        later.start()
        close(client.gemm(a, a), a @ a)
        later.join()


def test_what_had_begun_is_of_unknown_outcome_and_not_made_again(own_server: Any) -> None:
    with tw.connect(own_server.target) as client:
        slow = client.plan("sleep", {}, attributes={"seconds": 30.0})
        caught: list[BaseException] = []

        def call() -> None:
            try:
                slow()
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        stream = slow.stream()
        futures = [stream.submit() for _ in range(600)]
        deadline = time.monotonic() + 20
        while counted(client).get("sleep", 0) < 2:  # the call, and the first of the stream
            assert time.monotonic() < deadline
            time.sleep(0.01)
        restart(own_server)
        thread.join(10)
        (error,) = caught
        assert isinstance(error, tw.UnknownOutcomeError)
        assert (error.rule, error.code) == ("outcome_unknown", "unavailable")
        assert "may run twice" in error.fix
        ends = [type(future.exception(timeout=10)) for future in futures]
        assert ends[0] is tw.UnknownOutcomeError
        assert ends[-1] is tw.UnavailableError  # it was never sent
        assert ends == sorted(ends, key=lambda kind: kind is tw.UnavailableError)
        with pytest.raises(tw.UnavailableError, match="open another stream"):
            stream.submit()
        stream.close()
        assert "sleep" not in counted(client)
        a = client.asarray(random(4, 4))
        with client.plan_gemm(a, a).stream() as stream:
            close(stream.submit(a, a).result(10), a @ a)


@pytest.mark.extended
def test_a_pipeline_says_what_failed_and_goes_on(own_real_server: Any) -> None:
    with tw.connect(own_real_server.target, launch="server") as client:
        a = client.asarray(random(8, 8))
        bound = client.plan_gemm(a, a).bind(a, a, out=client.zeros((8, 8)))
        pipeline = client.pipeline()
        pipeline.launch(bound)
        pipeline.join()
        restart(own_real_server)
        bound.out[...] = 0
        for _ in range(100):
            pipeline.launch(bound)
        try:
            pipeline.join()
        except tw.UnavailableError:
            for _ in range(3):
                pipeline.launch(bound)
            pipeline.join()
        close(bound.out, a @ a)


@pytest.mark.extended
def test_many_sessions_leave_nothing_behind(server: Any) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with tw.connect(server.target, launch="server") as client:
        a = client.asarray(random(8, 8))
        plan = client.plan_gemm(a, a)
        before = held()
        for _ in range(20):
            client.reconnect()
            close(plan(a, a), a @ a)
        deadline = time.monotonic() + 10
        while held()[0] > before[0] or held()[1] > before[1]:
            assert time.monotonic() < deadline, (before, held())
            time.sleep(0.02)
        assert [len(segment.regions) for segment in client._subject.pool._segments.values()] == [1]
        assert len(client._retired) == 0


def test_refusals_are_waited_out_within_the_deadline(own_server: Any) -> None:
    with tw.connect(own_server.target) as client:
        client.plan("refuse", {}, attributes={"times": 3.0, "pushback_ms": 30.0})()
        counts = counted(client)
        assert (counts["refused"], counts["refuse"]) == (3, 1)
        assert counts["earliest"] >= 30
        with pytest.raises(tw.ResourceExhaustedError):  # too late for its deadline
            client.plan("refuse", {}, attributes={"times": 3.0, "pushback_ms": 3000.0})(timeout=0.5)
        assert counted(client)["refused"] == 4
        for words in ({"pushback_ms": -1.0}, {"rule": "on_demand"}):
            with pytest.raises(tw.ResourceExhaustedError):
                client.plan("refuse", {}, attributes={"times": 3.0, "pushback_ms": 1.0} | words)()
        assert counted(client)["refused"] == 6
    with tw.connect(own_server.target, retries=0) as client:
        with pytest.raises(tw.ResourceExhaustedError) as caught:
            client.plan("refuse", {}, attributes={"times": 1.0, "pushback_ms": 30.0})()
        assert caught.value.retry_after == 0.03


class Load:
    """Threads that make calls of every kind, check every result, and count what came of them."""

    def __init__(self, target: str) -> None:
        self.client = tw.connect(target, launch="server", timeout=30.0)
        self.counts: Counter[str] = Counter()
        self.wrong: list[BaseException] = []
        self.over = threading.Event()
        self.sizes: list[int] = []
        self.threads = [threading.Thread(target=self._run, args=(kind,)) for kind in (0, 1, 2, 3)]
        self.threads.append(threading.Thread(target=lambda: asyncio.run(self._run_async(target))))
        for thread in self.threads:
            thread.start()

    def _run(self, kind: int) -> None:
        client, size = self.client, 8 + kind
        a = client.asarray(random(size, size))
        plan = client.plan_gemm(a, a)
        bound = plan.bind(a, a, out=client.zeros((size, size)))
        mine = np.array(a)
        calls = {
            0: bound,
            1: lambda: client.gemm(a, a),
            2: lambda: plan(mine, mine),
            3: lambda: self._streamed(plan, a),
        }
        while not self.over.is_set():
            bound.out[...] = 0
            self._note(calls[kind], mine @ mine)

    def _streamed(self, plan: Any, a: Any) -> Any:
        with plan.stream() as stream:
            return [stream.submit(a, a) for _ in range(20)][-1].result(60)

    def _note(self, call: Any, wanted: Any) -> None:
        try:
            close(call(), wanted)
            self.counts["done"] += 1
        except tw.UnknownOutcomeError:
            self.counts["unknown"] += 1
        except tw.UnavailableError as error:
            self.counts[error.rule] += 1
        except BaseException as error:
            self.wrong.append(error)
            raise

    async def _run_async(self, target: str) -> None:
        async with tw.aio.connect(target, launch="server", timeout=30.0) as client:
            a = await client.asarray(random(16, 16))
            wanted = a @ a
            while not self.over.is_set():
                for result in await asyncio.gather(*(client.gemm(a, a) for _ in range(4)), return_exceptions=True):
                    if isinstance(result, BaseException):
                        self._note(lambda result=result: (_ for _ in ()).throw(result), wanted)
                    else:
                        self._note(lambda result=result: result, wanted)

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a call hangs"
        self.client.close()


def goes_on(load: Load, since: int) -> bool:
    """Wait until more calls than ``since`` have succeeded; true if they do so within 30 s."""
    deadline = time.monotonic() + 30
    while load.counts["done"] <= since and time.monotonic() < deadline:
        time.sleep(0.05)
    return load.counts["done"] > since


def killed_again_and_again(server: Any, restarts: int) -> None:
    load = Load(server.target)
    own = psutil.Process()
    stopped = False
    begun = time.monotonic()
    memory: list[tuple[int, int]] = []
    for _ in range(restarts):
        time.sleep(1.0)
        done = load.counts["done"]
        restart(server)
        memory.append((own.memory_info().rss, own.num_fds()))
        if not goes_on(load, done):
            stopped = True
            break
    took_s = time.monotonic() - begun
    load.end()
    held = [(nbytes >> 20, descriptors) for nbytes, descriptors in (memory[0], memory[len(memory) // 3], memory[-1])]
    print(  # noqa: T201
        f"{len(memory)} restarts in {took_s:.0f} s; {dict(load.counts)}; the client's memory in MiB and descriptors at "
        f"first, after a third, at last: {held}"
    )
    assert not load.wrong
    assert not stopped, "calls go on after every restart"
    unfinished = sum(count for name, count in load.counts.items() if name != "done")
    assert unfinished <= restarts * 40, load.counts  # those under way, of all threads
    assert set(load.counts) <= {"done", "unknown", "stream_open", "session_alive"}, load.counts
    middle = memory[len(memory) // 3]
    assert memory[-1][0] - middle[0] < 48 << 20, memory
    assert memory[-1][1] - middle[1] < 24, memory


@pytest.mark.extended
def test_a_server_that_is_killed_again_and_again_spoils_no_result(own_real_server: Any) -> None:
    killed_again_and_again(own_real_server, 3)


@pytest.mark.exhaustive
def test_a_minute_of_restarts_leaves_memory_flat(own_real_server: Any) -> None:
    killed_again_and_again(own_real_server, 45)


LEAVING = """
import sys, tilewright as tw
client = tw.connect(sys.argv[1], timeout=0.5)
a = client.zeros((4, 4))
print("ready", flush=True)
sys.stdin.readline()
try:
    client.gemm(a, a)
except tw.UnavailableError:
    print("gone")
"""


def test_a_process_whose_server_is_gone_ends(own_server: Any) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LEAVING, own_server.target]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        own_server.kill()
        assert one.communicate("\n", timeout=30)[0] == "gone\n"
        assert one.returncode == 0
