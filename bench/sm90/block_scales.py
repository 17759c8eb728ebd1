"""Speed of fp8 products with block scales beside cuBLAS's, in turns, on a machine with a Hopper GPU and PyTorch.

    python bench/sm90/block_scales.py [--every]

``--every`` has all kernels of the set ``block_scaled`` that suit a problem, beside what the planner takes. Each is
captured in a CUDA graph of as many calls as take about 3 ms; times are medians of nine replays, one of each in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilewright
import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.fusion import RULES
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

SHAPES = ((4096, 7168, 16384), (4096, 4096, 4096), (128, 7168, 4096), (64, 7168, 4096), (16, 7168, 4096))
BLOCKS = {"128x128": ((1, 128), (128, 128)), "1x128": ((1, 128), (1, 128))}
GRAPH_SECONDS, CALL_SECONDS, RATE, REPLAYS = 3e-3, 4e-6, 1.2e15, 9
Call = Callable[[], object]


def captured(call: Call, count: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
    torch.cuda.synchronize()
    return graph


def milliseconds(graphs: dict[str, torch.cuda.CUDAGraph], count: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def suits(config: GemmConfig, m: int, block: str) -> bool:
    if config.pipeline != "ws" or config.layout != "rcr" or config.scale_b.value != block:
        return False
    return m <= 256 if config.transpose_c else m >= 64


def calls(client: tilewright.Client, m: int, n: int, k: int, *, every: bool) -> dict[str, Call]:
    draw, fp8 = lambda *shape: torch.randn(shape, device="cuda"), torch.float8_e4m3fn
    a, b = draw(m, k).to(fp8), draw(n, k).to(fp8).t()
    blocks = k // 128
    scale_a = (draw(blocks, m).abs() + 0.5).t()
    scale_b = {"128x128": draw(n // 128, blocks).abs() + 0.5, "1x128": (draw(blocks, n).abs() + 0.5).t()}
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    factors = {
        "tensor": (torch.ones((), device="cuda"),) * 2,
        "rows": (torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")),
        "blocks": (scale_a, scale_b["128x128"].t()),
    }

    def peer(kind: str, *, fast: bool) -> Call:
        left, right = factors[kind]
        return lambda: torch._scaled_mm(
            a, b, scale_a=left, scale_b=right, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def ours(block: str, **more: Any) -> Call:
        return lambda: client.gemm(
            a, b, scale_a=scale_a, scale_b=scale_b[block], scale_block=BLOCKS[block], out=out, **more
        )

    found = {f"cuBLAS {kind}{' fast' * fast}": peer(kind, fast=fast) for kind in factors for fast in (False, True)}
    found["plain"] = lambda: client.gemm(a, b, out=out)
    for block in BLOCKS:
        found[f"ours {block}"] = ours(block)
        for config in KERNEL_SETS["block_scaled"].expand(tilewright_arch.load("sm_90a"), RULES) if every else ():
            if suits(config, m, block):
                found[config.name] = ours(block, config=config.to_dict())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true")
    every = parser.parse_args().every
    from gpu_server import CudaServer

    with CudaServer() as server, tilewright.connect(server.target) as client:
        for m, n, k in SHAPES:
            count = max(4, int(GRAPH_SECONDS / (2 * m * n * k / RATE + CALL_SECONDS)))
            graphs = {}
            for name, call in calls(client, m, n, k, every=every).items():
                try:
                    graphs[name] = captured(call, count)
                except (RuntimeError, tilewright.TilewrightError) as error:  # noqa: PERF203
                    print(f"{name}: {type(error).__name__}: {str(error)[:120]}")
            for name, time in sorted(milliseconds(graphs, count).items(), key=lambda item: item[1]):
                print(f"{m}x{n}x{k} {time * 1e3:9.2f} us {2e-9 * m * n * k / time:8.1f} TFLOP/s  {name}")


if __name__ == "__main__":
    main()
