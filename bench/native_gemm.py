"""Our CPU GEMM kernels against NumPy (OpenBLAS) and PyTorch (oneDNN, MKL), in one process, taking turns.

    python bench/native_gemm.py [--dtypes fp32,bf16,int8] [--threads 1,2] [--shapes square,skinny] [--seconds 0.4]

Needs NumPy and ml_dtypes; PyTorch is compared with when it is installed. Every contender of a shape runs in each round,
and its best and its median round count. Ratios are ours over theirs (above 1: we are faster), with geometric means at
the end.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What holds a peer back is taken out of the environment. Idle threads of the peers spin so long by default that they
# would take the core from whoever is measured next (seen: half the speed for 30 ms and more); this shortens the wait,
# and a round begins with a pause.
_UNWANTED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS")
_WANTED = {"OPENBLAS_THREAD_TIMEOUT": "20", "GOMP_SPINCOUNT": "100000"}
if __name__ == "__main__" and ({*_UNWANTED} & {*os.environ} or not _WANTED.items() <= os.environ.items()):
    kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    os.execve(sys.executable, [sys.executable, *sys.argv], kept | _WANTED)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "native"))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from native_harness import (  # noqa: E402  # noqa: E402
    DTYPES,
    LEVELS,
    RUNTIME,
    Config,
    GemmArgs,
    Library,
    ProblemArgs,
    Runtime,
    compile_unit,
    compiler,
    missing_features,
)

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

Shape = tuple[int, int, int]
SHAPES: dict[str, list[Shape]] = {
    "small": [(16, 16, 16), (32, 32, 32), (64, 64, 64), (128, 128, 128)],
    "square": [(256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)],
    "skinny": [
        (4096, 4096, 1024),
        (4096, 64, 4096),
        (128, 4096, 4096),
        (8192, 128, 1024),
        (1, 4096, 4096),
        (4096, 1, 4096),
        (8, 4096, 4096),
    ],
    "packed": [(128, 4096, 4096), (32, 4096, 4096), (1, 4096, 4096)],
}
DEPTH = {"fp32": 1, "fp16": 1, "bf16": 2, "int8": 4}
RESULT = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "int32"}


@dataclass
class Contender:
    """Something that computes the product; `seconds` gathers its rounds, each per call."""

    name: str
    call: Callable[[], Any]
    seconds: list[float]

    def round(self, calls: int) -> None:
        time.sleep(0.005)
        self.call()
        begin = time.perf_counter()
        for _ in range(calls):
            self.call()
        self.seconds.append((time.perf_counter() - begin) / calls)


def recommended(shape: Shape, dtype: str, threads: int, packed: bool = False) -> Config:
    """What the cost model should choose for row-major A and B; see the table in the documentation."""
    m, n, k = shape
    depth = DEPTH[dtype]
    wave = (threads, 1) if m > n else (1, threads)
    base = Config(a=dtype, b=dtype, c=RESULT[dtype], b_col=False, wave=wave, warp_tile=(14, 32, depth))
    if packed:
        warp = (8, 48, depth) if m >= 8 else (m, 64, depth)
        return base.replace(pipeline="preshufflev2", preshuffle=True, warp_tile=warp, tile=(1024, 384, 512 * depth))
    if min(m, n) <= 8:
        return base.replace(pipeline="mem", tile=(8, 512, 512 * depth) if n >= m else (512, 8, 512 * depth))
    if max(m, n, k) <= 128 and threads == 1:
        return base.replace(pipeline="compv1", tile=(128, 128, 512 * depth))
    if m > n:
        return base.replace(tile=(168, 2048, 512 * depth))
    if m <= 256 and n >= 1024:  # rows in multiples of 8: less is lost at the edge
        return base.replace(warp_tile=(8, 48, depth), tile=(2016, 192, 512 * depth))
    return base.replace(tile=(2016, 128, 512 * depth))


class Ours:
    """Kernels compiled once for each configuration."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.folder = Path(tempfile.mkdtemp(prefix="native_gemm_"))
        compile_unit(compiler(), RUNTIME, self.folder / "runtime.so", ["-pthread"])
        self.runtime = Runtime(self.folder / "runtime.so", len(os.sched_getaffinity(0)))
        self.libraries: dict[Config, Library] = {}

    def build(self, configs: list[Config]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in self.libraries]
        folder = self.folder / str(len(self.libraries))
        folder.mkdir()
        library = Library(folder, new, self.level)
        self.libraries.update(dict.fromkeys(new, library))

    def memory(self, bytes_: int) -> int:
        address: int = self.runtime.lib.tw_memory_reserve(max(bytes_, 64))
        return address

    def prepare(
        self, config: Config, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
    ) -> tuple[Callable[[], None], np.ndarray[Any, Any], list[Any]]:
        """A call that multiplies, the array it fills, and what must be kept alive."""
        (m, k), n = a.shape, b.shape[1]
        c = np.zeros((m, n), DTYPES[config.c])
        b_from, ldb = (np.ascontiguousarray(b.T), k) if config.b_col else (b, n)
        table = (ProblemArgs * 1)()
        p = table[0]
        p.a, p.b, p.c, p.m, p.n, p.k = a.ctypes.data, b_from.ctypes.data, c.ctypes.data, m, n, k
        p.lda, p.ldb, p.ldc, p.batch, p.alpha = k, ldb, n, 1, 1.0
        library, pool, launch = self.libraries[config], self.runtime.pool, self.runtime.lib.tw_pool_launch
        args = GemmArgs(table, 1, None, 0, 1)
        if config.preshuffle:
            bytes_ = library.entry(config, "_packed_b")(ctypes.c_int64(n), ctypes.c_int64(k))
            p.c = packed = self.memory(bytes_)
            self.runtime.launch(library.entry(config, "_pack_b"), args, 1)
            p.b, p.c = packed, c.ctypes.data
        args.workspace_bytes = library.entry(config, "_workspace")(ctypes.byref(args))
        args.workspace = self.memory(args.workspace_bytes)
        entry, pointer = ctypes.cast(library.entry(config), ctypes.c_void_p), ctypes.byref(args)
        return (lambda: launch(pool, entry, pointer, config.team)), c, [table, args, b_from, c]


def openblas_threads(count: int) -> None:
    """NumPy has no call for it: ask its bundled library."""
    for path in (Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*"):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(count)


def operands(shape: Shape, dtype: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    m, n, k = shape
    rng = np.random.default_rng(m + n + k)
    if dtype == "int8":
        return rng.integers(-128, 128, (m, k)).astype(np.int8), rng.integers(-128, 128, (k, n)).astype(np.int8)
    a, b = (rng.standard_normal(size, np.float32).astype(DTYPES[dtype]) for size in ((m, k), (k, n)))
    return a, b


def to_torch(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def peers(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: str, packed: bool) -> list[Contender]:
    found: list[Contender] = []
    if dtype == "fp32" and not packed:
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
        found.append(Contender("OpenBLAS", lambda: np.matmul(a, b, out=out), []))
    if torch is None:
        return found
    x, w = to_torch(a), to_torch(b)
    if packed and dtype != "int8":
        weight = torch.ops.mkldnn._reorder_linear_weight(w.t().contiguous(), a.shape[0])
        found.append(
            Contender("oneDNN", lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""), [])
        )
    elif dtype == "int8" and not packed:
        found.append(Contender("torch", lambda: torch._int_mm(x, w), []))
    elif not packed:
        result = torch.empty((a.shape[0], b.shape[1]), dtype=x.dtype)
        found.append(Contender("torch", lambda: torch.mm(x, w, out=result), []))
    return found


def measure(contenders: list[Contender], seconds: float) -> None:
    """Rounds in turn until the time is up, at least five; a round of a short call is many calls."""
    for contender in contenders:
        contender.round(1)
    fastest = min(contender.seconds[-1] for contender in contenders)
    calls = max(1, int(0.002 / max(fastest, 1e-7)))
    for contender in contenders:
        contender.seconds.clear()
    deadline = time.perf_counter() + seconds * len(contenders)
    rounds = 0
    while rounds < 5 or time.perf_counter() < deadline:
        for contender in contenders if rounds % 2 else contenders[::-1]:
            contender.round(calls)
        rounds += 1


def check(c: np.ndarray[Any, Any], a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    rows = slice(0, min(len(a), 64))
    want = a[rows].astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(c[rows].astype(np.float64) - want) / np.linalg.norm(want)
    assert error < 5e-3, f"wrong result: relative error {error}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def bench(ours: Ours, dtype: str, threads: int, groups: list[str], seconds: float) -> None:
    jobs = [(shape, group == "packed") for group in groups for shape in SHAPES[group]]
    configs = [recommended(shape, dtype, threads, packed) for shape, packed in jobs]
    ours.build(configs)
    openblas_threads(threads)
    if torch is not None:
        torch.set_num_threads(threads)
    ratios: dict[str, list[float]] = {}
    print(f"\n{dtype}, {threads} thread{'s' * (threads > 1)}: best (median) GFLOP/s, ratio of the best")
    for (shape, packed), config in zip(jobs, configs, strict=True):
        a, b = operands(shape, dtype)
        call, c, keep = ours.prepare(config, a, b)
        contenders = [Contender("ours", call, []), *peers(a, b, dtype, packed)]
        measure(contenders, seconds)
        check(c, a, b)
        del keep
        work = 2e-9 * math.prod(shape)
        cells = []
        for contender in contenders:
            best, middle = min(contender.seconds), statistics.median(contender.seconds)
            cell = f"{contender.name} {work / best:7.1f} ({work / middle:7.1f})"
            if contender.name != "ours":
                ratio = best / min(contenders[0].seconds)
                ratios.setdefault(contender.name, []).append(ratio)
                cell += f" {ratio:5.2f}x"
            cells.append(cell)
        label = "x".join(map(str, shape)) + (" packed B" if packed else "")
        print(
            f"  {label:24s} {' | '.join(cells)} | {min(contenders[0].seconds) * 1e6:9.1f} us {config.pipeline}",
            flush=True,
        )
    for name, values in ratios.items():
        mean, least = geometric_mean(values), min(values)
        print(f"  geometric mean over {name}: {mean:.3f} (least {least:.3f}, {len(values)} shapes)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="fp32,bf16,int8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--shapes", default="square,skinny")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each contender and shape")
    options = parser.parse_args()
    level = next((level for level in reversed(LEVELS) if not missing_features(level)), "v2")
    ours = Ours(level)
    print(
        f"level {level}, NumPy {np.__version__}, PyTorch {torch.__version__ if torch is not None else 'not installed'}"
    )
    for dtype in options.dtypes.split(","):
        for threads in map(int, options.threads.split(",")):
            bench(ours, dtype, threads, options.shapes.split(","), options.seconds)


if __name__ == "__main__":
    main()
