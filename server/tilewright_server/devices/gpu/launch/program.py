"""The stages of a plan on a GPU: bound to addresses once, launched again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from tilewright_kit.contract.launch_plan import root_bytes, stages_plan
from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError
from tilewright_server.devices.contract import ProgramStage
from tilewright_server.devices.gpu.driver import GpuDriver, GpuFunction
from tilewright_server.devices.gpu.launch.library import library
from tilewright_server.devices.gpu.launch.stages import BoundLaunch, Stage
from tilewright_server.devices.gpu.launch.stream_state import Lane

__all__ = ["GpuProgram"]


class GpuProgram:
    """See ``Program``. Thread-safe. Runs on lanes that it borrows; launches of clients run on lanes of their own."""

    weight = 1

    def __init__(
        self,
        driver: GpuDriver,
        stages: Sequence[ProgramStage],
        operands: Sequence[str],
        *,
        functions: Callable[[int], GpuFunction],
        borrow: Callable[[], Lane],
        give_back: Callable[[Lane], None],
        closed: Callable[[GpuProgram], None],
        counter_bytes: int = 0,
    ) -> None:
        """Raises ``KeyError`` for an operand that is not listed, ``DeviceError``, ``InternalError``. The context must
        be current."""
        self.counter_bytes = counter_bytes
        self._driver = driver
        self._borrow = borrow
        self._give_back = give_back
        self._closed = closed
        self._operands = tuple(operands)
        self._library = library()
        admitted = [Stage(functions(stage.function), stage.geometry, root_bytes(stage.args)) for stage in stages]
        self._count = len(admitted)
        records = [
            (stage.args, stage.geometry, made.function.param_bytes)
            for stage, made in zip(stages, admitted, strict=True)
        ]
        data = stages_plan(driver.kind, records, operands, counter_bytes)
        self._plan = self._library.open_plan(driver, data, [int(stage.function.handle) for stage in admitted])
        # A connection may launch it still when the server has dropped it.
        weakref.finalize(self, self._library.native.tw_plan_close, self._plan).atexit = False
        self._table_bytes = self._library.table_bytes(self._plan)

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        self._driver.enter()
        lane = self._borrow()
        try:
            return lane.timed(lane.bound(self, tuple(addresses), workspace), max(1, repeat))
        except (DeviceError, ResourceExhaustedError):
            lane.synchronize()  # of several stages the first may be under way, on memory that is given back now
            raise
        finally:
            self._give_back(lane)

    def bind(self, lane: Lane, addresses: tuple[int, ...], workspace: int, counters: int) -> BoundLaunch:
        """Everything for launches on ``lane`` with these addresses, each of an operand.

        Tables are uploaded in the order of the lane's stream. Raises ``InvalidArgumentError`` for a tensor that a
        tensor map cannot describe, ``ResourceExhaustedError``, ``DeviceError``.
        """
        tables = lane.take(self._table_bytes) if self._table_bytes else 0
        try:
            memory = workspace, counters, tables
            handle = self._library.bind(self._driver, self._plan, addresses, self._operands, memory, int(lane.stream))
        except BaseException:
            if tables:
                lane.give_back(tables)
            raise
        free = (lambda: lane.give_back(tables)) if tables else None
        return BoundLaunch(self._driver, handle, self._count, lane.stream, free)

    def close(self) -> None:
        """Nobody will run it any more: lanes let go of what they hold for it."""
        self._closed(self)
