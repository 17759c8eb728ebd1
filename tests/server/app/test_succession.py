"""Sockets that a server is started with, and servers that follow one another at them without losing a call."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from authorities import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import FAKE, REAL, Client, ServerProcess, eventually, free_port

import tilewright as tw
from tilewright_proto.inference import inference_pb2 as pb

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


class Server(ServerProcess):
    """A server of every operation, and those that follow it."""

    def __init__(self, folder: Path, command: list[str] = REAL, **settings: Any) -> None:
        super().__init__(folder, command, **{"grace_s": 20, **settings})

    def successors(self) -> list[int]:
        """Processes that were started to follow."""
        return [int(pid) for pid in re.findall(r"process (\d+) is to succeed", self.log())]

    def succeed(self, pid: int) -> int:
        """Have the server ``pid`` followed; returns the process number of the next, once it serves alone."""
        before = len(self.successors())
        os.kill(pid, signal.SIGUSR2)
        assert eventually(lambda: len(self.successors()) > before and ended(pid), 120), self.log()
        return self.successors()[-1]

    def stop(self) -> int:
        for pid in self.successors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        status = super().stop()
        assert eventually(lambda: all(map(ended, self.successors())), 60)
        return status


def ended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def activated(folder: Path, mode: str = "600", **settings: Any) -> Server:
    return Server(folder, [sys.executable, "-c", ACTIVATE, str(folder / "s.sock"), mode, *REAL], **settings)


class Load:
    """Clients that multiply matrices one after the other, each in a thread."""

    def __init__(self, address: str, count: int, tls: tw.Tls | None = None) -> None:
        self._tls = tls
        self.errors: list[BaseException] = []
        self.calls = [0] * count
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(address, index)) for index in range(count)]

    def _run(self, address: str, index: int) -> None:
        a = np.random.default_rng(index).integers(-4, 4, (24, 24)).astype(np.float32)
        try:
            with tw.connect(address, tls=self._tls) as client:
                while not self._stop.is_set():
                    assert (client.gemm(a, a, launch="server") == a @ a).all()
                    self.calls[index] += 1
        except BaseException as error:
            self.errors.append(error)

    def more(self) -> bool:
        """Each client has been answered ten times more, or one has failed."""
        before = list(self.calls)
        enough = lambda: all(now > then + 10 for now, then in zip(self.calls, before, strict=True))  # noqa: E731
        return eventually(lambda: bool(self.errors) or enough(), 120)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("local_socket", [True, False])
@pytest.mark.some(1)
def test_an_upgrade_under_load_loses_no_call(tmp_path: Path, local_socket: bool) -> None:
    with Server(tmp_path, local_socket=local_socket) as server, Load(server.addresses[0], 4) as load:
        upgrade(server, load, 2)
    assert server.wait() == 0
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith("s.sock")] == []


def upgrade(server: Server, load: Load, times: int) -> None:
    """Have a server followed, and those that follow it, under load."""
    pid = server.pid
    for _ in range(times):
        assert load.more()
        assert load.errors == []
        pid = server.succeed(pid)
    assert load.more()
    assert load.errors == []
    assert server.log().count("serves now, this one ends") == times


class Inferences(Load):
    """Clients of the Open Inference Protocol, by stubs that know nothing of successors."""

    def _run(self, address: str, index: int) -> None:
        a = np.random.default_rng(index).integers(-4, 4, (24, 24)).astype(np.float32)
        request = pb.ModelInferRequest(model_name="tilewright.gemm", raw_input_contents=[a.tobytes()] * 2)
        for name in ("a", "b"):
            request.inputs.add(name=name, datatype="FP32", shape=a.shape)
        options = [("grpc.use_local_subchannel_pool", 1)]
        try:
            with grpc.insecure_channel(address, options) as channel:
                infer: Any = channel.unary_unary(
                    "/inference.GRPCInferenceService/ModelInfer",
                    pb.ModelInferRequest.SerializeToString,
                    pb.ModelInferResponse.FromString,
                )
                while not self._stop.is_set():
                    assert infer(request, timeout=60).raw_output_contents == [(a @ a).tobytes()]
                    self.calls[index] += 1
        except BaseException as error:
            self.errors.append(error)


@pytest.mark.extended
def test_an_upgrade_over_tcp_loses_no_call(tmp_path: Path, kernel_cache: Path) -> None:
    listen, own = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = {"listen": listen, "kserve_listen": own, "insecure": True, "cache_dir": kernel_cache}
    with Server(tmp_path, **settings) as server, Load(listen, 2) as load, Inferences(own, 2) as inferences:
        upgrade(server, load, 1)
        assert inferences.more()
        assert inferences.errors == []
        server.succeed(server.successors()[-1])
        assert load.more()
        assert inferences.more()
    assert load.errors == inferences.errors == []
    assert server.log().count("serves now, this one ends") == 2
    assert "a socket was given" not in server.log()


@pytest.mark.extended
def test_an_upgrade_over_tls_loses_no_call(tmp_path: Path, kernel_cache: Path) -> None:
    authority = Authority(tmp_path)
    own, who = authority.server(), authority.sign("alice")
    tls = tw.Tls(ca=authority.path, certificate=who.certificate, key=who.key, server_name="localhost")
    listen = f"127.0.0.1:{free_port()}"
    settings = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
    with Server(tmp_path, listen=listen, cache_dir=kernel_cache, **settings) as server, Load(listen, 2, tls) as load:
        upgrade(server, load, 2)
    assert "a socket was given" not in server.log()


def test_a_handshake_that_has_begun_is_served_by_whoever_accepted_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, who = authority.server(), authority.sign("alice")
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(who.certificate, who.key)
    context.set_alpn_protocols(["h2"])
    port = free_port()
    settings = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
    with Server(tmp_path, FAKE, listen=f"127.0.0.1:{port}", **settings) as server:
        with socket.create_connection(("127.0.0.1", port), 60) as way:
            time.sleep(0.5)  # accepted
            server.signal(signal.SIGUSR2)
            assert eventually(lambda: "serves now, this one ends" in server.log(), 60)
            time.sleep(2)
            with context.wrap_socket(way, server_hostname="localhost") as tls:
                tls.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
                assert tls.recv(9)[3:4] == b"\4", "settings of HTTP/2"
        assert eventually(lambda: ended(server.pid), 60)


class Probes:
    """A kubelet's gRPC probes, each over a connection of its own, one after the other."""

    def __init__(self, port: int) -> None:
        self.answers: list[str] = []
        self._address = f"127.0.0.1:{port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def ask(self) -> str:
        """Status, or the error instead of one."""
        kind = health_pb2.HealthCheckResponse.ServingStatus
        with grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            except grpc.RpcError as error:
                return str(error.code())
        return str(kind.Name(reply.status))

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.answers.append(self.ask())

    def __enter__(self) -> Probes:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def test_probes_over_grpc_are_answered_throughout_an_upgrade(tmp_path: Path) -> None:
    port = free_port()
    with Server(tmp_path, FAKE, health_listen=f"127.0.0.1:{port}") as server, Probes(port) as probes:
        assert eventually(lambda: len(probes.answers) > 5, 60)
        pid = server.succeed(server.pid)
        before = len(probes.answers)
        assert eventually(lambda: len(probes.answers) > before + 5, 60)
        assert set(probes.answers) == {"SERVING"}, (probes.answers, server.log())
        os.kill(pid, signal.SIGTERM)
        assert eventually(lambda: ended(pid), 60)
        assert probes.ask() == "StatusCode.UNAVAILABLE", "the last one takes the port with it"
    assert server.log().count(f"health checks over gRPC at 127.0.0.1:{port}") == 2


def test_a_server_goes_on_if_its_successor_cannot_start(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    with Server(tmp_path, policy=policy) as server, Client(server.addresses[0]) as client:
        policy.write_text("nonsense")
        server.signal(signal.SIGUSR2)
        assert eventually(lambda: "before it served; this server goes on" in server.log(), 60)
        assert client.status() is not None
        with Client(server.addresses[0]) as other:
            assert other.status() is not None
        policy.write_text("")
        server.succeed(server.pid)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"relay": False}, "gRPC gives the socket that it listens on to nobody"), ({}, "the system has chosen the port")],
    ids=["relay", "port"],
)
def test_a_server_over_tcp_says_why_it_cannot_be_followed(tmp_path: Path, settings: Any, reason: str) -> None:
    with Server(tmp_path, FAKE, listen="127.0.0.1:0", insecure=True, **settings) as server:
        server.signal(signal.SIGUSR2)
        assert eventually(lambda: reason in server.log(), 60)
        with Client(server.addresses[0]) as client:
            assert client.status() is not None


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
