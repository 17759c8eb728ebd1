"""Runs plans of imagined CUDA devices on the CPU: the host platform of the kernels makes every thread a fiber."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conv_runner import INCLUDE, NAN, Array, Tensor, compiler, stored
from libraries import Libraries

from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.strided_copy.config import TransformConfig, generate_transform
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, ExecutionPlan, pack
from tilewright_kit.contract.problem import Role
from tilewright_kit.contract.source import SourceUnit

FLAGS = (
    "-std=c++17", "-Og", "-shared", "-fPIC", "-fvisibility=hidden", "-DTW_PLATFORM_HOST", "-DTW_HOST_WAVE=32",
    "-Wno-unknown-pragmas",
)  # fmt: skip
ALIGNMENT = 256


class ConvEmulated:
    """Builds kernels of CUDA devices for the CPU, and runs plans."""

    def __init__(self, folder: Path) -> None:
        self._units = Libraries(compiler(), [*FLAGS, f"-I{INCLUDE}"], folder)

    def prepare(self, plans: Sequence[ExecutionPlan], device: DeviceInfo) -> None:
        """Build the kernels of several plans together."""
        self._units.build(_unit(config, device) for plan in plans for config in plan.kernels)

    def function(self, config: KernelConfig, role: str, device: DeviceInfo) -> Any:
        unit = _unit(config, device)
        return getattr(self._units.load(unit), unit.entries[role])

    def run(self, plan: ExecutionPlan, inputs: Mapping[str, Array], device: DeviceInfo) -> dict[str, Tensor]:
        """Execute the plan's launches; returns every tensor's memory."""
        memory = {
            item.name: stored(item.desc, inputs[item.name] if item.role is Role.INPUT else None)
            for item in plan.operands
        }
        workspace = np.full(plan.workspace_bytes + 2 * ALIGNMENT, NAN, np.uint8)
        counters = np.zeros(plan.counter_bytes // 4 + 1, np.uint32)
        start = -(-workspace.ctypes.data // ALIGNMENT) * ALIGNMENT
        addresses = {name: item.address for name, item in memory.items()}
        addresses |= {WORKSPACE: start, COUNTERS: counters.ctypes.data}
        for stage in plan.stages:
            packed, geometry = pack(stage.args), stage.geometry
            block = bytearray(len(packed.template))
            store = (ctypes.c_char * (len(block) + 64))()
            base = -(-ctypes.addressof(store) // 64) * 64
            packed.bind(addresses, block, base)
            ctypes.memmove(base, bytes(block), len(block))
            function = self.function(stage.config, stage.role, device)
            assert geometry.grid[1:] == geometry.block[1:] == (1, 1)
            status = function(ctypes.c_void_p(base), geometry.grid[0], geometry.shared_bytes, ctypes.c_uint(1))
            assert status == 0, f"{stage.config.name} failed, or its threads wait for each other for ever"
        assert not counters.any(), "launches leave their counters at zero"
        for name, item in memory.items():
            assert not item.overrun(), f"{name} was overrun"
        return memory


def _unit(config: KernelConfig, device: DeviceInfo) -> SourceUnit:
    if isinstance(config, TransformConfig):
        return generate_transform(config, device.arch)
    return generate(config, device.arch)  # type: ignore[arg-type]
