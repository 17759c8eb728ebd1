"""Sockets that a server is started with, by a service manager that keeps them."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from authorities import Authority
from fake_engine import BEGUN
from rpc_harness import FAKE, REAL, Client, MemoryFile, eventually, in_region
from successors import Inferences, Load, Probes, Server, upgrade

import tilewright as tw

ACTIVATE = """
import os, socket, sys
path, mode, command = sys.argv[1], int(sys.argv[2], 8), sys.argv[3:]
held = []
for kind, name in ((socket.SOCK_STREAM, path), (socket.SOCK_SEQPACKET, path + ".local")):
    if os.path.exists(name):
        os.unlink(name)
    held.append(socket.socket(socket.AF_UNIX, kind))
    held[-1].bind(name)
    os.chmod(name, mode)
    held[-1].listen()
high = [os.dup(item.fileno()) for item in held]
for item in held:
    item.detach()
for number, found in enumerate(high):
    os.dup2(found, 3 + number)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "tilewright.socket:x"}
os.execv(command[0], command)
"""
"""Listens as a service manager does for a .socket unit, and becomes the server."""


TAKE = """
import fcntl, os, socket, sys
with socket.socket(socket.AF_UNIX) as way:
    way.connect(sys.argv[1])
    _, numbers, _, _ = socket.recv_fds(way, 1, 16)
high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 32) for number in numbers]
for place, number in enumerate(high):
    os.dup2(number, 3 + place)
names = ":".join(["tilewright.socket"] * len(high))
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(high)), "LISTEN_FDNAMES": names}
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Takes sockets from a manager, and becomes the server."""


class SocketManager:
    """Listens over TCP as a service manager does for a .socket unit, and keeps the sockets for every server."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._sockets = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(count)]
        for item in self._sockets:
            item.setblocking(False)
        self.addresses = [f"127.0.0.1:{item.getsockname()[1]}" for item in self._sockets]

    def place(self, index: int) -> tuple[str, int]:
        host, port = self._sockets[index].getsockname()
        return str(host), int(port)

    def start(self, command: list[str] = REAL, **settings: Any) -> Server:
        path = self._folder / "manager"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as way:
            way.bind(str(path))
            way.listen()
            threading.Thread(target=self._give, args=(way.dup(),)).start()
            return Server(self._folder, [sys.executable, "-c", TAKE, str(path), *command], **settings)

    def _give(self, listening: socket.socket) -> None:
        with listening, listening.accept()[0] as way:
            socket.send_fds(way, [b"x"], [item.fileno() for item in self._sockets])

    def __enter__(self) -> SocketManager:
        return self

    def __exit__(self, *exc: object) -> None:
        for item in self._sockets:
            item.close()


def activated(folder: Path, mode: str = "600", **settings: Any) -> Server:
    return Server(folder, [sys.executable, "-c", ACTIVATE, str(folder / "s.sock"), mode, *REAL], **settings)


@pytest.mark.extended
def test_tcp_sockets_of_a_service_manager_go_to_successors_and_outlive_them(tmp_path: Path, kernel_cache: Path) -> None:
    with SocketManager(tmp_path, 4) as manager:
        listen, own, pages, probes = manager.addresses
        settings: dict[str, Any] = {"listen": listen, "kserve_listen": own, "http_listen": pages}
        settings |= {"health_listen": probes, "insecure": True, "cache_dir": kernel_cache}
        with (
            manager.start(**settings) as server,
            Probes(int(probes.rpartition(":")[2])) as probing,
            Load(listen, 2) as load,
            Inferences(own, 2) as inferences,
        ):
            upgrade(server, load, 2)
            assert inferences.more()
            assert ready(pages)
        assert load.errors == inferences.errors == []
        assert set(probing.answers) == {"SERVING"}
        assert "a socket was given" not in server.log()
        with ThreadPoolExecutor(1) as threads:  # the last one has ended: who comes now waits for the next
            waiting = threads.submit(product, listen)
            assert not wait([waiting], 1).done, "it is neither refused nor served"
            with manager.start(**settings):
                assert waiting.result(60) and ready(pages)


@pytest.mark.extended
def test_a_tls_socket_of_a_service_manager_goes_to_successors(tmp_path: Path, kernel_cache: Path) -> None:
    authority = Authority(tmp_path)
    own, who = authority.server(), authority.sign("alice")
    tls = tw.Tls(ca=authority.path, certificate=who.certificate, key=who.key, server_name="localhost")
    settings = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
    with SocketManager(tmp_path, 1) as manager:
        (listen,) = manager.addresses
        with (
            manager.start(listen=listen, cache_dir=kernel_cache, **settings) as server,
            Load(listen, 2, tls) as load,
        ):
            upgrade(server, load, 1)
        with socket.create_connection(manager.place(0), 5):
            pass  # the manager's to the end
    assert "a socket was given" not in server.log()


def test_a_given_tcp_socket_needs_the_relay(tmp_path: Path) -> None:
    with SocketManager(tmp_path, 1) as manager:
        server = manager.start(FAKE, listen=manager.addresses[0], insecure=True, relay=False)
        assert (server.ready, server.wait()) == ("", 1)
        assert "only the relay can accept on it" in server.log()


def test_who_connects_over_tcp_while_a_server_drains_waits_for_the_next(tmp_path: Path) -> None:
    with (
        SocketManager(tmp_path, 1) as manager,
        contextlib.ExitStack() as opened,
        contextlib.closing(MemoryFile(4096)) as file,
    ):
        settings = {"kserve_listen": manager.addresses[0], "insecure": True}
        with manager.start(FAKE, **settings) as server, Client(server.addresses[0]) as client:
            region = client.register(file).region
            call = client.execution(client.plan(held=1), in_region(region), in_region(region, 64))
            running = client.dispatch.Execute.future(call)
            assert eventually(lambda: file.bytes[64] == BEGUN)
            server.signal()
            assert eventually(lambda: "draining for up to" in server.log())
            time.sleep(0.5)
            way = opened.enter_context(socket.create_connection(manager.place(0), 60))
            way.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
            way.settimeout(1)
            with pytest.raises(TimeoutError):
                way.recv(9)
            assert not running.done()
            server.signal()  # at once
            server.wait()
        with manager.start(FAKE, **settings):
            way.settimeout(60)
            assert way.recv(9)[3:4] == b"\4", "settings of HTTP/2"


def product(address: str) -> bool:
    a = np.eye(8, dtype=np.float32)
    with tw.connect(address, timeout=60) as client:
        return bool((client.gemm(a, a, launch="server") == a).all())


def ready(pages: str) -> bool:
    """True once the server says so over HTTP."""

    def answer() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{pages}/readyz", timeout=10) as reply:
            return bool(reply.status == 200)
        return False

    return eventually(answer, 60)


def test_sockets_of_a_service_manager_are_served_and_left_to_it(tmp_path: Path) -> None:
    a = np.eye(8, dtype=np.float32)
    with activated(tmp_path) as server:
        assert server.addresses == [f"unix:{server.socket}"]
        with tw.connect(server.addresses[0]) as client:
            assert (client.gemm(a, a, launch="server") == a).all()
            assert client.session.local_socket == f"{server.socket}.local"
        assert server.stop() == 0
    assert server.socket.is_socket()
    assert Path(f"{server.socket}.local").is_socket()
    assert "a socket was given" not in server.log()


def connects(path: Path) -> bool:
    """True if somebody listens: a socket's file is there from bind() on."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as way:
        way.connect(str(path))
        return True
    return False


def test_who_connected_before_the_server_was_there_is_served(tmp_path: Path) -> None:
    served = threading.Event()

    def early() -> None:
        assert eventually(lambda: connects(tmp_path / "s.sock"))
        with Client(f"unix:{tmp_path / 's.sock'}") as client:
            assert client.token
        served.set()

    threading.Thread(target=early, daemon=True).start()
    with activated(tmp_path):
        assert served.wait(60)


def test_a_socket_that_is_open_to_more_than_the_settings_say_is_refused(tmp_path: Path) -> None:
    server = activated(tmp_path, "666")
    assert (server.ready, server.wait()) == ("", 1)
    assert "SocketMode=0600" in server.log()
    with activated(tmp_path, "666", socket_mode="666") as other:
        assert other.addresses


def test_a_given_socket_needs_the_relay(tmp_path: Path) -> None:
    server = activated(tmp_path, relay=False)
    assert (server.ready, server.wait()) == ("", 1)
    assert "only the relay can accept on it" in server.log()


def test_sockets_without_a_place_in_the_settings_are_named_and_closed(tmp_path: Path) -> None:
    with activated(tmp_path, listen=f"unix:{tmp_path / 'other.sock'}") as server:
        assert eventually(lambda: server.log().count("a socket was given to this server that it does not") == 2)
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as way:
            way.connect(str(tmp_path / "s.sock"))
