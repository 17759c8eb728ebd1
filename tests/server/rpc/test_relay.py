"""The relay before gRPC's Unix sockets: bytes pass as they are, and what one process sends is held to rates."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from header_blocks import PREFACE, frame
from relay_harness import WAIT_S, Server, behind, echo, everything, say, sender
from rpc_harness import ServerProcess, eventually

from tilewright_server.endpoints.rpc.relay import NO_PROCESS, Origin
from tilewright_server.settings.rates import Rates

__all__ = ["behind"]


def test_bytes_pass_as_they_are_to_a_reader_that_is_late(behind: Callable[..., Server]) -> None:
    sent = PREFACE + b"".join(frame(0, bytes([index % 251]) * (index * 37 % 16000), 1) for index in range(400))
    with behind(echo).connect() as way:
        writer = threading.Thread(target=lambda: (way.sendall(sent), way.shutdown(socket.SHUT_WR)))
        writer.start()
        # The echo waits for us, the relay for the echo, the writer for the relay: nothing is read yet.
        writer.join(0.5)
        assert writer.is_alive()
        assert everything(way) == sent
        writer.join()


def test_what_a_server_says_last_arrives(behind: Callable[..., Server]) -> None:
    said = bytes(range(256)) * 4096

    def last(way: socket.socket) -> None:
        way.recv(1)
        way.sendall(said)

    with behind(last).connect() as way:
        way.send(PREFACE + frame(1, b"x" * 100, 1))
        assert everything(way) == said


def test_a_client_that_dies_ends_its_connection(behind: Callable[..., Server]) -> None:
    ended = threading.Event()

    def wait(way: socket.socket) -> None:
        everything(way)
        ended.set()

    server = behind(wait)
    with sender(server, 1) as process:
        say(process, PREFACE)
        assert eventually(lambda: server.relay.counts().open == 1)
        process.kill()
        assert ended.wait(WAIT_S)
    assert eventually(lambda: server.relay.counts().open == 0)


def test_frames_without_calls_are_held_to_a_rate(behind: Callable[..., Server]) -> None:
    got = bytearray()
    pings = 2 * int(Rates().relay_control[1])
    flood = PREFACE + frame(6, b"12345678") * pings

    def read(way: socket.socket) -> None:
        while part := way.recv(1 << 16):
            got.extend(part)

    server = behind(read)
    with sender(server, 1) as process:
        say(process, flood)
        assert eventually(lambda: server.relay.counts().paced > 0, WAIT_S)
        # Others are not held up by it, nor is what carries calls.
        with server.connect() as other:
            other.sendall(PREFACE + frame(0, b"z" * 9, 1))
            assert eventually(lambda: b"z" * 9 in got, WAIT_S)
        assert eventually(lambda: len(got) == len(flood) + len(PREFACE) + 18, WAIT_S)
    assert got.count(b"12345678") == pings


def test_connections_of_a_process_are_held_to_a_rate(behind: Callable[..., Server]) -> None:
    server = behind(echo)
    with sender(server, 3 * int(Rates().relay_connects[1])) as process:
        assert eventually(lambda: server.relay.counts().refused > 0, WAIT_S)
        assert server.relay.counts().accepted >= Rates().relay_connects[1]
        with sender(server, 1) as other:
            say(other, PREFACE + frame(0, b"hello", 1))
            other.stdin.close()  # type: ignore[union-attr]
            assert bytes.fromhex(other.stdout.read().split()[-1]).endswith(b"hello")  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]
        assert b"too many connections" in bytes.fromhex(process.stdout.read().split()[-1])  # type: ignore[union-attr]


def test_rates_are_those_of_the_settings(behind: Callable[..., Server]) -> None:
    server = behind(echo, rates=Rates(relay_connects=(1.0, 3.0), relay_list_bytes=8192))
    with sender(server, 6) as process:
        assert eventually(lambda: server.relay.counts().refused >= 2, WAIT_S)
        assert 3 <= server.relay.counts().accepted <= 4
        process.stdin.close()  # type: ignore[union-attr]
        assert b"too many connections" in bytes.fromhex(process.stdout.read().split()[-1])  # type: ignore[union-attr]


@pytest.mark.extended
def test_a_server_has_its_relays_keep_to_its_settings(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, relay_connects="1, 8") as server, contextlib.ExitStack() as stack:
        ways = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(16)]
        for way in ways:
            way.settimeout(WAIT_S)
            way.connect(str(server.socket))
            way.sendall(PREFACE)
        assert 4 <= sum(b"too many connections" in way.recv(200) for way in ways) <= 8


def test_a_server_that_is_gone_is_no_silence(behind: Callable[..., Server], tmp_path: Path) -> None:
    server = behind(echo)
    (tmp_path / "s~").unlink()
    with server.connect() as way:
        assert everything(way) == b""


def test_a_connection_is_known_by_its_name_until_it_ends(behind: Callable[..., Server]) -> None:
    seen: list[bytes] = []

    def name(way: socket.socket) -> None:
        seen.append(way.getpeername())
        echo(way)

    server = behind(name)
    numbers: list[int] = []
    for index in range(3):
        with server.connect() as way, sender(server, 1) as process:
            assert eventually(lambda: len(seen) == 2 * index + 2)  # noqa: B023
            for found in seen[-2:]:
                beginning, _, number = found.decode().removeprefix("\0").rpartition("-")
                assert beginning == server.relay.name
                numbers.append(int(number, 16))
            peers = [server.relay.peer(number) for number in numbers[-2:]]
            assert peers == [Origin(os.getpid(), os.geteuid()), Origin(process.pid, os.geteuid())]
            way.send(b"x")
        assert eventually(lambda: server.relay.counts().open == 0)
        assert server.relay.peer(numbers[-1]) is None
    assert len(set(numbers)) == 6
    assert server.relay.peer(1 << 60) is None


def test_over_tcp_a_connection_is_known_by_its_address(behind: Callable[..., Server]) -> None:
    seen: list[str] = []

    def name(way: socket.socket) -> None:
        seen.append(way.getpeername().decode().rpartition("-")[2])
        echo(way)

    server, asked = behind(name, tcp=True), threading.Event()
    sent = PREFACE + frame(0, bytes(16000), 1) * 100
    with server.connect() as way:
        writer = threading.Thread(target=lambda: (way.sendall(sent), asked.wait(60), way.shutdown(socket.SHUT_WR)))
        writer.start()
        assert way.recv(len(PREFACE), socket.MSG_PEEK)
        known = server.relay.peer(int(seen[0], 16))
        asked.set()  # who has said all is forgotten as soon as he is answered
        assert known == Origin(NO_PROCESS, 0, f"ipv4:127.0.0.1:{way.getsockname()[1]}")
        assert everything(way) == sent
        writer.join()


def test_a_connection_that_others_accepted_is_one_of_the_host_that_they_name(behind: Callable[..., Server]) -> None:
    server = behind(echo, tcp=True)
    ways = []
    for index in range(int(Rates().relay_connects[1]) + 40):
        own, its = socket.socketpair()
        server.relay.adopt(its, "2001:db8::1" if index % 2 else "2001:db8::2", 7, index)  # of one owner
        ways.append(own)
    other, its = socket.socketpair()
    server.relay.adopt(its, "192.0.2.1", 7, 99)
    other.sendall(PREFACE + frame(6, bytes(8)))
    assert other.recv(10)
    assert server.relay.counts().refused > 0
    for way in (*ways, other):
        way.close()
    with pytest.raises(ValueError):
        server.relay.adopt(its, "nowhere", 7, 1)


def test_a_relay_that_leaves_accepts_nobody_and_goes_on_with_who_is_there(behind: Callable[..., Server]) -> None:
    server = behind(echo)
    with server.connect() as way:
        way.sendall(PREFACE)
        assert way.recv(100) == PREFACE
        server.relay.leave()
        assert eventually(lambda: is_left(server))
        way.sendall(frame(0, b"on", 1))
        assert way.recv(100) == frame(0, b"on", 1)


def is_left(server: Server) -> bool:
    """A new connection stays in the kernel's queue."""
    before = server.relay.counts().accepted
    with server.connect() as late:
        late.settimeout(0.2)
        late.sendall(PREFACE)
        with contextlib.suppress(TimeoutError):
            late.recv(100)
    return server.relay.counts().accepted == before


GOAWAY = frame(7, b"\x7f\xff\xff\xff" + bytes(4))


@pytest.mark.parametrize("cut", [0, 4, 9, 12])
def test_clients_of_a_relay_that_leaves_are_told_between_two_frames(behind: Callable[..., Server], cut: int) -> None:
    headers = frame(1, b"h" * 20, 1)  # without the flag that ends them
    end = b"\0\0\3\x09\4\0\0\0\1abc"
    first, rest = frame(4) + headers[:cut], headers[cut:] + end + frame(0, b"data", 1)
    left = threading.Event()

    def answer(way: socket.socket) -> None:
        way.sendall(first)
        left.wait(WAIT_S)
        way.sendall(rest)
        everything(way)

    server = behind(answer)
    with server.connect() as way, server.connect() as silent:
        silent.sendall(PREFACE)
        got = b""
        while len(got) < len(first):
            got += way.recv(100)
        server.relay.leave()
        assert eventually(lambda: is_left(server))
        left.set()
        while len(got) < len(first + rest + GOAWAY):
            got += way.recv(100)
        # Before what began afterwards, or after the whole of it.
        assert got in (frame(4) + GOAWAY + headers + end + frame(0, b"data", 1), first + rest + GOAWAY)
        assert (got[9:26] == GOAWAY) == (cut == 0)
