"""Clients of a device's process that die or leave work behind, and streams that are not waited for."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from worker_harness import (
    Bench,
    Client,
    N,
    bind_add,
    eventually,
    resident_kib,
    usage,
)

from tilewright_kit.contract.plan import I64, Geometry, Pointer, Struct, pack
from tilewright_kit.types.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
)
from tilewright_server.devices.contract import (
    RECORD,
    REPLY,
    TIME,
    WAIT,
    DeviceLostError,
    ProgramStage,
)
from tilewright_server.devices.worker import clients
from tilewright_server.protocol.frames import HEADER, REPLY_KIND, Kind

NO_OPTION = 9999
"""No option of a socket, as on a kernel that lacks one."""
DYING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
sys.stdin.readline()
connection.close()
sys.stdin.readline()
"""


LAUNCHING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
sys.stdin.readline()
connection.send(bytes.fromhex(sys.argv[2]))
sys.stdin.readline()
"""


@pytest.mark.extended
def test_launches_of_a_dead_client_that_never_end_cost_the_worker_and_those_of_a_living_one_do_not(
    hosted: Callable[[str], Bench], tmp_path: Path
) -> None:
    bench, ended = hosted("open_endless"), threading.Event()
    pid = bench.device.pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-c", DYING, str(tmp_path / "s")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            accepted, _ = listener.accept()
            with accepted:
                bench.device.attach(accepted.fileno(), 1, ended.set)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert ended.wait(10)
            time.sleep(1)
            assert bench.losses == []
            process.kill()
    eventually(lambda: bench.losses)
    assert bench.losses[0].suspects == ()
    bench.check_that_it_adds()
    assert bench.device.pid != pid


@pytest.mark.extended
def test_a_launch_that_a_dead_client_waited_for_costs_the_worker_too(
    hosted: Callable[[str], Bench], tmp_path: Path
) -> None:
    bench, ended = hosted("open_stuck"), threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-c", LAUNCHING, str(tmp_path / "s"), HEADER.pack(Kind.LAUNCH, TIME, 0, 0, 7).hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            accepted, _ = listener.accept()
            with accepted:
                bench.device.attach(accepted.fileno(), 1, ended.set)
            bench.device.bind(1, 7, bench.add(), [bench.put(np.ones(N, np.float32)).address] * 3, 0)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(1)
            assert not ended.is_set()
            assert bench.losses == []
            process.kill()
    assert ended.wait(10)
    eventually(lambda: bench.losses)
    bench.check_that_it_adds()


class Waiting:
    is_busy = True

    def __init__(self, waits: bool) -> None:
        self.waits = waits


def test_work_of_a_dead_client_may_be_finished_but_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
    for connected in (True, False):
        for waits in (True, False):
            known, peer = clients.Clients(), types.SimpleNamespace(is_known=True, is_dead=False, close=lambda: None)
            client = known.begin(Waiting(waits), peer)  # type: ignore[arg-type]
            if not connected:
                known.end(client)
            known.check()
            peer.is_dead = True
            time.sleep(0.01)
            with pytest.raises(DeviceLostError) if waits else contextlib.nullcontext():
                known.check()
            monkeypatch.setattr(clients, "LONG_PATIENCE_S", 0.0)
            with pytest.raises(DeviceLostError):
                known.check()
            monkeypatch.setattr(clients, "LONG_PATIENCE_S", 60.0)


def test_a_client_that_nobody_can_watch_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = clients.Peer(ours)
        assert peer.is_known
        assert not peer.is_dead
        peer.close()
        monkeypatch.setattr(clients, "_SO_PEERPIDFD", NO_OPTION)
        monkeypatch.delattr(os, "pidfd_open")
        peer = clients.Peer(ours)
        assert not peer.is_known
        assert not peer.is_dead
        peer.close()


@pytest.mark.parametrize("option", [clients._SO_PEERPIDFD, NO_OPTION], ids=["by descriptor", "by number"])
def test_the_end_of_a_clients_process_is_seen(option: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_SO_PEERPIDFD", option)
    with connected(tmp_path / "s") as (accept, process):
        peer = clients.Peer(accept())
        assert (peer.is_known, peer.is_dead) == (True, False)
        process.communicate("\n\n")
        assert peer.is_dead
        peer.close()


def test_a_client_that_dies_before_it_is_seen_is_not_taken_for_another_of_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(tmp_path / "s") as (accept, process):
        process.communicate("\n\n")
        accepted = accept()
        try:
            os.close(accepted.getsockopt(socket.SOL_SOCKET, clients._SO_PEERPIDFD))
        except OSError as error:
            if error.errno == errno.ENOPROTOOPT:
                pytest.skip("this kernel has no descriptors of peers (Linux 6.5)")
        opened, own = os.pidfd_open, os.getpid()
        monkeypatch.setattr(os, "pidfd_open", lambda pid: opened(own))  # as if the number were ours by now
        peer = clients.Peer(accepted)
        assert (peer.is_known, peer.is_dead) == (True, True)
        peer.close()


@contextlib.contextmanager
def connected(path: Path) -> Iterator[tuple[Callable[[], socket.socket], subprocess.Popen[str]]]:
    """A process that has connected to a socket, and how to accept it. It ends after two lines."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-c", DYING, str(path)]
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        assert poll.poll(60_000), "the process did not connect"
        yield lambda: stack.enter_context(listener.accept()[0]), process


def test_connections_that_leave_launches_under_way_are_limited(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_endless")
    for number in range(1, 4):
        gone = Client(bench, number)
        gone.socket.close()
        assert gone.ended.wait(10)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(ResourceExhaustedError) as caught:
        bench.device.attach(theirs.fileno(), 4, lambda: None)
    assert caught.value.rule == "connections_left"
    assert caught.value.retry_after_s
    bench.check_that_it_adds()


def test_launches_on_a_stream_are_answered_before_they_end(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_streams")
    client, go = Client(bench), bench.put(np.zeros(1, np.int32))
    bench.device.bind(1, 1, bench.spin(), [go.address], 0)
    out = bind_add(client, 2)
    client.socket.send(HEADER.pack(Kind.OPEN_EVENT, 0, 4, 9, 0) + bytes(range(64)))
    header, payload = client.receive()
    assert header[:4] == (REPLY_KIND | Kind.OPEN_EVENT, 0, 4, 9)
    assert payload == b"done" + bytes(range(4, 64))
    client.send((0, 0, 1, 1), (WAIT | RECORD | REPLY, 4, 2, 2))
    assert client.receive()[0][3] == 2  # while the first still spins
    assert (bench.get(out) == 0).all()
    bench.device.write(go, 0, memoryview(np.ones(1, np.int32)))
    client.send((TIME, 0, 3, 2))
    assert client.receive()[0][4] > 0
    assert (bench.get(out) == 2).all()
    client.socket.close()
    assert client.ended.wait(10)


def test_taking_a_binding_back_waits_for_its_launches(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_streams")
    client, go = Client(bench), bench.put(np.zeros(1, np.int32))
    bench.device.bind(1, 1, bench.spin(), [go.address], 0)
    client.send((REPLY, 0, 1, 1))
    client.receive()
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(bench.device.unbind, 1, 1)
        time.sleep(0.1)
        assert not taken.done()
        bench.device.write(go, 0, memoryview(np.ones(1, np.int32)))
        taken.result(10)
    client.socket.close()


def test_stream_of_the_servers_own(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_streams")
    stream = bench.device.open_stream()
    x, out = bench.put(np.ones(N, np.float32)), bench.device.allocate(4 * N)
    addresses = (x.address, x.address, out.address)
    assert stream.open_event(1, bytes(64)) == b"done" + bytes(60)
    assert stream.launch(bench.add(), addresses, WAIT, 1) == 0
    stream.synchronize()
    assert (bench.get(out) == 2).all()
    assert stream.launch(bench.add(), addresses, TIME, 0) > 0
    with pytest.raises(InvalidArgumentError):
        stream.launch(bench.add(), addresses, WAIT, 2)
    stream.close()
    stream.close()


def test_connections_leave_nothing_behind(bench: Bench) -> None:
    pid = bench.device.pid
    args = Struct((Pointer("x"), Pointer("x"), Pointer("out"), I64(N)))
    stage = ProgramStage(bench.device.load(bench._binary).function("add"), pack(args), Geometry())

    def cycle(number: int) -> None:
        client = Client(bench, number)
        x, out = bench.put(np.ones(N, np.float32)), bench.device.allocate(4 * N)
        program = bench.device.program([stage], ["x", "out"])
        bench.device.bind(number, 7, program, [x.address, out.address], 4 * N)
        client.send((REPLY, 0, 0, 7))
        client.receive()
        client.socket.close()
        assert client.ended.wait(10)
        bench.device.free(x)
        bench.device.free(out)

    for number in range(50):
        cycle(number)
    eventually(lambda: len(bench.device.life().connections) == 0)
    before = usage(os.getpid()) + usage(pid)
    worker, server = resident_kib(pid), resident_kib(os.getpid())
    for number in range(50, 250):
        cycle(number)
    eventually(lambda: all(now <= then for now, then in zip(usage(os.getpid()) + usage(pid), before, strict=True)))
    assert resident_kib(pid) - worker < 4096
    assert resident_kib(os.getpid()) - server < 4096
