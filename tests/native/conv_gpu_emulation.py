"""Runs the convolution kernels of GPUs on the CPU (see gpu_emulation.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from conv_gpu_case import ConvCase
from conv_gpu_config import ConvGpuConfig
from gpu_emulation import HostUnits, LaunchHead
from native_harness import Guarded

CONVERT_THREADS = 256
CONVERT_SHARED = 4 * CONVERT_THREADS
PER_UNIT = 8  # kernels that are compiled together: what they share is compiled once


class ConvEmulator:
    """Kernels under names of their own, built when they are first wanted, with a few others."""

    def __init__(
        self, folder: Path, configs: Sequence[ConvGpuConfig], first: Collection[ConvGpuConfig] | None = None
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        self._units = HostUnits(
            folder, configs, first, lambda config: f'#include "tilewright/gpu/{config.header}"\n',
            lambda config, name: config.text(name), PER_UNIT, lambda config: config.wave_size,
        )  # fmt: skip

    def launch(self, case: ConvCase, seed: int = 1) -> None:
        config, tasks = case.config, case.tasks()
        library, name = self._units.library(config)
        table = np.frombuffer(tasks + bytes(8), np.uint8).copy()
        workspace = Guarded(case.workspace(), 64)
        workspace.array(np.dtype(np.uint8), workspace.bytes)[:] = 0xFF
        tiles = sum(case.tiles())
        counters = np.zeros(tiles + 1, np.uint32)
        grid, convert = launches(case)
        head = LaunchHead(
            0, len(case.table), tiles, workspace.address, counters.ctypes.data, case.split_k, workspace.bytes, 0
        )
        if config.grouped:
            head.tasks = table.ctypes.data
        block = bytes(head) + (b"" if config.grouped else tasks)
        if grid:
            status = getattr(library, name)(block, grid, case.shared_bytes(), ctypes.c_uint(seed))
            assert status == 0, f"{config} failed, or its threads wait for each other for ever"
        if convert:
            status = getattr(library, f"{name}_convert")(block, convert, CONVERT_SHARED, ctypes.c_uint(seed))
            assert status == 0, f"{config}: the conversion failed"
        assert not counters.any(), "the launch leaves its counters at zero"


def launches(case: ConvCase) -> tuple[int, int]:
    """Workgroups of the kernel, and of the one that adds its partial sums (0: none)."""
    config = case.config
    convert = -(-case.w.size * config.convert_lanes // CONVERT_THREADS) if config.converts else 0
    return case.grid(), convert
