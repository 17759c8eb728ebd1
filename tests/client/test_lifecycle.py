"""Connecting, forking, servers that go away."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw


def test_no_server_is_said_at_once_with_the_way_to_start_one(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(tw.UnavailableError, match="no Tilewright server") as caught:
        tw.connect(f"unix:{tmp_path}/none")
    assert caught.value.fix == f"start one with: tilewright serve --listen unix:{tmp_path}/none"
    assert time.monotonic() - started < 5


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mute"))
        listener.listen()
        with pytest.raises(tw.UnavailableError):
            tw.connect(str(tmp_path / "mute"), timeout=0.3)


def test_closing_twice_is_fine_and_use_after_it_is_an_error(server) -> None:
    client = tw.connect(server.target)
    array = client.zeros((3,))
    client.close()
    client.close()
    assert array.sum() == 0
    with pytest.raises(tw.UnavailableError, match="closed"):
        client.zeros((3,))


def test_a_forgotten_client_is_closed_with_a_warning(server) -> None:
    client = tw.connect(server.target)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del client
        gc.collect()


FORGOTTEN = {
    "end of the script": """
client = tw.connect(target)
client.zeros((2,))
""",
    "work under way": """
client = tw.connect(target)
stream = client.plan("sleep", {}, attributes={"seconds": 1.0}).stream()
future = stream.submit()
""",
    "interrupt": """
client = tw.connect(target)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
""",
    "interrupt in a call": """
client = tw.connect(target)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
client.run("sleep", {}, attributes={"seconds": 3.0})
""",
    "exception": """
def work(client):
    raise ValueError
work(tw.connect(target))
""",
    "forked child": """
client = tw.connect(target)
if os.fork() == 0:
    client.zeros((2,))
    sys.exit(0)
os.wait()
""",
    "asyncio": """
async def main():
    global client
    client = await tw.aio.connect(target)
    await client.zeros((2,))
asyncio.run(main())
""",
    "cycle": """
class Holder: pass
holder = Holder()
holder.self, holder.client = holder, tw.connect(target)
del holder
""",
}


@pytest.mark.parametrize("script", FORGOTTEN)
@pytest.mark.some(3)
def test_a_script_that_forgets_to_close_ends(server, script: str) -> None:
    code = "import asyncio, os, signal, sys, threading, time\nimport tilewright as tw\ntarget = sys.argv[1]\n"
    # Whoever runs the tests in the background may have SIGINT ignored, which children inherit.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-W", "ignore", "-c", code + FORGOTTEN[script], server.target]
    ended = subprocess.run(command, timeout=20, capture_output=True, text=True)
    wanted = {"interrupt": -signal.SIGINT, "interrupt in a call": -signal.SIGINT, "exception": 1}.get(script, 0)
    assert ended.returncode == wanted, ended.stderr
    assert "Fatal" not in ended.stderr


def test_a_killed_server_is_a_typed_error_for_everything_under_way(own_server) -> None:
    with tw.connect(own_server.target, reconnect=False) as client:
        a = client.zeros((4, 4))
        plan = client.plan_gemm(a, a)
        slow = client.plan("sleep", {}, attributes={"seconds": 30.0})
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                slow()
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        stream = slow.stream()
        futures = [stream.submit() for _ in range(3)]
        deadline = time.monotonic() + 20
        while {item["name"]: item["success"] for item in client.kernels.statistics()["operations"]}.get("sleep", 0) < 2:
            assert time.monotonic() < deadline, "the call and the first of the stream have not begun"
            time.sleep(0.01)
        own_server.kill()
        thread.join(10)
        assert [type(error) for error in caught] == [tw.UnknownOutcomeError]
        for future in futures:
            assert isinstance(future.exception(timeout=10), tw.UnavailableError)
        stream.close()
        for _ in range(2):
            with pytest.raises(tw.UnavailableError, match="reconnect"):
                plan(a, a)
        assert a.sum() == 0


@pytest.mark.parametrize("kind", ["own_server", "own_real_server"])
@pytest.mark.extended
def test_after_a_restart_reconnecting_revives_arrays_and_plans(kind, request) -> None:
    own_server = request.getfixturevalue(kind)
    with tw.connect(own_server.target, launch="server", reconnect=False) as client:
        a = client.zeros((4, 4))
        a[...] = 1
        plan = client.plan_gemm(a, a)
        bound = plan.bind(a, a, out=client.zeros((4, 4)))
        packed = client.pack_b(a)
        own_server.kill()
        own_server.start()
        with pytest.raises(tw.UnavailableError, match=r"over|went away"):
            client.gemm(a, a)
        with pytest.raises(tw.UnavailableError, match="over"):
            plan(a, a)
        client.reconnect()
        assert (client.gemm(a, a) == 4).all()
        assert client.report is not None
        assert client.report.staged_bytes == 0
        assert (plan(a, a) == 4).all()
        assert (bound() == 4).all()
        with pytest.raises(tw.NotFoundError, match="earlier session"):
            client.gemm(a, packed)


def in_child(work) -> int:
    """Run ``work`` in a forked child; its exit status is 0 if it returned."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["server", "real_server"])
@pytest.mark.extended
def test_a_forked_child_gets_a_session_of_its_own(kind, request) -> None:
    with tw.connect(request.getfixturevalue(kind).target) as client:
        a = client.zeros((100, 100))
        a[...] = 1
        plan = client.plan_gemm(a, a)
        plan(a, a)
        parent = client.session.token

        def child() -> None:
            assert (client.gemm(a, a) == 100).all()  # the parent's array: copied
            assert client.session.token != parent
            mine = client.zeros((100, 100))
            mine[...] = 2
            assert (plan(mine, mine) == 400).all()
            assert client.report is not None
            assert client.report.staged_bytes == 0
            client.close()

        assert in_child(child) == 0
        assert in_child(lambda: None) == 0
        assert client.session.token == parent
        assert (plan(a, a) == 100).all()
        assert (client.gemm(a, a) == 100).all()
        assert client.report is not None
        assert client.report.staged_bytes == 0


GRPC_FIRST = """
import grpc, os, sys, tilewright as tw
client = tw.connect(sys.argv[1])
if os.fork() == 0:
    try:
        client.zeros((3,))
    except tw.UnavailableError as error:
        os._exit(0 if error.rule == "fork_support" and "import tilewright first" in error.fix else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
client.close()
"""


def test_a_grpc_that_would_crash_a_forked_child_is_an_error_there(server) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-W", "ignore", "-c", GRPC_FIRST, server.target]
    subprocess.run(command, env=environment, check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_parent_and_child_never_hand_out_the_same_memory(server) -> None:
    with tw.connect(server.target) as client:
        a = client.zeros((64,))

        def child() -> None:
            for _ in range(50):
                client.empty((64,)).fill(9)
            kept = client.empty((64,))
            kept.fill(9)

        assert in_child(child) == 0
        b = client.empty((64,))
        b.fill(1)
        assert a.sum() == 0
        assert np.all(b == 1)


def test_many_clients_leave_no_descriptor_behind(server) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def use() -> None:
        with tw.connect(server.target) as client:
            a = client.zeros((4, 4))
            client.gemm(a, a)

    use()
    before = descriptors()
    for _ in range(10):
        use()
    deadline = time.monotonic() + 20
    while descriptors() > before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.extended
def test_a_server_that_stops_in_order_ends_the_session(own_real_server) -> None:
    with tw.connect(own_real_server.target, launch="server", timeout=2) as client:
        a = client.zeros((4, 4))
        client.gemm(a, a)
        assert own_real_server.process is not None
        own_real_server.process.terminate()
        own_real_server.process.wait(15)
        with pytest.raises(tw.UnavailableError):
            client.gemm(a, a)


def test_what_a_client_held_is_free_after_its_end(real_server) -> None:
    with tw.connect(real_server.target) as watcher:
        before = watcher.kernels.statistics()["regions"]
        with tw.connect(real_server.target) as client:
            client.zeros((1024,))
            assert watcher.kernels.statistics()["regions"] == before + 1
        deadline = time.monotonic() + 10
        while watcher.kernels.statistics()["regions"] != before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_priority_that_there_is_not_is_refused(server) -> None:
    with pytest.raises(tw.InvalidArgumentError, match="priority"):
        tw.connect(server.target, priority="urgent")
