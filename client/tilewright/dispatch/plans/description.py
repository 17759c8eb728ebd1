"""Descriptions of prepared plans, blocking and asynchronous."""

from __future__ import annotations

from typing import Any

from tilewright.dispatch.plans.plan import PlanState
from tilewright.types.report import Report
from tilewright.types.spec import Spec

__all__ = ["PlanBase"]


class PlanBase:
    def __init__(self, state: PlanState) -> None:
        self._state = state

    @property
    def inputs(self) -> dict[str, Spec]:
        """Inputs of the plan, in order."""
        return {slot.name: slot.spec for slot in self._state.inputs}

    @property
    def outputs(self) -> dict[str, Spec]:
        """Outputs of the plan."""
        return {slot.name: slot.spec for slot in self._state.outputs}

    @property
    def report(self) -> Report:
        """How planning went, and the names of the kernels."""
        return self._state.report

    @property
    def kernels(self) -> tuple[str, ...]:
        return self._state.report.kernels

    @property
    def flops(self) -> int:
        """Arithmetic operations of one execution, a multiply-add counted as two."""
        return self._state.flops

    @property
    def workspace_bytes(self) -> int:
        return self._state.workspace_bytes

    @property
    def description(self) -> dict[str, Any]:
        """Stages, kernels and launch geometry."""
        return self._state.description

    def close(self) -> None:
        """Release the plan with the next call to the server. Idempotent."""
        self._state.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        def named(specs: dict[str, Spec]) -> str:
            return ", ".join(f"{name}: {spec.dtype.name}{list(spec.shape)}" for name, spec in specs.items())

        return f"<{type(self).__name__} {self._state.request.operation}({named(self.inputs)}) -> {named(self.outputs)}>"
