"""Runs the convolution kernels of GPUs in the project's emulator of AMD GPUs (docs/emulator.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from pathlib import Path

import numpy as np
from amd_config import WAVE, Built, units_of
from amd_emulation import aligned
from conv_gpu_case import ConvCase
from conv_gpu_config import ConvGpuConfig
from conv_gpu_emulation import CONVERT_THREADS, launches
from gpu_emulation import LaunchHead

import tilewright_arch
from tilewright_emulator import Checks, CodeObject, Memory

PER_UNIT = 8  # kernels that are compiled together: what they share is compiled once
SIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "bf8": 1, "int8": 1}


def for_arch(config: ConvGpuConfig, arch: str, turn: int = 0) -> ConvGpuConfig | None:
    """The same kernel with a warp tile that the arch has, of which ``turn`` chooses one; None if it has none."""
    config = config.replace(wave_size=WAVE[arch], stages=2)
    if not config.is_matrix or (config.a == "fp32" and WAVE[arch] == 32):
        return config
    offered = tilewright_arch.load(arch).warp_tiles
    key = f"{config.a}_{config.b}_{'int32' if config.a == 'int8' else 'fp32'}"
    m, n, k = config.tile
    waves = config.wave
    tiles = [
        tile
        for tile in offered.get(key, ())
        if m % (tile[0] * waves[0]) == 0 and n % (tile[1] * waves[1]) == 0 and k % tile[2] == 0 and min(tile[:2]) >= 16
    ]
    return config.replace(warp_tile=tiles[turn % len(tiles)]) if tiles else None


class AmdConvKernels:
    """Kernels of one arch under names of their own, compiled when they are first wanted, with a few others."""

    def __init__(
        self, folder: Path, arch: str, configs: list[ConvGpuConfig], first: Collection[ConvGpuConfig] | None = None
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        self.arch = arch
        self._units = units_of(folder, arch, configs, first, head, kernel_text, PER_UNIT)

    def built(self, config: ConvGpuConfig) -> tuple[Built, str]:
        """The code object that holds the configuration's kernel, and the kernel's name."""
        return Built(self._units.file(config)), self._units.names[config]

    def launch(self, case: ConvCase, checks: Checks | None = None) -> None:
        """One launch of the case's kernel, and of the one that adds its partial sums."""
        launch(*self.built(case.config), case, checks)


def unit(kernels: dict[str, ConvGpuConfig]) -> str:
    """A source text, with what launches of products need as constants of the code object."""
    (first,) = {head(config) for config in kernels.values()}
    return first + "".join(kernel_text(config, name) for name, config in kernels.items())


def head(config: ConvGpuConfig) -> str:
    return f'#include "tilewright/gpu/{config.header}"\n'


def kernel_text(config: ConvGpuConfig, name: str) -> str:
    """One kernel's part of a source text."""
    text = config.text(name)
    if config.is_matrix:
        conv = f"tw::gpu::Conv<Config_{name}>"
        text += (
            f'extern "C" __attribute__((device, used, visibility("protected"))) const uint32_t {name}_facts[2] = '
            f"{{{conv}::threads, {conv}::shared_bytes}};\n"
        )
    return text


def launch(built: Built, name: str, case: ConvCase, checks: Checks | None = None) -> None:
    """See ``AmdConvKernels.launch``."""
    config = case.config
    threads, shared = built.facts(name) if config.is_matrix else (config.threads, case.shared_bytes())
    assert threads == config.threads
    tiles, tasks = sum(case.tiles()), case.tasks()
    memory = Memory()
    for kept in case.guards():
        if kept.bytes:
            written = kept.address <= case.result.ctypes.data < kept.address + kept.bytes
            data = np.frombuffer((ctypes.c_char * kept.bytes).from_address(kept.address), np.uint8)
            memory.map(kept.address, data, "the result" if written else "an operand", writable=written)
    table = aligned(np.frombuffer(tasks, np.uint8))
    workspace = aligned(np.full(max(case.workspace(), 16), 0xFF, np.uint8))
    counters = aligned(np.zeros(tiles + 1, np.uint32))
    for array, what in ((table, "tasks"), (workspace, "workspace"), (counters, "counters")):
        memory.map(array.ctypes.data, array, what, writable=what != "tasks")
    head = LaunchHead(
        0, len(case.table), tiles, workspace.ctypes.data, counters.ctypes.data, case.split_k, workspace.nbytes, 0
    )
    if config.grouped:
        head.tasks = table.ctypes.data
    arguments = bytes(head) + (b"" if config.grouped else tasks)
    code = CodeObject.load(built.path)
    grid, convert = launches(case)
    code.kernel(name).launch(
        memory, grid=(grid, 1, 1), block=(threads, 1, 1), arguments=arguments, dynamic_lds=shared, checks=checks
    )
    if convert:
        code.kernel(f"{name}_convert").launch(
            memory, grid=(convert, 1, 1), block=(CONVERT_THREADS, 1, 1), arguments=arguments, dynamic_lds=0,
            checks=checks,
        )  # fmt: skip
    assert not counters.any(), "the launch leaves its counters at zero"
