"""The stages of a plan on a GPU: bound to addresses once, launched again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError
from tilewright_server.devices.contract import ProgramStage
from tilewright_server.devices.gpu.argument_block import ProgramLayout
from tilewright_server.devices.gpu.driver import GpuDriver, GpuFunction, Graph
from tilewright_server.devices.gpu.launch.stages import BoundLaunch, Stage
from tilewright_server.devices.gpu.launch.stream_state import Lane, Prepared

__all__ = ["GpuProgram"]

_UPLOAD = 32 << 10
"""The driver takes copies of up to 64 KiB of unlocked host memory into its own buffers at once, without waiting for the
stream. CUDA driver API, API synchronisation behaviour. HIP stages small copies likewise."""


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
        """Raises ``KeyError`` for an operand that is not listed, ``DeviceError``, ``InternalError``."""
        self.counter_bytes = counter_bytes
        self._driver = driver
        self._borrow = borrow
        self._give_back = give_back
        self._closed = closed
        layout = self._layout = ProgramLayout([stage.args for stage in stages], operands)
        self._maps = tuple((offset, place, driver.encoder(item)) for offset, place, item in layout.maps)
        self.stages = tuple(
            Stage(functions(stage.function), stage.geometry, size)
            for stage, size in zip(stages, layout.root_sizes, strict=True)
        )

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

    def graph(self, stream: Any) -> Graph | None:
        """A graph for a stream; None for one stage, which would gain nothing."""
        return self._driver.graph(self.stages, stream) if len(self.stages) > 1 else None

    def bind(
        self, lane: Lane, prepared: Prepared, addresses: tuple[int, ...], workspace: int, counters: int
    ) -> BoundLaunch:
        """Everything for launches on ``lane`` with these addresses, each of an operand.

        Tables are uploaded in the order of the lane's stream. Raises ``InvalidArgumentError`` for a tensor that a
        tensor map cannot describe, ``ResourceExhaustedError``, ``DeviceError``.
        """
        layout = self._layout
        tables = lane.take(layout.table_bytes) if layout.table_bytes else 0
        try:
            places = layout.addresses(addresses, workspace, counters, tables)
            block = layout.bound(places)
            for offset, place, encoder in self._maps:
                encoder.encode(places[place], block.address + offset)
            if tables:
                self._upload(block.address + layout.tables_at, tables, layout.table_bytes, lane.stream)
        except BaseException:
            if tables:
                lane.give_back(tables)
            raise
        free = (lambda: lane.give_back(tables)) if tables else None
        return BoundLaunch(self._driver, prepared.configs, block, layout.roots, graph=prepared.graph, free=free)

    def _upload(self, source: int, target: int, nbytes: int, stream: Any) -> None:
        check, copy = self._driver.check, self._driver.api.copy_in
        for offset in range(0, nbytes, _UPLOAD):
            check(copy(target + offset, source + offset, min(_UPLOAD, nbytes - offset), stream), "an upload")

    def close(self) -> None:
        """Nobody will run it any more: lanes let go of what they hold for it."""
        self._closed(self)
