"""Clients of the soak: packets, messages, the library, floods, and a GPU's."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SERVER_TESTS = Path(__file__).parents[1] / "server"
sys.path[:0] = [str(SERVER_TESTS / "rpc"), str(SERVER_TESTS / "local")]

import grpc  # noqa: E402
import numpy as np  # noqa: E402
from local_harness import BIND, CALL, HEADER, HELLO, LAUNCH, REGISTER, REPLY, UNBIND, UNREGISTER, Wire  # noqa: E402
from rpc_harness import Client, MemoryFile, in_region  # noqa: E402

import tilewright as tw  # noqa: E402
from tests.soak.counters import Counts  # noqa: E402
from tests.soak.messages import METHODS, Known, random_request  # noqa: E402
from tilewright_proto.v1 import dispatch_pb2 as dp  # noqa: E402
from tilewright_proto.v1 import error_pb2  # noqa: E402
from tilewright_proto.v1 import memory_pb2 as mp  # noqa: E402
from tilewright_proto.v1 import tensor_pb2 as tp  # noqa: E402
from tilewright_server.protocol.frames import Kind  # noqa: E402

__all__ = ["Actor", "Evictor", "Flood", "Gpu", "Library", "Messages", "Packets"]

BATCH = 64
"""gRPC calls of one actor that are under way together."""
LONG = ("/tilewright.v1.Kernels/Export", "/tilewright.v1.Kernels/List", "/tilewright.v1.Kernels/Describe")
"""Methods whose right answers read all kernels, which takes up to seconds of processor time."""
LONG_SHARE = 0.05
"""The share of their turns in which they are called: all else would wait for them."""
UNKNOWN = range(max(Kind) + 1, 128)
"""Kinds of packets that are not, each of which is answered."""
PACKETS = 12
"""Packets of launches of no binding that are under way together."""


class Actor:
    """What all have: where the server is, chance, counts, an end."""

    def __init__(self, target: str, seed: int, counts: Counts, seconds: float) -> None:
        self.target = target
        self.rng = random.Random(seed)
        self.counts = counts
        self.end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def detail(self, detail: error_pb2.ErrorDetail) -> None:
        """Count an error."""
        if detail.code in ("", "internal"):
            sys.stderr.write(f"{type(self).__name__}: {detail}\n")
            self.counts.add("untyped")
        else:
            self.counts.add("refused")

    def error(self, error: Any) -> None:
        """Count a failed call of gRPC."""
        metadata = dict(error.trailing_metadata() or ())
        if "tilewright-error-bin" in metadata:
            self.detail(error_pb2.ErrorDetail.FromString(metadata["tilewright-error-bin"]))
        elif error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
            self.counts.add("refused")  # of this side's making
        else:
            sys.stderr.write(f"{type(self).__name__}: {error.code()} {error.details()}\n")
            self.counts.add("untyped")

    def run(self) -> None:
        raise NotImplementedError


def product(client: Client) -> dp.PlanRequest:
    spec = tp.TensorSpec(dtype=tp.FP32, shape=[8, 8])
    inputs = [tp.Operand(name=name, spec=spec) for name in "ab"]
    return dp.PlanRequest(session=client.token, operation="gemm", inputs=inputs)


class Packets(Actor):
    """Packets of the local socket, right and wrong, one after the other over one connection and then another."""

    def run(self) -> None:
        while not self.over:
            try:
                with Client(self.target) as client:
                    self.session(client)
            except grpc.RpcError as error:  # noqa: PERF203 - while it opens a session and plans
                self.error(error)
                time.sleep(self.rng.uniform(0.1, 1.0))

    def session(self, client: Client) -> None:
        rng = self.rng
        with Wire(client.opened.local_socket, client.token, timeout=120.0) as wire:
            file = MemoryFile(4096)
            values = np.frombuffer(file.bytes, np.float32)[: 3 * 64].reshape(3, 8, 8)
            values[:2] = np.random.default_rng(rng.randrange(1 << 30)).standard_normal((2, 8, 8))
            plan = client.dispatch.Plan(product(client)).plan
            region = wire.register(file)
            binding = wire.bind(plan, *(in_region(region, 256 * index) for index in range(3)))
            until = min(self.end, time.monotonic() + rng.uniform(1, 20))
            while time.monotonic() < until:
                values[2] = 0
                self.reply(wire.launch(binding))
                if not np.allclose(values[2], values[0] @ values[1], atol=1e-4):
                    self.counts.add("wrong")
                for _ in range(50):
                    self.counts.add("hostile")
                    self.hostile(wire, file)
                self.launches(wire)
            del values
            file.close()

    def reply(self, reply: Any) -> None:
        self.counts.add("requests")
        if reply is None:
            raise ConnectionResetError
        if reply.error is None:
            self.counts.add("answered")
        else:
            self.detail(reply.error)

    def launches(self, wire: Wire) -> None:
        """Packets of launches of bindings that are not, each of which is answered, in order."""
        sent = 0
        for _ in range(PACKETS):
            count = self.rng.randrange(1, 64)
            numbers = range(sent, sent + count)
            wire.send(b"".join(HEADER.pack(LAUNCH, REPLY, 0, number, self.number()) for number in numbers))
            sent += count
        self.counts.add("hostile", sent)
        for number in range(sent):
            reply = wire.receive()
            self.reply(reply)
            if reply is None or reply.error is None or reply.sequence != number:
                self.counts.add("wrong")

    def number(self) -> int:
        return self.rng.choice((0, 1, 2**32, 2**63, 2**64 - 1, self.rng.getrandbits(64)))

    def hostile(self, wire: Wire, file: MemoryFile) -> None:
        rng = self.rng
        kind = rng.randrange(9)
        if kind == 0:
            self.reply(wire.ask(rng.choice(UNKNOWN), self.number(), rng.randbytes(rng.randrange(200))))
        elif kind == 1:
            wire.send(rng.randbytes(rng.randrange(1, 16)))
            self.reply(wire.receive())
        elif kind == 2:
            wire.send(HEADER.pack(LAUNCH, REPLY, 0, 1, 1) + rng.randbytes(rng.randrange(1, 15)))
            self.reply(wire.receive())
        elif kind == 3:
            self.reply(wire.ask(CALL, rng.choice((BIND, UNBIND, UNREGISTER, 99)), rng.randbytes(rng.randrange(64))))
        elif kind == 4:
            request = mp.RegisterRegionRequest(attached={}, bytes=rng.choice((0, 1, 4096, 4097, 2**46, 2**63)))
            reply = wire.call(REGISTER, request, [rng.choice((file.fd, 0, 1, wire.socket.fileno()))])
            if reply.error is None:
                self.reply(wire.call(UNREGISTER, mp.UnregisterRegionRequest(region=reply.value)))
            self.reply(reply)
        elif kind == 5:
            self.reply(wire.ask(HELLO, 1, rng.randbytes(16)))
        elif kind == 6:  # which nothing answers
            silent = rng.choice((Kind.TRACE, Kind.REQUEST))
            wire.send(HEADER.pack(silent, 0, 0, 1, self.number()) + rng.randbytes(rng.randrange(1200)))
        else:
            self.reply(wire.launch(self.number()))


class Messages(Actor):
    """Requests that are right in structure and wrong in everything else, to every method."""

    def run(self) -> None:
        paths = sorted(path for path, method in METHODS.items() if not method.client_streaming)
        while not self.over:
            with Client(self.target) as client:
                try:
                    known = self.known(client)
                except grpc.RpcError as error:
                    self.error(error)
                    time.sleep(self.rng.uniform(0.1, 1.0))
                    continue
                until = min(self.end, time.monotonic() + self.rng.uniform(2, 20))
                while time.monotonic() < until:
                    self.batch(client, known, paths)

    def known(self, client: Client) -> Known:
        plan = client.dispatch.Plan(product(client)).plan
        buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4096)).buffer
        if not self.target.startswith("unix:"):
            return Known(client.token, 1, plan, buffer)  # of no region: there is no memory to share
        file = MemoryFile(4096)
        region = client.register(file).region
        file.close()
        return Known(client.token, region, plan, buffer)

    def batch(self, client: Client, known: Known, paths: list[str]) -> None:
        calls = []
        for _ in range(BATCH):
            path = self.rng.choice(paths)
            if path in LONG and self.rng.random() > LONG_SHARE:
                continue
            if self.rng.random() < 0.05:
                data = self.rng.randbytes(self.rng.randrange(300))
            else:
                data = random_request(path, known, self.rng)
            if METHODS[path].server_streaming:
                if path.endswith("Build"):
                    continue  # which would rightly build everything
                stream = client.channel.unary_stream(path)(data, timeout=60)
                self.counts.add("requests")
                self.counts.add("hostile")
                try:
                    next(stream)
                    self.counts.add("answered")
                    stream.cancel()
                except StopIteration:
                    self.counts.add("answered")
                except grpc.RpcError as error:
                    self.error(error)
                continue
            calls.append(client.channel.unary_unary(path).future(data, timeout=60))
        for call in calls:
            self.counts.add("requests")
            self.counts.add("hostile")
            error = call.exception()
            if error is None:
                self.counts.add("answered")
            else:
                self.error(error)


class Library(Actor):
    """The Python client: products of all sorts, every one checked."""

    def run(self) -> None:
        launch: Any = self.rng.choice(("server", "server", "auto"))
        if self.rng.random() < 0.3:
            asyncio.run(self.awaited())
            return
        with tw.connect(self.target, launch=launch, timeout=60.0) as client:
            while not self.over:
                try:
                    self.products(client)
                except tw.TilewrightError as error:  # noqa: PERF203 - of plans and bindings, which are not counted
                    self.failed(error)

    def products(self, client: tw.Client) -> None:
        rng = self.rng
        m, n, k = (rng.randrange(1, 40) for _ in range(3))
        data = np.random.default_rng(rng.randrange(1 << 30))
        x, y = data.standard_normal((m, k), np.float32), data.standard_normal((k, n), np.float32)
        a, b = client.asarray(x), client.asarray(y)
        plan = client.plan_gemm(a, b)
        bound = plan.bind(a, b, out=client.zeros((m, n)))
        calls: list[Callable[[], Any]] = [
            lambda: client.gemm(a, b),
            lambda: client.gemm(x, y),
            lambda: plan(a, b),
            lambda: plan(x, y, repeat=rng.randrange(1, 20)),
            lambda: plan.run_many([bound] * rng.randrange(1, 10))[0],
            bound,
            lambda: self.streamed(plan, a, b),
            lambda: client.gemm(a, client.pack_b(b)),
        ]
        for _ in range(20):
            self.checked(rng.choice(calls), x @ y)
        with client.buffer(rng.randrange(1, 1 << 16)) as buffer:
            buffer.write(bytes(min(buffer.nbytes, 4096)))
            self.checked(lambda: buffer.read(1)[0], np.uint8(0))

    def streamed(self, plan: Any, a: Any, b: Any) -> Any:
        with plan.stream() as stream:
            return [stream.submit(a, b) for _ in range(self.rng.randrange(1, 50))][-1].result(300)

    def checked(self, call: Callable[[], Any], wanted: Any) -> None:
        self.counts.add("requests")
        try:
            self.compared(call(), wanted)
        except tw.TilewrightError as error:
            self.failed(error)

    def compared(self, result: Any, wanted: Any) -> None:
        self.counts.add("answered")
        if not np.allclose(result, wanted, atol=1e-3):
            self.counts.add("wrong")

    def failed(self, error: tw.TilewrightError) -> None:
        if isinstance(error, tw.UnknownOutcomeError):
            self.counts.add("unknown")
        elif error.code == "internal":
            sys.stderr.write(f"Library: {error}\n")
            self.counts.add("untyped")
        else:
            self.counts.add("refused")

    async def awaited(self) -> None:
        async with tw.aio.connect(self.target, launch="server", timeout=60.0) as client:
            x = np.random.default_rng(self.rng.randrange(1 << 30)).standard_normal((9, 9), np.float32)
            a = await client.asarray(x)
            while not self.over:
                results = await asyncio.gather(*(client.gemm(a, a) for _ in range(8)), return_exceptions=True)
                self.counts.add("requests", len(results))
                for result in results:
                    if isinstance(result, tw.TilewrightError):
                        self.failed(result)
                    elif isinstance(result, BaseException):
                        raise result
                    else:
                        self.compared(result, x @ x)


class Evictor(Library):
    """Products by one kernel after another, more than the cache has room for."""

    def products(self, client: tw.Client) -> None:
        names = [
            item.name
            for item in client.kernels.list("gemm", limit=400)
            if "fp32_rcr" in item.name or "fp32_rrr" in item.name
        ]
        x = np.ones((16, 16), np.float32)
        for name in self.rng.sample(names, min(6, len(names))):
            if self.over:
                return
            self.checked(lambda name=name: client.gemm(x, x, kernel=name, launch="server"), x @ x)  # type: ignore[misc]
            time.sleep(self.rng.uniform(1, 4))


class Flood(Actor):
    """Everything that can be opened, until it is refused; then nothing for a while."""

    def run(self) -> None:
        rng = self.rng
        with contextlib.ExitStack() as opened:
            while not self.over:
                kind, count = rng.randrange(4), rng.randrange(1, 60)
                for _ in range(count):
                    with contextlib.suppress(OSError):
                        self.opened(kind, opened)
                if kind == 3:
                    self.unread(opened)
                time.sleep(rng.uniform(0.2, 2))
                if rng.random() < 0.5:
                    opened.close()

    def opened(self, kind: int, opened: contextlib.ExitStack) -> None:
        self.counts.add("requests")
        self.counts.add("hostile")
        if kind == 0:
            client = opened.enter_context(Client(self.target, session=False))
            client.lease = client.memory.OpenSession(mp.OpenSessionRequest(), timeout=60)
            try:
                next(client.lease)
                self.counts.add("answered")
            except grpc.RpcError as error:
                self.error(error)
        elif kind == 1:
            silent = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.settimeout(5)
            silent.connect(self.target.removeprefix("unix:") + ".local")
        else:
            noise = opened.enter_context(socket.socket(socket.AF_UNIX))
            noise.settimeout(5)
            noise.connect(self.target.removeprefix("unix:"))
            noise.send(self.rng.choice((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"")))
            noise.send(self.rng.randbytes(self.rng.randrange(1, 3000)))

    def unread(self, opened: contextlib.ExitStack) -> None:
        """Replies that nobody reads."""
        try:
            client = opened.enter_context(Client(self.target))
            buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=1 << 20)).buffer
        except grpc.RpcError as error:
            self.error(error)
            return
        request = mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=1 << 20).SerializeToString()
        for _ in range(30):
            self.counts.add("requests")
            self.counts.add("hostile")
            opened.callback(client.channel.unary_stream("/tilewright.v1.Memory/ReadBuffer")(request).cancel)


class Gpu(Library):
    """Launches on a GPU whose driver is simulated, and whose process is killed now and then. Kernels leave outputs as
    they were: what was written is read again."""

    def run(self) -> None:
        with tw.connect(self.target, launch="server", timeout=60.0) as client:
            while not self.over:
                with contextlib.suppress(tw.TilewrightError):
                    self.products(client)

    def products(self, client: tw.Client) -> None:
        buffers = [client.buffer(1 << 15, "cuda:0") for _ in range(3)]
        a, b, out = (buffer.tensor((128, 128), "bf16") for buffer in buffers)
        written = np.frombuffer(self.rng.randbytes(1 << 15), np.uint8)
        buffers[2].write(written)
        bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
        for _ in range(200):
            self.checked(bound, None)
            self.checked(lambda: client.gemm(a, b, out=out), None)
        if not (buffers[2].read() == written).all():
            self.counts.add("wrong")

    def compared(self, result: Any, wanted: Any) -> None:
        self.counts.add("answered")
