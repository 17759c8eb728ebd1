"""True if an output would be written over an operand that is still to be read, or over another output."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["OverlapCheck"]

_MAX_PAIRS = 64
"""Up to so many pairs are compared one by one; beyond that, sorting is faster."""
_MAX_WORK = 10_000


class OverlapCheck:
    """Compares spans first, which is all that most calls need, and elements where spans meet: columns of one matrix may
    well be input and output of the same call.

    A plan allows operands to be the very same tensor with ``details["in_place"]``, a list of (output, input) names.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self._operands = plan.operands
        self._sizes = tuple(item.desc.nbytes for item in plan.operands)
        self._in_place = {(str(output), str(source)) for output, source in plan.details.get("in_place", ())}
        outputs = [place for place in self._present() if self._is_output(place)]
        others = list(self._present())
        pairs = len(outputs) * len(others)
        self._pairs: tuple[tuple[int, int, int, int], ...] | None = None
        if pairs <= _MAX_PAIRS:
            self._pairs = tuple(
                (output, other, self._sizes[output], self._sizes[other])
                for output in outputs
                for other in others
                if other != output and not (self._is_output(other) and other < output)
            )

    def check(self, addresses: Sequence[int]) -> None:
        """Raise ``InvalidArgumentError`` that names both operands."""
        if self._pairs is None:
            self._sweep(addresses)
            return
        for output, other, output_size, other_size in self._pairs:
            start, other_start = addresses[output], addresses[other]
            if start < other_start + other_size and other_start < start + output_size:
                self._compare(output, other, addresses)

    def _sweep(self, addresses: Sequence[int]) -> None:
        """All pairs whose spans meet, found in one pass over the spans by address."""
        active: list[int] = []
        for place in sorted(self._present(), key=lambda item: addresses[item]):
            start = addresses[place]
            active = [other for other in active if addresses[other] + self._sizes[other] > start]
            for other in active:
                if self._is_output(place) or self._is_output(other):
                    self._compare(*((place, other) if self._is_output(place) else (other, place)), addresses)
            # Inputs may share memory as they like; only outputs must be compared with everything.
            if self._is_output(place) or not any(self._covers(other, place, addresses) for other in active):
                active.append(place)

    def _covers(self, other: int, place: int, addresses: Sequence[int]) -> bool:
        """True if an input that is remembered already stands for this one: the same bytes."""
        return (
            not self._is_output(other)
            and addresses[other] == addresses[place]
            and self._operands[other].desc == self._operands[place].desc
        )

    def _compare(self, output: int, other: int, addresses: Sequence[int]) -> None:
        first, second = self._operands[output], self._operands[other]
        same = addresses[output] == addresses[other] and first.desc == second.desc
        if same and ((first.name, second.name) in self._in_place or (second.name, first.name) in self._in_place):
            return
        if same or _share(first.desc, addresses[output], second.desc, addresses[other]):
            raise self._refusal(first, second)

    @staticmethod
    def _refusal(output: Operand, other: Operand) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"output {output.name} overlaps {other.role.value} {other.name}",
            field=output.name,
            value=other.name,
            rule="operand_overlap",
            fix=f"give {output.name} memory of its own",
        )

    def _present(self) -> list[int]:
        return [place for place, size in enumerate(self._sizes) if size > 0]

    def _is_output(self, place: int) -> bool:
        return self._operands[place].role is Role.OUTPUT


def _share(first: TensorDesc, first_address: int, second: TensorDesc, second_address: int) -> bool:
    """True if two tensors have a byte in common; True if that is too hard to tell."""
    if first.packing or second.packing:
        return True
    import numpy as np  # takes a tenth of a second: a server is ready without it

    try:
        return bool(
            np.shares_memory(_view(first, first_address), _view(second, second_address), max_work=cast(Any, _MAX_WORK))
        )
    except np.exceptions.TooHardError:
        return True


def _view(desc: TensorDesc, address: int) -> Any:
    """The tensor's bytes as an array that is only asked for its bounds; the memory is not touched."""
    import numpy as np

    item = desc.dtype.bytes
    memory: Any = (ctypes.c_uint8 * desc.nbytes).from_address(address)
    strides = (*(stride * item for stride in desc.strides), 1)
    return np.ndarray((*desc.shape, item), np.uint8, memory, strides=strides)
