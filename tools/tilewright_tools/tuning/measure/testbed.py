"""The test stand: one problem's operands in the memory of an open device, and kernels that are run on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.commands.cases import Case
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.arguments import ARGS, COUNTERS, WORKSPACE, PackedArgs, pack
from tilewright_kit.contract.device import Buffer, Device, Module
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Operand, Problem, Role
from tilewright_kit.numerics.compare import poison
from tilewright_kit.numerics.contents import contents, view
from tilewright_kit.types.errors import BuildFailedError
from tilewright_server.build.cache.artifacts import Artifact
from tilewright_server.devices.argument_layout import DeviceProgram
from tilewright_server.devices.contract import Program, ProgramDevice, ProgramStage
from tilewright_server.engine.engine import Engine
from tilewright_tools.tuning.measure.check import Truth, Verdict
from tilewright_tools.tuning.measure.timing import Timing, TimingOptions, measure
from tilewright_tools.tuning.problems.families import family_of
from tilewright_tools.tuning.problems.prepared import PreparedOperand

__all__ = ["Stand"]

Array = npt.NDArray[Any]

MOST_COPIES = 32
MEMORY_SHARE = 0.4
"""Part of the device's memory that copies of operands may take."""
_NAMED = (ARGS, COUNTERS, WORKSPACE)
_MIB = 1 << 20


class Loaded:
    """A kernel's modules, loaded for as long as it is measured."""

    def __init__(self, engine: Engine, device: Device, plan: ExecutionPlan) -> None:
        """Raises ``BuildFailedError`` if a kernel is not in the cache, ``DeviceError``."""
        self._artifacts: list[Artifact] = []
        self._modules: list[Module] = []
        self.stages: list[ProgramStage] = []
        try:
            functions: dict[tuple[KernelConfig, str], int] = {}
            for config in plan.kernels:
                self._load(engine, device, config, functions)
            for stage in plan.stages:
                function = functions[stage.config, stage.role]
                self.stages.append(ProgramStage(function, pack(stage.args), stage.geometry))
        except BaseException:
            self.unload()
            raise

    def _load(
        self, engine: Engine, device: Device, config: KernelConfig, functions: dict[tuple[KernelConfig, str], int]
    ) -> None:
        unit = engine.operations[config.operation].generate(config, device.info.arch)
        artifact = engine.cache.get(engine.pool.key(unit, device.info.arch))
        if artifact is None:
            raise BuildFailedError(f"{config.name} is not in the cache", rule="not_built", fix="build it first")
        self._artifacts.append(artifact)
        module = device.load(artifact.binary)
        self._modules.append(module)
        functions.update({(config, role): module.function(symbol) for role, symbol in unit.entries.items()})

    def unload(self) -> None:
        for module in self._modules:
            module.unload()
        for artifact in self._artifacts:
            artifact.release()
        self._modules, self._artifacts = [], []


class Stand:
    """Operands of one problem, as often as they rotate, with equal contents."""

    def __init__(
        self,
        engine: Engine,
        device: Device,
        problem: Problem,
        case: Case | None,
        options: TimingOptions,
        *,
        seed: int,
        check: bool = True,
        prepared: Sequence[PreparedOperand] = (),
    ) -> None:
        """Raises ``ResourceExhaustedError`` if the device has no room for the operands, ``BuildFailedError`` if a
        kernel that prepares one is not in the cache.
        """
        self._engine, self._device, self._problem = engine, device, problem
        self._options = options
        self._operation = engine.operations[problem.operation]
        rng = np.random.default_rng(seed)
        descs = {item.name: item.desc for item in problem.operands if item.role is Role.INPUT}
        descs |= {item.name: _source(item).desc for item in prepared}
        self._memory = {name: contents(desc, options.init, rng) for name, desc in descs.items()}
        self.inputs = {name: view(self._memory[name], desc) for name, desc in descs.items()}
        if case is not None:
            family_of(problem.operation).settle(case, self.inputs, rng)
        self.truth = Truth(self._operation, problem, case, self.inputs, device.info, rng)
        self._poison = {
            item.name: poison(item.desc.dtype, (item.desc.span,))
            for item in problem.operands
            if item.role is Role.OUTPUT
        }
        self.copies = self._copies()
        self._buffers: list[Buffer] = []
        self._flush: Buffer | None = None
        self._workspace: Buffer | None = None
        self._junk = b""
        try:
            self._memory |= {item.name: self._made(item) for item in prepared}
            self._addresses = [self._allocate() for _ in range(self.copies)]
            if check:
                self.truth.prepare()
        except BaseException:
            self.close()
            raise

    def _copies(self) -> int:
        info = self._device.info
        nbytes = max(1, sum(item.desc.nbytes for item in self._problem.operands))
        wanted = self._options.rotating
        if self._options.flush:
            wanted = 1
        elif wanted == 0:
            wanted = 1 if info.kind == "cpu" else min(MOST_COPIES, 1 + -(-2 * _cache_bytes(self._device) // nbytes))
        return max(1, min(wanted, int(MEMORY_SHARE * info.memory_bytes / nbytes)))

    def _made(self, item: PreparedOperand) -> Array:
        """The bytes of an operand that the plan makes of the plain one."""
        device, plan = self._device, item.plan
        loaded = Loaded(self._engine, device, plan)
        buffers = [device.allocate(max(operand.desc.nbytes, 1)) for operand in plan.operands]
        room = device.allocate(max(plan.workspace_bytes, 1))
        try:
            made = np.empty(0, np.uint8)
            for operand, buffer in zip(plan.operands, buffers, strict=True):
                if operand.role is Role.INPUT:
                    device.write(buffer, 0, _bytes(self._memory[item.name]))
            program = self._program(plan, loaded, 1)
            program.run([buffer.address for buffer in buffers], room.address, 1)
            for operand, buffer in zip(plan.operands, buffers, strict=True):
                if operand.role is Role.OUTPUT:
                    made = np.empty(operand.desc.nbytes, np.uint8)
                    device.read(buffer, 0, _bytes(made))
            return made
        finally:
            loaded.unload()
            for buffer in (*buffers, room):
                device.free(buffer)

    def _allocate(self) -> list[int]:
        """One set of operands; the addresses in binding order."""
        addresses = []
        for item in self._problem.operands:
            buffer = self._device.allocate(max(item.desc.nbytes, 1))
            self._buffers.append(buffer)
            addresses.append(buffer.address)
            data = self._memory.get(item.name)
            if data is not None and data.size:
                self._device.write(buffer, 0, _bytes(data))
        return addresses

    def check(self, config: KernelConfig) -> Verdict:
        """Run a kernel once on poisoned outputs and compare. Raises ``BuildFailedError``, ``DeviceError``, ..."""
        plan = self._plan(config)
        loaded = Loaded(self._engine, self._device, plan)
        try:
            return self._check(self._program(plan, loaded, 1), plan)
        finally:
            loaded.unload()

    def time(
        self, config: KernelConfig, *, check: bool, limit_ns: float, samples: int
    ) -> tuple[Verdict | None, Timing | None]:
        """Check a kernel, unless it was checked before, and time it if it is right."""
        plan = self._plan(config)
        loaded = Loaded(self._engine, self._device, plan)
        try:
            single = self._program(plan, loaded, 1)
            verdict = self._check(single, plan) if check else None
            if verdict is not None and verdict.reason:
                return verdict, None
            program = single if self.copies == 1 else self._program(plan, loaded, self.copies)
            return verdict, self._time(program, plan, limit_ns, samples)
        finally:
            loaded.unload()

    def _plan(self, config: KernelConfig) -> ExecutionPlan:
        plan = self._operation.plan(self._problem, config, self._device.info)
        if plan.workspace_bytes and (self._workspace is None or self._workspace.nbytes < plan.workspace_bytes):
            if self._workspace is not None:
                self._device.free(self._workspace)
                self._workspace = None
            self._workspace = self._device.allocate(plan.workspace_bytes)
        return plan

    def _program(self, plan: ExecutionPlan, loaded: Loaded, copies: int) -> Program:
        """The plan's stages, one after the other for each set of operands: launches then follow each other on the
        device, with no host between them."""
        names = [item.name for item in plan.operands]
        stages = [
            replace(stage, args=_renamed(stage.args, copy)) if copy else stage
            for copy in range(copies)
            for stage in loaded.stages
        ]
        operands = [f"{name}#{copy}" if copy else name for copy in range(copies) for name in names]
        if not isinstance(self._device, ProgramDevice):
            return DeviceProgram(self._device, stages, operands)
        if plan.counter_bytes:
            return self._device.program(stages, operands, counter_bytes=plan.counter_bytes)
        return self._device.program(stages, operands)

    def _run(self, program: Program, copies: int, repeat: int) -> float:
        """Nanoseconds of one run of the plan."""
        addresses = [address for copy in range(copies) for address in self._addresses[copy]]
        workspace = self._workspace.address if self._workspace is not None else 0
        begun = time.perf_counter_ns()
        stages = program.run(addresses, workspace, repeat)
        total = sum(stages) if self._options.timer == "device" else time.perf_counter_ns() - begun
        return total / (copies * repeat)

    def _time(self, program: Program, plan: ExecutionPlan, limit_ns: float, samples: int) -> Timing:
        options = replace(self._options, repeat=samples)
        before = self._overwrite_caches if options.flush else None
        if not plan.stages:
            return Timing(1.0, 1.0, 1.0, 1)
        return measure(
            lambda repeat: self._run(program, self.copies, repeat),
            options,
            limit_ns=limit_ns,
            before=before,
            turns=self.copies,
        )

    def _check(self, program: Program, plan: ExecutionPlan) -> Verdict:
        outputs: dict[str, Array] = {}
        places = {item.name: place for place, item in enumerate(self._problem.operands)}
        written = {name: self._buffers[places[name]] for name in self._poison}
        for name, buffer in written.items():
            self._device.write(buffer, 0, _bytes(self._poison[name]))
        if plan.stages:
            self._run(program, 1, 1)
        descs = {item.name: item.desc for item in self._problem.operands}
        for name, buffer in written.items():
            memory = np.empty_like(self._poison[name])
            self._device.read(buffer, 0, _bytes(memory))
            outputs[name] = view(memory, descs[name])
        poisoned = {name: view(memory, descs[name]) for name, memory in self._poison.items()}
        return self.truth.check(outputs, poisoned)

    def _overwrite_caches(self) -> None:
        """Write twice as much as the caches hold, through the device's copies."""
        if self._flush is None:
            self._junk = bytes(8 * _MIB)
            self._flush = self._device.allocate(max(2 * _cache_bytes(self._device), len(self._junk)))
        for offset in range(0, self._flush.nbytes - len(self._junk) + 1, len(self._junk)):
            self._device.write(self._flush, offset, memoryview(self._junk))

    def close(self) -> None:
        """Give the device's memory back."""
        extra = [buffer for buffer in (self._flush, self._workspace) if buffer is not None]
        for buffer in (*self._buffers, *extra):
            self._device.free(buffer)
        self._buffers, self._flush, self._workspace = [], None, None


def _source(item: PreparedOperand) -> Operand:
    """The plain operand of what prepares it."""
    (found,) = (operand for operand in item.plan.operands if operand.role is Role.INPUT)
    return found


def _renamed(args: PackedArgs, copy: int) -> PackedArgs:
    """The same arguments on another set of operands."""

    def name(operand: str) -> str:
        return operand if operand in _NAMED else f"{operand}#{copy}"

    relocations = tuple((offset, name(operand), addend) for offset, operand, addend in args.relocations)
    maps = tuple((offset, replace(item, operand=name(item.operand))) for offset, item in args.maps)
    return replace(args, relocations=relocations, maps=maps)


def _cache_bytes(device: Device) -> int:
    caches = device.info.arch.caches
    return int(max(caches.l2_bytes, caches.l3_bytes, _MIB))


def _bytes(array: Array) -> memoryview:
    """The bytes of contiguous memory."""
    raw: Any = array.view(np.uint8)
    return memoryview(raw)
