"""A plan that is ready to run: kernels loaded, arguments laid out, only addresses missing."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Protocol

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Operand, Problem
from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError
from tilewright_server.devices.contract import Program
from tilewright_server.devices.lifetime import Lifetime
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.overlap import OverlapCheck
from tilewright_server.engine.execution.value_check import ValueCheck
from tilewright_server.engine.kernels.store import KernelUse
from tilewright_server.engine.statistics import KernelCounters, OperationCounters
from tilewright_server.engine.types import Outcome

__all__ = ["Execution", "PlanExecutor", "Prepared"]

# Measured on grouped products of 1 to 1000 members.
_BYTES = 8192
_OPERAND_BYTES = 700
_ARGUMENT_FACTOR = 12
"""The described arguments are that much larger than the packed ones."""
_FOREVER = Lifetime()
"""Lifetime of programs whose device cannot be lost before the server's end."""


class PlanExecutor(Protocol):
    """The device's executor as prepared plans name it: it runs them, and accounts for workspace in use elsewhere."""

    def run(self, prepared: Prepared, addresses: Sequence[int], call: Call, repeat: int = 1) -> Outcome:
        """Run one plan; see ``Engine.execute``."""
        ...

    def run_many(self, executions: Sequence[Execution], call: Call) -> list[Outcome | TilewrightError]:
        """Run several with one admission; see ``Engine.execute_many``."""
        ...

    def claim_workspace(self, nbytes: int) -> None:
        """Count bytes of workspace that the device takes by itself. Raises ``ResourceExhaustedError``."""
        ...

    def disclaim_workspace(self, nbytes: int) -> None: ...


class Prepared:
    """A plan that ``Engine.execute`` runs with addresses. Shared by all sessions; never changes, but for
    ``successor``."""

    __slots__ = (
        "_aligned",
        "_overlap",
        "_required",
        "caller_plan",
        "device",
        "executor",
        "is_fallback",
        "kernel_counters",
        "kernels",
        "life",
        "nbytes",
        "notes",
        "operands",
        "operation_counters",
        "partial",
        "plan",
        "problem",
        "program",
        "successor",
        "uses",
        "values",
        "weight",
        "workspace_bytes",
    )

    def __init__(
        self,
        problem: Problem,
        plan: ExecutionPlan,
        device: DeviceInfo,
        *,
        program: Program | None,
        executor: PlanExecutor | None,
        operation_counters: OperationCounters,
        kernel_counters: Sequence[KernelCounters] = (),
        uses: Sequence[KernelUse] = (),
        args_bytes: int = 0,
        notes: Sequence[str] = (),
        is_fallback: bool = False,
        values: ValueCheck | None = None,
    ) -> None:
        self.problem = problem
        self.plan = plan
        self.device = device
        self.operands: tuple[Operand, ...] = plan.operands
        """In the order in which ``execute`` takes their addresses."""
        self.kernels: tuple[str, ...] = tuple(dict.fromkeys(config.name for config in plan.kernels))
        """Names of the kernels that run, in order of first use; none for an empty problem."""
        self.workspace_bytes = plan.workspace_bytes
        self.notes: tuple[str, ...] = (*plan.notes, *notes)
        self.is_fallback = is_fallback
        """A better kernel is being built; executions of this very object use it as soon as it is there."""
        self.successor: Prepared | None = None
        """Plan that is run in its place: a better kernel, or the same on a device that was lost and opened again."""
        self.program = program
        self.executor = executor
        self.weight = program.weight if program is not None else 0
        self.operation_counters = operation_counters
        self.kernel_counters = tuple(kernel_counters)
        self.caller_plan: object = None
        """Its launch plan for callers, once one was asked for; see ``caller_launch``."""
        self.values = values
        """Check of operands whose content must make sense; None: the operation asks for no check."""
        self.uses = tuple(uses)
        """Keeps the kernels loaded."""
        self.life: Lifetime = getattr(program, "life", _FOREVER)
        self.nbytes = _BYTES + _OPERAND_BYTES * len(self.operands) + _ARGUMENT_FACTOR * args_bytes
        """About how much of the server's memory this takes."""
        self._required = tuple(index for index, item in enumerate(self.operands) if item.desc.nbytes > 0)
        self.partial = frozenset(map(str, plan.details.get("partial", ())))
        """Outputs that keep what they held in places that are data (``details["partial"]``)."""
        alignment = plan.details.get("alignment", {})
        self._aligned = tuple(
            (index, int(alignment[item.name]))
            for index, item in enumerate(self.operands)
            if int(alignment.get(item.name, 1)) > 1 and item.desc.nbytes > 0
        )
        self._overlap = OverlapCheck(plan)

    @property
    def current(self) -> Prepared:
        """This, or what has replaced it."""
        latest = self
        while latest.successor is not None:
            latest = latest.successor
        return latest

    @property
    def lost(self) -> bool:
        """True if its device was lost: it cannot be run any more."""
        return self.life.lost

    def check(self, addresses: Sequence[int]) -> None:
        """Raise ``InvalidArgumentError`` unless the addresses can be run with: one for each operand, none null, all
        aligned as the plan assumes (``details["alignment"]``, bytes by operand), and no output in the way of another
        operand."""
        if len(addresses) != len(self.operands):
            raise InvalidArgumentError(
                f"the plan has {len(self.operands)} operands, not {len(addresses)}",
                field="locations",
                value=len(addresses),
                rule="operand_count",
                fix="give one location for each operand, in the order of the plan",
            )
        for index in self._required:
            if addresses[index] <= 0:
                raise InvalidArgumentError(
                    "an operand has no memory",
                    field=self.operands[index].name,
                    rule="operand_address",
                    fix="say where its data lies",
                )
        for index, nbytes in self._aligned:
            if addresses[index] % nbytes:
                raise self._misaligned(index, gcd(addresses[index], nbytes), nbytes)
        self._overlap.check(addresses)

    def check_values(self, addresses: Sequence[int]) -> None:
        """Raise ``InvalidArgumentError`` if operands of this process' memory hold what the operation cannot mean: to be
        made right before a launch, as what ran before may have written them.
        """
        if self.values is not None:
            self.values.at(addresses)

    def _misaligned(self, index: int, actual: int, nbytes: int) -> InvalidArgumentError:
        name = self.operands[index].name
        return InvalidArgumentError(
            f"{name} lies at a multiple of {actual} bytes, but the plan was made for multiples of {nbytes}",
            field=name,
            value=actual,
            rule="operand_alignment",
            fix=f"prepare with the attribute alignment={actual}, or align the tensor",
        )


Execution = tuple[Prepared, Sequence[int], int]
"""A plan, the addresses of its operands, and how often to run it."""
