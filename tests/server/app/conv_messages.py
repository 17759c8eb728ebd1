"""Requests for convolutions as a client of bare stubs sends them, and the truth to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_proto.v1 import tensor_pb2 as tp

OPERATIONS = {operation.name: operation for operation in map(ConvOperation, Direction)}
OUTPUTS = {"conv": "y", "conv_backward_data": "dx", "conv_backward_weight": "dw"}


def last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of an image whose channels, the second axis, lie last."""
    strides, step = [1] * len(shape), shape[1]
    for axis in (*range(len(shape) - 1, 1, -1), 0):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def spec(*shape: int, last: bool = True, dtype: Any = tp.FP32) -> tp.TensorSpec:
    return tp.TensorSpec(dtype=dtype, shape=shape, strides=last_strides(shape) if last else ())


def attribute(value: Any) -> tp.Attribute:
    if isinstance(value, tp.Attribute):
        return value
    if isinstance(value, bool):
        return tp.Attribute(flag=value)
    if isinstance(value, int):
        return tp.Attribute(integer=value)
    if isinstance(value, str):
        return tp.Attribute(text=value)
    if isinstance(value, float):
        return tp.Attribute(number=value)
    return tp.Attribute(integers=tp.Attribute.Ints(values=value))


def attributes(**values: Any) -> dict[str, tp.Attribute]:
    return {name: attribute(value) for name, value in values.items()}


def operand(name: str, described: tp.TensorSpec, location: tp.Location | None = None) -> tp.Operand:
    return tp.Operand(name=name, spec=described, location=location)


def memory(shape: tuple[int, ...], seed: int, *, last: bool = True) -> np.ndarray[Any, Any]:
    """A random image of that shape, in memory of that order."""
    values = np.random.default_rng(seed).standard_normal(prod(shape)).astype(np.float32)
    return placed(values, shape, last=last)


def placed(values: Any, shape: tuple[int, ...], *, last: bool = True) -> np.ndarray[Any, Any]:
    """A view of flat values as an image, channels last or first."""
    if not last:
        return np.asarray(values.reshape(shape))
    return np.moveaxis(values.reshape(shape[0], *shape[2:], shape[1]), -1, 1)


def flat(array: Any) -> bytes:
    """The bytes of an array in the order of its memory."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    return np.ascontiguousarray(array.transpose(order)).tobytes()


def truth(operation: str, inputs: Mapping[str, Any], **words: Any) -> np.ndarray[Any, Any]:
    """The right output in float64."""
    descs = {name: TensorDesc.of("fp32", array.shape) for name, array in inputs.items()}
    found = OPERATIONS[operation]
    problem = found.parse(OperationRequest(operation, descs, {}, words))
    return np.asarray(found.reference(problem, inputs)[OUTPUTS[operation]])
