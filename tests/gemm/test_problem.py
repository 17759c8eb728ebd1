"""Requests: what is inferred, what is refused and how, and that nothing but typed errors ever comes back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright_gemm.problem.attributes import MAX_GROUPS
from tilewright_gemm.problem.pack_b import parse_pack_b
from tilewright_gemm.problem.parse import parse_gemm
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Binary, ScaleA, ScaleB, Unary
from tilewright_kit.contract.problem import OperationRequest, Problem
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

of = TensorDesc.of
A, B = of("fp32", (8, 16)), of("fp32", (16, 12))


def request(inputs: dict[str, Any], outputs: dict[str, Any] | None = None, **attributes: Any) -> OperationRequest:
    return OperationRequest("gemm", inputs, outputs or {}, attributes)


def parse(inputs: dict[str, Any], outputs: dict[str, Any] | None = None, **attributes: Any) -> GemmProblem:
    return parse_gemm(request(inputs, outputs, **attributes))


# ---- what is inferred ----


def test_output_shape_and_type_are_inferred() -> None:
    for dtype, out in (
        ("fp32", "fp32"),
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("fp8", "fp16"),
        ("bf8", "fp16"),
        ("int8", "int32"),
    ):
        problem = parse({"a": of(dtype, (3, 8, 16)), "b": of(dtype, (16, 12))})
        assert problem.tensors[-1].name == "out"
        assert problem.tensors[-1].desc == of(out, (3, 8, 12))


@pytest.mark.parametrize(
    ("a_strides", "b_strides", "layout"),
    [((16, 1), (1, 16), "rcr"), ((20, 1), (12, 1), "rrr"), ((1, 8), (30, 1), "crr"), ((1, 9), (1, 17), "ccr")],
)
def test_layouts_come_from_strides(a_strides: tuple[int, int], b_strides: tuple[int, int], layout: str) -> None:
    problem = parse({"a": of("fp32", (8, 16), a_strides), "b": of("fp32", (16, 12), b_strides)})
    assert problem.layout == layout


def test_degenerate_sizes_leave_the_layout_free() -> None:
    assert parse({"a": of("fp32", (1, 16), (999, 1)), "b": of("fp32", (16, 1), (1, 77))}).layout == "rcr"
    assert parse({"a": of("fp32", (1, 16), (1, 5)), "b": of("fp32", (16, 12))}).layout == "crr"
    assert parse({"a": of("fp32", (8, 1), (1, 1)), "b": of("fp32", (1, 12))}).layout == "rcr"


def test_equal_requests_give_equal_problems_and_strides_of_single_rows_do_not_matter() -> None:
    one = parse({"a": of("fp32", (1, 16), (16, 1)), "b": B})
    other = parse({"a": of("fp32", (1, 16), (16, 1)), "b": B})
    assert one == other and hash(one) == hash(other) and one.signature == other.signature
    far = parse({"a": of("fp32", (1, 16), (640, 1)), "b": B})
    assert far.products == one.products


def test_a_linear_layer_on_a_batch_of_tokens_is_one_product() -> None:
    problem = parse({"a": of("fp32", (4, 10, 16)), "b": B, "d[0]": of("fp32", (4, 10, 12)), "bias": of("fp32", (12,))})
    (product,) = problem.products
    assert (product.batch, product.m, product.n, product.k) == (1, 40, 12, 16)


def test_batches_that_one_stride_cannot_reach_become_several_products() -> None:
    heads = of("fp32", (2, 3, 7, 16), (336, 16, 48, 1))
    problem = parse({"a": heads, "b": of("fp32", (2, 3, 16, 7), (336, 16, 1, 48))})
    assert [product.batch for product in problem.products] == [3, 3]
    assert [product.a.offset for product in problem.products] == [0, 336]
    assert problem.flops == 2 * 6 * 7 * 7 * 16


def test_words_are_canonical() -> None:
    d = of("fp32", (8, 12))
    assert parse({"a": A, "b": B, "d[0]": d}).binary is Binary.ADD
    assert parse({"a": A, "b": B, "d[0]": d}, binary="MultiDAdd").binary is Binary.ADD
    assert parse({"a": A, "b": B, "d[0]": d, "d[1]": d}).binary is Binary.MULTI_D_ADD
    assert parse({"a": A, "b": B, "d[0]": d}, binary="MultiDMultiply").binary is Binary.MULTIPLY
    with_c = parse({"a": A, "b": B, "c": d, "d[0]": d})
    assert with_c.binary is Binary.MULTI_D_ADD and [view.operand for view in with_c.products[0].d] == ["d[0]", "c"]
    assert parse({"a": A, "b": B}, unary="Swish").unary is Unary.SILU


def test_scales_are_told_apart_by_shape() -> None:
    for shape, kind in (((), ScaleA.TENSOR), ((1,), ScaleA.TENSOR), ((8,), ScaleA.ROW), ((8, 1), ScaleA.ROW)):
        assert parse({"a": A, "b": B, "scale_a": of("fp32", shape)}).scale_a is kind
    for shape, scale in (((), ScaleB.TENSOR), ((12,), ScaleB.COLUMN), ((1, 12), ScaleB.COLUMN)):
        assert parse({"a": A, "b": B, "scale_b": of("fp32", shape)}).scale_b is scale


@pytest.mark.parametrize("shapes", [((0, 16), (16, 12)), ((8, 0), (0, 12)), ((8, 16), (16, 0)), ((0, 8, 16), (16, 12))])
def test_empty_sizes_are_legal(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    problem = parse({"a": of("fp32", shapes[0]), "b": of("fp32", shapes[1])})
    assert problem.flops == 0
    assert problem.is_empty == (0 in problem.tensors[-1].desc.shape)


def test_problem_describes_itself_in_json() -> None:
    import json

    problem = parse({"a": A, "b": B}, unary="Clamp", clamp_lo=-1.0, clamp_hi=2)
    assert json.loads(json.dumps(problem.describe(), allow_nan=False))["clamp_hi"] == 2.0
    groups = parse({"a[0]": A, "b[0]": B, "a[1]": of("fp32", (3, 4)), "b[1]": of("fp32", (4, 5))})
    assert groups.grouped and len(groups.products) == 2 and groups.describe()["num_products"] == 2


# ---- what is refused ----

D = of("fp32", (8, 12))
BAD: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ("operand_missing", {"b": B}, {}, {}, "a"),
    ("operand_missing", {"a": A}, {}, {}, "b"),
    ("operand_known", {"a": A, "b": B, "e": B}, {}, {}, "e"),
    ("operand_known", {"a": A, "b": B, "out": B}, {}, {}, "out"),
    ("operand_known", {"a": A, "b": B}, {"c": D}, {}, "c"),
    ("operand_known", {"a": A, "b": B, "d": D}, {}, {}, "d"),
    ("tensor_type", {"a": A, "b": 3}, {}, {}, "b"),
    ("tensor_type", {"a": A, "b": TensorDesc(DType.FP32, (16, 1.5), (1, 1))}, {}, {}, "b"),  # type: ignore[arg-type]
    ("matrix_rank", {"a": of("fp32", (16,)), "b": B}, {}, {}, "a.shape"),
    ("k_mismatch", {"a": A, "b": of("fp32", (15, 12))}, {}, {}, "b.shape"),
    ("output_shape", {"a": A, "b": B}, {"out": of("fp32", (8, 13))}, {}, "out.shape"),
    ("output_shape", {"a": A, "b": B}, {"out": of("fp32", (9, 12))}, {}, "out.shape"),
    ("output_overlap", {"a": A, "b": B}, {"out": of("fp32", (8, 12), (11, 1))}, {}, "out.strides"),
    ("output_overlap", {"a": A, "b": B}, {"out": of("fp32", (8, 12), (0, 1))}, {}, "out.strides"),
    ("output_layout", {"a": A, "b": B}, {"out": of("fp32", (8, 12), (1, 8))}, {}, "out.strides"),
    ("output_dtype", {"a": A, "b": B}, {"out": of("int32", (8, 12))}, {}, "out.dtype"),
    ("output_dtype", {"a": A, "b": B}, {"out": D}, {"out_dtype": "fp16"}, "attributes.out_dtype"),
    ("output_dtype", {"a": A, "b": B}, {}, {"out_dtype": "fp8"}, "out.dtype"),
    ("dtype_pair", {"a": A, "b": of("fp16", (16, 12))}, {}, {}, "b.dtype"),
    ("dtype_pair", {"a": of("int32", (8, 16)), "b": of("int32", (16, 12))}, {}, {}, "b.dtype"),
    ("unit_stride", {"a": of("fp32", (8, 16), (32, 2)), "b": B}, {}, {}, "a.strides"),
    ("tensor_non_negative", {"a": TensorDesc(DType.FP32, (8, -16), (16, 1)), "b": B}, {}, {}, "a.shape"),
    ("tensor_non_negative", {"a": TensorDesc(DType.FP32, (8, 16), (-16, 1)), "b": B}, {}, {}, "a.strides"),
    ("tensor_overflow", {"a": TensorDesc(DType.FP32, (2**40, 2**40), (2**40, 1)), "b": B}, {}, {}, "a.shape"),
    ("tensor_overflow", {"a": of("fp32", (2**30, 1)), "b": of("fp32", (1, 2**30))}, {}, {}, "out.shape"),
    ("batch_broadcast", {"a": of("fp32", (2, 8, 16)), "b": of("fp32", (3, 16, 12))}, {}, {}, "b.shape"),
    ("operand_broadcast", {"a": A, "b": B, "d[0]": of("fp32", (8, 11))}, {}, {}, "d[0].shape"),
    ("operand_broadcast", {"a": A, "b": B, "bias": of("fp32", (8,))}, {}, {}, "bias.shape"),
    ("operand_broadcast", {"a": A, "b": B, "scale_a": of("fp32", (7,))}, {}, {}, "scale_a.shape"),
    ("operand_broadcast", {"a": A, "b": B, "scale_b": of("fp32", (7,))}, {}, {}, "scale_b.shape"),
    ("epilogue_dtype", {"a": A, "b": B, "bias": of("int32", (12,))}, {}, {}, "bias.dtype"),
    ("epilogue_dtype", {"a": A, "b": B, "scale_a": of("fp16", (1,))}, {}, {}, "scale_a.dtype"),
    ("epilogue_dtype", {"a": A, "b": B, "d[0]": of("fp8", (8, 12))}, {}, {}, "d[0].dtype"),
    ("d_numbering", {"a": A, "b": B, "d[1]": D}, {}, {}, "d"),
    ("d_count", {"a": A, "b": B} | {f"d[{index}]": D for index in range(256)}, {}, {}, "d"),
    ("operand_known", {"a": A, "b": B, "d[0]": D, "d[00]": D}, {}, {}, "d[00]"),
    ("operand_known", {"a[0]": A, "b[0]": B, "a[00]": A}, {}, {}, "a[00]"),
    ("d_count", {"a": A, "b": B}, {}, {"binary": "Add"}, "attributes.binary"),
    ("d_count", {"a": A, "b": B}, {}, {"binary": "MultiDAdd"}, "attributes.binary"),
    ("d_count", {"a": A, "b": B, "d[0]": D, "d[1]": D}, {}, {"binary": "Multiply"}, "attributes.binary"),
    ("d_count", {"a": A, "b": B, "d[0]": D}, {}, {"binary": "PassThrough"}, "attributes.binary"),
    ("one_binary_step", {"a": A, "b": B, "c": D, "d[0]": D}, {}, {"binary": "MultiDMultiply"}, "attributes.binary"),
    ("attribute_known", {"a": A, "b": B}, {}, {"beta": 1.0}, "attributes.beta"),
    ("attribute_choice", {"a": A, "b": B}, {}, {"unary": "Gellu"}, "attributes.unary"),
    ("attribute_choice", {"a": A, "b": B}, {}, {"out_dtype": "fp99"}, "attributes.out_dtype"),
    ("attribute_type", {"a": A, "b": B}, {}, {"alpha": "1"}, "attributes.alpha"),
    ("attribute_type", {"a": A, "b": B}, {}, {"split_k": 2.0}, "attributes.split_k"),
    ("attribute_type", {"a": A, "b": B}, {}, {"split_k": True}, "attributes.split_k"),
    ("attribute_range", {"a": A, "b": B}, {}, {"alpha": math.nan}, "attributes.alpha"),
    ("attribute_range", {"a": A, "b": B}, {}, {"alpha": 10**400}, "attributes.alpha"),
    ("attribute_range", {"a": A, "b": B}, {}, {"split_k": -1}, "attributes.split_k"),
    ("attribute_range", {"a": A, "b": B}, {}, {"split_k": 256}, "attributes.split_k"),
    ("attribute_range", {"a": A, "b": B}, {}, {"unary": "Clamp", "clamp_lo": math.nan}, "attributes.clamp_lo"),
    ("clamp_bounds", {"a": A, "b": B}, {}, {"unary": "Clamp"}, "attributes.clamp_lo"),
    ("clamp_bounds", {"a": A, "b": B}, {}, {"unary": "Clamp", "clamp_lo": 2, "clamp_hi": 1}, "attributes.clamp_lo"),
    ("clamp_bounds", {"a": A, "b": B}, {}, {"clamp_hi": 1}, "attributes.clamp_hi"),
    ("group_count", {"a[0]": A, "b[0]": B, "a[2]": A, "b[2]": B}, {}, {}, "attributes.groups"),
    ("group_count", {"a[0]": A, "b[0]": B}, {}, {"groups": 2}, "attributes.groups"),
    ("group_signature", {"a[0]": A, "b[0]": B, "a[1]": A, "b[1]": B, "bias[1]": of("fp32", (12,))}, {}, {}, "a[1]"),
    (
        "group_signature",
        {"a[0]": A, "b[0]": B, "a[1]": A, "b[1]": B, "scale_a[1]": of("fp32", ())},
        {},
        {},
        "scale_a[1]",
    ),
    (
        "group_layout",
        {"a[0]": A, "b[0]": B, "a[1]": of("fp32", (8, 16), (1, 8)), "b[1]": B},
        {},
        {},
        "a[1].strides",
    ),
    (
        "packed_operand",
        {"a": TensorDesc(DType.FP32, (8, 16), (), "bpanel-fp32-nr32-vk1", 64), "b": B},
        {},
        {},
        "a.packing",
    ),
    ("packing_format", {"a": A, "b": TensorDesc(DType.FP32, (16, 12), (), "zpanel", 64)}, {}, {}, "b.packing"),
    (
        "packed_size",
        {"a": A, "b": TensorDesc(DType.FP32, (16, 12), (), "bpanel-fp32-nr32-vk1", 64)},
        {},
        {},
        "b.packed_bytes",
    ),
    ("integer_output", {"a": of("int8", (8, 16)), "b": of("int8", (16, 12))}, {}, {"alpha": 0.5}, "attributes.alpha"),
    (
        "integer_output",
        {"a": of("int8", (8, 16)), "b": of("int8", (16, 12))},
        {},
        {"unary": "Gelu"},
        "attributes.unary",
    ),
]


@pytest.mark.parametrize(
    ("rule", "inputs", "outputs", "attributes", "field"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_requests_name_field_rule_and_fix(
    rule: str, inputs: dict[str, Any], outputs: dict[str, Any], attributes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(inputs, outputs, **attributes)
    assert (caught.value.rule, caught.value.field) == (rule, field)
    assert caught.value.fix and caught.value.reason


def test_too_many_groups_are_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse({"a": A, "b": B}, groups=MAX_GROUPS + 1)
    assert caught.value.field == "attributes.groups"


# ---- anything at all ----

sizes = st.integers(0, 5) | st.sampled_from([2**31, 2**48, 2**62, -1])
shapes = st.lists(sizes, max_size=4).map(tuple)
descs = st.builds(
    TensorDesc,
    st.sampled_from(list(DType)),
    shapes,
    shapes,
    st.sampled_from(["", "", "", "bpanel-fp32-nr32-vk1", "x"]),
    st.integers(-1, 5000),
)
small = st.integers(0, 4)
plain = st.tuples(st.sampled_from(list(DType)), small, small, st.sampled_from([(), (1,), (2,), (2, 3)])).map(
    lambda t: TensorDesc.of(t[0], (*t[3], t[1], t[2]))
)
names = st.sampled_from(
    ["a", "b", "c", "d[0]", "d[1]", "bias", "scale_a", "scale_b", "out", "a[0]", "b[0]", "a[1]", "d[0][0]", "x"]
)
values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["Relu", "Clamp", "Add", "Multiply", "fp16", "fp32", "int32"])
    | st.lists(st.integers(), max_size=2).map(tuple)
)
attribute_names = st.sampled_from(
    [
        "alpha",
        "binary",
        "unary",
        "clamp_lo",
        "clamp_hi",
        "out_dtype",
        "split_k",
        "groups",
        "format",
        "m",
        "dtype_a",
        "?",
    ]
)


@settings(max_examples=600, derandomize=True, deadline=None)
@given(
    st.dictionaries(names, descs | plain, max_size=5),
    st.dictionaries(names, descs | plain, max_size=2),
    st.dictionaries(attribute_names, values, max_size=3),
)
@pytest.mark.extended
def test_parsing_raises_nothing_but_typed_errors(inputs: Any, outputs: Any, attributes: Any) -> None:
    for parser in (parse_gemm, parse_pack_b):
        require_problem_or_refusal(parser, OperationRequest("gemm", inputs, outputs, attributes))


def require_problem_or_refusal(parser: Callable[[OperationRequest], Problem], request: OperationRequest) -> None:
    try:
        problem = parser(request)
    except (InvalidArgumentError, UnsupportedError) as error:
        assert error.reason
        return
    hash(problem)
    for operand in problem.operands:
        operand.desc.check(operand.name)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    batch_a=st.sampled_from([(), (1,), (3,), (2, 3), (1, 3), (2, 1)]),
    batch_b=st.sampled_from([(), (1,), (3,), (2, 3), (2, 1)]),
    m=st.integers(1, 4),
    n=st.integers(1, 4),
    k=st.integers(1, 4),
    order=st.permutations([0, 1, 2, 3]),
)
def test_collapsed_batches_address_the_elements_that_numpy_would(
    batch_a: tuple[int, ...], batch_b: tuple[int, ...], m: int, n: int, k: int, order: list[int]
) -> None:
    """Walks all products of a problem and checks every element's address against the broadcast arrays."""

    def laid_out(shape: tuple[int, ...]) -> tuple[TensorDesc, np.ndarray[Any, Any]]:
        full = (1,) * (4 - len(shape)) + shape
        inner = [axis for axis in order if axis < 2] + [2, 3]
        strides, step = [0] * 4, 1
        for axis in reversed(inner):
            strides[axis] = step
            step *= full[axis]
        own = tuple(strides[4 - len(shape) :])
        index = sum(
            np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(shape))]) * own[axis]
            for axis, size in enumerate(shape)
        )
        return TensorDesc.of("fp32", shape, own), np.broadcast_to(index, shape)

    a, a_index = laid_out((*batch_a, m, k))
    b, b_index = laid_out((*batch_b, k, n))
    batch = np.broadcast_shapes(batch_a, batch_b)
    problem = parse({"a": a, "b": b})
    wanted_a = np.broadcast_to(a_index, (*batch, m, k)).reshape(-1, m, k)
    wanted_b = np.broadcast_to(b_index, (*batch, k, n)).reshape(-1, k, n)
    wanted = {}
    for item in range(wanted_a.shape[0]):
        for i in range(m):
            for j in range(n):
                wanted[(item * m + i) * n + j] = (wanted_a[item, i].tolist(), wanted_b[item, :, j].tolist())
    found = {}
    for product in problem.products:
        for item in range(product.batch):
            for i in range(product.m):
                for j in range(product.n):
                    at = [view.offset + item * view.batch_stride for view in (product.a, product.b, product.out)]
                    row = [at[0] + i * product.a.row_stride + p * product.a.col_stride for p in range(k)]
                    column = [at[1] + p * product.b.row_stride + j * product.b.col_stride for p in range(k)]
                    found[at[2] + i * product.out.row_stride + j * product.out.col_stride] = (row, column)
    assert found == wanted
