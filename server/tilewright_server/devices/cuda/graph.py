"""Graphs of CUDA: one for all bindings of a program, whose nodes take the arguments of each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright_server.devices.cuda.launches import launch_node
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.launch.graph import CapturedGraph, ProgramGraph

if TYPE_CHECKING:
    from tilewright_server.devices.gpu.launch.stages import BoundLaunch, Stage

__all__ = ["CudaGraph"]


class CudaGraph(ProgramGraph):
    """See ``ProgramGraph``.

    It is captured when it is first launched, so that clusters and dependent launches come with it. For another binding
    only the nodes' arguments are replaced, which does not touch launches that are under way.
    """

    def __init__(self, driver: GpuDriver, stages: Sequence[Stage], stream: Any) -> None:
        super().__init__(driver, stages, stream)
        self._graph: CapturedGraph | None = None

    def _graph_of(self, bound: BoundLaunch, again: bool) -> CapturedGraph:  # noqa: ARG002
        graph = self._graph
        if graph is None:
            graph = self._graph = CapturedGraph(self._driver, self._stages, bound)
            return graph
        api, check = self._driver.api.raw, self._driver.check
        for node, params in zip(graph.nodes, self._params(bound), strict=True):
            check(api.cuGraphExecKernelNodeSetParams(graph.handle, node, params), "a graph's arguments")
        return graph

    def _params(self, bound: BoundLaunch) -> tuple[Any, ...]:
        """Parameters of the stages as nodes; made when they are first asked for."""
        if bound.nodes is None:
            api = self._driver.api.raw
            bound.nodes = tuple(
                launch_node(api, function, stage.geometry, params)
                for stage, (_, function, params, _) in zip(self._stages, bound.calls, strict=True)
            )
        return bound.nodes

    def close(self) -> None:
        super().close()
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()
