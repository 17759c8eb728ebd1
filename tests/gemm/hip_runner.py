"""Runs plans for AMD GPUs without one: kernels are built as for a device and executed by the emulator."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gemm_runner import Array
from hip_units import toolchain

from tilewright_arch import ArchSpec
from tilewright_emulator import CodeObject, Memory, Report
from tilewright_gemm.codegen import generate
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, ExecutionPlan, Geometry, pack
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.numerics.compare import poison

__all__ = ["HipRunner", "Storage", "configured", "results_of"]

GEMM = GemmOperation()
_GRAIN = 16
"""Bytes that memory is handed out in: a kernel may read, but not use, what lies within."""
_CANARY = 0xA5
_FIRST, _APART = 0x7F00_0000_0000, 1 << 32
"""Where operands lie: each far from the others, so that whoever runs past one is caught."""


@dataclass
class Storage:
    """One tensor at ``address``, ``lead`` bytes into its memory; around it bytes that nobody may write."""

    raw: npt.NDArray[np.uint8]
    view: Array
    lead: int
    nbytes: int
    start: int

    @classmethod
    def of(cls, item: Operand, values: Array | None, start: int, lead: int) -> Storage:
        """``values``, or poison, as the tensor's description lays them out, ``lead`` bytes behind ``start``."""
        desc = item.desc
        raw = np.full(-(-max(desc.nbytes + lead, 1) // _GRAIN) * _GRAIN, _CANARY, np.uint8)
        own = raw[lead : lead + desc.nbytes]
        if desc.packing:
            own[:] = 0xFF if values is None else values
            return cls(raw, own, lead, desc.nbytes, start)
        view = np.ndarray(desc.shape, desc.dtype.numpy, own.data if desc.nbytes else b"")
        if desc.nbytes:
            strides = [stride * desc.dtype.bytes for stride in desc.strides]
            view = np.ndarray(desc.shape, desc.dtype.numpy, raw.data, lead, strides)
            view[...] = poison(desc.dtype, desc.shape) if values is None else values
        return cls(raw, view, lead, desc.nbytes, start)

    @property
    def address(self) -> int:
        return self.start + self.lead

    def overrun(self) -> bool:
        around = (self.raw[: self.lead], self.raw[self.lead + self.nbytes :])
        return any(bool(np.any(part != _CANARY)) for part in around)


class HipRunner:
    """Builds each kernel once."""

    first = _FIRST
    """Where operands begin."""

    def __init__(self, arch: ArchSpec) -> None:
        self.arch = arch
        self._built: dict[str, tuple[bytes, str]] = {}
        self.reports: list[Report] = []

    def image(self, config: GemmConfig | PackBConfig) -> tuple[bytes, str]:
        """Code object and symbol."""
        unit = generate(config, self.arch)
        if unit.text not in self._built:
            with tempfile.TemporaryDirectory() as folder:
                compiled = toolchain().compile(unit, Path(folder), self.arch)
                (symbol,) = unit.entries.values()
                self._built[unit.text] = compiled.binary.read_bytes(), symbol
        return self._built[unit.text]

    def run(self, plan: ExecutionPlan, inputs: Mapping[str, Array], lead: int = 0) -> dict[str, Storage]:
        """Execute all stages; returns every tensor's memory. Operands begin ``lead`` bytes off their grain."""
        found = {}
        for number, item in enumerate(plan.operands):
            values = inputs[item.name] if item.role is Role.INPUT else None
            found[item.name] = Storage.of(item, values, self.first + number * _APART, 0 if item.desc.packing else lead)
        workspace = np.full(-(-max(plan.workspace_bytes, 1) // _GRAIN) * _GRAIN, _CANARY, np.uint8)
        counters = np.zeros(plan.counter_bytes // 4 + 4, np.uint32)
        scratch = self.first + len(found) * _APART
        places = {WORKSPACE: scratch, COUNTERS: scratch + _APART}
        before = {name: storage.raw.copy() for name, storage in found.items()}
        for stage in plan.stages:
            memory = Memory()
            for item in plan.operands:
                storage = found[item.name]
                memory.map(storage.start, storage.raw, item.name, writable=item.role is Role.OUTPUT)
            memory.map(places[WORKSPACE], workspace, "workspace")
            memory.map(places[COUNTERS], counters, "counters")
            self._launch(stage, memory, {name: item.address for name, item in found.items()} | places)
        assert not counters.any(), "the launch leaves its counters as it found them"
        assert not np.any(workspace[plan.workspace_bytes :] != _CANARY), "the workspace was overrun"
        for item in plan.operands:
            assert not found[item.name].overrun(), f"{item.name} was overrun"
            if item.role is Role.INPUT:
                assert np.array_equal(found[item.name].raw, before[item.name]), f"{item.name} was written"
        return found

    def _launch(self, stage: Any, memory: Memory, addresses: Mapping[str, int]) -> None:
        packed, geometry = pack(stage.args), stage.geometry
        block = bytearray(len(packed.template))
        table = self.first - _APART
        packed.bind(addresses, block, table)
        if len(block) > packed.root_bytes:  # tables of tasks lie behind the parameter itself
            whole = np.zeros(-(-len(block) // _GRAIN) * _GRAIN, np.uint8)
            whole[: len(block)] = np.frombuffer(bytes(block), np.uint8)
            memory.map(table, whole, "tables", writable=False)
        self.execute(*self.image(stage.config), memory, geometry, bytes(block[: packed.root_bytes]))

    def execute(self, image: bytes, symbol: str, memory: Memory, geometry: Geometry, arguments: bytes) -> None:
        """One launch."""
        kernel = CodeObject.load(image).kernel(symbol)
        report = kernel.launch(
            memory,
            grid=geometry.grid,
            block=geometry.block,
            arguments=arguments,
            dynamic_lds=geometry.shared_bytes,
        )
        self.reports.append(report)


def configured(problem: GemmProblem, fields: Mapping[str, Any]) -> GemmConfig:
    """A kernel for the problem with these fields of an algorithm; slices of K are theirs, too."""
    config = with_signature(problem, GemmConfig(dtype_a=problem.dtype_a, **fields))
    return config.replace(split_k=fields.get("split_k", 1))


def results_of(
    problem: GemmProblem, config: GemmConfig, device: DeviceInfo, inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """All tensors after the plan of a kernel, which is valid on the device, has run in the emulator."""
    assert not GEMM.rules.check(config, device.arch), GEMM.rules.check(config, device.arch)
    memory = HipRunner(device.arch).run(GEMM.plan(problem, config, device), inputs)
    return {name: item.view for name, item in memory.items()}
