"""Runs the convolution kernels of GPUs on the CPU (see gpu_emulation.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from conv_gpu_case import ConvCase
from conv_gpu_config import ConvGpuConfig
from gpu_emulation import FLAGS, LaunchHead
from native_harness import Guarded, build_once

CONVERT_THREADS = 256
CONVERT_SHARED = 4 * CONVERT_THREADS
PER_UNIT = 8  # kernels that are compiled together: what they share is compiled once


class ConvEmulator:
    """Kernels under names of their own, built when they are first wanted, with a few others."""

    def __init__(self, folder: Path, configs: Sequence[ConvGpuConfig]) -> None:
        self._folder = folder
        self.names = {config: f"c{index}" for index, config in enumerate(dict.fromkeys(configs))}
        self._libraries: dict[str, ctypes.CDLL] = {}

    def _library(self, config: ConvGpuConfig) -> ctypes.CDLL:
        name = self.names[config]
        if name not in self._libraries:
            same = [c for c in self.names if (c.header, c.wave_size) == (config.header, config.wave_size)]
            at = same.index(config) // PER_UNIT * PER_UNIT
            group = same[at : at + PER_UNIT]
            text = f'#include "tilewright/gpu/{config.header}"\n' + "".join(c.text(self.names[c]) for c in group)
            flags = (*FLAGS, f"-DTW_HOST_WAVE={config.wave_size}")
            library = ctypes.CDLL(str(build_once(self._folder, text, flags)))
            self._libraries.update({self.names[c]: library for c in group})
        return self._libraries[name]

    def launch(self, case: ConvCase, seed: int = 1) -> None:
        config, library = case.config, self._library(case.config)
        name, tasks = self.names[config], case.tasks()
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
