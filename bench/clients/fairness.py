"""How long one client waits beside others that flood the server: launches, and builds of new kernels, on a CPU.

    python bench/clients/fairness.py [--seconds 5] [--size 512] [--only messages,unread]

Starts a server of its own. The victim launches one bound product at a time, over gRPC and over the local socket, first
alone and then beside each flood, which runs in a process of its own. Then it asks for new kernels one at a time, alone
and beside a client that has the whole set built.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np
from serving import serving

import tilewright as tw
from tilewright_proto.v1 import dispatch_pb2, memory_pb2, memory_pb2_grpc, tensor_pb2

FLOODS = {
    "1 busy": "a thread that computes, outside of the server",
    "2 busy": "two such threads",
    "63 calls": "one session, 63 threads that launch over gRPC",
    "100 streams": "100 execution streams with two requests each",
    "60 sessions": "60 sessions that launch over the local socket",
    "repeats": "one launch repeated 100,000 times",
    "70 repeats": "70 threads with such a launch each",
    "builds": "`Kernels.Build` of a set",
    "unread": "400 replies of 4 MiB at a time that nobody reads",
    "messages": "120 messages of 18 MiB at a time, without a session",
}
NEW_KERNELS = 3
SLICE_MS = 5.0
"""After so long an execution of repeats makes way for others."""


class Product:
    """A product of squares, bound to arrays in shared memory."""

    def __init__(self, client: tw.Client, size: int) -> None:
        self.a = client.asarray(np.eye(size, dtype=np.float32))
        self.plan, self.out = client.plan_gemm(self.a, self.a), client.empty((size, size))
        self.bound = self.plan.bind(self.a, self.a, out=self.out)


def patiently(work: Callable[[], object]) -> None:
    """Do it for ever; what the server refuses for the moment is asked for again."""
    while True:
        with contextlib.suppress(tw.ResourceExhaustedError, tw.UnavailableError):
            work()


def unread(target: str) -> None:
    """Ask for replies for ever, a second's worth after the other, and read none of them."""
    way = grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)])
    memory = memory_pb2_grpc.MemoryStub(way)
    lease = memory.OpenSession(memory_pb2.OpenSessionRequest())
    token = next(lease).opened.session
    buffer = memory.CreateBuffer(memory_pb2.CreateBufferRequest(session=token, bytes=4 << 20)).buffer
    request = memory_pb2.ReadBufferRequest(session=token, buffer=buffer, bytes=4 << 20).SerializeToString()
    read = way.unary_stream("/tilewright.v1.Memory/ReadBuffer")
    while True:
        calls = [read(request) for _ in range(400)]
        time.sleep(1.0)
        for call in calls:
            call.cancel()


def messages(target: str) -> None:
    """Send requests that are refused for their size, for ever."""
    way = grpc.insecure_channel(target, options=[("grpc.max_send_message_length", -1)])
    location = tensor_pb2.Location(inline=bytes(18 << 20))
    request = dispatch_pb2.RunRequest(operation="gemm", inputs=[tensor_pb2.Operand(name="a", location=location)])
    run, data = way.unary_unary("/tilewright.v1.Dispatch/Run"), request.SerializeToString()
    while True:
        for call in [run.future(data) for _ in range(120)]:
            call.exception()


def busy(threads: int) -> None:
    """Compute in so many threads, without a connection: what they take of the processors, any flood may."""
    data = bytes(8 << 20)

    def compute() -> None:
        while True:
            hashlib.sha256(data)

    for _ in range(threads):
        threading.Thread(target=compute, daemon=True).start()


def flood(kind: str, target: str, size: int) -> None:
    """One of ``FLOODS``, until this process is killed."""
    if kind.endswith("busy"):
        busy(int(kind.split()[0]))
        print("ready", flush=True)
        threading.Event().wait()
    if kind in ("unread", "messages"):
        threading.Thread(target=unread if kind == "unread" else messages, args=(target,), daemon=True).start()
        time.sleep(1.0)
        print("ready", flush=True)
        threading.Event().wait()
    with tw.connect(target, launch="server") as client:
        if kind == "builds":
            print("ready", flush=True)
            for dtype in itertools.cycle(("fp32", "bf16", "fp16")):
                client.kernels.build(operation="gemm", pattern=f"gemm_{dtype}_*")
        product = Product(client, size)
        works: list[Callable[[], object]] = []
        if kind == "63 calls":
            works = [lambda: product.bound(timeout=60.0)] * 63
        elif kind == "100 streams":
            for _ in range(100):
                stream, out = product.plan.stream(max_pending=2), client.empty((size, size))
                works.append(lambda stream=stream, out=out: stream.submit(product.a, product.a, out=out).result())
        elif kind == "60 sessions":
            others = [Product(tw.connect(target, launch="server"), size) for _ in range(60)]
            works = [other.bound for other in others]
        else:
            count = 70 if kind == "70 repeats" else 1
            works = [lambda: product.plan(product.a, product.a, out=product.out, repeat=100_000)] * count
        for work in works:
            threading.Thread(target=patiently, args=(work,), daemon=True).start()
        time.sleep(1.0)
        print("ready", flush=True)
        threading.Event().wait()


@contextlib.contextmanager
def flooded(kind: str, target: str, size: int) -> Iterator[None]:
    """A process that floods the server meanwhile; none for the empty name."""
    if not kind:
        yield
        return
    command = [sys.executable, __file__, "--flood", kind, "--target", target, "--size", str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def launched(client: tw.Client) -> int:
    """Launches that the server has counted, of all clients."""
    return sum(int(item["launches"]) for item in client.kernels.statistics()["kernels"])


def latencies(client: tw.Client, call: Callable[[], object], seconds: float) -> tuple[float, float, float]:
    """p50 and p99 in milliseconds, and how many launches of others there were for each of these."""
    taken = []
    before, end = launched(client), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        taken.append((time.perf_counter() - start) * 1e3)
    others = launched(client) - before - len(taken)
    p50, p99 = np.percentile(taken, [50, 99])
    return float(p50), float(p99), others / len(taken)


def launches(target: str, size: int, seconds: float, chosen: Sequence[str]) -> None:
    """Prints what the promise allows, too: three times the p99 beside nobody, and one slice."""
    print("| beside | gRPC p50 | p99 | of allowed | others | local socket p50 | p99 | of allowed | others |")
    print("|---" * 9 + "|")
    allowed: list[float] = []
    for kind in ("", *chosen):
        with tw.connect(target, launch="server") as client, flooded(kind, target, size):
            bound = Product(client, size).bound
            cells = []
            for way, call in enumerate((lambda bound=bound: bound(timeout=60.0), bound)):
                for _ in range(3):
                    call()
                p50, p99, others = latencies(client, call, seconds)
                if not kind:
                    allowed.append(3 * p99 + SLICE_MS)
                cells += [f"{p50:.1f}", f"{p99:.1f}", f"{p99 / allowed[way]:.2f}", f"{others:.1f}"]
        print(f"| {FLOODS.get(kind, 'nobody')} | {' | '.join(cells)} |", flush=True)


def builds(target: str, size: int) -> None:
    """New kernels come from the end of the set, that the flood builds from its beginning."""
    with tw.connect(target, launch="server") as client:
        names = [item.name for item in client.kernels.list("gemm", name="gemm_fp32_rrr_*")]
        fresh = iter(reversed(names))
        print("\n| beside | a new kernel, seconds |\n|---|---|")
        for kind in ("", "builds"):
            with flooded(kind, target, size):
                if kind:
                    time.sleep(2.0)
                taken = []
                for name in itertools.islice(fresh, NEW_KERNELS):
                    start = time.perf_counter()
                    client.kernels.build([name], operation="gemm", timeout=120.0)
                    taken.append(f"{time.perf_counter() - start:.1f}")
            print(f"| {'`Kernels.Build` of a set' if kind else 'nobody'} | {', '.join(taken)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the matrices")
    parser.add_argument("--only", default="", help="floods of these names alone, with commas: " + ", ".join(FLOODS))
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        flood(options.flood, options.target, options.size)
        return
    with serving() as target:
        chosen = options.only.split(",") if options.only else list(FLOODS)
        launches(target, options.size, options.seconds, chosen)
        if "builds" in chosen:
            builds(target, options.size)


if __name__ == "__main__":
    main()
