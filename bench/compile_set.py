"""Compile every kernel of a set, one at a time, and say which take longer than promised. Needs no GPU.

    python bench/compile_set.py                                     # all operations, for this CPU and for sm_90a
    python bench/compile_set.py 'attention*' --arch sm_90a
    python bench/compile_set.py 'conv*' --arch x86-64-v4 --named depthwise --workers 4
    python bench/compile_set.py gemm --arch sm_90a --headers ../changed/native/include

Leave the machine alone meanwhile. With several workers each compiles one kernel at a time; give them fewer than the
machine has cores. A kernel over the limit is compiled twice more, and its least counts. Exit code 1 if any is over, 2
if nothing can be compiled: an arch or operation that does not exist, or no compiler.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import tilewright_arch
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.types.errors import BuildFailedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain
from tilewright_server.build.toolchains.toolchain import CpuToolchain

__all__ = ["Compile", "Took", "jobs", "limit_of", "main"]

LIMITS = {"gemm": (0.5, 0.5), "conv": (0.7, 0.5), "attention": (1.0, 1.0)}
"""Most seconds that a kernel of a family may take, for a CPU and for a GPU: what the project promises."""
TOOLCHAINS: dict[str, Any] = {"cpu": CpuToolchain, "cuda": NvrtcToolchain, "hip": HipToolchain}
TURNS = 3
SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Compile:
    """One kernel to compile."""

    operation: str
    arch: str
    config: Any
    limit: float
    headers: Path


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds by the clock and of the compiler's processes; ``fault`` is empty if it compiled."""

    job: Compile
    seconds: float = math.nan
    busy: float = math.nan
    fault: str = ""


def limit_of(operation: str, arch: tilewright_arch.ArchSpec) -> float:
    """The promise for kernels of an operation, its helpers' too; infinite where none is made (``kv_append``)."""
    for family, (cpu, gpu) in LIMITS.items():
        if operation == family or operation.startswith(f"{family}_"):
            return cpu if arch.kind == "cpu" else gpu
    return math.inf


def jobs(patterns: Iterable[str], archs: Iterable[str], which: str, named: str, headers: Path) -> Iterator[Compile]:
    """The kernels of the set ``which`` whose names hold ``named``, of operations that match any pattern."""
    for name in archs:
        arch = tilewright_arch.load(name)
        for operation in sorted(plugins().operations):
            found = plugins().operations[operation]
            if not any(fnmatch.fnmatch(operation, pattern) for pattern in patterns) or which not in found.kernel_sets:
                continue
            for config in found.kernel_sets[which].expand(arch, found.rules):
                if named in config.name:
                    yield Compile(operation, name, config, limit_of(operation, arch), headers)


@lru_cache(1)
def plugins() -> PluginManager:
    manager = PluginManager()
    manager.load_entry_points()
    return manager


@lru_cache
def toolchain(arch: str, headers: Path) -> Any:
    """One of each for a process, after a first kernel, which starts its helper and fills the caches of files."""
    spec = tilewright_arch.load(arch)
    made = TOOLCHAINS[spec.kind]([headers])
    operation = plugins().operations["gemm"]
    first = next(iter(operation.kernel_sets["default"].iterate(spec, operation.rules)))
    compiled(operation, made, first, spec)
    return made


def take(job: Compile) -> Took:
    operation, arch = plugins().operations[job.operation], tilewright_arch.load(job.arch)
    best = (math.inf, math.inf)
    try:
        for _ in range(TURNS):
            best = min(best, compiled(operation, toolchain(job.arch, job.headers), job.config, arch))
            if best[0] <= job.limit:
                break
    except BuildFailedError as error:
        return Took(job, fault=f"{job.config.name}: {error}")
    return Took(job, *best)


def compiled(operation: Any, toolchain: Any, config: Any, arch: tilewright_arch.ArchSpec) -> tuple[float, float]:
    """Seconds by the clock, and of the compiler's processes."""
    with tempfile.TemporaryDirectory() as scratch:
        before = processor_time()
        seconds = toolchain.compile(operation.generate(config, arch), Path(scratch), arch).seconds
        return seconds, processor_time() - before


def processor_time() -> float:
    """Processor time of all children of this process: those that ended, and helpers that stay."""
    total = sum(os.times()[2:4])
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def report(took: list[Took], console: Console) -> int:
    """A line for each operation and arch, the slowest kernels below it. Returns how many are over their limit."""
    over = 0
    for key in dict.fromkeys((one.job.arch, one.job.operation) for one in took):
        group = [one for one in took if (one.job.arch, one.job.operation) == key]
        faults = [one.fault for one in group if one.fault]
        good = sorted((one for one in group if not one.fault), key=lambda one: -one.seconds)
        late = sum(one.seconds > one.job.limit for one in good)
        over += late + len(faults)
        if good:
            median, busy = (statistics.median(getattr(one, field) for one in good) for field in ("seconds", "busy"))
            most, most_busy = (max(getattr(one, field) for one in good) for field in ("seconds", "busy"))
            text = f"{key[1]} for {key[0]}: {len(good)} kernels, median {median:.2f} s (processor {busy:.2f} s), "
            text += f"most {most:.2f} s (processor {most_busy:.2f} s)"
            text += f", {late} over {good[0].job.limit} s" if math.isfinite(good[0].job.limit) else ""
            console.print(text, soft_wrap=True, highlight=False)
        for one in good[: max(SLOWEST, late)]:
            console.print(f"  {one.seconds:.2f} s {one.job.config.name}", soft_wrap=True, highlight=False)
        for fault in faults:
            console.print(f"  failed: {fault}", soft_wrap=True, highlight=False, markup=False)
    return over


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", default=["*"], help="names or patterns (default: all)")
    parser.add_argument("--arch", action="append", help="may be repeated (default: this CPU's, and sm_90a)")
    parser.add_argument("--set", default="default", dest="which", help="the kernel set (default: default)")
    parser.add_argument("--named", default="", metavar="TEXT", help="only kernels whose names hold this")
    parser.add_argument("--headers", type=Path, default=include_dir(), help="in place of the shipped ones")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile at the same time (default: 1)")
    options = parser.parse_args(arguments)
    archs = options.arch or [tilewright_arch.detect_cpu().id, "sm_90a"]
    try:
        for name in archs:
            TOOLCHAINS[tilewright_arch.load(name).kind]([options.headers]).identity()
    except (tilewright_arch.ArchError, ToolchainMissingError) as error:
        parser.error(str(error))
    todo = list(jobs(options.operations, archs, options.which, options.named, options.headers.resolve()))
    if not todo:
        parser.error(f"no kernel of the set {options.which!r} matches; operations: {', '.join(plugins().operations)}")
    console = Console()
    console.print(f"{len(todo)} kernels, load {os.getloadavg()[0]:.1f} before", highlight=False)
    with ProcessPoolExecutor(options.workers) as pool, Progress(console=console, transient=True) as progress:
        took = list(progress.track(pool.map(take, todo), total=len(todo), description="compiling"))
    over = report(took, console)
    console.print(f"{over} of {len(took)} fail or are over their limit" if over else "all compile in time")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
