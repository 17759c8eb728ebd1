"""How many launches a second many clients get, each in a process of its own and waiting for its own result.

    python bench/clients/many_clients.py [--device cuda] [--shape 64,64,64] [--clients 1,8] [--mps auto]
        [--launch server] [--control]

``--control``: also what the machine itself allows, clients of the same number that each wait for 16 bytes of a server
that only sends back what it gets, by one thread and the same kind of socket.

Starts a server of its own. On a GPU operands are PyTorch's, of bf16; on a CPU fp32 in shared memory. Prints for each
number of clients the launches a second of all together, and the times of single ones that are waited for, in
microseconds; on a GPU also the kernel's own time, of launches in place that follow each other.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from serving import serving

import tilewright as tw

FEW = 50
PACKET = 16
"""Bytes of a launch and of its answer."""


def product(client: tw.Client, device: str, shape: tuple[int, int, int]) -> tuple[Callable[[], object], Any]:
    """A launch that is waited for, and on a GPU one that is not."""
    m, n, k = shape
    if device == "cpu":
        a, b = (client.asarray(np.ones(size, np.float32)) for size in ((m, k), (k, n)))
        return client.plan_gemm(a, b).bind(a, b, out=client.empty((m, n))), None
    import torch

    a, b, out = (torch.ones(size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (k, n), (m, n)))
    bound = client.plan_gemm(a, b).bind(a, b, out=out)

    def waited() -> None:
        bound()
        torch.cuda.synchronize()

    return waited, bound


def work(target: str, given: argparse.Namespace, ready: Any, go: Any, results: Any) -> None:
    with tw.connect(target, launch=given.launch) as client:
        call, _ = product(client, given.device, given.shape)
        take(call, given.seconds, ready, go, results)


def exchange(path: str, given: argparse.Namespace, ready: Any, go: Any, results: Any) -> None:
    """``work`` of the control."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        send, receive, packet, buffer = connection.send, connection.recv_into, bytes(PACKET), bytearray(PACKET)

        def call() -> None:
            send(packet)
            receive(buffer)

        take(call, given.seconds, ready, go, results)


def take(call: Callable[[], object], seconds: float, ready: Any, go: Any, results: Any) -> None:
    """Time one call after the other, from when all clients are ready."""
    for _ in range(FEW):
        call()
    ready.release()
    go.wait()
    taken, clock = [], time.perf_counter_ns
    end = clock() + int(seconds * 1e9)
    while (start := clock()) < end:
        call()
        taken.append(clock() - start)
    results.put(np.array(taken) / 1e3)


def echo(listener: socket.socket) -> None:
    """Send back what comes, until the process is ended."""
    poll, open_now = select.epoll(), {listener.fileno(): listener}
    poll.register(listener, select.EPOLLIN)
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                made, _ = listener.accept()
                open_now[made.fileno()] = made
                poll.register(made, select.EPOLLIN)
            elif data := open_now[number].recv(PACKET):
                open_now[number].send(data)
            else:
                poll.unregister(number)
                open_now.pop(number).close()


@contextlib.contextmanager
def echoing() -> Iterator[str]:
    """The path of a server that only sends back."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(256)
        server = multiprocessing.get_context("fork").Process(target=echo, args=(listener,))
        server.start()
        try:
            yield f"{folder}/s"
        finally:
            server.terminate()
            server.join()


def measure(target: str, given: argparse.Namespace, count: int, work: Callable[..., None] = work) -> None:
    context = multiprocessing.get_context("spawn")
    ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
    clients = [context.Process(target=work, args=(target, given, ready, go, results)) for _ in range(count)]
    for client in clients:
        client.start()
    for _ in clients:
        ready.acquire()
    go.set()
    taken = np.concatenate([results.get() for _ in clients])
    for client in clients:
        client.join()
    p50, p99 = np.percentile(taken, [50, 99])
    print(f"{count:3} clients {len(taken) / given.seconds:9.0f} /s   p50 {p50:7.1f} us   p99 {p99:7.1f} us", flush=True)


def kernel_time(target: str, shape: tuple[int, int, int], results: Any) -> None:
    with tw.connect(target, launch="caller") as client:
        import torch

        waited, bound = product(client, "cuda", shape)
        waited()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(500):
            bound()
        end.record()
        torch.cuda.synchronize()
        results.put(begin.elapsed_time(end) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split(","))), default=(64, 64, 64))
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of clients")
    parser.add_argument("--launch", choices=("server", "caller"), default="server")
    parser.add_argument("--mps", choices=("off", "auto", "require"), default="off")
    parser.add_argument("--control", action="store_true", help="also what a server that does nothing reaches")
    given = parser.parse_args()
    with serving("--mps", given.mps, "--device", f"{given.device}:0") as target:
        if given.device == "cuda":
            context = multiprocessing.get_context("spawn")
            results = context.Queue()
            alone = context.Process(target=kernel_time, args=(target, given.shape, results))
            alone.start()
            print(f"the kernel alone {results.get():.1f} us", flush=True)
            alone.join()
        for count in given.clients:
            measure(target, given, count)
    if given.control:
        print("control: packets that come back")
        with echoing() as path:
            for count in given.clients:
                measure(path, given, count, exchange)


if __name__ == "__main__":
    main()
