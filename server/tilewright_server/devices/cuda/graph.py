"""Programs of several stages as one launch: a CUDA graph, whose nodes take the arguments of each binding in turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.errors import DeviceError, InternalError
from tilewright_server.devices.base import DeviceLostError
from tilewright_server.devices.cuda.launches import launch_config, launch_node
from tilewright_server.devices.gpu.driver import GpuDriver

if TYPE_CHECKING:
    from tilewright_server.devices.gpu.stages import BoundLaunch, Stage

__all__ = ["ProgramGraph"]

log = logging.getLogger(__name__)


class ProgramGraph:
    """The graph of a program on one stream. Of the lane's thread.

    It is captured when it is first launched, from the very launches that it replaces, so that clusters and dependent
    launches come with it. For another binding only the nodes' arguments are replaced, which does not touch launches
    that are under way. A program whose stages the driver cannot put into a graph is launched stage by stage.
    """

    def __init__(self, driver: GpuDriver, stages: Sequence[Stage], stream: Any) -> None:
        self._driver = driver
        self._stages = stages
        self._stream = stream
        self._graph: Any = None
        self._executable: Any = None
        self._nodes: list[Any] = []
        self._current: BoundLaunch | None = None
        self._usable = True

    @property
    def is_usable(self) -> bool:
        """False once the driver has refused it."""
        return self._usable

    def launch(self, bound: BoundLaunch) -> bool:
        """Launch with the arguments of ``bound``; False if there is no graph of it. Raises ``DeviceError``."""
        if bound is not self._current and not self._take(bound):
            return False
        result = self._driver.api.raw.cuGraphLaunch(self._executable, self._stream)[0]
        if result:
            raise self._driver.error(result, "a graph")
        return True

    def _take(self, bound: BoundLaunch) -> bool:
        if not self._usable:
            return False
        try:
            if self._executable is None:
                self._capture(bound)
            else:
                api, check = self._driver.api.raw, self._driver.check
                for node, params in zip(self._nodes, self._params(bound), strict=True):
                    check(api.cuGraphExecKernelNodeSetParams(self._executable, node, params), "a graph's arguments")
        except DeviceLostError:
            raise
        except (DeviceError, InternalError) as error:
            log.warning("launching stage by stage: %s", error)
            self._usable = False
            self.close()
            return False
        self._current = bound
        return True

    def _capture(self, bound: BoundLaunch) -> None:
        """On a stream of its own: others may ask about the lane's stream at any time, which ends a capture."""
        driver, api = self._driver, self._driver.api.raw
        stream = driver.check(api.cuStreamCreate(api.CUstream_flags.CU_STREAM_NON_BLOCKING.value))
        try:
            driver.check(api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            try:
                self._nodes = self._launched(bound, stream)
            finally:
                answer = api.cuStreamEndCapture(stream)
            self._graph = driver.check(answer, "a graph")
            self._executable = driver.check(api.cuGraphInstantiate(self._graph, 0), "a graph")
        finally:
            driver.quietly(api.cuStreamDestroy(stream))

    def _launched(self, bound: BoundLaunch, stream: Any) -> list[Any]:
        """Put all stages on a stream of a capture; the node of each."""
        driver, api = self._driver, self._driver.api.raw
        nodes = []
        for stage, (_, function, params, _) in zip(self._stages, bound.calls, strict=True):
            config = launch_config(api, stage.geometry, stream)
            driver.check(driver.launch(config, function, params, 0), "a launch in a graph")
            captured = driver.check(api.cuStreamGetCaptureInfo(stream))
            nodes.append(captured[3][0])
        return nodes

    def _params(self, bound: BoundLaunch) -> tuple[Any, ...]:
        """Of the stages, as nodes; made when they are first asked for."""
        if bound.nodes is None:
            api = self._driver.api.raw
            bound.nodes = tuple(
                launch_node(api, function, stage.geometry, params)
                for stage, (_, function, params, _) in zip(self._stages, bound.calls, strict=True)
            )
        return bound.nodes

    def close(self) -> None:
        """Destroy it; what is under way ends first. Idempotent."""
        api, quietly = self._driver.api.raw, self._driver.quietly
        executable, self._executable = self._executable, None
        graph, self._graph = self._graph, None
        self._current = None
        if executable is not None:
            quietly(api.cuGraphExecDestroy(executable))
        if graph is not None:
            quietly(api.cuGraphDestroy(graph))
