"""A contest: kernels of one problem run in turns on operands of their own, and are compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.contract.device import Buffer, Device
from tilewright_kit.contract.problem import Problem, Role
from tilewright_kit.numerics.compare import poison, relative_error
from tilewright_kit.numerics.contents import contents
from tilewright_kit.types.errors import ResourceExhaustedError, TilewrightError
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine, Prepared
from tilewright_server.hosting.confirmation.budget import Budget

__all__ = ["Contest", "Times"]

Array = npt.NDArray[Any]

ROUNDS = 11
_MEMORY_SHARE = 0.02
"""Part of the device's memory that operands may take."""
_MAX_SETS = 16
_CACHE_BYTES = 96 << 20
"""Operands of GPUs take turns until they exceed this: live work finds caches cold, too."""
_LARGEST_ERROR = {1: 0.2, 2: 0.03}
"""Largest relative distance of two right results, by the bytes of an element; each may have rounded all of its sums."""
_LARGEST_ERROR_OF_OTHERS = 1e-3


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of one launch."""

    median_ns: float
    p10_ns: float
    p90_ns: float
    samples: int


class Contest:
    """Operands of a problem in memory of the device. A context manager; all of it in one thread."""

    def __init__(self, engine: Engine, device: Device, problem: Problem, budget: Budget, call: Call) -> None:
        """Raises ``ResourceExhaustedError`` where operands would take too much of the device."""
        self._engine, self._device, self._problem = engine, device, problem
        self._budget, self._call = budget, call
        self._buffers: list[Buffer] = []
        nbytes = max(1, sum(item.desc.nbytes for item in problem.operands))
        if nbytes > _MEMORY_SHARE * device.info.memory_bytes:
            raise ResourceExhaustedError(
                f"operands of {nbytes} bytes are too large to time kernels beside live work",
                field="device",
                value=device.info.id,
                rule="confirmation_memory",
                fix="measure it with `tilewright bench --record`",
            )
        wanted = 1 if device.info.kind == "cpu" else min(_MAX_SETS, 1 + _CACHE_BYTES // nbytes)
        self._count = max(1, min(wanted, int(_MEMORY_SHARE * device.info.memory_bytes / nbytes)))
        self._sets: list[list[int]] = []

    @property
    def sets(self) -> int:
        """Number of sets of operands that are used in turns."""
        return self._count

    def __enter__(self) -> Contest:
        rng = np.random.default_rng()
        read = [item for item in self._problem.operands if item.role is not Role.OUTPUT]
        given = {item.name: contents(item.desc, "normal", rng) for item in read}
        try:
            self._sets = [self._allocate(given) for _ in range(self._count)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            with suppress(TilewrightError):  # of a device that was lost
                self._device.free(buffer)
        self._buffers.clear()

    def _allocate(self, given: dict[str, Array]) -> list[int]:
        addresses = []
        for item in self._problem.operands:
            buffer = self._device.allocate(max(item.desc.nbytes, 1))
            self._buffers.append(buffer)
            addresses.append(buffer.address)
            data = given.get(item.name)
            if data is not None and data.size:
                self._device.write(buffer, 0, _raw(data))
        return addresses

    def agree(self, rivals: Sequence[Prepared]) -> list[bool]:
        """For each whether its result is that of the first, but for rounding; false for all without outputs of their
        own."""
        if not self._outputs:
            return [False] * len(rivals)
        results = [self._result(rival) for rival in rivals]
        return [all(map(self._is_near, result, results[0], self._outputs)) for result in results]

    @property
    def _outputs(self) -> list[int]:
        return [place for place, item in enumerate(self._problem.operands) if item.role is Role.OUTPUT]

    def _result(self, rival: Prepared) -> list[Array]:
        """The outputs of a launch into memory that held no sensible numbers."""
        memory = [
            poison(self._problem.operands[place].desc.dtype, (self._problem.operands[place].desc.span,))
            for place in self._outputs
        ]
        buffers = [self._buffers[place] for place in self._outputs]
        for buffer, data in zip(buffers, memory, strict=True):
            self._device.write(buffer, 0, _raw(data))
        self._launch(rival, 0)
        for buffer, data in zip(buffers, memory, strict=True):
            self._device.read(buffer, 0, _raw(data))
        return memory

    def _is_near(self, found: Array, expected: Array, place: int) -> bool:
        dtype = self._problem.operands[place].desc.dtype
        if not dtype.is_float:
            return bool(np.array_equal(found, expected))
        # Numbers that no kernel wrote are those of the poison in both.
        if not np.array_equal(np.isfinite(found.astype(np.float32)), np.isfinite(expected.astype(np.float32))):
            return False
        return relative_error(found, expected) <= _LARGEST_ERROR.get(dtype.bytes, _LARGEST_ERROR_OF_OTHERS)

    def times(self, rivals: Sequence[Prepared]) -> list[Times]:
        """Time all in turns, round by round; none if the budget has ended.

        Disturbances of the device, and changes of its clock, last longer than a round: each kernel is compared with the
        first in every round, and only then are rounds brought together.
        """
        rounds: list[list[float]] = []
        for _ in range(ROUNDS):
            rounds.append([])
            for rival in rivals:
                launches = []
                for number in range(self._count):
                    if not self._budget.wait():
                        return []
                    launches.append(self._launch(rival, number))
                rounds[-1].append(float(np.median(launches)))
        found = np.maximum(np.asarray(rounds), 1.0)
        scale = float(np.median(found[:, 0]))
        return [_times(scale * found[:, place] / found[:, 0], self._count) for place in range(len(rivals))]

    def _launch(self, rival: Prepared, number: int) -> float:
        begun = time.perf_counter()
        outcome = self._engine.execute(rival, self._sets[number], self._call)
        # Not the time in the queue, in which others had the device.
        waited_s = outcome.queue_ns / 1e9
        self._budget.spend(max(outcome.device_ns / 1e9, time.perf_counter() - begun - waited_s))
        return float(outcome.device_ns)


def _raw(data: Array) -> memoryview:
    raw: Any = data.view(np.uint8).reshape(-1)  # not every element type of ml_dtypes is a buffer
    return memoryview(raw)


def _times(rounds: Array, launches: int) -> Times:
    low, median, high = (float(item) for item in np.percentile(rounds, (10, 50, 90)))
    return Times(median, low, high, launches * len(rounds))
