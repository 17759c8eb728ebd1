"""Runs the portable GPU kernels on the CPU: their host platform makes every thread of a workgroup a fiber.

Waves of a workgroup take turns where the seed of a launch is even, and run one after another where it is odd.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from gpu_config import GpuConfig
from grouping import Units
from host_order import ordered_platform
from native_case import Call
from native_harness import Guarded, ProblemArgs, compile_unit, compiler

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


K = TypeVar("K", bound=Hashable)
PER_UNIT = 8  # kernels that are compiled together: what they share is compiled once


class HostUnits(Generic[K]):
    """GPU kernels for the host's platform, compiled when they are first wanted, with a few others."""

    def __init__(
        self,
        folder: Path,
        kernels: Sequence[K],
        first: Collection[K] | None,
        head: Callable[[K], str],
        text: Callable[[K, str], str],
        size: int,
        lanes: Callable[[K], int],
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        command, self._lanes = compiler(), lanes

        def units(wave_size: int) -> Units[K]:
            flags = (*FLAGS, ordered_platform(folder), f"-DTW_HOST_WAVE={wave_size}")
            return Units(
                folder, [kernel for kernel in kernels if lanes(kernel) == wave_size], first,
                lambda source, output: compile_unit(command, source, output, flags),
                head=head, text=text, options=repr([command, flags]), size=size,
            )  # fmt: skip

        self._units = {wave_size: units(wave_size) for wave_size in set(map(lanes, kernels))}
        self._libraries: dict[K, ctypes.CDLL] = {}

    def library(self, kernel: K) -> tuple[ctypes.CDLL, str]:
        """The one that has the configuration's kernel, and the kernel's name."""
        units = self._units[self._lanes(kernel)]
        if kernel not in self._libraries:
            self._libraries[kernel] = ctypes.CDLL(str(units.file(kernel)))
        return self._libraries[kernel], units.names[kernel]


class Emulator:
    """Kernels under names of their own, built when they are first wanted, with a few others."""

    def __init__(self, folder: Path, configs: Sequence[GpuConfig], first: Collection[GpuConfig] | None = None) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        self._units = HostUnits(
            folder, configs, first, lambda _: '#include "tilewright/gpu/gemm/gemm.hpp"\n',
            lambda config, name: config.text(name), PER_UNIT, lambda config: config.wave_size,
        )  # fmt: skip

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
        library, name = self._units.library(config)
        function = getattr(library, name)
        status = function(block, grid if config.persistent else total, config.shared_bytes, ctypes.c_uint(seed))
        assert status == 0, f"{config} failed, or its threads wait for each other for ever"
        assert not counters.any(), "the launch leaves its counters at zero"
