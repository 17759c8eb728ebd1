"""Launches, prepared so far that only the driver's call is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewright_kit.contract.plan import Geometry
from tilewright_server.devices.gpu.argument_block import HostBlock
from tilewright_server.devices.gpu.driver import GpuDriver, GpuFunction, Graph

__all__ = ["BoundLaunch", "Stage"]


class Stage:
    """A function with the geometry that it is launched with."""

    __slots__ = ("function", "geometry")

    def __init__(self, function: GpuFunction, geometry: Geometry, args_bytes: int) -> None:
        """Raises ``DeviceError`` if the device cannot launch it so, or the arguments do not fit."""
        function.admit(geometry, args_bytes)
        self.function = function
        self.geometry = geometry

    def config(self, driver: GpuDriver, stream: Any) -> Any:
        """Launch configuration on a stream."""
        return driver.config(self.function, self.geometry, stream)


class BoundLaunch:
    """A program's launches on one stream with all arguments in place. The driver copies them at every launch."""

    __slots__ = (
        "_driver", "_free", "_graph", "_kept", "_launch", "block", "calls", "count", "nodes", "roots",
    )  # fmt: skip

    def __init__(
        self,
        driver: GpuDriver,
        configs: Sequence[Any],
        block: HostBlock,
        roots: Sequence[int],
        *,
        graph: Graph | None = None,
        free: Callable[[], None] | None = None,
    ) -> None:
        """``roots`` are the offsets of the stages' roots in ``block``; ``free`` gives back what lies on the device."""
        self.count = len(configs)
        self._driver = driver
        self.block = block
        """The arguments."""
        self.roots = roots
        """Where those of each stage lie in ``block``."""
        self._launch = driver.launch
        self._graph = graph
        self._free = free
        self.calls, self._kept = driver.calls(configs, block, roots)
        """Arguments of the driver's launch, for each stage."""
        self.nodes: tuple[Any, ...] | None = None
        """The graph's own: what it made of the launches."""

    def launch(self) -> None:
        """Put all stages on the stream. Raises ``DeviceError``, ``DeviceLostError``."""
        if self._graph is not None and self._graph.launch(self):
            return
        launch = self._launch
        for call in self.calls:
            result = launch(*call)[0]
            if result:
                raise self._driver.error(result, "a launch")

    def launch_stage(self, place: int) -> None:
        """One stage alone."""
        result = self._launch(*self.calls[place])[0]
        if result:
            raise self._driver.error(result, "a launch")

    def prepare(self) -> None:
        """Do ahead of many launches what would lengthen the first of them. Raises ``DeviceLostError``."""
        if self._graph is not None:
            self._graph.prepare(self)

    def close(self) -> None:
        """Give back what lies on the device, behind what was launched. Idempotent."""
        if self._graph is not None:
            self._graph.drop(self)
        free, self._free = self._free, None
        if free is not None:
            free()
