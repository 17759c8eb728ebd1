"""Runs the portable GPU kernels on the CPU: their host platform makes every thread of a workgroup a fiber."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gpu_config import GpuConfig
from native_case import Call
from native_harness import Guarded, ProblemArgs, build_once

FLAGS = ("-DTW_PLATFORM_HOST", "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-clobbered", "-O1")


class LaunchHead(ctypes.Structure):
    """``tw_gemm_launch``."""

    _fields_ = [
        ("tasks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("split_k", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("reserved", ctypes.c_int64),
    ]


def tiles_of(config: GpuConfig, args: ProblemArgs) -> int:
    """Output tiles of one problem, over its batch."""
    return int(-(-args.m // config.tile[0]) * -(-args.n // config.tile[1]) * args.batch)


def task_bytes(config: GpuConfig, args: ProblemArgs, first_tile: int) -> bytes:
    """``GemmTask`` without tensor maps."""
    count = len(config.d)
    plain = ProblemArgs.from_buffer_copy(args)
    plain.d = None
    operands = bytes(ctypes.string_at(args.d, 32 * count)) if count else b""
    return bytes(plain) + first_tile.to_bytes(8, "little") + operands


PER_UNIT = 8  # kernels that are compiled together: what they share is compiled once


class Emulator:
    """Kernels under names of their own, built when they are first wanted, with a few others."""

    def __init__(self, folder: Path, configs: Sequence[GpuConfig]) -> None:
        self.names = {config: f"k{index}" for index, config in enumerate(dict.fromkeys(configs))}
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}

    def library(self, config: GpuConfig) -> ctypes.CDLL:
        """The one that has the configuration's kernel."""
        name = self.names[config]
        if name not in self._libraries:
            same = [item for item in self.names if item.wave_size == config.wave_size]
            at = same.index(config) // PER_UNIT * PER_UNIT
            group = same[at : at + PER_UNIT]
            text = '#include "tilewright/gpu/gemm/gemm.hpp"\n' + "".join(item.text(self.names[item]) for item in group)
            library = ctypes.CDLL(str(build_once(self._folder, text, (*FLAGS, f"-DTW_HOST_WAVE={config.wave_size}"))))
            self._libraries.update({self.names[item]: library for item in group})
        return self._libraries[name]

    def launch(self, call: Call, grid: int = 0, seed: int = 1) -> None:
        """One launch of the call's kernel; ``grid`` is the number of workgroups of a persistent kernel."""
        config = call.config
        assert isinstance(config, GpuConfig)
        counts = [tiles_of(config, args) for args in call.table]
        firsts = np.cumsum([0, *counts]).tolist()
        tiles = int(firsts[-1])
        tasks = b"".join(task_bytes(config, args, first) for args, first in zip(call.table, firsts[:-1], strict=True))
        table = np.frombuffer(tasks + bytes(8), np.uint8).copy()
        slot = config.tile[0] * config.tile[1] * 4
        workspace = Guarded(tiles * call.split_k * slot if call.split_k > 1 else 0, 64)
        workspace.array(np.dtype(np.uint8), workspace.bytes)[:] = 0xFF
        counters = np.zeros(tiles + 1, np.uint32)
        head = LaunchHead(0, len(call.table), tiles, workspace.address, counters.ctypes.data, call.split_k, 0, 0)
        if config.grouped:
            head.tasks = table.ctypes.data
        block = bytes(head) + (b"" if config.grouped else tasks)
        total = tiles * call.split_k
        name = self.names[config]
        function = getattr(self.library(config), name)
        status = function(block, grid if config.persistent else total, config.shared_bytes, ctypes.c_uint(seed))
        assert status == 0, f"{config} failed, or its threads wait for each other for ever"
        assert not counters.any(), "the launch leaves its counters at zero"
