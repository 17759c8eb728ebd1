"""Problems in a graph of PyTorch's own functions, as Dynamo records a model, and their replacement."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tilewright.torch.compiler.problems import ATTENTION, CONVOLUTION, PRODUCT, Kind

__all__ = ["Found", "problem_at", "replace", "value_of"]

_functional = torch.nn.functional
_LINEAR = {_functional.linear, torch._C._nn.linear}
_MATMUL = {torch.matmul, torch.mm, torch.bmm, operator.matmul, "matmul", "mm", "bmm"}
_ADDMM = {torch.addmm}
_ADDING = {operator.iadd, "add_"}
_ADD = {operator.add, torch.add, "add"} | _ADDING
_WRITING = {name for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)} | {"setitem"}
"""Operators that write to their first operand."""
_CONVOLUTIONS = {torch.conv1d: 3, torch.conv2d: 4, torch.conv3d: 5}
_ATTENTION = {_functional.scaled_dot_product_attention}
_ACTIVATIONS: dict[Any, str] = {
    _functional.relu: "relu", torch.relu: "relu", "relu": "relu", _functional.silu: "silu",
    torch.sigmoid: "sigmoid", _functional.sigmoid: "sigmoid", "sigmoid": "sigmoid",
    torch.tanh: "tanh", _functional.tanh: "tanh", "tanh": "tanh",
}  # fmt: skip
_GELU = {_functional.gelu, torch._C._nn.gelu}
_TYPES = {torch.float32, torch.float16, torch.bfloat16}
_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_ATTENTION_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


class Found(NamedTuple):
    """A problem in a graph."""

    kind: Kind
    nodes: tuple[Any, ...]
    """The nodes that are replaced, in order: each but the last is used by the next alone."""
    operands: tuple[Any, ...]
    words: Mapping[str, Any]


def value_of(node: Any) -> Any:
    """The tensor without data that Dynamo recorded for a node; ``None`` if it is none."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def problem_at(node: Any) -> Found | None:
    """The problem that a node is, with the addition and the activation behind it."""
    if node.op not in ("call_function", "call_method"):
        return None
    found = _product(node) or _convolution(node) or _attention(node)
    if found is None or not _is_plain(found):
        return None
    return _with_epilogue(found) if found.kind is PRODUCT else found


def _bound(node: Any, names: tuple[str, ...], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _product(node: Any) -> Found | None:
    words = {"linear": False, "activation": None}
    if node.target in _LINEAR:
        given = _bound(node, ("input", "weight", "bias"), {"bias": None})
        return Found(PRODUCT, (node,), (given["input"], given["weight"], given["bias"], None), words | {"linear": True})
    if node.target in _ADDMM:
        given = _bound(node, ("input", "mat1", "mat2"), {"alpha": 1, "beta": 1})
        bias = value_of(given["input"])
        if given["alpha"] != 1 or given["beta"] != 1 or bias is None or bias.dim() != 1:
            return None
        return Found(PRODUCT, (node,), (given["mat1"], given["mat2"], given["input"], None), words)
    if node.target in _MATMUL and len(node.args) == 2 and not node.kwargs:
        return Found(PRODUCT, (node,), (*node.args, None, None), words)
    return None


def _convolution(node: Any) -> Found | None:
    if not callable(node.target) or node.target not in _CONVOLUTIONS:
        return None
    given = _bound(node, _CONV_ARGUMENTS, _CONV_DEFAULTS)
    image = value_of(given["input"])
    if image is None or image.dim() != _CONVOLUTIONS[node.target]:
        return None
    operands = (given["input"], given["weight"], given["bias"])
    sizes = tuple(given[name] for name in ("stride", "padding", "dilation", "groups"))
    sizes = tuple(tuple(item) if isinstance(item, (list, tuple)) else item for item in sizes)
    return Found(CONVOLUTION, (node,), operands, {"sizes": sizes})


def _attention(node: Any) -> Found | None:
    if node.target not in _ATTENTION:
        return None
    given = _bound(node, _ATTENTION_ARGUMENTS, _ATTENTION_DEFAULTS)
    query = value_of(given["query"])
    if given["dropout_p"] != 0 or query is None or query.dim() != 4:
        return None
    words = {name: given[name] for name in ("is_causal", "scale", "enable_gqa")}
    return Found(ATTENTION, (node,), tuple(given[name] for name in _ATTENTION_ARGUMENTS[:4]), words)


def _is_plain(found: Found) -> bool:
    """True for tensors of one float type on one device, of two dimensions or more but for a bias, with known sizes;
    and a result of that type, which it has not where autocast is on.
    """
    values = [value_of(item) for item in found.operands if item is not None]
    result = value_of(found.nodes[0])
    if result is None or any(value is None for value in values) or len(values) < 2:
        return False
    first: Any = values[0]
    if first.dtype not in _TYPES or result.dtype is not first.dtype or first.device.type not in ("cpu", "cuda"):
        return False
    for index, item in enumerate(found.operands):
        value: Any = value_of(item) if item is not None else None
        if value is None:
            continue
        mask = found.kind is ATTENTION and index == 3
        if value.device != first.device or (value.dtype is not first.dtype and not (mask and _masks(value))):
            return False
        if (index < 2 and value.dim() < 2) or not value.numel() or value.layout is not torch.strided:
            return False
    plain = [number for value in values if value is not None for number in (*value.shape, *value.stride())]
    words = [item for word in found.words.get("sizes", ()) for item in (word if isinstance(word, tuple) else (word,))]
    return all(type(number) is int for number in plain) and all(type(word) in (int, str) for word in words)


def _masks(value: Any) -> bool:
    return value.dtype is torch.bool or value.dtype is torch.float32


def _with_epilogue(found: Found) -> Found:
    """The product with the addition and the activation behind it, as far as nothing else needs what is between, and
    nothing on the way may write to an operand.
    """
    last, words = found.nodes[-1], dict(found.words)
    nodes, operands = [last], list(found.operands)
    follower = _follower(last)
    addend = None if follower is None else _addend(follower, last)
    if addend is not None:
        operands[3] = addend
        nodes.append(follower)
        last, follower = follower, _follower(follower)
    activation = _activation(follower) if follower is not None else None
    if activation is not None:
        words["activation"] = activation
        nodes.append(follower)
    return Found(found.kind, tuple(nodes), tuple(operands), words)


def _follower(node: Any) -> Any:
    """The only user of a node, if nothing before it may write to a tensor or change how PyTorch works."""
    if len(node.users) != 1:
        return None
    user, between = next(iter(node.users)), node.next
    while between is not user:
        if _is_barrier(between):
            return None
        between = between.next
    return user


def _is_barrier(node: Any) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    written = name.endswith("_") or name.startswith("_") or name in _WRITING
    return bool(node.op == "call_module" or written or node.kwargs.get("inplace") or "out" in node.kwargs)


def _addend(node: Any, product: Any) -> Any:
    """The tensor that a node adds to a product, if it is like that, and is not what is written."""
    if node.target not in _ADD or len(node.args) != 2 or node.kwargs:
        return None
    other = node.args[0] if node.args[1] is product else node.args[1]
    have, want = value_of(other), value_of(product)
    if other is product or have is None or have.shape != want.shape or have.dtype is not want.dtype:
        return None
    in_place = node.target in _ADDING and other is node.args[0]
    return None if in_place or have.device != want.device or have.layout is not torch.strided else other


def _activation(node: Any) -> str | None:
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    if node.target in _GELU:
        kind = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(kind)
    if len(node.args) != 1 or node.kwargs.get("inplace"):
        return None
    return _ACTIVATIONS.get(node.target)


def replace(graph: Any, found: Found) -> None:
    """Let Tilewright do a problem: at the place of its last node, where all of its operands are known."""
    last = found.nodes[-1]
    with graph.inserting_before(last):
        made = graph.call_function(found.kind.ours, found.operands, dict(found.words))
    made.meta.update(last.meta)
    last.replace_all_uses_with(made)
    for node in reversed(found.nodes):
        graph.erase_node(node)
