"""Clients of the soak by other ways than packets and messages over Unix sockets: TCP, TLS, the Open Inference Protocol,
launches in their own process, and connections to a GPU's process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "kserve"))

import grpc
import numpy as np
from fuzz_requests import SERVICE, TYPED, malformed
from local_harness import ATTACH, Wire
from rpc_harness import Client

import tilewright as tw
from tests.soak.actors import Actor, Library, Packets
from tilewright_proto.inference import inference_pb2 as pb

__all__ = ["Caller", "GpuPackets", "Handshakes", "KServe", "Malformed", "Remote", "Tls"]

MODEL = "tilewright.gemm"
SHARED = Path("/dev/shm")
BATCH = 16
"""Malformed requests that are under way together."""
GREETING = bytes.fromhex("160301020001 0001fc0303")
"""The beginning of a TLS handshake."""


class Remote(Library):
    """The Python client over TCP: operands travel in the messages."""

    def opened(self) -> tw.Client:
        return tw.connect(self.target, launch="server", timeout=60.0)

    def run(self) -> None:
        with self.opened() as client:
            while not self.over:
                try:
                    self.products(client)
                except tw.TilewrightError as error:  # noqa: PERF203
                    self.failed(error)

    def products(self, client: tw.Client) -> None:
        m, n, k = (self.rng.randrange(1, 200) for _ in range(3))
        data = np.random.default_rng(self.rng.randrange(1 << 30))
        x, y = data.standard_normal((m, k), np.float32), data.standard_normal((k, n), np.float32)
        plan = client.plan_gemm(x, y)
        calls: list[Callable[[], Any]] = [
            lambda: client.gemm(x, y),
            lambda: plan(x, y),
            lambda: plan(x, y, repeat=self.rng.randrange(1, 20)),
            lambda: self.streamed(plan, x, y),
        ]
        for _ in range(20):
            self.checked(self.rng.choice(calls), x @ y)


class Tls(Remote):
    """The same over TLS. The target names the folder of the certificates besides."""

    def opened(self) -> tw.Client:
        target, folder = self.target.split("|")
        files = {"ca": "authority.pem", "certificate": "client.pem", "key": "client.key"}
        tls = tw.Tls(**{name: Path(folder, file) for name, file in files.items()}, server_name="localhost")
        return tw.connect(target, launch="server", timeout=60.0, tls=tls)


class Caller(Remote):
    """Launches in this process, by libtilewright."""

    def opened(self) -> tw.Client:
        return tw.connect(self.target, launch="caller", timeout=60.0)

    def products(self, client: tw.Client) -> None:
        m, n, k = (self.rng.randrange(1, 40) for _ in range(3))
        data = np.random.default_rng(self.rng.randrange(1 << 30))
        x, y = data.standard_normal((m, k), np.float32), data.standard_normal((k, n), np.float32)
        plan, out = client.plan_gemm(x, y), np.zeros((m, n), np.float32)
        bound = plan.bind(x, y, out=out)
        for _ in range(20):
            out[:] = 0
            calls = (lambda: client.gemm(x, y), lambda: plan(x, y), bound)
            self.checked(self.rng.choice(calls), x @ y)
            if client.report is not None and client.report.placement != "caller":
                self.counts.add("wrong")


class KServe(Actor):
    """Products by the Open Inference Protocol, every one checked; operands and results in shared memory, too."""

    def run(self) -> None:
        while not self.over:
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(self.target, options=options) as way:
                until = min(self.end, time.monotonic() + self.rng.uniform(2, 20))
                while time.monotonic() < until:
                    try:
                        self.messages(way)
                        if self.target.startswith("unix:"):
                            self.shared(way)
                    except grpc.RpcError as error:  # noqa: PERF203
                        self.error(error)
                        time.sleep(self.rng.uniform(0.05, 0.5))

    def call(self, way: grpc.Channel, method: str, request: Any, kind: Any) -> Any:
        self.counts.add("requests")
        reply = kind.FromString(way.unary_unary(SERVICE + method)(request.SerializeToString(), timeout=60))
        self.counts.add("answered")
        return reply

    def operands(self) -> tuple[Any, Any, pb.ModelInferRequest]:
        side = self.rng.choice((4, 16, 37))
        data = np.random.default_rng(self.rng.randrange(1 << 30))
        a, b = data.standard_normal((2, side, side)).astype(np.float32)
        request = pb.ModelInferRequest(model_name=MODEL)
        for name in ("a", "b"):
            request.inputs.add(name=name, datatype="FP32", shape=[side, side])
        return a, b, request

    def compare(self, data: bytes, wanted: Any) -> None:
        if len(data) != wanted.nbytes or not np.allclose(
            np.frombuffer(data, np.float32).reshape(wanted.shape), wanted, atol=1e-3
        ):
            self.counts.add("wrong")

    def messages(self, way: grpc.Channel) -> None:
        for _ in range(self.rng.randrange(1, 20)):
            a, b, request = self.operands()
            request.raw_input_contents.extend([a.tobytes(), b.tobytes()])
            reply = self.call(way, "ModelInfer", request, pb.ModelInferResponse)
            self.compare(reply.raw_output_contents[0], a @ b)

    def shared(self, way: grpc.Channel) -> None:
        """Registered, used, and unregistered or left to the end of the connection."""
        a, b, request = self.operands()
        name = f"tw-soak-{os.getpid()}-{self.rng.getrandbits(40)}"
        with shared_memory(name, 3 * a.nbytes) as memory:
            memory[: 2 * a.nbytes] = a.tobytes() + b.tobytes()
            register = pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=3 * a.nbytes)
            self.call(way, "SystemSharedMemoryRegister", register, pb.SystemSharedMemoryRegisterResponse)
            request.outputs.add(name="out")
            for place, item in enumerate((*request.inputs, request.outputs[0])):
                item.parameters["shared_memory_region"].string_param = name
                item.parameters["shared_memory_byte_size"].int64_param = a.nbytes
                item.parameters["shared_memory_offset"].int64_param = place * a.nbytes
            for _ in range(self.rng.randrange(1, 10)):
                memory[2 * a.nbytes :] = bytes(a.nbytes)
                self.call(way, "ModelInfer", request, pb.ModelInferResponse)
                self.compare(bytes(memory[2 * a.nbytes :]), a @ b)
            if self.rng.random() < 0.8:
                gone = pb.SystemSharedMemoryUnregisterRequest(name=name)
                self.call(way, "SystemSharedMemoryUnregister", gone, pb.SystemSharedMemoryUnregisterResponse)


@contextlib.contextmanager
def shared_memory(name: str, nbytes: int) -> Iterator[mmap.mmap]:
    """An object of POSIX shared memory, mapped."""
    path = SHARED / name
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.pwrite(fd, bytes(nbytes), 0)
        with mmap.mmap(fd, nbytes) as mapped:
            yield mapped
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


class Malformed(Actor):
    """Requests of the Open Inference Protocol whose bytes, fields and lengths were changed."""

    def run(self) -> None:
        while not self.over:
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(self.target, options=options) as way:
                self.requests(way, min(self.end, time.monotonic() + self.rng.uniform(2, 20)))

    def requests(self, way: grpc.Channel, until: float) -> None:
        wrong = malformed(1 << 30, self.rng.randrange(1 << 30))
        while time.monotonic() < until:
            batch = [next(wrong) for _ in range(BATCH)]
            calls = [(method, way.unary_unary(SERVICE + method).future(data, timeout=60)) for method, data in batch]
            for method, call in calls:
                self.counts.add("requests")
                self.counts.add("hostile")
                code = call.code().name
                if code not in TYPED:
                    sys.stderr.write(f"Malformed: {method}: {code} {call.details()}\n")
                    self.counts.add("untyped")
                else:
                    self.counts.add("answered" if code == "OK" else "refused")


class Handshakes(Actor):
    """Connections to a listener of TLS that say nothing, half of a greeting, or anything."""

    def run(self) -> None:
        host, _, port = self.target.partition("|")[0].rpartition(":")
        with contextlib.ExitStack() as opened:
            while not self.over:
                for _ in range(self.rng.randrange(1, 40)):
                    self.counts.add("requests")
                    self.counts.add("hostile")
                    with contextlib.suppress(OSError):
                        way = opened.enter_context(socket.create_connection((host, int(port)), 5))
                        noise = random.Random(self.rng.random()).randbytes(self.rng.randrange(1, 3000))
                        way.send(self.rng.choice((b"", GREETING, noise, GREETING + noise)))
                time.sleep(self.rng.uniform(0.2, 2))
                if self.rng.random() < 0.7:
                    opened.close()


class GpuPackets(Packets):
    """Launches of bindings that are not, by connections to the process of a GPU, which may end meanwhile."""

    def run(self) -> None:
        while not self.over:
            try:
                with (
                    Client(self.target) as client,
                    Wire(client.opened.local_socket, client.token, timeout=60.0) as wire,
                ):
                    reply = wire.ask(ATTACH, payload=b"cuda:0")
                    self.reply(reply)
                    until = min(self.end, time.monotonic() + self.rng.uniform(1, 20))
                    while reply.error is None and time.monotonic() < until:
                        self.launches(wire)
                        time.sleep(0.05)  # all of this is the machine's, whose GPU costs nothing else
            except grpc.RpcError as error:
                self.error(error)
            except (OSError, AssertionError):
                self.counts.add("refused")  # the process ended, and its connections with it
            time.sleep(self.rng.uniform(0.1, 1.0))
