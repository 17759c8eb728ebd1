"""Builds kernel units with the system's compiler and drives them through ctypes, NumPy and guard pages.

Nothing here uses the server: these tests hold the templates to their own contract.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from grouping import Units

INCLUDE = Path(__file__).resolve().parents[2] / "native" / "include"
RUNTIME = INCLUDE / "tilewright" / "cpu" / "runtime.cpp"

DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "bf8": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
}

# Instruction-set levels: compiler flags (g++ and clang alike) and what /proc/cpuinfo must say to run them.
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "v2": (("-march=x86-64-v2",), frozenset({"sse4_2", "ssse3", "popcnt"})),
    "v3": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi2"})),
    "v4": (("-march=x86-64-v4",), frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    "v4_dot": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}),
    ),
}
FLAGS = ("-std=c++17", "-O1", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-unused-const-variable")


def missing_features(level: str) -> list[str]:
    """CPU features that the level needs and this machine lacks."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return sorted(LEVELS[level][1])
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return sorted(LEVELS[level][1] - set(flags.split()))


def zig() -> list[str]:
    """The pip-installable clang."""
    return [sys.executable, "-m", "ziglang", "c++"]


def compiler() -> list[str]:
    """The system's C++ compiler, else ziglang."""
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else zig()


def compile_unit(command: Sequence[str], source: Path, output: Path, flags: Iterable[str] = ()) -> None:
    """Builds one shared library; raises with the compiler's words if it fails."""
    arguments = [*command, *FLAGS, "-fPIC", "-shared", f"-I{INCLUDE}", *flags, str(source), "-o", str(output)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stderr[:6000]}")


def build_once(folder: Path, text: str, flags: Iterable[str] = (), command: Sequence[str] | None = None) -> Path:
    """The library of a source text, built unless it is there: other processes may want it at the same time."""
    command, flags = list(command or compiler()), list(flags)
    key = hashlib.sha256("\0".join([*command, *FLAGS, *flags, text]).encode()).hexdigest()[:24]
    source, output = folder / f"{key}.cpp", folder / f"{key}.so"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            source.write_text(text)
            partial = output.with_suffix(".partial")
            compile_unit(command, source, partial, flags)
            partial.rename(output)
    return output


@dataclass(frozen=True)
class Config:
    """One kernel configuration, as a generated source unit states it."""

    a: str = "fp32"
    b: str = "fp32"
    c: str = "fp32"
    bias: str | None = None
    d: tuple[str, ...] = ()
    a_col: bool = False
    b_col: bool = True
    tile: tuple[int, int, int] = (64, 128, 64)
    wave: tuple[int, int] = (1, 2)
    warp_tile: tuple[int, int, int] = (6, 16, 1)
    pipeline: str = "compv3"
    scheduler: str = "intrawave"
    persistent: bool = True
    pad: tuple[bool, bool, bool] = (True, True, True)
    preshuffle: bool = False
    scale_a: str = "none"
    scale_b: str = "none"
    binary: str = "PassThrough"
    unary: str = "PassThrough"

    @property
    def team(self) -> int:
        return self.wave[0] * self.wave[1]

    @property
    def accumulator(self) -> str:
        return "int32" if self.a == "int8" else "fp32"

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)

    def source(self, name: str) -> str:
        body = "\n  ".join(self.lines())
        return f"namespace {{ struct Config_{name} {{\n  {body}\n}}; }}\nTW_GEMM_ENTRIES({name}, Config_{name})\n"

    def lines(self) -> list[str]:
        """The members of the struct that states this configuration."""

        def flag(value: bool) -> str:
            return "true" if value else "false"

        constants = {
            "bool": {
                "a_col": flag(self.a_col),
                "b_col": flag(self.b_col),
                "persistent": flag(self.persistent),
                "pad_m": flag(self.pad[0]),
                "pad_n": flag(self.pad[1]),
                "pad_k": flag(self.pad[2]),
                "preshuffle": flag(self.preshuffle),
            },
            "int": {
                **dict(zip(("tile_m", "tile_n", "tile_k"), self.tile, strict=True)),
                **dict(zip(("wave_m", "wave_n"), self.wave, strict=True)),
                **dict(zip(("warp_tile_m", "warp_tile_n", "warp_tile_k"), self.warp_tile, strict=True)),
            },
            "tw::Pipeline": {"pipeline": f"tw::Pipeline::{self.pipeline}"},
            "tw::Scheduler": {"scheduler": f"tw::Scheduler::{self.scheduler}"},
            "tw::Scale": {"scale_a": f"tw::Scale::{self.scale_a}", "scale_b": f"tw::Scale::{self.scale_b}"},
            "tw::Binary": {"binary": f"tw::Binary::{self.binary}"},
            "tw::Unary": {"unary": f"tw::Unary::{self.unary}"},
        }
        lines = [f"using {x} = tw::{y};" for x, y in (("A", self.a), ("B", self.b), ("C", self.c))]
        lines.append(f"using Bias = {f'tw::{self.bias}' if self.bias else 'void'};")
        lines.append(f"using D = tw::types<{', '.join(f'tw::{d}' for d in self.d)}>;")
        lines += [
            f"static constexpr {kind} {key} = {value};"
            for kind, group in constants.items()
            for key, value in group.items()
        ]
        return lines


# ---- the argument structs of core/args/gemm.h ----


class Operand(ctypes.Structure):
    _fields_ = [
        ("ptr", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
        ("batch_stride", ctypes.c_int64),
    ]


class ProblemArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *(
            (name, ctypes.c_int64)
            for name in ("m", "n", "k", "lda", "ldb", "ldc", "batch", "stride_a", "stride_b", "stride_c")
        ),
        *((name, ctypes.c_double) for name in ("alpha", "clamp_lo", "clamp_hi")),
        *((name, Operand) for name in ("scale_a", "scale_b", "bias")),
        ("d", ctypes.POINTER(Operand)),
    ]


class GemmArgs(ctypes.Structure):
    _fields_ = [
        ("problems", ctypes.POINTER(ProblemArgs)),
        ("count", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("split_k", ctypes.c_int64),
    ]


class Runtime:
    """The native thread pool."""

    def __init__(self, library: Path, threads: int) -> None:
        self.lib = ctypes.CDLL(str(library), use_errno=True)
        self.lib.tw_pool_open.restype = ctypes.c_void_p
        self.lib.tw_pool_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        self.lib.tw_pool_close.argtypes = [ctypes.c_void_p]
        self.lib.tw_pool_close.restype = None
        self.lib.tw_memory_reserve.restype = ctypes.c_void_p
        self.lib.tw_memory_reserve.argtypes = [ctypes.c_int64]
        self.lib.tw_memory_release.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self.threads = threads
        self.pool = self.open(threads)

    def open(self, threads: int) -> int:
        """A pool of its own; more threads than processors share them in turn."""
        available = sorted(os.sched_getaffinity(0))
        cpus = (ctypes.c_int32 * threads)(*(available[i % len(available)] for i in range(threads)))
        pool: int | None = self.lib.tw_pool_open(threads, cpus)
        if not pool:
            raise OSError(ctypes.get_errno(), "tw_pool_open")
        return pool

    def launch(self, function: Any, args: Any, team: int, pool: int | None = None) -> None:
        pointer = ctypes.cast(ctypes.byref(args), ctypes.c_void_p) if args is not None else None
        error = self.lib.tw_pool_launch(pool or self.pool, ctypes.cast(function, ctypes.c_void_p), pointer, team)
        if error:
            raise OSError(error, "tw_pool_launch")


class Guarded:
    """An array between two pages that must not be touched, as close to one of them as its elements allow."""

    _libc = ctypes.CDLL(None, use_errno=True)

    def __init__(self, bytes_: int, align: int = 1, at_end: bool = True) -> None:
        page = mmap.PAGESIZE
        payload = (max(bytes_, 1) + page - 1) // page * page
        self._map = mmap.mmap(-1, payload + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for start in (base, base + page + payload):
            if self._libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        offset = (payload - bytes_) // align * align if at_end else 0
        self.address = base + page + offset
        self.bytes = bytes_

    def array(self, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
        buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.address)
        result = np.frombuffer(buffer, dtype=np.uint8).view(dtype)[:count]
        result.flags.writeable = True
        return result


def guarded(values: np.ndarray[Any, Any], at_end: bool = True) -> tuple[Guarded, np.ndarray[Any, Any]]:
    """A copy of a flat array in guarded memory."""
    memory = Guarded(values.nbytes, values.dtype.itemsize, at_end)
    array = memory.array(values.dtype, values.size)
    array[:] = values
    return memory, array


PER_UNIT = 8  # kernels that are compiled together: what they share is compiled once


class Library:
    """Every configuration under a name of its own, built when it is first wanted, with a few others."""

    def __init__(
        self,
        folder: Path,
        configs: Sequence[Config],
        level: str,
        command: Sequence[str] | None = None,
        header: str = "gemm/gemm.hpp",
        first: Collection[Config] | None = None,
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        command, flags = list(command or compiler()), LEVELS[level][0]
        self._units = Units(
            folder, configs, first, lambda source, output: compile_unit(command, source, output, flags),
            head=lambda _: f'#include "tilewright/cpu/{header}"\n', text=lambda config, name: config.source(name),
            options=repr([command, FLAGS, flags]), size=PER_UNIT,
        )  # fmt: skip
        self.names = self._units.names
        self.first = frozenset(first or ())
        self._handles: dict[Config, ctypes.CDLL] = {}

    def entry(self, config: Config, suffix: str = "") -> Any:
        if config not in self._handles:
            self._handles[config] = ctypes.CDLL(str(self._units.file(config)))
        function = getattr(self._handles[config], self.names[config] + suffix)
        if suffix in ("_workspace", "_packed_b"):
            function.restype = ctypes.c_int64
        return function
