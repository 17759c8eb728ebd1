"""Servers that follow one another at their sockets, and clients that hear nothing of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import REAL, ServerProcess, eventually

import tilewright as tw
from tilewright_proto.inference import inference_pb2 as pb


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
