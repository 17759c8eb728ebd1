"""Latency under load: 1 to 256 clients, by gRPC, the local socket, the Open Inference Protocol and in place.

Each row's saturation is measured first, with clients that call without a pause; then come 50, 80 and 95 % of it, as
Poisson arrivals, with times from when a call should have begun. A server of grpcio that sends its request back is
measured in the same run, with as many bytes either way: what Python's gRPC costs without us. Clients and servers share
the machine, so saturation is that of both together.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
from common.open_loop import Call, Clients, Opened

import tilewright
from suites.base import Options, Table, main
from tilewright_proto.inference import inference_pb2
from tilewright_proto.v1 import dispatch_pb2, tensor_pb2
from tilewright_tools.cli.private_server import PrivateServer

SIDE = 64
LOADS = (0.5, 0.8, 0.95)
COUNTS = (1, 4, 16, 64, 256)
RUN = "/tilewright.v1.Dispatch/Run"
INFER = "/inference.GRPCInferenceService/ModelInfer"
ECHO = "/bench.Echo/Echo"
ALONE = (("grpc.use_local_subchannel_pool", 1),)
"""Options of a channel with a connection of its own."""
A = np.ones((SIDE, SIDE), np.float32)


def bytes_call(target: str, stack: ExitStack, method: str, request: bytes) -> Call:
    """A unary call of bytes that are there: what a client's library spends on them is not of this."""
    call: Any = stack.enter_context(grpc.insecure_channel(target, ALONE)).unary_unary(method)
    return lambda: call(request, timeout=300)


def by_grpc(target: str, stack: ExitStack) -> Call:
    request = dispatch_pb2.RunRequest(operation="gemm")
    for name in ("a", "b"):
        operand = request.inputs.add(name=name)
        operand.spec.dtype = tensor_pb2.FP32
        operand.spec.shape.extend(A.shape)
        operand.location.inline = A.tobytes()
    return bytes_call(target, stack, RUN, request.SerializeToString())


def by_kserve(target: str, stack: ExitStack) -> Call:
    request = inference_pb2.ModelInferRequest(model_name="tilewright.gemm")
    for name in ("a", "b"):
        request.inputs.add(name=name, datatype="FP32", shape=A.shape)
        request.raw_input_contents.append(A.tobytes())
    return bytes_call(target, stack, INFER, request.SerializeToString())


def by_echo(target: str, stack: ExitStack) -> Call:
    return bytes_call(target, stack, ECHO, bytes(2 * A.nbytes))


def by_local_socket(target: str, stack: ExitStack) -> Call:
    return bound(target, stack, "server")


def in_place(target: str, stack: ExitStack) -> Call:
    return bound(target, stack, "caller")


def bound(target: str, stack: ExitStack, launch: Any) -> Call:
    """A bound plan on operands in shared memory."""
    client = stack.enter_context(tilewright.connect(target, launch=launch))
    a, b = client.asarray(A), client.asarray(A)
    return client.plan_gemm(a, b).bind(a, b, out=client.empty(A.shape, "fp32"))


_ECHO_SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request[:len(request) // 2])
server = grpc.server(ThreadPoolExecutor(64))
server.add_generic_rpc_handlers((Echo(),))
server.add_insecure_port(sys.argv[1])
server.start()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def echo_server() -> Iterator[str]:
    """A server of grpcio alone; ends with the block, and with this process."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{folder}/echo"
        command = [sys.executable, "-c", _ECHO_SERVER, target]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None and server.stdin is not None
            server.stdout.readline()
            try:
                yield target
            finally:
                server.stdin.close()


WAYS: dict[str, Opened] = {
    "in place": in_place,
    "local socket": by_local_socket,
    "gRPC (Run)": by_grpc,
    "KServe (ModelInfer)": by_kserve,
    "grpcio, echo": by_echo,
}


def measure(options: Options) -> list[Table]:
    counts, seconds = ((1, 4), 0.3) if options.quick else (COUNTS, 5.0)
    table = Table(
        f"Latency under load: a {SIDE}x{SIDE}x{SIDE} fp32 product, open loop (Poisson), us from the intended start",
        ["", "clients", "saturation /s", "load", "done /s", "p50", "p99", "p99.9", "calls"],
    )
    flags = ["--device", "cpu:0", "--cpu-threads", "1", "--call-rate", "0", "--local-connections", "1024"]
    flags += ["--queue-limit", "4096"]  # a few processes stand for all clients here, and each may fill half of it
    with PrivateServer(flags) as target, echo_server() as echo:
        for name, opened in WAYS.items():
            for count in counts:
                address = echo if opened is by_echo else target
                with Clients(opened, address, count, min(count, 2 * options.threads)) as clients:
                    clients.saturate(seconds / 5)
                    saturation = clients.saturate(seconds)
                    for number, load in enumerate(LOADS):
                        found = clients.offer(load * saturation, seconds, seed=1000 * number)
                        times = [found.percentile(share) * 1e6 for share in (50, 99, 99.9)]
                        row = [name, count, saturation, f"{load:.0%}", found.rate, *times, len(found.latencies)]
                        table.rows.append(row)
                        if found.unbegun:
                            table.notes.append(
                                f"- {name}, {count} clients, {load:.0%}: {found.unbegun} calls were not begun in twice"
                                " the time; their waits until then are counted"
                            )
    table.notes.append("- clients and servers share the machine; a call in place is made by no server")
    return [table]


if __name__ == "__main__":
    raise SystemExit(main(measure))
