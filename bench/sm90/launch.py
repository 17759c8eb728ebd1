"""Runs one Hopper GEMM kernel on the GPU: tensor maps, parameters, launches, references and timing.

Needs PyTorch and ``cuda-bindings``; imported in the worker process of check.py alone.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda.bindings import driver

from sm90.config import ELEMENT_BYTES, Config

Tensor = torch.Tensor
UNITS = 132
TORCH = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn,
    "bf8": torch.float8_e5m2, "int8": torch.int8, "int32": torch.int32,
}  # fmt: skip
MAP_TYPES = {"fp32": "FLOAT32", "fp16": "FLOAT16", "bf16": "BFLOAT16", "int32": "INT32"}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "PassThrough": lambda x: x,
    "Relu": lambda x: torch.where(x < 0, 0, x),
    "Gelu": torch.nn.functional.gelu,
    "FastGelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "Silu": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "HardSwish": torch.nn.functional.hardswish,
    "Clamp": lambda x: x.clamp(-0.5, 0.75),
}


def check(result: Sequence[Any]) -> Any:
    """The values of a driver call. Raises ``RuntimeError`` if it failed."""
    if int(result[0]) != 0:
        raise RuntimeError(f"driver call failed: {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def tensor_map(
    dtype: str, tensor: Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """An encoded map with 128-byte swizzle: sizes and box in elements, strides in bytes, fastest dimension first."""
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAP_TYPES.get(dtype, 'UINT8')}")
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            kind, len(sizes), tensor.data_ptr() + offset, [driver.cuuint64_t(x) for x in sizes],
            [driver.cuuint64_t(x) for x in strides], [driver.cuuint32_t(x) for x in box],
            [driver.cuuint32_t(1)] * len(sizes), driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    return ctypes.string_at(int(encoded.getPtr()), 128)


@dataclass
class Problem:
    """Random operands of one GEMM and its poisoned result. Matrices are (batch, rows, leading dimension)."""

    config: Config
    m: int
    n: int
    k: int
    batch: int = 1
    alpha: float = 1.0
    guard: bool = False
    """Leading dimensions longer than the rows; what lies between must stay as it was."""
    a: Tensor = field(init=False)
    b: Tensor = field(init=False)
    c: Tensor = field(init=False)
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    d: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.a = self._matrix(config.a, self.m, self.k, config.layout[0] == "c")
        self.b = self._matrix(config.b, self.k, self.n, config.layout[1] == "c")
        unaligned = self.guard and config.epilogue == "default"  # threads store to any address
        leading = self.n + 3 if unaligned else self._leading(self.n, config.c)
        self.c = torch.empty((self.batch, self.m, leading), device="cuda", dtype=TORCH[config.c])
        self.poison()
        if config.bias:
            self.bias = torch.randn(self.n, device="cuda").to(TORCH[config.bias])
        if config.scale_a != "none":
            self.scale_a = torch.rand(1 if config.scale_a == "tensor" else self.m, device="cuda") + 0.5
        if config.scale_b != "none":
            self.scale_b = torch.rand(1 if config.scale_b == "tensor" else self.n, device="cuda") + 0.5
        self.d = [torch.randn((self.batch, self.m, self.n), device="cuda").to(TORCH[x]) for x in config.d]

    def _leading(self, length: int, dtype: str) -> int:
        unit = 16 // ELEMENT_BYTES[dtype]
        return -(-length // unit) * unit + (unit if self.guard else 0)

    def _matrix(self, dtype: str, rows: int, columns: int, transposed: bool) -> Tensor:
        if transposed:
            rows, columns = columns, rows
        shape = (self.batch, rows, self._leading(max(columns, 1), dtype))
        if dtype == "int8":
            return torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
        scale = 1.0 / math.sqrt(max(1, self.k)) if dtype == "fp16" else 1.0
        return (torch.randn(shape, device="cuda") * scale).to(TORCH[dtype])

    def poison(self) -> None:
        """Every element of C's memory becomes a NaN or an unlikely number."""
        self.c.fill_(float("nan") if self.c.is_floating_point() else -1234567)

    def operand(self, which: str) -> Tensor:
        """A (batch, m, k) or B (batch, k, n) without padding, as float64."""
        rows, columns = (self.m, self.k) if which == "a" else (self.k, self.n)
        tensor = self.a if which == "a" else self.b
        if self.config.layout["ab".index(which)] == "c":
            return tensor[:, :columns, :rows].transpose(1, 2).to(torch.float64)
        return tensor[:, :rows, :columns].to(torch.float64)

    def reference(self) -> Tensor:
        """The exact result, float64, (batch, m, n)."""
        config = self.config
        x = self.operand("a") @ self.operand("b") * self.alpha
        if self.scale_b is not None:
            x = x * self.scale_b.double()
        if self.scale_a is not None:
            x = x * self.scale_a.double()[:, None]
        if self.bias is not None:
            x = x + self.bias.double()
        for d in self.d:
            x = x * d.double() if "Multiply" in config.binary else x + d.double()
        return UNARY[config.unary](x)

    def error(self) -> float:
        """Relative error of C in the Frobenius norm; infinite if an element outside was touched or one is missing."""
        reference, got = self.reference(), self.c[:, :, : self.n].double()
        outside = self.c[:, :, self.n :]
        untouched = outside.isnan().all() if outside.is_floating_point() else (outside == -1234567).all()
        if not bool(got.isfinite().all()):
            return math.inf
        if not bool(untouched):
            return 1e6
        norm = float(reference.norm())
        return float((got - reference).norm()) / norm if norm else float(got.norm())


def maps_of(config: Config, p: Problem) -> bytes:
    """The tensor maps of A, B and C."""
    (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = config.tile, config.cluster
    size, c_size = ELEMENT_BYTES[config.a], ELEMENT_BYTES[config.c]
    out = b""
    for which, tensor, rows, tile, parts in (("a", p.a, p.m, tile_m, cluster_n), ("b", p.b, p.n, tile_n, cluster_m)):
        k_major = config.layout["ab".index(which)] == ("r" if which == "a" else "c")
        sizes = (p.k, rows, p.batch) if k_major else (rows, p.k, p.batch)
        box = (128 // size, tile // parts, 1) if k_major else (64, tile_k, 1)
        strides = (tensor.stride(1) * size, tensor.stride(0) * size)
        out += tensor_map(getattr(config, which), tensor, 0, tuple(max(x, 1) for x in sizes), strides, box)
    if config.epilogue != "cshuffle":
        return out + bytes(128)
    box = (128 // c_size, 64, 1)
    if config.swap:
        box = (64 if c_size == 2 else 32, tile_m, 1)
    strides = (p.c.stride(1) * c_size, p.c.stride(0) * c_size)
    return out + tensor_map(config.c, p.c, 0, (p.n, p.m, p.batch), strides, box)


def operand_bytes(tensor: Tensor | None, row: int, column: int, batch: int = 0) -> bytes:
    return struct.pack("<Qqqq", tensor.data_ptr() if tensor is not None else 0, row, column, batch)


def task_bytes(config: Config, p: Problem, first_tile: int) -> bytes:
    """One GemmTask."""
    vector_a, vector_b = config.scale_a == "row", config.scale_b == "column"
    batches = [t.stride(0) if p.batch > 1 else 0 for t in (p.a, p.b, p.c)]
    body = struct.pack("<QQQ", p.a.data_ptr(), p.b.data_ptr(), p.c.data_ptr())
    body += struct.pack("<qqq", p.m, p.n, p.k)
    body += struct.pack("<qqq", p.a.stride(1), p.b.stride(1), p.c.stride(1))
    body += struct.pack("<qqqq", p.batch, *batches)
    body += struct.pack("<ddd", p.alpha, -0.5, 0.75)
    body += operand_bytes(p.scale_a, int(vector_a), 0) + operand_bytes(p.scale_b, 0, int(vector_b))
    body += operand_bytes(p.bias, 0, 1) + struct.pack("<Qq", 0, first_tile)
    for d in p.d:
        body += operand_bytes(d, d.stride(1), 1, d.stride(0))
    task = maps_of(config, p) + body
    return task + bytes(-len(task) % 64)


def padded_tiles(config: Config, p: Problem) -> int:
    """Output tiles of all batch items, rounded up to whole clusters both ways."""
    rows = -(-p.m // (config.tile[0] * config.cluster[0])) * config.cluster[0]
    columns = -(-p.n // (config.tile[1] * config.cluster[1])) * config.cluster[1]
    return rows * columns * p.batch


class Launcher:
    """A loaded kernel with everything that one launch over ``problems`` needs (one problem unless grouped)."""

    def __init__(self, config: Config, cubin: bytes, problems: Sequence[Problem], dependent: bool = False) -> None:
        self.module = check(driver.cuModuleLoadData(cubin))
        self.function = check(driver.cuModuleGetFunction(self.module, b"kernel"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.function, attribute, config.shared_bytes))
        self.config, self.problems, self.dependent = config, problems, dependent
        tiles = sum(padded_tiles(config, p) for p in problems)
        cluster = config.cluster[0] * config.cluster[1]
        units = UNITS // cluster * cluster
        self.grid = tiles * config.split_k
        if config.persistent:
            self.grid = units if config.stream else min(units, self.grid)
        slots = self.grid * 2 if config.stream else tiles * config.split_k
        partial = config.stream or config.split_k > config.cluster_k
        self.workspace = torch.empty(slots * config.tile[0] * config.tile[1] if partial else 1, device="cuda")
        self.workspace.fill_(float("nan"))
        self.counters = torch.zeros(max(tiles, 1), device="cuda", dtype=torch.int32)
        firsts = [sum(padded_tiles(config, q) for q in problems[:i]) for i in range(len(problems))]
        tasks = b"".join(task_bytes(config, p, first) for p, first in zip(problems, firsts, strict=True))
        self.table = torch.frombuffer(bytearray(tasks), dtype=torch.uint8).cuda()
        head = struct.pack(
            "<QqqQQqqq", self.table.data_ptr() if config.grouped else 0, len(problems), tiles,
            self.workspace.data_ptr(), self.counters.data_ptr(), config.split_k, self.workspace.numel() * 4, 0,
        )  # fmt: skip
        self.params = head if config.grouped else head + tasks
        raw = ctypes.create_string_buffer(len(self.params) + 64)
        address = (ctypes.addressof(raw) + 63) & ~63
        ctypes.memmove(address, self.params, len(self.params))
        self.arguments = (ctypes.c_void_p * 1)(address)
        self.keep = raw
        self.launch_config = self._launch_config(cluster * config.cluster_k)

    def _launch_config(self, cluster: int) -> Any:
        made = driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = self.grid, 1, 1
        made.blockDimX, made.blockDimY, made.blockDimZ = self.config.threads, 1, 1
        made.sharedMemBytes = self.config.shared_bytes
        attributes = []
        if cluster > 1:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            one.value.clusterDim.x, one.value.clusterDim.y, one.value.clusterDim.z = cluster, 1, 1
            attributes.append(one)
        if self.dependent:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            one.value.programmaticStreamSerializationAllowed = 1
            attributes.append(one)
        made.attrs, made.numAttrs = attributes, len(attributes)
        return made

    def __call__(self) -> None:
        """Launch on PyTorch's current stream."""
        self.launch_config.hStream = torch.cuda.current_stream().cuda_stream
        check(driver.cuLaunchKernelEx(self.launch_config, self.function, ctypes.addressof(self.arguments), 0))


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls, once each, as one graph; run once."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_graphs(
    graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int = 7, target_s: float = 0.012
) -> dict[str, float]:
    """Seconds per call: the graphs take turns; the median over the rounds."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    repeats: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            count = repeats.get(name, 1)
            begin.record()
            for _ in range(count):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) / 1e3 / count / calls
            if turn == 0:
                repeats[name] = max(1, round(target_s / (seconds * calls)))
            else:
                samples[name].append(seconds)
    return {name: sorted(values)[len(values) // 2] for name, values in samples.items()}


def peer_of(config: Config, p: Problem) -> Callable[[], object] | None:
    """Peers in PyTorch for the same product: cuBLAS, and separate kernels for what it does not fuse."""
    if p.guard or config.grouped:
        return None
    if p.batch > 1:
        first, second = p.a, p.b.transpose(1, 2) if config.layout[1] == "c" else p.b
        return lambda: torch.bmm(first, second)
    a = p.a[0].t() if config.layout[0] == "c" else p.a[0]
    b = p.b[0].t() if config.layout[1] == "c" else p.b[0]
    if config.a == "int8" and p.m <= 16:
        return None  # PyTorch refuses
    if config.a == "int8":
        return lambda: torch._int_mm(a, b)
    if ELEMENT_BYTES[config.a] == 1:
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=config.promote == 0
        )
    if p.bias is not None:
        bias, step = p.bias, UNARY[config.unary]
        return lambda: step(torch.addmm(bias, a, b))
    if p.d:
        d = p.d[0][0]
        return lambda: torch.addmm(d, a, b)
    out = torch.empty((p.m, p.n), device="cuda", dtype=a.dtype)
    return lambda: torch.matmul(a, b, out=out)
