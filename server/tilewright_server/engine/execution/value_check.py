"""Checks of the content of integer operands before every launch, for operations that ask for it.

Sizes are settled when a plan is made; lengths of sequences and numbers of pages are data, and may be wrong each time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.contract.abilities import ChecksValues
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Problem, Role
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.devices.contract import shares_host_memory

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["ValueCheck", "value_check"]


class ValueCheck:
    """The check of one problem. Arrays are copied first: who shares the memory may change it meanwhile."""

    __slots__ = ("_on_host", "_operands", "_operation", "_problem", "names")

    def __init__(
        self, operation: ChecksValues, problem: Problem, plan: ExecutionPlan, names: Sequence[str], on_host: bool
    ) -> None:
        self._operation = operation
        self._problem = problem
        self._on_host = on_host
        self._operands = tuple(
            (index, item.name, item.desc)
            for index, item in enumerate(plan.operands)
            if item.role is Role.INPUT and item.name in names
        )
        self.names = tuple(name for _, name, _ in self._operands)
        """The operands that are looked at."""

    def at(self, addresses: Sequence[int]) -> None:
        """Check what lies at the operands' addresses, if this process can read it. Raises ``InvalidArgumentError``."""
        if self._on_host:
            self._operation.check_values(
                self._problem, {name: _read(desc, addresses[index]) for index, name, desc in self._operands}
            )

    def contents(self, contents: Mapping[str, bytes]) -> None:
        """Check those operands whose content is here, on its way to a device. Raises ``InvalidArgumentError``."""
        found = {name: _parse(desc, contents[name]) for _, name, desc in self._operands if name in contents}
        if found:
            self._operation.check_values(self._problem, found)


def value_check(
    operation: Operation[Any, Any], problem: Problem, plan: ExecutionPlan, device: DeviceInfo
) -> ValueCheck | None:
    """The check that an operation makes of a problem's values; None if it makes none."""
    if not isinstance(operation, ChecksValues) or not (names := operation.value_operands(problem)):
        return None
    return ValueCheck(operation, problem, plan, names, shares_host_memory(device))


def _read(desc: TensorDesc, address: int) -> Array:
    if not desc.nbytes:
        return _view(desc, b"")
    memory: Any = (ctypes.c_uint8 * desc.nbytes).from_address(address)
    found: Array = _view(desc, memory).copy()
    return found


def _parse(desc: TensorDesc, content: bytes) -> Array:
    return _view(desc, content if desc.nbytes else b"")


def _view(desc: TensorDesc, memory: Any) -> Array:
    """The tensor in memory; an empty one takes none."""
    import numpy as np  # takes a tenth of a second: a server is ready without it

    if not desc.nbytes:
        return np.empty(desc.shape, desc.dtype.numpy)
    item = desc.dtype.bytes
    found: Array = np.ndarray(desc.shape, desc.dtype.numpy, memory, strides=[stride * item for stride in desc.strides])
    return found
