"""Declarations of the convolution and its gradients: operands, attributes and examples."""

from __future__ import annotations

from tilewright_grouped_conv.problem.attributes import ATTRIBUTES
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import OPERANDS, strides_in
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.declaration import Declaration, Example
from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["DECLARATIONS"]

_NOTES = (
    "One to three spatial axes. Along each, out = (spatial + padding before + padding behind - ((filter - 1) * "
    "dilation + 1)) // stride + 1. C and K count the channels of all groups.",
    "A layout is a matter of strides: shapes are the same for channels-first and channels-last.",
)
_FORWARD = "`accumulate` and `split_k` are for gradients."
_OF_IMAGE = "`binary` and `split_k` are for other directions. With `accumulate` there is no `unary`."
_OF_WEIGHTS = "`binary` and `unary` are for other directions."


def _image(*shape: int, dtype: str = "fp32") -> TensorDesc:
    """A tensor in channels-last order."""
    return TensorDesc.of(dtype, shape, strides_in(Order.LAST, shape))


def _example(title: str, operation: str, inputs: dict[str, TensorDesc], **attributes: Attribute) -> Example:
    return Example(title, OperationRequest(operation, inputs, {}, attributes))


def _declaration(direction: Direction, summary: str, note: str, *examples: Example) -> Declaration:
    return Declaration(summary, OPERANDS[direction], ATTRIBUTES[direction], examples, (*_NOTES, note))


_X, _W, _DY = _image(2, 32, 28, 28), _image(64, 32, 3, 3), _image(2, 64, 28, 28)
DECLARATIONS = {
    Direction.FORWARD: _declaration(
        Direction.FORWARD,
        "Grouped convolution with fused steps: y = unary(binary(alpha * scale * sum + bias, d...)).",
        _FORWARD,
        _example("A convolution of two dimensions", "conv", {"x": _X, "w": _W}, padding=1),
        _example("Depthwise, with a bias and an activation", "conv",
                 {"x": _X, "w": _image(32, 1, 3, 3), "bias": TensorDesc.of("fp32", (32,))},
                 groups=32, stride=2, padding="same_upper", unary="HardSwish"),
        _example("One dimension, causal: all padding before", "conv",
                 {"x": _image(1, 16, 100), "w": _image(16, 16, 3)}, padding=(2, 0)),
    ),
    Direction.BACKWARD_DATA: _declaration(
        Direction.BACKWARD_DATA,
        "Gradient of a convolution's image; as an operation of its own, a transposed convolution.",
        _OF_IMAGE,
        _example("The gradient for images of 28 pixels", "conv_backward_data",
                 {"dy": _DY, "w": _W}, padding=1, input_size=(28, 28)),
        _example("A transposed convolution with a bias", "conv_backward_data",
                 {"dy": _DY, "w": _image(64, 32, 2, 2), "bias": TensorDesc.of("fp32", (32,))},
                 stride=2, input_size=(56, 56)),
    ),
    Direction.BACKWARD_WEIGHT: _declaration(
        Direction.BACKWARD_WEIGHT,
        "Gradient of a convolution's weights.",
        _OF_WEIGHTS,
        _example("The gradient of filters of three pixels, in fp32", "conv_backward_weight",
                 {"x": _image(2, 32, 28, 28, dtype="bf16"), "dy": _image(2, 64, 28, 28, dtype="bf16")},
                 padding=1, filter_size=(3, 3), out_dtype="fp32"),
    ),
}  # fmt: skip
