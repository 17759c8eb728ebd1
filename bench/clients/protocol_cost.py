"""Cost of the Open Inference Protocol over our own, and of what watches a server, in processor time for each call.

    python bench/clients/protocol_cost.py kserve [--sides 4,64,256] [--rounds 15] [--calls 400]
    python bench/clients/protocol_cost.py watched [--sides 64]

Starts servers of its own and takes turns between two ways, so that whatever else the machine does meets both: the
median of the turns' ratios is printed, with quartiles, of the server's and the client's processor time and of the
median latency. `kserve`: the same product, operands and result inside of messages, by `Dispatch.Run` and by
`ModelInfer`, and of prepared plans by `Execute` and `ModelInfer`, with generated messages over one channel. `watched`:
`Dispatch.Run` on a server without metrics and logs, on another of the same (whose ratio shows how far figures can be
trusted), on one that is scraped every second and logs in JSON, and on one that traces 1 % of the calls, to an address
where nobody listens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from tilewright_proto.inference import inference_pb2
from tilewright_proto.v1 import dispatch_pb2, dispatch_pb2_grpc, memory_pb2, memory_pb2_grpc, tensor_pb2
from tilewright_tools.cli.private_server import PrivateServer

RUN = "/tilewright.v1.Dispatch/Run"
LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
INFER = "/inference.GRPCInferenceService/ModelInfer"
FLAGS = ("--device", "cpu:0", "--cpu-threads", "1", "--call-rate", "0")
PORT = 19464


def cpu_of(pid: int) -> float:
    """Seconds of processor time of all threads of a process, those that have ended too."""
    return time.clock_gettime((~pid << 3) | 2)


def own(channel: grpc.Channel, a: np.ndarray) -> Callable[[], Any]:
    stub: Any = channel.unary_unary(
        RUN,
        request_serializer=dispatch_pb2.RunRequest.SerializeToString,
        response_deserializer=dispatch_pb2.RunReply.FromString,
    )
    data, shape = a.tobytes(), a.shape

    def call() -> None:
        request = dispatch_pb2.RunRequest(operation="gemm")
        for name in ("a", "b"):
            tensor = request.inputs.add(name=name)
            tensor.spec.dtype = tensor_pb2.FP32
            tensor.spec.shape.extend(shape)
            tensor.location.inline = data
        np.frombuffer(stub(request).outputs[0].inline, np.float32).reshape(shape)

    return call


def kserve(channel: grpc.Channel, a: np.ndarray, model: str = "tilewright.gemm") -> Callable[[], Any]:
    stub: Any = channel.unary_unary(
        INFER,
        request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=inference_pb2.ModelInferResponse.FromString,
    )
    data, shape = a.tobytes(), a.shape

    def call() -> None:
        request = inference_pb2.ModelInferRequest(model_name=model)
        for name in ("a", "b"):
            tensor = request.inputs.add(name=name, datatype="FP32")
            tensor.shape.extend(shape)
            request.raw_input_contents.append(data)
        np.frombuffer(stub(request).raw_output_contents[0], np.float32).reshape(shape)

    return call


@contextmanager
def own_plan(channel: grpc.Channel, a: np.ndarray) -> Iterator[Callable[[], Any]]:
    """Executions of a prepared plan of a session of its own."""
    sessions = memory_pb2_grpc.MemoryStub(channel).OpenSession(memory_pb2.OpenSessionRequest())
    token = next(sessions).opened.session
    data, shape = a.tobytes(), a.shape
    planned = dispatch_pb2.PlanRequest(session=token, operation="gemm")
    for name in ("a", "b"):
        tensor = planned.inputs.add(name=name)
        tensor.spec.dtype = tensor_pb2.FP32
        tensor.spec.shape.extend(shape)
    dispatch = dispatch_pb2_grpc.DispatchStub(channel)
    plan = dispatch.Plan(planned).plan

    def call() -> None:
        request = dispatch_pb2.ExecuteRequest(session=token)
        execution = request.executions.add(plan=plan)
        for _ in range(2):
            execution.locations.add().inline = data
        execution.locations.add().return_inline.SetInParent()
        result = dispatch.Execute(request).results[0]
        np.frombuffer(result.outputs[0].inline, np.float32).reshape(shape)

    try:
        yield call
    finally:
        sessions.cancel()


def kserve_plan(channel: grpc.Channel, a: np.ndarray) -> Callable[[], Any]:
    """A model that is a prepared plan."""
    name = f"tilewright.gemm@{len(a)}"
    inputs = [{"name": item, "data_type": "TYPE_FP32", "dims": a.shape} for item in ("a", "b")]
    load = inference_pb2.RepositoryModelLoadRequest(model_name=name)
    load.parameters["config"].string_param = json.dumps({"input": inputs})
    channel.unary_unary(LOAD)(load.SerializeToString())
    return kserve(channel, a, name)


@dataclass(frozen=True)
class Way:
    """A call, and the process that serves it."""

    call: Callable[[], Any]
    pid: int


def turn(way: Way, calls: int) -> tuple[float, float, float]:
    """Processor time of server and client for each call, and the median latency, in microseconds."""
    server, client = cpu_of(way.pid), time.process_time()
    taken = []
    for _ in range(calls):
        begin = time.perf_counter()
        way.call()
        taken.append(time.perf_counter() - begin)
    spent = ((cpu_of(way.pid) - server) / calls, (time.process_time() - client) / calls, statistics.median(taken))
    return spent[0] * 1e6, spent[1] * 1e6, spent[2] * 1e6


def compare(title: str, ways: Mapping[str, Way], rounds: int, calls: int) -> None:
    """Take turns; print each way's least figures, and the others' ratios to the first."""
    for way in ways.values():
        turn(way, max(50, calls // 4))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(turn(ways[name], calls))
    first = found[names[0]]
    print(title)
    for name, turns in found.items():
        line = "  ".join(f"{min(values):7.1f}" for values in zip(*turns, strict=True))
        text = f"  {name:24} server, client, latency in us, least turn: {line}"
        if turns is not first:
            ratios = [
                sorted(mine / theirs for mine, theirs in zip(column, other, strict=True))
                for column, other in zip(zip(*turns, strict=True), zip(*first, strict=True), strict=True)
            ]
            text += "   ratio " + "  ".join(
                f"{statistics.median(item):.3f} ({item[len(item) // 4]:.3f}-{item[-1 - len(item) // 4]:.3f})"
                for item in ratios
            )
        print(text, flush=True)


@contextmanager
def scraped(port: int) -> Iterator[None]:
    """The page of metrics is read every second."""
    end = threading.Event()

    def read() -> None:
        while not end.wait(1.0):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                reply.read()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def of_kserve(given: argparse.Namespace) -> None:
    server = PrivateServer(FLAGS)
    with server as target, grpc.insecure_channel(target) as channel:
        for side in given.sides:
            a = np.ones((side, side), np.float32)
            ways = {
                "Dispatch.Run": Way(own(channel, a), server.pid),
                "ModelInfer": Way(kserve(channel, a), server.pid),
            }
            compare(f"{side}x{side}x{side} fp32, inside of messages", ways, given.rounds, given.calls)
            with own_plan(channel, a) as planned:
                ways = {
                    "Execute": Way(planned, server.pid),
                    "ModelInfer of a plan": Way(kserve_plan(channel, a), server.pid),
                }
                compare(f"{side}x{side}x{side} fp32, prepared plans", ways, given.rounds, given.calls)


def of_watching(given: argparse.Namespace) -> None:
    plain = (*FLAGS, "--log-level", "error", "--slow-call-s", "0")
    quiet, control = PrivateServer(plain), PrivateServer(plain)
    watched = PrivateServer((*FLAGS, "--log-format", "json", "--http-listen", str(PORT)))
    traced = PrivateServer(
        (*FLAGS, "--log-level", "error", "--trace-endpoint", "http://127.0.0.1:9", "--trace-ratio", "0.01")
    )
    servers = {"neither": quiet, "neither, once more": control, "metrics and logs": watched, "traces of 1 %": traced}
    with ExitStack() as running:
        targets = [running.enter_context(server) for server in servers.values()]
        running.enter_context(scraped(PORT))
        channels = [grpc.insecure_channel(target) for target in targets]
        for side in given.sides:
            a = np.ones((side, side), np.float32)
            ways = {
                name: Way(own(channel, a), server.pid)
                for (name, server), channel in zip(servers.items(), channels, strict=True)
            }
            compare(f"{side}x{side}x{side} fp32, inside of messages", ways, given.rounds, given.calls)
        for channel in channels:
            channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kserve", "watched"))
    parser.add_argument("--sides", type=lambda text: [int(part) for part in text.split(",")], default=[64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=400)
    given = parser.parse_args()
    (of_kserve if given.what == "kserve" else of_watching)(given)


if __name__ == "__main__":
    main()
