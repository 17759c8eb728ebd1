"""Builds and plans: one kernel, several with one and two workers, a load from the warm cache, a plan found again."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import timing
from common.build_conv import chosen, measure_conv_pool

import tilewright_arch
from suites.base import Options, Table, main
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.build.pool import BuildPool, PoolOptions
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.devices.cpu.device import CpuModule
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import EngineOptions, Selection

KERNELS = 6
HIP_ARCHS = ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201")
DTYPES = ("fp32", "bf16", "fp16", "int8", "fp8", "bf8")


def plugins() -> PluginManager:
    manager = PluginManager()
    manager.load_entry_points()
    return manager


def request(dtype: str, size: int = 512) -> OperationRequest:
    a = TensorDesc.of(dtype, (size, size))
    b = TensorDesc.of(dtype, (size, size), (1, size))
    return OperationRequest("gemm", {"a": a, "b": b})


def units(manager: PluginManager, arch: tilewright_arch.ArchSpec, options: Options) -> list[SourceUnit]:
    """One kernel for each element type: what the server would build for a square product. A check has one type."""
    operation = manager.operations["gemm"]
    (info,) = manager.devices["cpu"].discover()
    found = []
    for dtype in DTYPES[:1] if options.quick else DTYPES:
        problem = operation.parse(request(dtype))
        candidates = operation.candidates(problem, info)
        best = min(candidates, key=lambda config: operation.predict(problem, config, info).seconds)
        found.append(operation.generate(best, arch))
    return found


def measure_compile(all_units: list[SourceUnit], arch: tilewright_arch.ArchSpec, options: Options) -> Table:
    table = Table("Compiling one kernel (seconds)", ["compiler", "median", "fastest", "slowest", "kernels"])
    for compiler in ("g++", "clang++", "ziglang"):
        with tempfile.TemporaryDirectory() as scratch:
            toolchain = CpuToolchain([include_dir()], compiler=compiler, scratch=Path(scratch) / "cache")
            try:
                toolchain.identity()
            except ToolchainMissingError:
                continue
            seconds = []
            for turn in range(2 if options.quick else 4):
                for index, unit in enumerate(all_units):
                    folder = Path(scratch) / f"{turn}-{index}"
                    folder.mkdir()
                    taken = toolchain.compile(unit, folder, arch).seconds
                    if turn:  # the first turn warms the caches of files
                        seconds.append(taken)
            table.rows.append([compiler, statistics.median(seconds), min(seconds), max(seconds), len(all_units)])
    return table


def measure_hip(manager: PluginManager, options: Options) -> Table:
    """Kernels for an AMD GPU, which need no GPU to be compiled; processor time beside the clock's."""
    arch = tilewright_arch.load("gfx942")
    operation = manager.operations["gemm"]
    configs = list(operation.kernel_sets["essential"].iterate(arch, operation.rules))[:: 256 if options.quick else 3]
    columns = ["compiler", "median", "fastest", "slowest", "median of processor time", "kernels"]
    table = Table("Compiling one kernel for gfx942 (seconds)", columns)
    for compiler in ("hiprtc", "clang++-22", "ziglang"):
        toolchain = HipToolchain([include_dir()], compiler=compiler)
        try:
            toolchain.identity()
        except ToolchainMissingError:
            continue
        seconds, busy = compile_hip(operation, toolchain, configs, arch)
        toolchain.close()
        spread = [statistics.median(seconds), min(seconds), max(seconds)]
        table.rows.append([compiler, *spread, statistics.median(busy), len(configs)])
    return table


def measure_essential(manager: PluginManager, options: Options) -> Table:
    """The essential set of every AMD GPU with the first compiler that there is, one kernel after the other."""
    columns = ["arch", "kernels", "all of them", "processor time", "median of processor time", "most processor time"]
    table = Table("Compiling the essential set for AMD GPUs (seconds)", columns)
    operation, toolchain = manager.operations["gemm"], HipToolchain([include_dir()])
    try:
        toolchain.identity()
    except ToolchainMissingError:
        return table
    for name in HIP_ARCHS[:1] if options.quick else HIP_ARCHS:
        arch = tilewright_arch.load(name)
        configs = list(operation.kernel_sets["essential"].iterate(arch, operation.rules))
        seconds, busy = compile_hip(operation, toolchain, configs[:1] if options.quick else configs, arch)
        table.rows.append([name, len(busy), sum(seconds), sum(busy), statistics.median(busy), max(busy)])
    toolchain.close()
    return table


def compile_hip(
    operation: Any, toolchain: HipToolchain, configs: list[Any], arch: tilewright_arch.ArchSpec
) -> tuple[list[float], list[float]]:
    """Seconds of each by the clock, and of its compiler's processes."""
    seconds, busy = [], []
    for config in configs:
        with tempfile.TemporaryDirectory() as scratch:
            before = os.times()
            seconds.append(toolchain.compile(operation.generate(config, arch), Path(scratch), arch).seconds)
            after = os.times()
            busy.append(sum(after[2:4]) - sum(before[2:4]))
    return seconds, busy


def build_all(all_units: list[SourceUnit], arch: tilewright_arch.ArchSpec, workers: int) -> float:
    """Seconds to build all into an empty cache."""
    with tempfile.TemporaryDirectory() as scratch:
        pool = BuildPool(
            ArtifactCache(Path(scratch)), {"c++": CpuToolchain([include_dir()])}, PoolOptions(workers=workers)
        )
        try:
            keys = [pool.key(unit, arch) for unit in all_units]  # identifying the compiler is done once
            begun = time.perf_counter()
            builds = [pool.submit(unit, arch, key=key) for unit, key in zip(all_units, keys, strict=True)]
            for build in builds:
                build.wait(Call())
                if build.error is not None:
                    raise build.error
            return time.perf_counter() - begun
        finally:
            pool.close()


def measure_pool(all_units: list[SourceUnit], arch: tilewright_arch.ArchSpec, options: Options) -> Table:
    table = Table(f"Building {len(all_units)} kernels (seconds)", ["workers", "median", "speed-up"])
    turns: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(1 if options.quick else 5):
        for workers, values in turns.items():
            values.append(build_all(all_units, arch, workers))
    one = statistics.median(turns[1])
    for workers, values in turns.items():
        table.rows.append([workers, statistics.median(values), one / statistics.median(values)])
    return table


def measure_warm(all_units: list[SourceUnit], arch: tilewright_arch.ArchSpec) -> Table:
    """A kernel that another process built: verify its digest, map it, find its entries."""
    table = Table("A kernel from the warm disk cache (milliseconds)", ["", "median", "slowest"])
    with tempfile.TemporaryDirectory() as scratch:
        toolchain = CpuToolchain([include_dir()])
        pool = BuildPool(ArtifactCache(Path(scratch)), {"c++": toolchain}, PoolOptions(workers=2))
        for unit in all_units:
            pool.submit(unit, arch).wait(Call())
        pool.close()
        fresh = BuildPool(ArtifactCache(Path(scratch)), {"c++": toolchain})
        taken = []
        for unit in all_units:
            begun = time.perf_counter()
            artifact = fresh.cache.get(fresh.key(unit, arch))
            assert artifact is not None, "it was just built"
            module = CpuModule(artifact.binary, lambda _: None)
            for symbol in unit.entries.values():
                module.function(symbol)
            taken.append((time.perf_counter() - begun) * 1e3)
            module.unload()
            artifact.release()
        fresh.close()
    table.rows.append(["key, verify, load", statistics.median(taken), max(taken)])
    return table


def measure_plans(manager: PluginManager) -> Table:
    """Planning in the engine: the first time with a warm artifact cache, and again."""
    table = Table("Planning inside the server (microseconds)", ["", "median", "p99"])
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(EngineOptions(cache_dir=Path(scratch)), manager)
        try:
            engine.plan(request("fp32"), Selection(), Call())
            first = []
            for size in range(520, 840, 16):
                call = Call()
                begun = time.perf_counter()
                engine.plan(request("fp32", size), Selection(), call)
                first.append((time.perf_counter() - begun - call.build_ns / 1e9) * 1e6)
            again = request("fp32")
            hits = [item * 1e6 for item in timing.latencies(lambda: engine.plan(again, Selection(), Call()), 5000)]
        finally:
            engine.close()
    first.sort()
    table.rows.append(["new problem, without builds", statistics.median(first), first[-1]])
    table.rows.append(["plan-cache hit", timing.percentile(hits, 50), timing.percentile(hits, 99)])
    return table


def measure(options: Options) -> list[Table]:
    manager = plugins()
    arch = tilewright_arch.detect_cpu()
    all_units = units(manager, arch, options)
    tables = [
        measure_compile(all_units, arch, options),
        measure_hip(manager, options),
        measure_essential(manager, options),
        measure_pool(all_units, arch, options),
        measure_conv_pool(chosen(manager, arch, options), arch, options, build_all),
        measure_warm(all_units, arch),
        measure_plans(manager),
    ]
    return [table for table in tables if table.rows]  # without a compiler for AMD GPUs their tables are empty


if __name__ == "__main__":
    raise SystemExit(main(measure))
