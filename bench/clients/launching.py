"""Cost of a launch: in this process, in the server, and of NumPy's or PyTorch's own.

    python bench/clients/launching.py [--target unix:PATH] [--seconds 1] [--on cpu,cuda,host] [--mps require]

Starts a server of its own unless a target is given, under the Multi-Process Service if ``--mps`` says so. On a CPU:
products of 64 x 64 and some others, as calls on NumPy's arrays, by plans, and bound, beside the kernel alone (one call
of the library with everything settled) and NumPy. With a GPU and PyTorch: loops of products of bf16, alone and each
followed by a kernel of PyTorch (``mixed``), and both in a CUDA graph. Microseconds for each product, the best of rounds
that take turns; of the host for launches that are not waited for. The last columns are ratios. At the end the host's
time of single launches, from Python and from C, with what the driver's own launch of the same kernel costs
(``bare_launch.cpp``, which needs a C++ compiler).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from tilewright.launch.library import load_library
from tilewright_tools.cli.private_server import PrivateServer

CPU_SHAPES = [(64, 64, 64), (1, 2048, 2048), (16, 512, 512), (128, 128, 128), (256, 256, 256)]
GPU_SHAPES = [
    (64, 64, 64), (16, 4096, 4096), (128, 1024, 1024), (512, 4096, 4096), (2048, 4096, 4096), (8192, 8192, 8192),
]  # fmt: skip
ROUNDS = 7
Calls = dict[str, Callable[[], object]]


def turns(calls: Calls, seconds: float, settle: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Microseconds of each call: the best of rounds in which all take turns."""
    counts, best = {}, dict.fromkeys(calls, float("inf"))
    for name, call in calls.items():
        for _ in range(20):
            call()
        settle()
        begun = time.perf_counter()
        for _ in range(10):
            call()
        settle()
        counts[name] = max(10, int(seconds / ROUNDS / max((time.perf_counter() - begun) / 10, 1e-7)))
    gc.disable()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            count = counts[name]
            settle()
            begun = time.perf_counter()
            for _ in range(count):
                call()
            settle()
            best[name] = min(best[name], (time.perf_counter() - begun) / count * 1e6)
    gc.enable()
    return best


def show(rows: list[tuple[str, dict[str, float]]], ratios: dict[str, tuple[str, str]]) -> None:
    """A table of microseconds, with quotients of two columns."""
    names = list(rows[0][1])
    print("| m, n, k | " + " | ".join([*names, *ratios]) + " |")
    print("|---" * (1 + len(names) + len(ratios)) + "|")
    for title, found in rows:
        cells = [f"{found[name]:.1f}" for name in names]
        cells += [f"{found[above] / found[below]:.2f}" for above, below in ratios.values()]
        print(f"| {title} | " + " | ".join(cells) + " |")
    print()


def on_cpu(here: tw.Client, there: tw.Client, seconds: float) -> None:
    rows = []
    for m, n, k in CPU_SHAPES:
        a, b = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
        plan = here.plan_gemm(a, b, device="cpu:0")
        bound = plan.bind(a, b)
        shared = [there.asarray(a), there.asarray(b)]
        served = there.plan_gemm(*shared, device="cpu:0").bind(*shared, out=there.empty((m, n)))
        settled, number = bound._state.here.binding.launch, bound._state.here.binding.handle
        calls: Calls = {
            "kernel": lambda launch=settled, number=number: launch(number, None),
            "bound": bound,
            "plan": lambda plan=plan, a=a, b=b: plan(a, b),
            "gemm": lambda a=a, b=b: here.gemm(a, b, device="cpu:0"),
            "NumPy": lambda a=a, b=b: a @ b,
            "bound, server": served,
            "gemm, server": lambda a=a, b=b: there.gemm(a, b, device="cpu:0"),
        }
        rows.append((f"{m}, {n}, {k}", turns(calls, seconds)))
    print(f"NumPy's arrays on the CPU, fp32, {os.cpu_count()} processors")
    ratio = {"gemm / NumPy": ("gemm", "NumPy"), "server / here": ("gemm, server", "gemm")}
    show(rows, ratio)


def on_gpu(here: tw.Client, there: tw.Client, seconds: float) -> None:
    import torch

    settle = torch.cuda.synchronize
    rows, mixed, graphs = [], [], []
    for m, n, k in GPU_SHAPES:
        a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        out, other = (torch.empty((m, n), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        bound = here.plan_gemm(a, b, out=out).bind(a, b, out=out)
        served = there.plan_gemm(a, b, out=other).bind(a, b, out=other)
        alone: Calls = {
            "bound": bound.launch,
            "gemm": lambda a=a, b=b, out=out: here.gemm(a, b, out=out),
            "PyTorch": lambda a=a, b=b, other=other: torch.matmul(a, b, out=other),
            "bound, server": served.launch,
        }
        title = f"{m}, {n}, {k}"
        rows.append((title, turns(alone, seconds, settle)))
        assert here.report is not None
        assert here.report.placement == "caller", "the loop is to be launched here"

        def followed(call: Callable[[], object], target: Any) -> Callable[[], object]:
            def both() -> None:
                call()
                target.add_(1)

            return both

        targets = {"gemm": out, "bound": out, "PyTorch": other, "bound, server": other}
        mixed.append(
            (title, turns({name: followed(call, targets[name]) for name, call in alone.items()}, seconds, settle))
        )
        captured: Calls = {}
        for name in ("bound", "PyTorch"):
            captured[name] = graph_of(torch, alone[name]).replay
            captured[f"{name}, mixed"] = graph_of(torch, followed(alone[name], targets[name])).replay
        graphs.append((title, {name: us / 20 for name, us in turns(captured, seconds, settle).items()}))
        torch.testing.assert_close(bound(), a @ b, rtol=2e-2, atol=2e-2 * k**0.5)
    print(torch.cuda.get_device_name(), "bf16, PyTorch", torch.__version__)
    show(rows, {"bound / PyTorch": ("bound", "PyTorch"), "gemm / PyTorch": ("gemm", "PyTorch")})
    print("mixed: each product is followed by a kernel of PyTorch")
    show(mixed, {"bound / PyTorch": ("bound", "PyTorch"), "gemm / PyTorch": ("gemm", "PyTorch")})
    print("in a CUDA graph of 20 products")
    show(graphs, {"bound / PyTorch": ("bound", "PyTorch"), "mixed": ("bound, mixed", "PyTorch, mixed")})


def on_host(here: tw.Client) -> None:
    """The host's time of one launch on a GPU, by each way to make it."""
    import torch

    stream = torch.cuda.current_stream().cuda_stream

    def operands(*shapes: tuple[int, int]) -> list[Any]:
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    a, b, out = operands((64, 64), (64, 64), (64, 64))
    bound = here.plan_gemm(a, b, out=out).bind(a, b, out=out)
    long, wide, square = operands((64, 2048), (2048, 64), (64, 64))
    parts = here.plan_gemm(long, wide, out=square, split_k=16).bind(long, wide, out=square)
    settled, number = bound._state.here.binding.launch, bound._state.here.binding.handle
    calls: Calls = {
        "bound.launch()": bound.launch,
        "bound()": bound,
        "client.gemm(a, b, out=c)": lambda: here.gemm(a, b, out=out),
        "tw_launch by ctypes": lambda: settled(number, stream),
        "torch.matmul(a, b, out=c)": lambda: torch.matmul(a, b, out=out),
        "bound.launch(), with a workspace": parts.launch,
    }
    print("host time of one launch, us, the least of 300 rounds of 20 that begin with nothing on the GPU, in turns")
    taken = dict.fromkeys(calls, float("inf"))
    gc.disable()
    for _ in range(300):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(20):
                call()
            taken[name] = min(taken[name], (time.perf_counter() - begun) / 20 * 1e6)
    gc.enable()
    for name, least in taken.items():
        print(f"{least:6.2f} {name}")
    with tempfile.TemporaryDirectory() as folder:
        times = launch_times(Path(folder))
        for words, item in {"": bound, ", with a workspace": parts}.items() if times else ():
            binding, found = item._state.here.binding.handle, (ctypes.c_double * 2)()
            launch = ctypes.cast(load_library().tw_launch, ctypes.c_void_p)
            status = times(ctypes.c_void_p(binding), ctypes.c_void_p(stream), launch, 200, 20, found)
            assert status == 0, f"launches from C failed: {status}"
            print(f"{found[0]:6.2f} tw_launch from C{words}")
            if found[1] >= 0:
                print(f"{found[1]:6.2f} cuLaunchKernelEx from C{words}")


def launch_times(folder: Path) -> Any:
    """The function of ``bare_launch.cpp``; ``None`` without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        print("no C++ compiler: launches from C are not measured")
        return None
    native, made = Path(__file__).resolve().parents[2] / "native", folder / "bare_launch.so"
    includes = [f"-I{native / name}" for name in ("include", "runtime")]
    source = str(Path(__file__).with_name("bare_launch.cpp"))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", *includes, source, "-ldl", "-o", str(made)], check=True)
    return ctypes.CDLL(str(made)).launch_times


def graph_of(torch: Any, call: Callable[[], object]) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    return graph


FIRST = """
import sys, time
import numpy as np
import tilewright as tw
from tilewright.launch.library import load_library
load_library()
with tw.connect(sys.argv[1], launch="caller") as client:
    x = np.ones((8, 8), np.float32)
    client.gemm(x, x, device="cpu:0")
    a, b = np.ones((96, 80), np.float32), np.ones((80, 112), np.float32)
    begun = time.perf_counter()
    client.gemm(a, b, device="cpu:0")
    print((time.perf_counter() - begun) * 1e3)
"""


def first_use(target: str) -> None:
    """A problem that the server has built, in a process that has not used it: plan, code object, load."""
    taken = []
    for _ in range(6):
        done = subprocess.run([sys.executable, "-c", FIRST, target], capture_output=True, text=True, check=True)
        taken.append(float(done.stdout))
    print(f"first use of a problem that the server has built: {min(taken[1:]):.2f} ms")


@contextlib.contextmanager
def clients(target: str, mps: str) -> Iterator[tuple[tw.Client, tw.Client, str]]:
    with contextlib.ExitStack() as stack:
        place = target or stack.enter_context(PrivateServer(("--mps", mps), timeout=60))
        here, there = (stack.enter_context(tw.connect(place, launch=who)) for who in ("caller", "server"))
        yield here, there, place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument(
        "--on",
        type=lambda text: text.split(","),
        default=["cpu", "cuda", "host"],
        help="of cpu, cuda and host, which is the host's time of launches on a GPU",
    )
    parser.add_argument("--mps", choices=("off", "auto", "require"), default="off")
    given = parser.parse_args()
    with clients(given.target, given.mps) as (here, there, place):
        if "cpu" in given.on:
            on_cpu(here, there, given.seconds)
            first_use(place)
        if {"cuda", "host"} & set(given.on) and any(item.kind == "cuda" for item in here.session.devices):
            try:
                import torch
            except ModuleNotFoundError:
                print("no PyTorch: nothing is measured on the GPU")
                return
            if not torch.cuda.is_available():
                return
            if "cuda" in given.on:
                on_gpu(here, there, given.seconds)
            if "host" in given.on:
                on_host(here)


if __name__ == "__main__":
    main()
