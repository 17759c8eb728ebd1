"""Runs portable GPU kernels on an NVIDIA GPU: compilation by NVRTC, memory, launches, timing.

Needs PyTorch (memory, streams, cuBLAS) and ``cuda-bindings``. Imported by the worker processes of gpu_harness.py alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from gpu_config import GpuConfig
from gpu_emulation import LaunchHead, task_bytes, tiles_of
from native_case import Call
from native_harness import Guarded, ProblemArgs

UNITS = 132
TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "bf8": torch.float8_e5m2,
    "int8": torch.int8,
    "int32": torch.int32,
}
GUARD = 512


def check(result: Sequence[Any]) -> Any:
    """The values of a driver call. Raises ``RuntimeError`` if it failed."""
    if int(result[0]) != 0:
        raise RuntimeError(f"driver call failed: {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


class Kernel:
    """A loaded kernel."""

    def __init__(self, config: GpuConfig, cubin: bytes) -> None:
        self.config = config
        self.module = check(driver.cuModuleLoadData(cubin))
        self.function = check(driver.cuModuleGetFunction(self.module, b"kernel"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.function, attribute, config.shared_bytes))

    def launcher(self, block: bytes, grid: int) -> Callable[[], None]:
        """Launches with these parameters on PyTorch's current stream."""
        raw = ctypes.create_string_buffer(block, len(block))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(raw))

        def launch(keep: object = raw) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            check(
                driver.cuLaunchKernel(
                    self.function, grid, 1, 1, self.config.threads, 1, 1, self.config.shared_bytes, stream,
                    ctypes.addressof(arguments), 0,
                )
            )  # fmt: skip

        return launch


class Arena:
    """Device memory that mirrors the guarded host memory of calls, at the same alignment, between guard bytes."""

    def __init__(self, nbytes: int = 1 << 28) -> None:
        self.memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
        self.used = 0
        self.places: list[tuple[Guarded, int]] = []

    def reset(self) -> None:
        self.memory[: self.used + GUARD].fill_(0xFF)
        self.used, self.places = GUARD, []

    def take(self, nbytes: int, alignment_of: int = 0) -> int:
        """The offset of new memory whose address is ``alignment_of`` modulo 256."""
        offset = -(-self.used // 256) * 256 + alignment_of % 256
        self.used = offset + nbytes + GUARD
        return offset

    def put(self, memory: Guarded) -> None:
        offset = self.take(memory.bytes, memory.address)
        source = np.frombuffer(ctypes.string_at(memory.address, memory.bytes), np.uint8).copy()
        if memory.bytes:
            self.memory[offset : offset + memory.bytes] = torch.from_numpy(source).cuda()
        self.places.append((memory, offset))

    def address(self, pointer: int | None) -> int | None:
        if pointer:
            for memory, offset in self.places:
                if memory.address <= pointer <= memory.address + memory.bytes:
                    return int(self.memory.data_ptr() + offset + pointer - memory.address)
        return None  # of an operand without elements

    def fetch(self, pointer: int) -> str:
        """Copies the operand that holds the pointer back; what is wrong with the bytes around it, or nothing."""
        for memory, offset in self.places:
            if memory.address <= pointer <= memory.address + memory.bytes:
                around = self.memory[offset - 64 : offset + memory.bytes + 64].cpu().numpy()
                inside = around[64 : 64 + memory.bytes]
                ctypes.memmove(memory.address, inside.tobytes(), memory.bytes)
                outside = [*np.flatnonzero(around[:64] != 0xFF) - 64]
                outside += list(np.flatnonzero(around[64 + memory.bytes :] != 0xFF) + memory.bytes)
                return f"wrote outside of C at byte offsets {outside[:8]}" if outside else ""
        return ""


def translated(arena: Arena, args: ProblemArgs, config: GpuConfig) -> ProblemArgs:
    """The problem with device addresses."""
    moved = ProblemArgs.from_buffer_copy(args)
    for name in ("a", "b", "c"):
        setattr(moved, name, arena.address(getattr(args, name)))
    for name in ("scale_a", "scale_b", "bias"):
        operand = getattr(moved, name)
        operand.ptr = arena.address(operand.ptr)
    operands = (type(args.scale_a) * max(len(config.d), 1))()
    for i in range(len(config.d)):
        ctypes.memmove(ctypes.addressof(operands[i]), ctypes.addressof(args.d[i]), ctypes.sizeof(operands[i]))
        operands[i].ptr = arena.address(operands[i].ptr)
    moved.d = operands
    return moved


def run_call(arena: Arena, kernel: Kernel, call: Call, grid: int = 0) -> str:
    """One launch; results come back into the call's host memory. Says what was wrong beyond the results."""
    config = kernel.config
    arena.reset()
    for memory in call.keep:
        if isinstance(memory, Guarded):
            arena.put(memory)
    table = [translated(arena, args, config) for args in call.table]
    counts = [tiles_of(config, args) for args in table]
    firsts = np.cumsum([0, *counts]).tolist()
    tiles = int(firsts[-1])
    tasks = b"".join(task_bytes(config, args, first) for args, first in zip(table, firsts[:-1], strict=True))
    slot = config.tile[0] * config.tile[1] * 4
    workspace = arena.take(tiles * call.split_k * slot if call.split_k > 1 else 0)
    counters = torch.zeros(tiles + 1, dtype=torch.int32, device="cuda")
    device_table = torch.from_numpy(np.frombuffer(tasks, np.uint8).copy()).cuda()
    head = LaunchHead(
        device_table.data_ptr() if config.grouped else None, len(table), tiles,
        arena.memory.data_ptr() + workspace, counters.data_ptr(), call.split_k, 0, 0,
    )  # fmt: skip
    total = tiles * call.split_k
    if total:
        kernel.launcher(bytes(head) + (b"" if config.grouped else tasks), grid if config.persistent else total)()
    torch.cuda.synchronize()
    faults = [arena.fetch(args.c) for args in call.table if args.c]
    if bool(counters.any()):
        faults.append("counters left")
    return "; ".join(fault for fault in faults if fault)


def time_each(calls: dict[str, Callable[[], object]], target_s: float = 0.01, rounds: int = 3) -> dict[str, float]:
    """Seconds per call, from graphs of 20 launches that take turns; the median over the rounds."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    repeats: dict[str, int] = {}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                call()
        graphs[name] = graph
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            count = repeats.get(name, 1)
            begin.record()
            for _ in range(count):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) / 1e3 / count / 20
            if turn == 0:
                repeats[name] = max(1, round(target_s / (seconds * 20)))
            else:
                samples[name].append(seconds)
    return {name: sorted(values)[len(values) // 2] for name, values in samples.items()}


class Product:
    """A product of random matrices in device memory, for timing; leading dimensions are padded by ``pad`` elements."""

    def __init__(self, config: GpuConfig, shape: tuple[int, int, int], pad: int = 0) -> None:
        self.config, (self.m, self.n, self.k) = config, shape
        self.a = self._matrix(config.a, self.m, self.k, config.a_col, pad)
        self.b = self._matrix(config.b, self.k, self.n, config.b_col, pad)
        self.c = torch.empty((self.m, self.n), dtype=TORCH[config.c], device="cuda")

    def _matrix(self, dtype: str, rows: int, columns: int, column_major: bool, pad: int) -> torch.Tensor:
        shape = (columns, rows + pad) if column_major else (rows, columns + pad)
        if dtype == "int8":
            full = torch.randint(-64, 64, shape, device="cuda", dtype=torch.int8)
        else:
            full = torch.randn(shape, device="cuda").to(TORCH[dtype])
        return full[:, :rows].t() if column_major else full[:, :columns]

    def launcher(self, kernel: Kernel, split_k: int = 1) -> Callable[[], None]:
        args = ProblemArgs()
        args.a, args.b, args.c = self.a.data_ptr(), self.b.data_ptr(), self.c.data_ptr()
        args.m, args.n, args.k, args.batch, args.alpha = self.m, self.n, self.k, 1, 1.0
        args.lda = self.a.stride(1) if kernel.config.a_col else self.a.stride(0)
        args.ldb = self.b.stride(1) if kernel.config.b_col else self.b.stride(0)
        args.ldc = self.n
        config, tiles = kernel.config, tiles_of(kernel.config, args)
        self.workspace = torch.empty(tiles * split_k * config.tile[0] * config.tile[1], device="cuda")
        self.counters = torch.zeros(tiles, dtype=torch.int32, device="cuda")
        head = LaunchHead(
            None, 1, tiles, self.workspace.data_ptr(), self.counters.data_ptr(), split_k, self.workspace.numel() * 4, 0
        )
        total = tiles * split_k
        launch = kernel.launcher(
            bytes(head) + task_bytes(config, args, 0), min(total, 2 * UNITS) if config.persistent else total
        )
        keep = (self.workspace, self.counters)
        return lambda keep=keep: launch()  # type: ignore[misc]

    def peer(self) -> Callable[[], object] | None:
        """cuBLAS, through PyTorch."""
        dtype = self.config.a
        if dtype == "int8":
            aligned = self.m > 16 and self.n % 8 == 0 and self.k % 8 == 0
            return (lambda: torch._int_mm(self.a, self.b)) if aligned else None
        if dtype in ("fp8", "bf8"):
            if (self.config.a_col, self.config.b_col) != (False, True) or self.n % 16 or self.k % 16:
                return None
            one = torch.ones((), device="cuda")
            return lambda: torch._scaled_mm(self.a, self.b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        out = torch.empty((self.m, self.n), dtype=self.a.dtype, device="cuda")
        return lambda: torch.matmul(self.a, self.b, out=out)

    def error(self) -> float:
        """Relative error of C in the Frobenius norm, against a product in fp64 of (at most) its first 256 rows."""
        rows = slice(0, 256)
        want = self.a[rows].to(torch.float64) @ self.b.to(torch.float64)
        return float((self.c[rows].to(torch.float64) - want).norm() / want.norm())
