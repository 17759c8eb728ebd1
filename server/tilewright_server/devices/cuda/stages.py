"""Launches, prepared so far that only the driver's call is left."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.plan import Geometry
from tilewright_server.devices.cuda.driver import Driver
from tilewright_server.devices.cuda.module import Function
from tilewright_server.devices.cuda.packing import HostBlock

if TYPE_CHECKING:
    from tilewright_server.devices.cuda.graph import ProgramGraph

__all__ = ["BoundLaunch", "Stage"]


class Stage:
    """A function with the geometry that it is launched with."""

    __slots__ = ("function", "geometry")

    def __init__(self, function: Function, geometry: Geometry, args_bytes: int) -> None:
        """Raises ``DeviceError`` if the device cannot launch it so, or the arguments do not fit."""
        function.admit(geometry, args_bytes)
        self.function = function
        self.geometry = geometry

    def config(self, api: Any, stream: Any) -> Any:
        """``CUlaunchConfig`` for a stream. The grid counts workgroups, not clusters."""
        geometry = self.geometry
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
        config.sharedMemBytes = geometry.shared_bytes
        config.hStream = stream
        attributes = []
        if geometry.cluster != (1, 1, 1):
            cluster = api.CUlaunchAttribute()
            cluster.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = cluster.value.clusterDim
            size.x, size.y, size.z = geometry.cluster
            attributes.append(cluster)
        if geometry.dependent:
            dependent = api.CUlaunchAttribute()
            dependent.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            dependent.value.programmaticStreamSerializationAllowed = 1
            attributes.append(dependent)
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def node(self, api: Any, params: int) -> Any:
        """The parameters of a graph's node for the same launch, with arguments at host address ``params``."""
        geometry = self.geometry
        node = api.CUDA_KERNEL_NODE_PARAMS()
        node.func = self.function.handle
        node.gridDimX, node.gridDimY, node.gridDimZ = geometry.grid
        node.blockDimX, node.blockDimY, node.blockDimZ = geometry.block
        node.sharedMemBytes = geometry.shared_bytes
        node.kernelParams = params
        return node


class BoundLaunch:
    """A program's launches on one stream with all arguments in place. The driver copies them at every launch."""

    __slots__ = ("_block", "_calls", "_driver", "_free", "_graph", "_launch", "_params", "count", "nodes")

    def __init__(
        self,
        driver: Driver,
        stages: Sequence[Stage],
        configs: Sequence[Any],
        block: HostBlock,
        roots: Sequence[int],
        *,
        graph: ProgramGraph | None = None,
        free: Callable[[], None] | None = None,
    ) -> None:
        """``roots`` are the offsets of the stages' roots in ``block``; ``free`` gives back what lies on the device."""
        self.count = len(stages)
        self._driver = driver
        self._block = block
        self._launch = driver.api.cuLaunchKernelEx
        self._graph = graph
        self._free = free
        # The driver takes an array of addresses of parameters; ours have one parameter each.
        self._params = (ctypes.c_void_p * max(1, len(roots)))(*(block.address + root for root in roots))
        first = ctypes.addressof(self._params)
        self._calls = tuple(
            (config, stage.function.handle, first + place * ctypes.sizeof(ctypes.c_void_p))
            for place, (stage, config) in enumerate(zip(stages, configs, strict=True))
        )
        self.nodes: tuple[Any, ...] | None = None
        """Parameters of a graph's nodes; made when a graph first asks."""

    def launch(self) -> None:
        """Put all stages on the stream. Raises ``DeviceError``, ``DeviceLostError``."""
        if self._graph is not None and self._graph.launch(self):
            return
        launch = self._launch
        for config, function, params in self._calls:
            result = launch(config, function, params, 0)[0]
            if result:
                raise self._driver.error(result, "a launch")

    def launch_stage(self, place: int) -> None:
        """One stage alone."""
        config, function, params = self._calls[place]
        result = self._launch(config, function, params, 0)[0]
        if result:
            raise self._driver.error(result, "a launch")

    def node_params(self, stages: Sequence[Stage]) -> tuple[Any, ...]:
        """Of the stages, as nodes of a graph."""
        if self.nodes is None:
            api = self._driver.api
            self.nodes = tuple(
                stage.node(api, params) for stage, (_, _, params) in zip(stages, self._calls, strict=True)
            )
        return self.nodes

    def launch_on(self, stream: Any, stages: Sequence[Stage]) -> list[Any]:
        """Put all stages on another stream, of a capture; the node of each."""
        driver, api = self._driver, self._driver.api
        nodes = []
        for stage, (_, function, params) in zip(stages, self._calls, strict=True):
            driver.check(self._launch(stage.config(api, stream), function, params, 0), "a launch in a graph")
            captured = driver.check(api.cuStreamGetCaptureInfo(stream))
            nodes.append(captured[3][0])
        return nodes

    def close(self) -> None:
        """Give back what lies on the device, behind what was launched. Idempotent."""
        free, self._free = self._free, None
        if free is not None:
            free()
