"""Speed of products with 4-bit weights beside PyTorch's, in turns, on a machine with a Hopper GPU and PyTorch.

    python bench/sm90/int4.py [--every] [--types bf16,int8]

Peers: the same product with weights of bf16 (cuBLAS), ``torch._weight_int4pack_mm``, and a copy of as many bytes as
the weights, their factors and zero points have. ``--every`` has all candidates beside what the planner takes. Each is
captured in a CUDA graph of as many calls as take about 3 ms, over as many sets of weights as fill twice the L2 cache;
times are medians of nine replays, one of each in turn.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from block_scales import Call, captured, milliseconds

import tilewright
import tilewright_arch
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
ROWS = (1, 4, 16, 32, 64, 128, 512, 2048)
SECONDS, CACHE_BYTES = 3e-3, 100 << 20
RATE, BYTE_RATE, CALL_SECONDS = 4e14, 3.5e12, 4e-6
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def weights(n: int, k: int) -> dict[str, Any]:
    """One set of packed weights."""
    return {
        "b": torch.randint(-128, 128, (n, k // 2), device="cuda", dtype=torch.int8).t(),
        "scale_b": torch.rand(n, k // 128, device="cuda").half() + 0.5,
        "zero_b": torch.randint(0, 16, (n, k // 128), device="cuda", dtype=torch.int8),
    }


def in_turn(calls: list[Call]) -> Call:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def ours(client: tilewright.Client, a: Any, packed: list[dict[str, Any]], out: Any, **more: Any) -> Call:
    return in_turn(
        [lambda w=w: client.gemm(a, **w, b_format="int4_128", out=out, **more) for w in packed]  # type: ignore[misc]
    )


def peers(a: Any, n: int, k: int, sets: int) -> dict[str, Call]:
    """Products of bf16, PyTorch's own of 4 bits, and copies."""
    m, out = a.shape[0], torch.empty(a.shape[0], n, device="cuda", dtype=torch.bfloat16)
    wide = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(max(sets // 4, 1))]
    found = {"cuBLAS bf16": in_turn([lambda w=w: torch.mm(a, w.t(), out=out) for w in wide])}  # type: ignore[misc]
    nbytes = n * k // 2 + n * k // 128 * 3
    buffers = [torch.empty(2, nbytes, device="cuda", dtype=torch.uint8) for _ in range(sets)]
    found["copy of half as many bytes"] = in_turn(
        [lambda x=x: x[0][: nbytes // 2].copy_(x[1][: nbytes // 2]) for x in buffers]  # type: ignore[misc]
    )
    if hasattr(torch, "_convert_weight_to_int4pack"):
        values = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        own = [torch._convert_weight_to_int4pack(values, 8) for _ in range(sets)]
        factors = torch.rand(k // 128, n, 2, device="cuda").bfloat16()
        if m <= 512:
            found["torch._weight_int4pack_mm"] = in_turn(
                [lambda w=w: torch._weight_int4pack_mm(a, w, 128, factors) for w in own]  # type: ignore[misc]
            )
    return found


def candidates(m: int, n: int, k: int, dtype: str) -> list[Any]:
    operation, device = GemmOperation(), device_of(tilewright_arch.load("sm_90a"))
    of = TensorDesc.of
    inputs = {
        "a": of(dtype, (m, k)), "b": of("int8", (k // 2, n), (1, k // 2)), "scale_b": of("fp16", (n, k // 128)),
        "zero_b": of("int8", (n, k // 128)),
    }  # fmt: skip
    request = OperationRequest("gemm", inputs, {}, {"b_format": "int4_128", "out_dtype": "bf16"})
    return list(operation.candidates(operation.parse(request), device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--types", default="bf16,int8")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    given = parser.parse_args()
    from gpu_server import CudaServer

    with CudaServer() as server, tilewright.connect(server.target) as client:
        for (n, k), m in itertools.product(LAYERS, map(int, given.rows.split(","))):
            sets = max(CACHE_BYTES // (n * k // 2), 1)
            packed = [weights(n, k) for _ in range(sets)]
            a = torch.randn(m, k, device="cuda")
            calls = peers(a.bfloat16(), n, k, sets)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            for dtype in given.types.split(","):
                own = (a * 30).to(torch.int8) if dtype == "int8" else a.to(TYPES[dtype])

                calls[f"ours {dtype}"] = ours(client, own, packed, out)
                for config in candidates(m, n, k, dtype) if given.every else ():
                    calls[config.name] = ours(client, own, packed, out, config=config.to_dict())
            seconds = max(2 * m * n * k / RATE, n * k / 2 / BYTE_RATE) + CALL_SECONDS
            count = -(-max(4, int(SECONDS / seconds)) // sets) * sets
            graphs = {}
            for name, call in calls.items():
                try:
                    graphs[name] = captured(call, count)
                except (RuntimeError, tilewright.TilewrightError) as error:  # noqa: PERF203
                    print(f"{name}: {type(error).__name__}: {str(error)[:120]}")
            for name, time in sorted(milliseconds(graphs, count).items(), key=lambda item: item[1]):
                rate, speed = n * k * 0.5234 / time * 1e-6, 2e-9 * m * n * k / time
                print(f"{m}x{n}x{k} {time * 1e3:9.2f} us {rate:7.0f} GB/s of weights {speed:8.1f} TFLOP/s  {name}")


if __name__ == "__main__":
    main()
