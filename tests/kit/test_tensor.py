"""Tensor descriptions are bounded, so that no product of theirs overflows in a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import MAX_ELEMENTS, TensorDesc, contiguous_strides

sizes = st.lists(st.integers(0, 12), max_size=5).map(tuple)


@given(st.sampled_from(DType), sizes)
def test_a_contiguous_tensor_agrees_with_numpy(dtype: DType, shape: tuple[int, ...]) -> None:
    desc, array = TensorDesc.of(dtype, shape), np.zeros(shape, dtype.numpy)
    assert desc.size == array.size
    assert desc.nbytes == array.nbytes
    assert desc.is_contiguous
    if array.size:
        assert desc.strides == tuple(step // array.itemsize for step in array.strides)


def test_strides_of_a_tensor_without_elements_are_those_of_axes_of_one() -> None:
    assert contiguous_strides((2, 0, 3)) == (3, 3, 1)
    assert contiguous_strides((4, 0)) == (1, 1)


@given(sizes, st.data())
def test_a_span_is_one_past_the_last_element(shape: tuple[int, ...], data: Any) -> None:
    strides = data.draw(st.tuples(*(st.integers(0, 30) for _ in shape)))
    desc = TensorDesc.of("fp32", shape, strides)
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    assert desc.span == (max(offsets) + 1 if offsets else 0)


@given(
    st.lists(st.integers(-(2**70), 2**70), max_size=10),
    st.lists(st.integers(-(2**70), 2**70), max_size=10),
)
def test_any_integers_are_either_refused_or_safe_in_int64(shape: list[int], strides: list[int]) -> None:
    try:
        desc = TensorDesc.of("fp32", shape, strides)
    except InvalidArgumentError as error:
        assert error.field.startswith("tensor.")
        return
    assert max(desc.nbytes, desc.size, *desc.shape, *desc.strides, 0) < 2**63


@pytest.mark.parametrize(
    ("shape", "strides", "rule"),
    [
        ((1,) * 9, None, "tensor_rank"),
        ((2, 2), (1,), "tensor_strides"),
        ((-1,), None, "tensor_non_negative"),
        ((2,), (-1,), "tensor_non_negative"),
        ((MAX_ELEMENTS + 1,), None, "tensor_overflow"),
        ((2**30, 2**30), (0, 0), "tensor_overflow"),
        ((0, 2**47, 2**47), None, "tensor_overflow"),
        ((2, 2), (2**60, 1), "tensor_overflow"),
        ((1,), (2**60,), "tensor_overflow"),
        ((2.0,), None, "tensor_integers"),
        ((True,), None, "tensor_integers"),
        ("12", None, "tensor_integers"),
        (None, None, "tensor_integers"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_rule(shape: Any, strides: Any, rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        TensorDesc.of("fp32", shape, strides)
    assert caught.value.rule == rule


def test_an_unknown_element_type_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgumentError, match="fp32, fp16"):
        TensorDesc.of("float32", (1,))


def test_numpy_integers_become_plain_ones() -> None:
    desc = TensorDesc.of("fp32", np.array([2, 3]), np.array([3, 1]))
    assert all(type(number) is int for number in (*desc.shape, *desc.strides))


def test_a_packed_tensor_has_its_own_size_and_is_never_contiguous() -> None:
    desc = TensorDesc(DType.INT8, (4, 4), (), "panel", 64)
    desc.check("b")
    assert (desc.nbytes, desc.is_contiguous) == (64, False)
    assert TensorDesc.from_dict(desc.to_dict()) == desc


@pytest.mark.parametrize(("packing", "packed_bytes"), [("", 4), ("panel", -1)])
def test_packed_bytes_need_a_packing_and_are_not_negative(packing: str, packed_bytes: int) -> None:
    with pytest.raises(InvalidArgumentError):
        TensorDesc(DType.INT8, (4,), (1,), packing, packed_bytes).check("b")


@given(st.sampled_from(DType), sizes)
def test_a_tensor_comes_back_from_its_dict(dtype: DType, shape: tuple[int, ...]) -> None:
    desc = TensorDesc(dtype, shape, contiguous_strides(shape))
    assert TensorDesc.from_dict(desc.to_dict()) == desc


@pytest.mark.parametrize(
    "record",
    [None, 3, {}, {"dtype": "fp32"}, {"dtype": "x", "shape": []}, {"dtype": "fp32", "shape": "12"},
     {"dtype": [], "shape": []}, {"dtype": "fp32", "shape": [1], "strides": [1, 2]},
     {"dtype": "fp32", "shape": [1], "packing": 3}, {"dtype": "fp32", "shape": [1], "packed_bytes": 3}],
)  # fmt: skip
def test_a_damaged_record_is_an_invalid_argument(record: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        TensorDesc.from_dict(record)
