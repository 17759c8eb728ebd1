"""Read an ONNX model and run it: convolutions by whom the caller likes, everything else by NumPy.

Steps behind a convolution that can be part of its kernel are made part of it: batch normalisation with known statistics
and factors become other weights, adding a constant for each channel becomes a bias, and Relu and HardSwish become its
activation.

    graph = fuse(read("model.onnx"))
    outputs = run(graph, {"x": picture}, convolve)

Only the operators that the models of `ocr_layers.py` use are here; others are refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class MissingPackageError(RuntimeError):
    """Something that the example needs is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Layer:
    """A convolution, or a transposed one, with what its kernel does to the sums."""

    name: str
    weight: Array
    """[K, C / groups, *filter], or [C, K / groups, *filter] of a transposed one."""
    bias: Array | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """All that comes before, then all that comes behind."""
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    activation: str | None = None

    def __str__(self) -> str:
        taps = "x".join(map(str, self.weight.shape[2:]))
        kind = "transposed " if self.transposed else ""
        parts = [f"{self.channels} to {self.filters}, {kind}{taps}"]
        parts += [f"stride {'x'.join(map(str, self.stride))}"] if set(self.stride) != {1} else []
        parts += [f"{self.groups} groups"] if self.groups > 1 else []
        return ", ".join(parts)

    @property
    def channels(self) -> int:
        return self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups

    @property
    def filters(self) -> int:
        return self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]


@dataclass(frozen=True)
class Node:
    op: str
    inputs: tuple[str, ...]
    """Names of values; an empty one is left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    layer: Layer | None = None


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    input: str
    outputs: tuple[str, ...]
    metadata: Mapping[str, str]

    @property
    def layers(self) -> list[Node]:
        """Its convolutions, in order."""
        return [node for node in self.nodes if node.layer is not None]


def read(path: Path) -> Graph:
    """The graph of a model file, its convolutions as layers. Raises ``NotImplementedError`` for what they cannot be."""
    try:
        import onnx
        from onnx import helper, numpy_helper
    except ModuleNotFoundError:
        raise MissingPackageError("the package onnx is missing; get it with: pip install onnx") from None
    model = onnx.load(str(path))
    constants = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    nodes = []
    for item in model.graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in item.attribute}
        if item.op_type == "Constant":
            constants[item.output[0]] = numpy_helper.to_array(attributes["value"])
            continue
        node = Node(item.op_type, tuple(item.input), tuple(item.output), attributes)
        nodes.append(_as_layer(node, constants) if node.op in ("Conv", "ConvTranspose") else node)
    (entry,) = (item.name for item in model.graph.input if item.name not in constants)
    metadata = {item.key: item.value for item in model.metadata_props}
    return Graph(tuple(nodes), constants, entry, tuple(item.name for item in model.graph.output), metadata)


def _as_layer(node: Node, constants: Mapping[str, Array]) -> Node:
    x, weight, *bias = node.inputs
    words = node.attributes
    if words.get("auto_pad", b"NOTSET") != b"NOTSET" or any(words.get("output_padding", ())):
        raise NotImplementedError(f"{node.outputs[0]}: padding that is not given in numbers")
    ndim = constants[weight].ndim - 2
    layer = Layer(
        name=node.outputs[0],
        weight=constants[weight],
        bias=constants[bias[0]] if bias and bias[0] else None,
        stride=tuple(words.get("strides", (1,) * ndim)),
        padding=tuple(words.get("pads", (0,) * 2 * ndim)),
        dilation=tuple(words.get("dilations", (1,) * ndim)),
        groups=words.get("group", 1),
        transposed=node.op == "ConvTranspose",
    )
    return replace(node, inputs=(x,), layer=layer)


# ---- what becomes part of a convolution ----


def fuse(graph: Graph) -> Graph:
    """The same graph with fewer nodes."""
    readers: Counter[str] = Counter(name for node in graph.nodes for name in node.inputs)
    readers.update(graph.outputs)
    by_input: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            by_input.setdefault(name, []).append(node)
    gone: set[str] = set()
    fused: dict[str, Node] = {}
    for node in graph.layers:
        grown = node
        while (step := _absorb(grown, by_input.get(grown.outputs[0], []), by_input, readers, graph)) is not None:
            grown, absorbed = step
            gone.update(item.outputs[0] for item in absorbed)
        fused[node.outputs[0]] = grown
    nodes = [fused.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in gone]
    return replace(graph, nodes=tuple(nodes))


def _absorb(
    node: Node, after: list[Node], by_input: Mapping[str, list[Node]], readers: Mapping[str, int], graph: Graph
) -> tuple[Node, list[Node]] | None:
    """A convolution with one step more of what follows it, and the nodes that this step was."""
    layer, name = node.layer, node.outputs[0]
    assert layer is not None
    if layer.activation is not None:
        return None
    if readers[name] == 2 and (found := _hard_swish(name, after, by_input, readers, graph.constants)) is not None:
        return replace(node, outputs=found[-1].outputs, layer=replace(layer, activation="hard_swish")), found
    if readers[name] != 1:
        return None
    (following,) = after
    if following.op == "Relu":
        changed = replace(layer, activation="relu")
    elif following.op == "BatchNormalization":
        changed = _normalised(layer, following, graph.constants)
    elif (
        following.op in ("Add", "Mul") and (value := _per_channel(layer, following, name, graph.constants)) is not None
    ):
        changed = _shifted(layer, value) if following.op == "Add" else _scaled(layer, value)
    else:
        return None
    return replace(node, outputs=following.outputs, layer=changed), [following]


def _per_channel(layer: Layer, node: Node, name: str, constants: Mapping[str, Array]) -> Array | None:
    """The summand or factor, if it is one constant for each channel, or for all."""
    (other,) = (entry for entry in node.inputs if entry != name) if len(set(node.inputs)) == 2 else ("",)
    value = constants.get(other)
    wanted = (layer.filters, *(1 for _ in layer.stride))
    if value is None or (value.size != 1 and value.shape not in (wanted, (1, *wanted))):
        return None
    return np.broadcast_to(value.reshape(-1), (layer.filters,))


def _shifted(layer: Layer, addend: Array) -> Layer:
    bias = addend if layer.bias is None else layer.bias.astype(np.float64) + addend
    return replace(layer, bias=bias.astype(layer.weight.dtype))


def _scaled(layer: Layer, factor: Array) -> Layer:
    """The layer whose results are multiplied already: other weights and another bias."""
    weight, ones = layer.weight.astype(np.float64), (1,) * len(layer.stride)
    if layer.transposed:
        grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
        weight = (grouped * factor.reshape(layer.groups, 1, -1, *ones)).reshape(weight.shape)
    else:
        weight = weight * factor.reshape(-1, 1, *ones)
    bias = None if layer.bias is None else (layer.bias * factor).astype(layer.weight.dtype)
    return replace(layer, weight=weight.astype(layer.weight.dtype), bias=bias)


def _normalised(layer: Layer, node: Node, constants: Mapping[str, Array]) -> Layer:
    gain, shift, mean, variance = (constants[name].astype(np.float64) for name in node.inputs[1:])
    factor = gain / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
    return _shifted(_scaled(layer, factor), shift - mean * factor)


def _hard_swish(
    name: str,
    after: list[Node],
    by_input: Mapping[str, list[Node]],
    readers: Mapping[str, int],
    constants: Mapping[str, Array],
) -> list[Node] | None:
    """``x * clip(x + 3, 0, 6) / 6``, which older exporters write as four nodes."""

    def constant(node: Node, other: str) -> float | None:
        (entry,) = (item for item in node.inputs if item != other) if len(set(node.inputs)) == 2 else ("",)
        value = constants.get(entry)
        return float(value.reshape(())) if value is not None and value.size == 1 else None

    def only(node: Node, op: str) -> Node | None:
        following = by_input.get(node.outputs[0], [])
        return following[0] if readers[node.outputs[0]] == 1 and following[0].op == op else None

    add = next((node for node in after if node.op == "Add" and constant(node, name) == 3.0), None)
    clip = add and only(add, "Clip")
    if not add or not clip or [float(constants[entry]) for entry in clip.inputs[1:]] != [0.0, 6.0]:
        return None
    product = only(clip, "Mul")
    if not product or set(product.inputs) != {name, clip.outputs[0]}:
        return None
    last = only(product, "Div")
    return [add, clip, product, last] if last and constant(last, product.outputs[0]) == 6.0 else None


# ---- running ----

Convolve = Callable[[Layer, Array], Array]


def run(graph: Graph, x: Array, convolve: Convolve) -> list[Array]:
    """The outputs for one input. Raises ``NotImplementedError`` for an operator, or a form of it, that is not here."""
    values: dict[str, Array] = {graph.input: x}
    left: Counter[str] = Counter(name for node in graph.nodes for name in node.inputs)
    left.update(graph.outputs)
    for node in graph.nodes:
        inputs = [values[name] if name in values else graph.constants.get(name) for name in node.inputs]
        if node.layer is not None:
            values[node.outputs[0]] = convolve(node.layer, values[node.inputs[0]])
        elif node.op in OPERATORS:
            values[node.outputs[0]] = OPERATORS[node.op](node.attributes, *inputs)
        else:
            raise NotImplementedError(f"the operator {node.op} is not one of {', '.join(sorted(OPERATORS))}")
        left.subtract(node.inputs)
        for name in node.inputs:
            if not left[name]:
                values.pop(name, None)
    return [values[name] for name in graph.outputs]


Words = Mapping[str, Any]


def _pool(words: Words, x: Array, reduce: Any) -> Array:
    """Pooling whose windows do not overlap and need no padding."""
    steps, window = list(words["strides"]), list(words["kernel_shape"])
    if steps != window or any(words.get("pads", ())):
        raise NotImplementedError("pooling windows that overlap or leave the image")
    rows, columns = (size // step for size, step in zip(x.shape[2:], steps, strict=True))
    whole = x[:, :, : rows * steps[0], : columns * steps[1]]
    split = whole.reshape(*x.shape[:2], rows, steps[0], columns, steps[1])
    result: Array = reduce(split, axis=(3, 5))
    return result


def _resize(words: Words, x: Array, _roi: Array, scales: Array) -> Array:
    """Enlarging by whole numbers, each element repeated."""
    if words.get("mode") != b"nearest" or any(float(scale) % 1 for scale in scales):
        raise NotImplementedError("resizing other than by repeating elements")
    for axis, scale in enumerate(scales):
        x = x.repeat(int(scale), axis=axis) if scale != 1 else x
    return x


def _slice(_words: Words, x: Array, starts: Array, ends: Array, axes: Array | None = None, *steps: Array) -> Array:
    chosen = [slice(None)] * x.ndim
    every = steps[0] if steps else np.ones_like(starts)
    along = np.arange(len(starts)) if axes is None else axes
    for axis, start, end, step in zip(along, starts, ends, every, strict=True):
        chosen[int(axis)] = slice(int(start), int(end), int(step))
    return x[tuple(chosen)]


def _reshape(_words: Words, x: Array, shape: Array) -> Array:
    return x.reshape([x.shape[axis] if size == 0 else int(size) for axis, size in enumerate(shape)])


def _softmax(words: Words, x: Array) -> Array:
    axis = words.get("axis", 1)
    if axis not in (-1, x.ndim - 1):
        raise NotImplementedError("softmax over other than the last axis")
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def _batch_norm(words: Words, x: Array, gain: Array, shift: Array, mean: Array, variance: Array) -> Array:
    factor = gain / np.sqrt(variance + np.float32(words.get("epsilon", 1e-5)))
    form = (1, -1, *(1,) * (x.ndim - 2))
    return x * factor.reshape(form) + (shift - mean * factor).reshape(form)


def _hard_sigmoid(words: Words, x: Array) -> Array:
    return np.clip(np.float32(words.get("alpha", 0.2)) * x + np.float32(words.get("beta", 0.5)), 0, 1)


def _cast(words: Words, x: Array) -> Array:
    return x.astype({1: np.float32, 6: np.int32, 7: np.int64}[words["to"]])


OPERATORS: dict[str, Callable[..., Array]] = {
    "Add": lambda _, a, b: a + b,
    "AveragePool": lambda words, x: _pool(words, x, np.mean),
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": lambda _, x, low, high: np.clip(x, low, high),
    "Concat": lambda words, *parts: np.concatenate([np.atleast_1d(part) for part in parts], axis=words["axis"]),
    "Div": lambda _, a, b: a / b if a.dtype.kind == "f" else a // b,
    "GlobalAveragePool": lambda _, x: x.mean(axis=tuple(range(2, x.ndim)), keepdims=True),
    "HardSigmoid": _hard_sigmoid,
    "Identity": lambda _, x: x,
    "MatMul": lambda _, a, b: np.matmul(a, b),
    "MaxPool": lambda words, x: _pool(words, x, np.max),
    "Mul": lambda _, a, b: a * b,
    "Pow": lambda _, a, b: np.power(a, b),
    "ReduceMean": lambda words, x: x.mean(axis=tuple(words["axes"]), keepdims=bool(words.get("keepdims", 1))),
    "Relu": lambda _, x: np.maximum(x, 0),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": lambda _, x: np.array(x.shape, np.int64),
    "Sigmoid": lambda _, x: 0.5 + 0.5 * np.tanh(0.5 * x),
    "Slice": _slice,
    "Softmax": _softmax,
    "Sqrt": lambda _, x: np.sqrt(x),
    "Squeeze": lambda words, x: x.squeeze(tuple(words["axes"])),
    "Sub": lambda _, a, b: a - b,
    "Transpose": lambda words, x: x.transpose(words["perm"]),
}
"""Operators as NumPy computes them: attributes, then operands."""
