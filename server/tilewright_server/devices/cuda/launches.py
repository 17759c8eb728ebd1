"""How launches are described to the CUDA driver."""

from __future__ import annotations

from typing import Any

from tilewright_kit.contract.plan import Geometry

__all__ = ["launch_config", "launch_node"]


def launch_config(raw: Any, geometry: Geometry, stream: Any) -> Any:
    """``CUlaunchConfig`` for a stream. The grid counts workgroups, not clusters."""
    config = raw.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
    config.sharedMemBytes = geometry.shared_bytes
    config.hStream = stream
    attributes = []
    if geometry.cluster != (1, 1, 1):
        cluster = raw.CUlaunchAttribute()
        cluster.id = raw.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = cluster.value.clusterDim
        size.x, size.y, size.z = geometry.cluster
        attributes.append(cluster)
    if geometry.dependent:
        dependent = raw.CUlaunchAttribute()
        dependent.id = raw.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        attributes.append(dependent)
    if attributes:
        config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def launch_node(raw: Any, function: Any, geometry: Geometry, params: int) -> Any:
    """The parameters of a graph's node for the same launch, with arguments at host address ``params``."""
    node = raw.CUDA_KERNEL_NODE_PARAMS()
    node.func = function
    node.gridDimX, node.gridDimY, node.gridDimZ = geometry.grid
    node.blockDimX, node.blockDimY, node.blockDimZ = geometry.block
    node.sharedMemBytes = geometry.shared_bytes
    node.kernelParams = params
    return node
