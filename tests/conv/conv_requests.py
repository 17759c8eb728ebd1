"""Requests of convolutions in the words of the protocol, for tests."""

from __future__ import annotations

from typing import Any

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

OPERATIONS = {
    Direction.FORWARD: "conv",
    Direction.BACKWARD_DATA: "conv_backward_data",
    Direction.BACKWARD_WEIGHT: "conv_backward_weight",
}


def last(dtype: str, *shape: int) -> TensorDesc:
    """A tensor whose channels are neighbours."""
    return TensorDesc.of(dtype, shape, strides_in(Order.LAST, shape))


def first(dtype: str, *shape: int) -> TensorDesc:
    """A tensor whose pixels are neighbours."""
    return TensorDesc.of(dtype, shape)


def request(direction: Direction, tensors: dict[str, TensorDesc], **attributes: Any) -> OperationRequest:
    """Tensors named ``y``, ``dx`` and ``dw`` are outputs of the directions that write them."""
    output = {Direction.FORWARD: "y", Direction.BACKWARD_DATA: "dx", Direction.BACKWARD_WEIGHT: "dw"}[direction]
    inputs = {name: desc for name, desc in tensors.items() if name != output}
    outputs = {name: desc for name, desc in tensors.items() if name == output}
    return OperationRequest(OPERATIONS[direction], inputs, outputs, attributes)


def forward(tensors: dict[str, TensorDesc], **attributes: Any) -> ConvProblem:
    return parse_conv(request(Direction.FORWARD, tensors, **attributes), Direction.FORWARD)


def backward_data(tensors: dict[str, TensorDesc], **attributes: Any) -> ConvProblem:
    return parse_conv(request(Direction.BACKWARD_DATA, tensors, **attributes), Direction.BACKWARD_DATA)


def backward_weight(tensors: dict[str, TensorDesc], **attributes: Any) -> ConvProblem:
    return parse_conv(request(Direction.BACKWARD_WEIGHT, tensors, **attributes), Direction.BACKWARD_WEIGHT)
