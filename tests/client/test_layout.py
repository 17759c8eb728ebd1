import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.types.dtypes import dtype_name, element_type
from tilewright.types.spec import Spec, as_array, dense, element_strides, same_places, span_bytes

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Any view that slicing, reversing, transposing and broadcasting can make."""
    array = np.arange(1 + max(1, np.prod(shape := draw(SHAPES), dtype=int)), dtype=np.float32)[1:]
    array = array[: np.prod(shape, dtype=int)].reshape(shape)
    step = st.sampled_from([1, 2, -1, -2])
    array = array[tuple(slice(None, None, draw(step)) for _ in shape)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (3, *array.shape))
    return array


@settings(deadline=None, max_examples=300)
@given(views())
def test_dense_copy_read_by_its_strides_is_the_array(array: np.ndarray) -> None:
    source, strides = dense(array)
    data = np.frombuffer(source.tobytes() or b"\0" * 4, np.float32)
    size = array.dtype.itemsize
    again = np.lib.stride_tricks.as_strided(data, array.shape, [stride * size for stride in strides])
    if array.size:
        np.testing.assert_array_equal(again, array)
        assert Spec(array.shape, array.dtype, strides).nbytes == source.nbytes
    assert all(stride >= 0 for stride in strides)


@settings(deadline=None, max_examples=300)
@given(views())
def test_strides_by_reference_say_where_the_elements_are(array: np.ndarray) -> None:
    strides = element_strides(array)
    if strides is None:
        assert any(step < 0 for step in array.strides)
    else:
        assert same_places(array, strides)
        if array.size:
            assert span_bytes(array) == Spec(array.shape, array.dtype, strides).nbytes


def test_a_transposed_matrix_stays_transposed() -> None:
    _, strides = dense(np.zeros((8, 4), np.float32)[::2].T)
    assert strides == (1, 4)


def test_spec_travels_both_ways() -> None:
    for spec in (Spec.of((2, 3), "bf16"), Spec.of((2, 3), "fp8", (1, 2)), Spec.of((0, 3), "int8"), Spec.of((), "fp32")):
        assert Spec.of_wire(spec.to_wire("x")) == spec


@pytest.mark.parametrize("name", list(tw.DTYPES))
def test_every_element_type_has_a_name_and_a_dtype(name: str) -> None:
    assert dtype_name(element_type(name)) == name


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (np.float64, "float32"),
        (">f4", "byte order"),
        (np.uint8, "int8"),
        (object, "one of"),
        ("fp17", "one of"),
    ],
)
def test_unknown_element_types_are_refused_with_the_nearest(value: object, fix: str) -> None:
    with pytest.raises(tw.InvalidArgumentError, match="not an element type") as caught:
        element_type(value)
    assert fix in caught.value.fix
    assert caught.value.rule == "dtype_known"


def test_what_is_no_array_is_refused() -> None:
    for value in (object(), "text", [[1, 2], [3]], None):
        with pytest.raises(tw.InvalidArgumentError):
            as_array(value, "a")


def test_bad_specs_are_refused() -> None:
    with pytest.raises(tw.InvalidArgumentError, match="negative"):
        Spec.of((2, -1), "fp32")
    with pytest.raises(tw.InvalidArgumentError, match="strides"):
        Spec.of((2, 2), "fp32", (1,))
