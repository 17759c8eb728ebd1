"""Processor time that metrics, logs and traces add to a call, as a share of what the server spends on it.

    python bench/clients/watching.py [--turns 15] [--calls 400]

What watches a call is run alone, many times, in this process: the books of gRPC calls, those of an execution, a trace
of 1 % of the calls with its exporter (to an address where nobody listens), and a line of the log. Beside it stands the
server's processor time for a call of each way in (64 x 64 x 64, fp32), and for a page of metrics. All of it is
processor time of one thread or process, the least of several turns that alternate, so other programs on the machine
hardly matter: that is why this bound is shown beside the comparison of whole servers (`protocol_cost.py watched`).
"""

from __future__ import annotations

import argparse
import logging
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import numpy as np
from protocol_cost import FLAGS, PORT, cpu_of, own, own_plan

import tilewright as tw
from tilewright_server.clients.client import ANONYMOUS
from tilewright_server.endpoints.rpc.transport.tracing import Tracer, open_tracer
from tilewright_server.endpoints.rpc.transport.traffic import Traffic
from tilewright_server.engine.statistics import Statistics
from tilewright_server.hosting.logs import set_up
from tilewright_server.protocol.request_ids import Given
from tilewright_tools.cli.private_server import PrivateServer

SIDE = 64
LOOP = 20_000
METHOD = "tilewright.v1.Dispatch/Run"
METADATA = (("user-agent", "grpc-python/1.80.0 grpc-c/52.0.0 (linux; chttp2)"),)
NAMED = Given("")
PARTS = (("plan", 1000), ("build", 0), ("queue", 2000), ("device", 3000))


@dataclass
class Cost:
    """Microseconds of processor time for one of something, the least of all turns."""

    once: Callable[[], float]
    least: float = field(default=float("inf"))

    def turn(self) -> None:
        self.least = min(self.least, self.once())


def alone(call: Callable[[], object]) -> Cost:
    """Cost of what a function of this process does, without that of calling it."""

    def once() -> float:
        return (loop(call) - loop(nothing)) / LOOP / 1000

    return Cost(once)


def loop(call: Callable[[], object]) -> int:
    begin = time.thread_time_ns()
    for _ in range(LOOP):
        call()
    return time.thread_time_ns() - begin


def nothing() -> None:
    """Do what a function costs that does nothing."""


def of_server(pid: int, call: Callable[[], object], count: int, each: int = 1) -> Cost:
    """Cost of what a server does for a call, of ``each`` requests."""

    def once() -> float:
        begin = cpu_of(pid)
        for _ in range(count):
            call()
        return (cpu_of(pid) - begin) / count / each * 1e6

    return Cost(once)


def traced(tracer: Tracer) -> Cost:
    """Cost of the look at each call and the spans of one in a hundred, with the thread that exports them."""

    def once() -> float:
        begin = time.process_time_ns()
        for _ in range(LOOP):
            if tracer.samples(METADATA):
                tracer.ended(METHOD, 10_000, ANONYMOUS, METADATA, PARTS, None, NAMED)
        return (time.process_time_ns() - begin) / LOOP / 1000

    return Cost(once)


def watching(tracer: Tracer) -> dict[str, Cost]:
    """Everything that watches, by name."""
    traffic, statistics = Traffic(), Statistics()
    operation, kernel = statistics.operation("gemm"), statistics.kernel("gemm", "cpu:0")
    times, line = operation.classes[ANONYMOUS.priority], logging.getLogger("tilewright.calls")
    return {
        "books of a gRPC call": alone(lambda: traffic.ended(METHOD, 10_000, ANONYMOUS, None, NAMED)),
        "books of an execution": alone(
            lambda: statistics.executed(operation, (kernel,), (1000,), 1, 2000, ANONYMOUS.priority)
        ),
        "of these its two histograms": alone(lambda: (times.queue.observe(2000), times.device.observe(1000))),
        "traces of 1 %": traced(tracer),
        "a line that is not written (debug)": alone(lambda: line.isEnabledFor(logging.DEBUG)),
    }


def serving(pid: int, channel: grpc.Channel, client: tw.Client, calls: int) -> dict[str, tuple[Cost, int]]:
    """Costs of a server, by way in; and whether gRPC's books are kept of it."""
    a = np.ones((SIDE, SIDE), np.float32)
    shared, out = client.asarray(a), client.empty(a.shape, "fp32")
    bound = client.plan_gemm(shared, shared).bind(shared, shared, out=out)

    def pipeline() -> None:
        with client.pipeline() as pipeline:
            for _ in range(64):
                pipeline.launch(bound)

    return {
        "Dispatch.Run": (of_server(pid, own(channel, a), calls), 1),
        "launch over the local socket": (of_server(pid, bound, 4 * calls), 0),
        "launch in a pipeline": (of_server(pid, pipeline, calls // 10, 64), 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=400)
    given = parser.parse_args()
    set_up("info", "text")
    tracer = open_tracer("http://127.0.0.1:9", 0.01)
    assert tracer is not None
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # nobody listens there: that is what is measured
    server = PrivateServer((*FLAGS, "--http-listen", str(PORT)))
    with server as target, grpc.insecure_channel(target) as channel, tw.connect(target, launch="server") as client:
        a = np.ones((SIDE, SIDE), np.float32)
        with own_plan(channel, a) as planned:
            served = serving(server.pid, channel, client, given.calls)
            served["Execute of a plan"] = (of_server(server.pid, planned, given.calls), 1)

            def scrape() -> None:
                time.sleep(0.3)  # a page is kept for a quarter of a second
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=30).read()

            page = of_server(server.pid, scrape, 2)
            costs = watching(tracer)
            for _ in range(given.turns):
                for cost in (*(cost for cost, _ in served.values()), *costs.values(), page):
                    cost.turn()
    tracer.close()
    for name, cost in costs.items():
        print(f"{name:36} {cost.least:8.2f} us")
    print(f"{'page of metrics':36} {page.least:8.0f} us, {page.least / 1e6:.2%} of a processor, read every second")
    call, execution, histograms, traces = (costs[name].least for name in list(costs)[:4])
    print("Shares; without metrics an execution would keep its counters, for Statistics and the choice of kernels:")
    for name, (cost, books) in served.items():
        shares = {"metrics": histograms + call * books, "and counters": execution + call * books}
        if books:
            shares["traces of 1 %"] = traces
        text = "".join(f"   {what} {part / cost.least:.2%}" for what, part in shares.items())
        print(f"{name:36} {cost.least:8.1f} us{text}")


if __name__ == "__main__":
    main()
