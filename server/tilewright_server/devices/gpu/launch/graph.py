"""Programs of several stages as one launch: graphs of the driver, captured from the very launches that they replace."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tilewright_kit.types.errors import DeviceError, InternalError, ResourceExhaustedError
from tilewright_server.devices.contract import DeviceLostError
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.launch.stages import BoundLaunch, Stage

__all__ = ["BindingGraphs", "CapturedGraph", "ProgramGraph"]

log = logging.getLogger(__name__)


class CapturedGraph:
    """Launches of a program as the driver's graph, which can be launched with the arguments that they had."""

    __slots__ = ("_driver", "_graph", "handle", "nodes")

    def __init__(self, driver: GpuDriver, stages: Sequence[Stage], bound: BoundLaunch) -> None:
        """Raises ``DeviceError``, ``ResourceExhaustedError``; then nothing is left of it."""
        self._driver = driver
        api, check = driver.api, driver.check
        # On a stream of its own: others may ask about the lane's stream at any time, which ends a capture.
        stream = check(api.new_stream(), "a stream")
        try:
            self.nodes = self._capture(stages, bound, stream)
            """Handles of the launches in the driver; None where it does not say."""
            self._graph = check(api.end_capture(stream), "a graph")
        finally:
            driver.quietly(api.end_stream(stream))
        try:
            self.handle = check(api.instantiate(self._graph), "a graph")
            """Handle that the driver launches."""
        except BaseException:
            driver.quietly(api.end_graph(self._graph))
            raise

    def _capture(self, stages: Sequence[Stage], bound: BoundLaunch, stream: Any) -> tuple[Any, ...]:
        driver, nodes = self._driver, []
        api, check = driver.api, driver.check
        configs = [stage.config(driver, stream) for stage in stages]
        calls, _ = driver.calls(configs, bound.block, bound.roots)
        check(api.begin_capture(stream), "a graph")
        try:
            for call in calls:
                check(driver.launch(*call), "a launch in a graph")
                nodes.append(check(api.captured_node(stream), "a graph"))
        except BaseException:
            answer = api.end_capture(stream)
            if not answer[0]:
                driver.quietly(api.end_graph(answer[1]))
            raise
        return tuple(nodes)

    def close(self) -> None:
        """Destroy it; what is under way ends first. Once only."""
        api, quietly = self._driver.api, self._driver.quietly
        quietly(api.end_executable(self.handle))
        quietly(api.end_graph(self._graph))


class ProgramGraph(ABC):
    """The stages of a program as one launch on one stream. Of the lane's thread.

    A program whose stages the driver cannot put into a graph is launched stage by stage. Kinds of it differ in how the
    arguments of other bindings come in.
    """

    def __init__(self, driver: GpuDriver, stages: Sequence[Stage], stream: Any) -> None:
        self._driver = driver
        self._stages = stages
        self._stream = stream
        self._launch = driver.api.launch_graph
        self._current: BoundLaunch | None = None
        self._handle: Any = None
        self._usable = True

    @property
    def is_usable(self) -> bool:
        """False once the driver has refused it."""
        return self._usable

    def launch(self, bound: BoundLaunch) -> bool:
        """Launch with the arguments of ``bound``; False if there is no graph of it. Raises ``DeviceError``."""
        if bound is not self._current and not self._turn_to(bound):
            return False
        result = self._launch(self._handle, self._stream)[0]
        if result:
            raise self._driver.error(result, "a graph")
        return True

    def prepare(self, bound: BoundLaunch) -> None:
        """It is to be launched again and again, and its time matters. Raises ``DeviceLostError``."""
        if bound is not self._current:
            self._turn_to(bound, again=True)

    def drop(self, bound: BoundLaunch) -> None:
        """It will not be launched any more."""
        if bound is self._current:
            self._current = self._handle = None

    def close(self) -> None:
        """Destroy everything; what is under way ends first. Idempotent."""
        self._current = self._handle = None

    @abstractmethod
    def _graph_of(self, bound: BoundLaunch, again: bool) -> CapturedGraph | None:
        """A graph with the arguments of ``bound``; None to launch it stage by stage. ``again``: it will be launched
        more than once. Raises ``DeviceError``, ``ResourceExhaustedError``."""

    def _turn_to(self, bound: BoundLaunch, again: bool = False) -> bool:
        if not self._usable:
            return False
        try:
            graph = self._graph_of(bound, again)
        except DeviceLostError:
            raise
        except (DeviceError, InternalError, ResourceExhaustedError) as error:
            log.warning("launching stage by stage: %s", error)
            self._usable = False
            self.close()
            return False
        if graph is None:
            return False
        self._current, self._handle = bound, graph.handle
        return True


class BindingGraphs(ProgramGraph):
    """A graph for each binding, whose arguments never change: for drivers that replace a graph's arguments badly.

    A graph costs more than the launches that it replaces, so it is made when a binding is launched for the second time.
    """

    limit = 64
    """Graphs that one program may have on one stream, each with memory of its own for arguments (HIP: 128 KiB or more).
    Bindings beyond them are launched stage by stage, as long as those with graphs stay."""

    def __init__(self, driver: GpuDriver, stages: Sequence[Stage], stream: Any) -> None:
        super().__init__(driver, stages, stream)
        self._graphs: dict[BoundLaunch, CapturedGraph | None] = {}
        """Graphs of every binding that was launched."""
        self._made = 0

    def _graph_of(self, bound: BoundLaunch, again: bool) -> CapturedGraph | None:
        graph = self._graphs.get(bound)
        if graph is None and self._made < self.limit:
            if again or bound in self._graphs:
                graph = CapturedGraph(self._driver, self._stages, bound)
                self._made += 1
            self._graphs[bound] = graph
        return graph

    def drop(self, bound: BoundLaunch) -> None:
        super().drop(bound)
        graph = self._graphs.pop(bound, None)
        if graph is not None:
            self._made -= 1
            graph.close()

    def close(self) -> None:
        super().close()
        for bound in tuple(self._graphs):
            self.drop(bound)
