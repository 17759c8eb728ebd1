"""ONNX's own tests of nodes, of the operators that the client has: one test for each operator, all of its cases in it.
Those of Attention, most of which want a kernel of their own, are dealt out to several.

What the client does not compute is in ``NOT_COMPUTED``, with the reason.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import tilewright as tw

node_cases = pytest.importorskip("onnx.backend.test.case.node", reason="onnx is missing: pip install onnx")

OPERATORS = ("Gemm", "MatMul", "Conv", "ConvTranspose", "MatMulInteger", "ConvInteger", "Attention")
NOT_COMPUTED = {
    "float64": "kernels compute in fp32 at most",
    "uint8": "unsigned bytes are operands of no kernel, and less their zero point these do not fit int8",
}
PARTS = {"Attention": 8}
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def cases():
    """Models of one node with inputs and outputs, by operator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = node_cases.collect_testcases(None)
    by_operator = {name: [] for name in OPERATORS}
    for case in found:
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in by_operator:
            by_operator[nodes[0].op_type].append(case)
    return by_operator


@pytest.fixture(scope="module")
def client(real_server):
    with tw.connect(real_server.target) as found:
        yield found


def attributes(node):
    from onnx import helper

    found = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def named_inputs(node, values):
    """Inputs in the node's order, None for those that are left out."""
    rest = iter(values)
    return [next(rest) if name else None for name in node.input]


def gemm(client, node, a, b, c=None):
    given = attributes(node)
    a = a.T if given.get("transA") else a
    b = b.T if given.get("transB") else b
    if c is not None:
        c = np.ascontiguousarray(np.broadcast_to(c, (a.shape[0], b.shape[1])))
    more = {} if c is None else {"c": c, "beta": given.get("beta", 1.0)}
    return client.gemm(a, b, alpha=given.get("alpha", 1.0), **more)


def matmul(client, node, a, b):
    return client.gemm(a, b)


def spatial(given, count):
    words = {"SAME_UPPER": "same_upper", "SAME_LOWER": "same_lower", "VALID": "valid"}
    padding = words.get(given.get("auto_pad", "NOTSET")) or list(given.get("pads", [0] * (2 * count)))
    named = {"stride": "strides", "dilation": "dilations"}
    sizes = {ours: list(given.get(theirs, [1] * count)) for ours, theirs in named.items()}
    return {"padding": padding, "groups": given.get("group", 1), **sizes}


def conv(client, node, x, w, bias=None):
    return client.conv(x, w, bias=bias, **spatial(attributes(node), x.ndim - 2))


def conv_transpose(client, node, x, w, bias=None):
    given, count = attributes(node), x.ndim - 2
    words = spatial(given, count)
    words["output_padding"] = list(given.get("output_padding", [0] * count))
    if "output_shape" in given:
        words |= {"output_size": list(given["output_shape"]), "output_padding": 0}
        words["padding"] = words["padding"] if isinstance(words["padding"], str) else "same_lower"
    return client.conv_transpose(x, w, bias=bias, **words)


def less_zero_point(value, zero):
    """Exact int8 of what the zero point is taken from; skipped by the caller where it does not fit."""
    zero = np.int32(0) if zero is None else np.asarray(zero, np.int32)
    if zero.ndim and value.ndim > 2:  # one for each filter
        zero = zero.reshape(-1, *[1] * (value.ndim - 1))
    wide = value.astype(np.int32) - zero
    if wide.size and (wide.min() < -128 or wide.max() > 127):
        raise tw.UnsupportedError(NOT_COMPUTED["uint8"])
    return wide.astype(np.int8)


def matmul_integer(client, node, a, b, a_zero=None, b_zero=None):
    return client.gemm(less_zero_point(a, a_zero), less_zero_point(b, b_zero))


def conv_integer(client, node, x, w, x_zero=None, w_zero=None):
    operands = less_zero_point(x, x_zero), less_zero_point(w, w_zero)
    return client.conv(*operands, out_dtype="int32", **spatial(attributes(node), x.ndim - 2))


STAGES = ("scaled", "softcap", "masked", "probabilities")
"""``qk_matmul_output_mode``: which stage of the scores is an output."""


def within(mask, rows, columns, left, right):
    """A mask, and what ONNX's diagonal hides: it begins where earlier keys end, which is no corner of the scores unless
    new keys are as many as queries.
    """
    seen = (columns <= rows + right if right >= 0 else True) & (columns >= rows - left if left >= 0 else True)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == bool else np.where(seen, mask, np.array(-np.inf, mask.dtype))


def attention(client, node, q, k, v, mask=None, past_key=None, past_value=None, nonpad=None):
    """All outputs: the result, keys and values with those of earlier calls before them, and a stage of the scores."""
    given, outputs = attributes(node), (*node.output, "", "", "")
    flat = q.ndim == 3
    if flat:
        heads, kv_heads = given["q_num_heads"], given["kv_num_heads"]
        q = q.reshape(*q.shape[:2], heads, -1).swapaxes(1, 2)
        k, v = (item.reshape(*item.shape[:2], kv_heads, -1).swapaxes(1, 2) for item in (k, v))
    if past_key is not None:
        k, v = (np.concatenate(pair, axis=2) for pair in ((past_key, k), (past_value, v)))
    if mask is not None and (short := k.shape[2] - mask.shape[-1]):
        hidden = False if mask.dtype == bool else -np.inf
        mask = np.pad(mask, ((0, 0),) * (mask.ndim - 1) + ((0, short),), constant_values=hidden)
    more = {name: given[name] for name in ("scale", "softcap") if given.get(name)}
    left, right = given.get("left_window_size", -1), given.get("right_window_size", -1)
    right = 0 if given.get("is_causal", 0) else right
    if past_key is not None and max(left, right) >= 0:
        mask = within(mask, np.arange(q.shape[2])[:, None] + past_key.shape[2], np.arange(k.shape[2]), left, right)
    elif max(left, right) >= 0:
        more |= {"window": (left, right), "mask_align": "top_left" if nonpad is None else "bottom_right"}
    if nonpad is not None:
        more["seqlens_k"] = nonpad
    if outputs[3]:
        more["return_scores"] = STAGES[given.get("qk_matmul_output_mode", 0)]
    found = client.attention(q, k, v, mask, **more)
    y, *scores = found if outputs[3] else (found,)
    y = y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], -1) if flat else y
    every = (y, k, v, *scores)
    return [item for item, name in zip(every, outputs, strict=False) if name]


RUN = {
    "Gemm": gemm, "MatMul": matmul, "Conv": conv, "ConvTranspose": conv_transpose,
    "MatMulInteger": matmul_integer, "ConvInteger": conv_integer, "Attention": attention,
}  # fmt: skip


def reason(case):
    """Why the client does not compute a case; empty if it does."""
    if any(isinstance(item, np.ndarray) and item.dtype == np.float64 for item in case.data_sets[0][0]):
        return NOT_COMPUTED["float64"]
    return ""


@pytest.mark.parametrize(
    ("operator", "part"), [(name, part) for name in OPERATORS for part in range(PARTS.get(name, 1))]
)
@pytest.mark.extended
def test_nodes_are_computed_as_onnx_has_them(operator, part, cases, client):
    ran, wrong = 0, {}
    for case in cases[operator][part :: PARTS.get(operator, 1)]:
        if reason(case):
            continue
        node = case.model.graph.node[0]
        for inputs, outputs in case.data_sets:
            try:
                found = RUN[operator](client, node, *named_inputs(node, inputs))
            except tw.TilewrightError as error:
                wrong[case.name] = str(error)
                continue
            found = found if isinstance(found, list) else [found]
            for have, output in zip(found, outputs, strict=True):
                want = np.asarray(output)
                bound = TOLERANCE.get(want.dtype.name, 0.0)
                close = have.shape == want.shape and np.allclose(
                    have.astype(np.float64), want.astype(np.float64), rtol=bound, atol=bound
                )
                if not close:
                    wrong[case.name] = f"{have.dtype} {have.shape}, not {want.dtype} {want.shape}"
            ran += 1
    assert wrong == {}
    assert ran
