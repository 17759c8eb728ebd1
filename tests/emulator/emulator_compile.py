"""Compiles small kernels for the emulator's tests: no header but what they say themselves."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amd_config import compile_text

from tilewright_emulator import Checks, CodeObject, Memory, Report
from tilewright_emulator.code.compiler import MISSING, compiler

PRELUDE = """
#define KERNEL(THREADS) extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, THREADS))) void
#define DEVICE __attribute__((device)) static inline
#define NOINLINE __attribute__((device, noinline)) static
#define SHARED __attribute__((shared))
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16; typedef unsigned char u8;
DEVICE u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
"""


def load(folder: Path, text: str, arch: str, *options: str) -> CodeObject:
    """Skips the test if a tool is missing."""
    if compiler(folder) is None:
        pytest.skip(f"needs {MISSING}")
    return CodeObject.load(compile_text(folder, PRELUDE + text, arch, ["-Wno-unused-function", *options]).path)


def run(
    code: CodeObject,
    name: str,
    *arguments: Any,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (64, 1, 1),
    dynamic_lds: int = 0,
    checks: Checks | None = None,
) -> Report:
    """Launches a kernel. Arguments: arrays (passed by address), ints (u32), floats, or ctypes values."""
    memory, packed = Memory(), bytearray()
    for at, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            memory.map(argument.ctypes.data, argument, f"argument {at}")
            raw = argument.ctypes.data.to_bytes(8, "little")
        elif isinstance(argument, int):
            raw = argument.to_bytes(4, "little")
        elif isinstance(argument, float):
            raw = np.float32(argument).tobytes()
        else:
            raw = bytes(argument)
        packed += bytes(-len(packed) % len(raw)) + raw
    return code.kernel(name).launch(
        memory, grid=grid, block=block, arguments=bytes(packed), dynamic_lds=dynamic_lds, checks=checks
    )


def zeros(count: int, dtype: Any = np.uint32) -> Any:
    """An array that begins at a multiple of 64."""
    room = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)


def wide(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)
