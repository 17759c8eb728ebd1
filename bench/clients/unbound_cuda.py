"""Host time of unprepared products on CUDA tensors of PyTorch, beside PyTorch's own: microseconds for a call that is
not waited for.

    python bench/clients/unbound_cuda.py [--target unix:PATH]

Starts a server of its own unless a target is given.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

import torch

import tilewright as tw
import tilewright.torch as twt
from tilewright_tools.cli.private_server import PrivateServer


def host_us(call: Callable[[], object], count: int = 200, rounds: int = 15) -> float:
    """The best round; between rounds the device comes to rest."""
    for _ in range(50):
        call()
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begun) / count)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target")
    target = parser.parse_args().target
    with contextlib.ExitStack() as stack:
        server = target or stack.enter_context(PrivateServer(("--device", "cuda:0"), timeout=60))
        client = stack.enter_context(tw.connect(server))
        twt.use(client)
        a, b = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
        calls: dict[str, Callable[[], object]] = {
            "bound.launch()": bound.launch,
            "client.gemm(a, b, out=out)": lambda: client.gemm(a, b, out=out),
            "client.gemm(a, b)": lambda: client.gemm(a, b),
            "torch.ops.tilewright.gemm(a, b)": lambda: torch.ops.tilewright.gemm(a, b),
            "torch.matmul(a, b, out=out)": lambda: torch.matmul(a, b, out=out),
            "a @ b": lambda: a @ b,
        }
        print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "64 x 64 x 64, bf16")
        for name, call in calls.items():
            print(f"{name:34} {host_us(call):7.1f} us")


if __name__ == "__main__":
    main()
