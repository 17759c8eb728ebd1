"""The last step of planning: load the kernels of a plan and lay out its arguments."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from tilewright_kit.contract.device import Device, DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, pack
from tilewright_kit.contract.problem import Problem
from tilewright_kit.types.errors import InternalError
from tilewright_server.devices.argument_layout import DeviceProgram
from tilewright_server.devices.contract import Program, ProgramDevice, ProgramStage
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.executor import Executor
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.execution.value_check import ValueCheck
from tilewright_server.engine.kernels.store import KernelStore, Unit
from tilewright_server.engine.planning.quarantine import Quarantine
from tilewright_server.engine.statistics import Statistics

__all__ = ["Assembler"]


class Assembler:
    """Makes prepared plans, and the executor of each device when the first plan for it is made."""

    def __init__(
        self,
        devices: DeviceRegistry,
        kernels: KernelStore,
        statistics: Statistics,
        make_executor: Callable[[Device, int], Executor],
        quarantine: Quarantine,
    ) -> None:
        self._devices = devices
        self._kernels = kernels
        self._statistics = statistics
        self._make_executor = make_executor
        self._quarantine = quarantine
        self._executors: dict[str, Executor] = {}
        self._running: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._reviving = threading.Lock()

    def executors(self) -> tuple[Executor, ...]:
        return tuple(self._executors.values())

    def executor_of(self, device: str) -> Executor | None:
        """The executor of a device by id, if plans were made for it."""
        return self._executors.get(device)

    def executor(self, device: Device) -> Executor:
        """The one executor of a device."""
        known = self._executors.get(device.info.id)
        if known is None:
            with self._lock:
                known = self._executors.get(device.info.id)
                if known is None:
                    lanes = device.lanes if isinstance(device, ProgramDevice) else 1
                    known = self._executors[device.info.id] = self._make_executor(device, lanes)
        return known

    def assemble(
        self,
        operation: str,
        problem: Problem,
        info: DeviceInfo,
        plan: ExecutionPlan,
        units: Sequence[Unit],
        call: Call,
        *,
        note: str = "",
        is_fallback: bool = False,
        values: ValueCheck | None = None,
    ) -> Prepared:
        """Load ``units``, one for each of ``plan.kernels``.

        Without stages there is nothing to load, and no device is opened. Raises what opening it raises,
        ``DeadlineError``, ``DeviceError``, or ``InternalError`` for a plan that contradicts itself. The ``note``
        is for people: why it is this kernel.
        """
        counters = self._statistics.operation(operation)
        if not plan.stages:
            return Prepared(problem, plan, info, program=None, executor=None, operation_counters=counters)
        self._quarantine.check(info.id, (config.name for config in plan.kernels))
        device = self._devices.get(info.id, call.remaining())
        uses = [self._kernels.use(device, unit, info.arch, call) for unit in units]
        by_config = dict(zip(plan.kernels, uses, strict=True))
        stages = [
            ProgramStage(by_config[stage.config].function(stage.role), pack(stage.args), stage.geometry)
            for stage in plan.stages
        ]
        program = _program(device, plan, stages)
        if hasattr(program, "life"):  # its device can be lost, and it can be the cause
            self._running[program] = tuple(config.name for config in plan.kernels)
        return Prepared(
            problem,
            plan,
            info,
            program=program,
            uses=uses,
            args_bytes=sum(len(stage.args.template) for stage in stages),
            executor=self.executor(device),
            operation_counters=counters,
            kernel_counters=[self._statistics.kernel(stage.config.name, info.id) for stage in plan.stages],
            notes=(note,) if note else (),
            is_fallback=is_fallback,
            values=values,
        )

    def revive(self, prepared: Prepared, call: Call) -> Prepared:
        """The plan that is run in place of one whose device was lost: the same, on the device that is opened anew.

        Raises what opening it raises, and what ``assemble`` does.
        """
        with self._reviving:
            current = prepared.current
            if current.lost:
                units = [use.unit for use in current.uses]
                fresh = self.assemble(
                    current.plan.operation,
                    current.problem,
                    current.device,
                    current.plan,
                    units,
                    call,
                    values=current.values,
                )
                fresh.notes, fresh.is_fallback = current.notes, current.is_fallback
                current.successor = current = fresh
            if current is not prepared:
                prepared.successor = current
            return current

    def kernels_of(self, program: object) -> tuple[str, ...]:
        """Names of the kernels of a program that was made for a device that can be lost."""
        return self._running.get(program, ())


def _program(device: Device, plan: ExecutionPlan, stages: Sequence[ProgramStage]) -> Program:
    names = [item.name for item in plan.operands]
    try:
        if isinstance(device, ProgramDevice):
            return device.program(stages, names, counter_bytes=plan.counter_bytes)
        return DeviceProgram(device, stages, names, counter_bytes=plan.counter_bytes)
    except KeyError as error:
        raise InternalError(
            f"a stage of the plan reads {error}, which is not among its operands",
            field="plan",
            value=str(error),
            rule="plan_operand",
            fix="report it as a fault of the operation's plugin",
        ) from error
