"""Costs of the service: round trips, streams, batches, copies, memory, start-up; relative to an empty call."""

from __future__ import annotations

import statistics
import time
from typing import Any

import grpc
import numpy as np
import psutil
from common import timing
from grpc_health.v1 import health_pb2

import tilewright
from suites.base import Options, Table, main
from tilewright_tools.cli.private_server import PrivateServer

IN_FLIGHT = 64
SIDE = 64


def empty_call(target: str) -> Any:
    """The cheapest unary call that the server answers: a health check, bytes in, bytes out."""
    channel = grpc.insecure_channel(target)
    request = health_pb2.HealthCheckRequest().SerializeToString()
    call = channel.unary_unary("/grpc.health.v1.Health/Check")
    return channel, lambda: call(request)


def measure_calls(client: tilewright.Client, target: str, options: Options) -> Table:
    count = 500 if options.quick else 4000
    a, b = client.asarray(np.ones((SIDE, SIDE), np.float32)), client.asarray(np.ones((SIDE, SIDE), np.float32))
    plain = np.ones((SIDE, SIDE), np.float32)
    out = client.gemm(a, b)
    plan = client.plan_gemm(a, b, out=out)
    bound = plan.bind(a, b, out=out)
    channel, empty = empty_call(target)
    try:
        calls = {
            "empty gRPC call": empty,
            "prepared, bound": bound,
            "prepared": lambda: plan(a, b, out=out),
            "gemm()": lambda: client.gemm(a, b, out=out),
            "prepared, ordinary arrays (gRPC)": lambda: plan(plain, plain),
            "gemm(), ordinary arrays (gRPC)": lambda: client.gemm(plain, plain),
        }
        for call in calls.values():
            timing.latencies(call, 200)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(10):  # in turns
            for name, call in calls.items():
                samples[name] += timing.latencies(call, count // 10)
    finally:
        channel.close()
    table = Table(
        f"Round trips of a {SIDE}x{SIDE}x{SIDE} fp32 product, Unix socket",
        ["", "p50 us", "p99 us", "of an empty call", "per s"],
    )
    base = statistics.median(samples["empty gRPC call"])
    for name, values in samples.items():
        values.sort()
        middle = timing.percentile(values, 50)
        table.rows.append([name, middle * 1e6, timing.percentile(values, 99) * 1e6, middle / base, 1 / middle])
    for kind in ("", ", ordinary arrays (gRPC)"):
        unprepared, prepared = (statistics.median(samples[name + kind]) for name in ("gemm()", "prepared"))
        table.notes.append(f"- gemm(){kind}: {unprepared / prepared:.2f} times a prepared plan")
    unary = 1 / statistics.median(samples["prepared, bound"])
    rates = {
        f"stream, {IN_FLIGHT} in flight": stream_rate(plan, bound, options),
        f"{IN_FLIGHT} in one message": batch_rate(plan, bound, options),
    }
    for name, rate in rates.items():
        table.rows.append([name, 1e6 / rate, None, 1 / rate / base, rate])
        table.notes.append(f"- {name}: {rate / unary:.1f} times the rate of unary calls")
    report = client.report
    assert report is not None
    table.notes.append(f"- bytes copied by the server for each execution: {report.bytes_copied}")
    return table


def stream_rate(plan: Any, bound: Any, options: Options) -> float:
    """Executions a second with a window of requests in flight."""
    total = 2000 if options.quick else 20000
    with plan.stream(max_pending=IN_FLIGHT) as stream:
        for _ in range(500):
            stream.submit(bound)
        stream.drain()
        begun = time.perf_counter()
        for _ in range(total):
            stream.submit(bound)
        stream.drain()
        return total / (time.perf_counter() - begun)


def batch_rate(plan: Any, bound: Any, options: Options) -> float:
    """Executions a second, many in each unary message."""
    calls = [bound] * IN_FLIGHT
    plan.run_many(calls)
    seconds = timing.latencies(lambda: plan.run_many(calls), 50 if options.quick else 400)
    return IN_FLIGHT / timing.percentile(seconds, 50)


def measure_copies(client: tilewright.Client) -> Table:
    """Operands of 64 MiB: in shared memory, and in ordinary memory."""
    table = Table(
        "Operands of 64 MiB (fp32, 4096 x 4096 by 4096 x 16)",
        ["operands", "round trip ms", "server copied", "client copied"],
    )
    plain = np.ones((4096, 4096), np.float32)
    b = client.asarray(np.ones((4096, 16), np.float32))
    out = client.empty((4096, 16), "fp32")
    for name, a in (("shared memory", client.asarray(plain)), ("ordinary memory", plain)):
        plan = client.plan_gemm(a, b, out=out)
        plan(a, b, out=out)
        seconds = timing.latencies(lambda plan=plan, a=a: plan(a, b, out=out), 9)
        report = client.report
        assert report is not None
        table.rows.append([name, timing.percentile(seconds, 50) * 1e3, report.bytes_copied, report.staged_bytes])
    return table


def measure_process(options: Options) -> Table:
    """Start-up, and memory of a server that has nothing to do."""
    starts, resident = [], []
    for _ in range(3 if options.quick else 7):
        server = PrivateServer()
        with server as target:
            starts.append(server.start_seconds)
            with tilewright.connect(target, launch="server"):
                time.sleep(0.5)
                resident.append(psutil.Process(server.pid).memory_info().rss / 2**20)
    table = Table("The server process", ["", "median", "worst"])
    table.rows.append(["start until ready, s", statistics.median(starts), max(starts)])
    table.rows.append(["resident memory, idle, MiB", statistics.median(resident), max(resident)])
    return table


def measure(options: Options) -> list[Table]:
    tables = [measure_process(options)]
    with PrivateServer() as target, tilewright.connect(target, launch="server") as client:
        tables.append(measure_calls(client, target, options))
        tables.append(measure_copies(client))
    return tables


if __name__ == "__main__":
    raise SystemExit(main(measure))
