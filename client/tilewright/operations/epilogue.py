"""Elementwise steps on results: arguments of callers in the server's words."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright.types.arguments import number
from tilewright.types.dtypes import DTypeLike, dtype_name

__all__ = [
    "ACTIVATIONS",
    "Blocks",
    "addends",
    "block_word",
    "block_words",
    "elementwise",
    "join_gate_up",
    "scale_operand",
]

ACTIVATIONS = {
    "relu": "Relu",
    "gelu": "Gelu",
    "fast_gelu": "FastGelu",
    "gelu_tanh": "FastGelu",
    "silu": "Silu",
    "swish": "Silu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "hard_swish": "HardSwish",
    "clamp": "Clamp",
    "relu6": "Clamp",
    "leaky_relu": "LeakyRelu",
    "elu": "Elu",
    "softplus": "Softplus",
    "mish": "Mish",
}
"""Values of ``activation``, and the server's word for each. ``gelu`` is exact (erf), ``fast_gelu`` its tanh
approximation; ``relu6`` clamps to 0 and 6. ``leaky_relu`` and ``elu`` have a factor below zero, ``slope``: 0.01 and 1
if it is not given. As ONNX and PyTorch's modules spell them (``LeakyRelu``), they are taken, too.
"""

Blocks = Any
"""A name, or a pair of (rows, k) of A and (columns, k) of B: ``((1, 128), (128, 128))``."""

_CAPITALS = {word.title().replace("_", ""): word for word in ACTIVATIONS}

_TURN = 8
"""Rows of a gate's weights that follow each other where both projections are joined, and of the other's behind them."""

_SLOPED = ("leaky_relu", "elu")

_BINARY = {"add": ("Add", "MultiDAdd"), "multiply": ("Multiply", "MultiDMultiply")}


def elementwise(
    *,
    alpha: float = 1.0,
    binary: str | None = None,
    count_d: int = 0,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    slope: float | None = None,
    out_dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """An operation's attributes. Raises ``InvalidArgumentError`` for words that are none."""
    found: dict[str, Any] = {}
    if number("alpha", alpha) != 1:
        found["alpha"] = float(alpha)
    if binary is not None:
        if not isinstance(binary, str) or binary not in _BINARY:
            raise _word("binary", binary, _BINARY)
        if not count_d:
            raise InvalidArgumentError(
                "binary has no effect: there is no d that it could bring in",
                field="binary",
                value=binary,
                rule="no_effect",
                fix="pass d=[tensor] as well, or leave it out",
            )
        found["binary"] = _BINARY[binary][count_d > 1]
    if isinstance(activation, str):
        activation = _CAPITALS.get(activation, activation)
    if clamp is not None and activation not in (None, "clamp") and activation in ACTIVATIONS:
        raise InvalidArgumentError(
            f"clamp has no effect with activation {activation!r}, which has no bounds of the caller's",
            field="clamp",
            value=clamp,
            rule="no_effect",
            fix="leave one of them out",
        )
    if activation == "relu6":
        activation, clamp = "clamp", (0.0, 6.0)
    if activation is None and clamp is not None:
        activation = "clamp"
    if activation is not None:
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise _word("activation", activation, ACTIVATIONS)
        found["unary"] = ACTIVATIONS[activation]
    if slope is not None:
        if activation not in _SLOPED:
            raise InvalidArgumentError(
                f"slope has no effect with activation {activation!r}",
                field="slope",
                value=slope,
                rule="no_effect",
                fix=f"set activation to {' or '.join(_SLOPED)}, or leave it out",
            )
        found["slope"] = number("slope", slope)
    if clamp is not None:
        if not isinstance(clamp, (tuple, list)) or len(clamp) != 2:
            raise InvalidArgumentError(
                "clamp is a pair of bounds",
                field="clamp",
                value=clamp,
                rule="clamp_bounds",
                fix="give (low, high); either may be None",
            )
        for name, bound in zip(("clamp_lo", "clamp_hi"), clamp, strict=True):
            if bound is not None:
                found[name] = number("clamp", bound)
    if out_dtype is not None:
        found["out_dtype"] = dtype_name(out_dtype, "out_dtype")
    return found


def addends(d: Sequence[Any], group: str = "") -> dict[str, Any]:
    """The operands of ``binary`` by name. Raises ``InvalidArgumentError`` for a tensor in place of a list of them."""
    if not isinstance(d, (list, tuple)):
        raise InvalidArgumentError("d is a list of tensors", field="d", rule="operand_list", fix="pass d=[tensor]")
    return {f"d{group}[{index}]": value for index, value in enumerate(d)}


def scale_operand(scale: Any, field: str = "scale") -> Any:
    """A scale as an operand: plain numbers, and lists of them, as arrays of fp32. Raises ``InvalidArgumentError`` for
    lists of anything else.
    """
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, (int, float, list, np.generic)):
        return scale
    try:
        return np.asarray(scale, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(
            f"{field} has something in it that is no number of fp32",
            field=field,
            value=scale,
            rule="array_like",
            fix="give a number, or as many as there are channels, rows or blocks",
        ) from None


def _word(field: str, value: object, known: Mapping[str, object]) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field} {value!r} is not known",
        field=field,
        value=value,
        rule="attribute_choice",
        fix=f"use one of {', '.join(known)}",
    )


def block_words(given: Blocks) -> str:
    """The attribute's name of a pair of blocks. Which pairs there are is the server's business."""
    if isinstance(given, str):
        return given
    try:
        (rows, k), (columns, along) = given
        return f"{int(rows)}x{int(k)}_{int(columns)}x{int(along)}"
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            "scale_block is no pair of blocks",
            field="scale_block",
            value=given,
            rule="attribute_type",
            fix="give (rows, k) of a and (columns, k) of b, as ((1, 128), (128, 128)) or ((1, 32), (1, 32))",
        ) from None


def block_word(given: Blocks) -> str:
    """The attribute's name of one block. Which there are is the server's business."""
    if isinstance(given, str):
        return given
    try:
        rows, columns = given
        return f"{int(rows)}x{int(columns)}"
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            "this is no block",
            field="out_scale_block",
            value=given,
            rule="attribute_type",
            fix="give (rows, columns) of the result, as (1, 128)",
        ) from None


def join_gate_up(gate: Any, up: Any) -> Any:
    """The weights of ``moe_gemm`` with ``activation="swiglu"``: ``[experts, 2 N, K]`` of two ``[experts, N, K]``, eight
    rows of the gate's, then eight of the other's, and so on. N is a multiple of 8. NumPy's arrays or PyTorch's tensors;
    factors of rows (blocks of ``(1, 128)``) are joined likewise. Factors of blocks of 128 rows have to be repeated for
    each row first.

        >>> join_gate_up(np.zeros((1, 8, 1)), np.ones((1, 8, 1))).ravel().tolist()[6:10]
        [0.0, 0.0, 1.0, 1.0]
    """
    shape = tuple(gate.shape)
    if len(shape) != 3 or tuple(up.shape) != shape or shape[1] % _TURN:
        raise InvalidArgumentError(
            f"the projections have shapes {list(shape)} and {list(up.shape)}",
            field="up",
            value=tuple(up.shape),
            rule="swiglu_weights",
            fix=f"give two [experts, N, K] with N a multiple of {_TURN}, padded with zeros",
        )
    experts, rows, k = shape
    turns = [item.reshape(experts, rows // _TURN, 1, _TURN, k) for item in (gate, up)]
    joined = np.concatenate(turns, 2) if isinstance(gate, np.ndarray) else sys.modules["torch"].cat(turns, 2)
    return joined.reshape(experts, 2 * rows, k)
