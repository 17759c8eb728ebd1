"""The planner's entry of one problem."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.strategies import Explicit, Ranked, Strategy
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.kernels.store import Unit

__all__ = ["OPERAND_BYTES", "Choice", "Entry", "Question", "settled"]

OPERAND_BYTES = 400
_RANKED_BYTES = 1500


@dataclass(frozen=True, slots=True)
class Question:
    """A parsed request."""

    operation: Operation[Any, Any]
    problem: Problem
    device: DeviceInfo
    strategy: Strategy

    @property
    def given(self) -> str:
        """Name of the kernel that the caller gave by its configuration; empty if none was."""
        kernel = self.strategy.kernel if isinstance(self.strategy, Explicit) else None
        return kernel.name if isinstance(kernel, KernelConfig) else ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel for a problem, with everything but its binaries."""

    plan: ExecutionPlan
    units: tuple[Unit, ...]


def settled(problem: Problem, plan: ExecutionPlan) -> ExecutionPlan:
    """``plan``, but without stages for a problem that has nothing to compute.

    Such a problem is planned all the same: the plan may know more of the operands than the problem does, a format for
    example.
    """
    return replace(plan, stages=(), workspace_bytes=0, counter_bytes=0) if problem.is_empty else plan


class Entry:
    """Results of planning one problem on one device under one selection.

    ``lock`` guards the fields and is held for moments only, ``assembling`` is held while kernels are loaded (and built
    once more, if they have vanished). The second is never asked for with the first in hand.
    """

    __slots__ = ("assembling", "best", "fallback", "key", "lock", "passed_over", "plan", "ranked", "upgrading")

    def __init__(self, key: tuple[object, ...]) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.assembling = OneAtATime()
        self.ranked: Sequence[Ranked] = ()
        """Empty again once ``best`` is there: then nobody asks."""
        self.plan: ExecutionPlan | None = None
        """Plan of the best-ranked kernel."""
        self.best: Prepared | None = None
        self.fallback: Prepared | None = None
        self.upgrading = False
        """Something better than the fallback is being built, or will be tried again."""
        self.passed_over: list[str] = []
        """Better-ranked kernels that turned out not to fit the machine."""

    @property
    def is_lost(self) -> bool:
        """True if it was made for a device that was lost since."""
        plans = (self.best, self.fallback)
        return any(prepared is not None and prepared.current.lost for prepared in plans)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        plans = sum(plan.nbytes for plan in (self.best, self.fallback) if plan is not None)
        described = OPERAND_BYTES * len(self.plan.operands) if self.plan is not None else 0
        return described + _RANKED_BYTES * len(self.ranked) + plans


class OneAtATime:
    """A lock that callers wait for under their own deadlines, and give up when they are cancelled."""

    __slots__ = ("_busy", "_changed")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False

    @contextmanager
    def held(self, call: Call) -> Iterator[None]:
        """Raises ``DeadlineError`` or ``CancelledError`` if the call ends before its turn comes."""
        forget = call.on_cancel(self._wake)
        try:
            with self._changed:
                while self._busy:
                    call.check()
                    self._changed.wait(call.remaining())
                self._busy = True
        finally:
            forget()
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
