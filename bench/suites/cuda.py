"""The GPU against PyTorch's cuBLAS: products of every type, fused steps, decoding, and what the service adds.

Needs an NVIDIA GPU and PyTorch built for it. Ratios are ours over the peer's in speed: above 1 we are faster. Errors
are relative norms against float64, ours over the peer's on the same inputs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from common import timing
from common.cuda_local import Cuda

from suites.base import Options, Table, main
from tilewright_kit.types.errors import TilewrightError

SHAPES = [
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16, 4096, 4096),
    (64, 8192, 8192),
    (128, 28672, 4096),
    (4096, 14336, 4096),
    (8192, 8192, 28672),
    (333, 777, 1111),
]
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp16": (torch.float16, {}),
    "bf16": (torch.bfloat16, {}),
    "fp8": (torch.float8_e4m3fn, {}),
    "fp8 fast": (torch.float8_e4m3fn, {"fast_accumulation": True}),
    "int8": (torch.int8, {}),
}
"""Element type and attributes of what is compared. fp8 comes twice: with sums that keep all bits, and with the fewer
bits of the matrix unit; the library is asked for the same each time.
"""
DECODE = [(m, n, k) for m in (1, 4, 8, 16, 32, 64) for n, k in ((4096, 4096), (8192, 8192), (28672, 4096))]
FUSED = [(1024, 1024, 1024), (4096, 4096, 4096), (128, 28672, 4096), (16, 4096, 4096), (4096, 14336, 4096)]
LEFT_OUT = {(name, (333, 777, 1111)) for name in ("fp8", "fp8 fast", "int8")} | {("int8", (16, 4096, 4096))}
"""Shapes that the library rejects: rows that are no multiple of 16 elements, int8 with fewer than 17 rows."""


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A [m, k] and B [k, n], stored as [n, k]."""
    if dtype == torch.int8:
        made = [torch.randint(-128, 128, shape, dtype=dtype, device="cuda") for shape in ((m, k), (n, k))]
    else:
        made = [torch.randn(shape, device="cuda").to(dtype) for shape in ((m, k), (n, k))]
    return made[0], made[1].t()


def peer(a: torch.Tensor, b: torch.Tensor, fast: bool = False) -> Callable[[], torch.Tensor]:
    """The library's product of the same operands; ``fast``: 8-bit floats are summed with fewer bits."""
    if a.dtype == torch.int8:
        return lambda: torch._int_mm(a, b)
    if a.dtype.itemsize == 1:
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return lambda: a @ b


def relative(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error of up to 512 rows, in float64."""
    rows = torch.randperm(a.shape[0], device="cuda")[:512]
    want = a[rows].double() @ b.double()
    return float(torch.linalg.norm(got[rows].double() - want) / torch.linalg.norm(want))


def brief(name: str) -> str:
    """The part of a kernel's name that says how."""
    parts = name.split("_")
    return " ".join(part for part in parts[3:] if part not in ("True", "False"))


def products(cuda: Cuda, options: Options) -> Table:
    table = Table(
        "GEMM on the GPU (A row-major, B as N x K; TFLOP/s, cold caches)",
        ["dtype", "M x N x K", "ours", "cuBLAS", "ours / cuBLAS", "error / cuBLAS's", "kernel"],
    )
    ratios: dict[str, list[float]] = {}
    for name, (dtype, attributes) in KINDS.items():
        for m, n, k in SHAPES[:3] if options.quick else SHAPES:
            a, b = operands(m, n, k, dtype)
            output = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.bfloat16}.get(dtype, dtype)
            fill = 7 if output == torch.int32 else float("nan")
            out = torch.full((m, n), fill, dtype=output, device="cuda")
            try:
                ours = cuda.product({"a": a, "b": b, "out": out}, attributes)
            except TilewrightError as error:
                table.notes.append(f"- {name} {m}x{n}x{k}: {error}")
                continue
            ours()
            cuda.stream.synchronize()
            error = relative(out, a, b)
            flops = 2.0 * m * n * k
            calls: dict[str, Callable[[], object]] = {"ours": ours}
            worse: float | None = None
            if (name, (m, n, k)) not in LEFT_OUT:
                library = peer(a, b, bool(attributes))
                theirs = relative(library(), a, b)
                worse = error / theirs if theirs else float(error > 0)
                calls["cuBLAS"] = library
            measured = cuda.alternate(calls)
            rate = {who: flops / seconds / 1e12 for who, seconds in measured.items()}
            ratio = measured["cuBLAS"] / measured["ours"] if "cuBLAS" in measured else None
            if ratio is not None:
                ratios.setdefault(name, []).append(ratio)
            row = [name, f"{m}x{n}x{k}", rate["ours"], rate.get("cuBLAS"), ratio, worse, brief(ours.config.name)]
            table.rows.append(row)
            print(row, flush=True)
    for name, values in ratios.items():
        table.notes.append(
            f"- {name}: geometric mean {timing.geomean(values):.2f} of cuBLAS over {len(values)} shapes, "
            f"least {min(values):.2f}"
        )
    return table


def linear_gelu(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(a, weight, bias))


def fused(cuda: Cuda, options: Options) -> Table:
    table = Table(
        "Bias and GELU fused, against cuBLAS (with its own fused bias) and a GELU kernel after it (bf16, microseconds)",
        ["M x N x K", "ours", "cuBLAS + kernel", "ours / theirs", "kernel"],
    )
    for m, n, k in FUSED[:2] if options.quick else FUSED:
        a, b = operands(m, n, k, torch.bfloat16)
        bias = torch.randn(n, device="cuda").to(torch.bfloat16)
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        ours = cuda.product({"a": a, "b": b, "bias": bias, "out": out}, {"unary": "Gelu"})
        measured = cuda.alternate({"ours": ours, "theirs": lambda a=a, b=b, bias=bias: linear_gelu(a, b.t(), bias)})
        ratio = measured["theirs"] / measured["ours"]
        row = [f"{m}x{n}x{k}", measured["ours"] * 1e6, measured["theirs"] * 1e6, ratio, brief(ours.config.name)]
        table.rows.append(row)
        print(row, flush=True)
    return table


def decoding(cuda: Cuda, options: Options) -> Table:
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    seconds = cuda.alternate({"copy": lambda source=source, target=target: target.copy_(source)})["copy"]
    copy = 2 * source.numel() / seconds
    del source, target
    table = Table(
        f"Few rows (bf16): bytes decide; a copy on the device moves {copy / 1e12:.2f} TB/s",
        ["M x N x K", "ours GB/s", "cuBLAS GB/s", "ours / cuBLAS", "ours / copy", "kernel"],
    )
    for m, n, k in DECODE[:3] if options.quick else DECODE:
        a, b = operands(m, n, k, torch.bfloat16)
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        ours = cuda.product({"a": a, "b": b, "out": out})
        measured = cuda.alternate({"ours": ours, "cuBLAS": lambda a=a, b=b: a @ b})
        moved = 2 * (m * k + n * k + m * n)
        row: list[Any] = [f"{m}x{n}x{k}", *(moved / measured[who] / 1e9 for who in ("ours", "cuBLAS"))]
        ratio = measured["cuBLAS"] / measured["ours"]
        table.rows.append([*row, ratio, moved / measured["ours"] / copy, brief(ours.config.name)])
        print(table.rows[-1], flush=True)
    return table


def single(cuda: Cuda, options: Options) -> Table:
    """fp32 without tensor cores, as PyTorch computes it by default."""
    table = Table(
        "fp32 (no TF32, TFLOP/s)", ["M x N x K", "ours", "cuBLAS", "ours / cuBLAS", "error / cuBLAS's", "kernel"]
    )
    for m, n, k in ((1024, 1024, 1024), (4096, 4096, 4096), (333, 777, 1111))[: 1 if options.quick else 3]:
        a, b = operands(m, n, k, torch.float32)
        out = torch.full((m, n), float("nan"), device="cuda")
        ours = cuda.product({"a": a, "b": b, "out": out})
        ours()
        cuda.stream.synchronize()
        worse = relative(out, a, b) / relative(a @ b, a, b)
        measured = cuda.alternate({"ours": ours, "cuBLAS": lambda a=a, b=b: a @ b})
        rate = {who: 2e-12 * m * n * k / seconds for who, seconds in measured.items()}
        ratio = measured["cuBLAS"] / measured["ours"]
        table.rows.append([f"{m}x{n}x{k}", rate["ours"], rate["cuBLAS"], ratio, worse, brief(ours.config.name)])
        print(table.rows[-1], flush=True)
    return table


def dispatch(cuda: Cuda, options: Options) -> Table:
    """Cost of a launch from another process, beyond one in this process."""
    import tilewright
    from tilewright_tools.cli.private_server import PrivateServer

    table = Table("Launches of a 64x64x64 bf16 product", ["", "p50 us", "p99 us", "per s"])
    a, b = operands(64, 64, 64, torch.bfloat16)
    out = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    count = 500 if options.quick else 5000
    direct = cuda.product({"a": a, "b": b, "out": out})

    def here() -> None:
        direct()
        cuda.stream.synchronize()

    def row(name: str, call: Callable[[], object]) -> float:
        timing.latencies(call, 200)
        seconds = timing.latencies(call, count)
        middle = timing.percentile(seconds, 50)
        table.rows.append([name, middle * 1e6, timing.percentile(seconds, 99) * 1e6, 1 / middle])
        return middle

    base = row("in this process, launch and wait", here)
    with (
        PrivateServer(("--device", "cuda:0"), timeout=60) as target,
        tilewright.connect(target, launch="server") as client,
    ):
        bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)

        def followed() -> None:
            bound.launch()
            torch.cuda.current_stream().synchronize()

        away = row("from another process, launch and wait", lambda: bound.launch(wait=False).synchronize())
        row("from another process, its stream waits, then the host", followed)
        row("from another process, launch only", bound.launch)
        torch.cuda.synchronize()
        total = 20_000 if options.quick else 200_000
        for _ in range(2):
            begun = time.perf_counter()
            with client.pipeline() as pipeline:
                for _ in range(total):
                    pipeline.launch(bound)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
        table.rows.append(["pipeline", seconds / total * 1e6, None, total / seconds])
        table.notes.append(f"- beyond a launch in the same process: {(away - base) * 1e6:.1f} us (p50)")
    return table


def memory() -> Table:
    """GPU memory of the server's device process, for one client and for eight."""
    from tilewright_tools.cli.private_server import PrivateServer

    client = """
import sys, torch, tilewright
a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
out = torch.empty_like(a)
with tilewright.connect(sys.argv[1], launch="server") as client:
    bound = client.plan_gemm(a, a, out=out).bind(a, a, out=out)
    bound.launch()
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
"""
    table = Table("GPU memory of the server, MiB", ["clients", "server", "one client of its own"])
    with PrivateServer(("--device", "cuda:0"), timeout=60) as target:
        running: list[subprocess.Popen[bytes]] = []
        for count in (1, 8):
            while len(running) < count:
                process = subprocess.Popen(
                    [sys.executable, "-c", client, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                assert process.stdout is not None
                process.stdout.readline()
                running.append(process)
            used = memory_by_process()
            clients = [used.pop(process.pid, 0) for process in running]
            used.pop(os.getpid(), None)
            table.rows.append([count, sum(used.values()), statistics.median(clients)])
        for process in running:
            process.communicate(b"\n")
    return table


def memory_by_process() -> dict[int, int]:
    """MiB of the first GPU by process: what others of the machine are used for does not count."""
    first = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["nvidia-smi", first, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return {int(pid): int(mib) for pid, mib in (line.split(",") for line in answer.strip().splitlines())}


def compiling(cuda: Cuda, options: Options) -> Table:
    """Time to compile, cold: one kernel at a time, and the candidates of a problem on all cores."""
    from tilewright_kit.contract.problem import OperationRequest
    from tilewright_kit.types.tensor import TensorDesc
    from tilewright_server.engine.call import Call

    operation = cuda.engine.operations["gemm"]
    configs: dict[str, Any] = {}
    for dtype in ("fp16", "bf16", "fp8", "int8"):
        for m, n, k in SHAPES:
            tensors = {"a": TensorDesc.of(dtype, (m, k)), "b": TensorDesc.of(dtype, (k, n), (1, k))}
            problem = operation.parse(OperationRequest("gemm", tensors))
            configs |= {config.name: config for config in operation.candidates(problem, cuda.info)}
    chosen = list(configs.values())
    alone, many = chosen[: 3 if options.quick else 12], chosen[12:112]
    times = []
    for config in alone:
        begun = time.perf_counter()
        cuda.engine.build([config], cuda.info.arch, lambda _: None, Call())
        times.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    results = cuda.engine.build(many, cuda.info.arch, lambda _: None, Call())
    seconds = time.perf_counter() - begun
    failed = [result.config.name for result in results if result.error is not None]
    table = Table("Compiling for sm_90a", ["", "seconds"])
    table.rows.append([f"one kernel, median of {len(times)}", statistics.median(times)])
    table.rows.append(["one kernel, slowest", max(times)])
    table.rows.append([f"{len(many)} kernels, {os.cpu_count()} cores", seconds])
    table.notes += [f"- failed: {name}" for name in failed]
    return table


PARTS: list[Callable[[Cuda, Options], Table]] = [compiling, products, fused, decoding, single, dispatch]


def measure(options: Options) -> list[Table]:
    torch.backends.cuda.matmul.allow_tf32 = False
    tables = []
    with Cuda() as cuda:
        tables += [attempt(part.__name__, lambda part=part: part(cuda, options)) for part in PARTS]
    return [*tables, attempt("memory", memory)]


def attempt(name: str, part: Callable[[], Table]) -> Table:
    """A part that fails must not lose the others."""
    try:
        return part()
    except Exception as error:
        traceback.print_exc()
        return Table(f"{name}: failed", ["error"], [[f"{type(error).__name__}: {error}"]])


if __name__ == "__main__":
    raise SystemExit(main(measure))
