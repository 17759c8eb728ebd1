"""A right result passes, a wrong, unwritten or misplaced one does not, in every element type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.numerics.compare import bound, compare, poison, relative_error, unit_roundoff
from tilewright_kit.types.dtypes import DType

FLOATS = [dtype for dtype in DType if dtype.is_float]


def truth(shape: tuple[int, ...] = (64, 48), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 64, 4096])
def test_a_rounded_result_passes_and_one_that_is_off_does_not(dtype: DType, k: int) -> None:
    reference = truth()
    right = reference.astype(np.float32).astype(dtype.numpy)
    assert compare(right, reference, dtype, k).passed
    wrong = (reference * (1 + 3 * bound(dtype, k))).astype(np.float32).astype(dtype.numpy)
    assert not compare(wrong, reference, dtype, k).passed


@pytest.mark.parametrize("k", [16, 1024, 16384])
def test_a_sum_in_single_precision_passes_and_one_in_half_does_not(k: int) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((8, k)).astype(np.float32), rng.standard_normal((k, 8)).astype(np.float32)
    reference = a.astype(np.float64) @ b.astype(np.float64)
    serial = np.zeros((8, 8), np.float32)
    for i in range(k):
        serial += np.outer(a[:, i], b[i])
    assert compare(serial, reference, DType.FP32, k).passed
    coarse = (a.astype(np.float16) @ b.astype(np.float16)).astype(np.float32)
    assert not compare(coarse, reference, DType.FP32, k).passed


@pytest.mark.parametrize("dtype", list(DType))
def test_an_element_that_was_not_written_is_seen(dtype: DType) -> None:
    reference = np.rint(truth() * 10)
    for index in ((0, 0), (17, 5), (63, 47)):
        before = poison(dtype, reference.shape)
        output = reference.astype(np.float32).astype(dtype.numpy)
        assert compare(output, reference, dtype, 64, poisoned=before).unwritten == 0
        output[index] = before[index]
        result = compare(output, reference, dtype, 64, poisoned=before)
        assert (result.unwritten, result.worst, result.passed) == (1, index, False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_that_should_not_be_there_is_misplaced_and_one_that_should_is_not(dtype: DType) -> None:
    reference = truth()
    output = reference.astype(np.float32).astype(dtype.numpy)
    output[3, 4] = np.nan
    assert compare(output, reference, dtype).misplaced == 1
    reference[3, 4] = np.nan
    assert compare(output, reference, dtype).passed
    assert compare(output, reference, dtype, poisoned=poison(dtype, reference.shape)).passed
    output[3, 4] = 0
    assert compare(output, reference, dtype).misplaced == 1


def test_an_infinity_of_the_wrong_sign_is_misplaced() -> None:
    reference = np.array([np.inf, 1.0])
    assert compare(np.array([np.inf, 1.0], np.float32), reference, DType.FP32).passed
    assert not compare(np.array([-np.inf, 1.0], np.float32), reference, DType.FP32).passed


@pytest.mark.parametrize(("dtype", "largest"), [(DType.FP16, 65504.0), (DType.FP8, 448.0), (DType.BF8, 57344.0)])
def test_beyond_the_range_both_saturation_and_overflow_are_right(dtype: DType, largest: float) -> None:
    reference = np.array([1e6, -1e6, 1.0])
    saturated = np.array([largest, -largest, 1.0]).astype(dtype.numpy)
    assert compare(saturated, reference, dtype).passed
    over = np.nan if dtype is DType.FP8 else np.inf
    assert compare(np.array([over, -over, 1.0]).astype(dtype.numpy), reference, dtype).passed
    assert not compare(np.array([1.0, -largest, 1.0]).astype(dtype.numpy), reference, dtype).passed


def test_results_below_the_normal_range_are_not_held_to_a_relative_bound() -> None:
    reference = truth() * 1e-8
    assert compare(reference.astype(np.float16), reference, DType.FP16).passed


@given(st.integers(-(2**31), 2**31 - 2))
def test_integers_are_exact_or_wrong(value: int) -> None:
    reference = np.array([value, 3], np.int64)
    assert compare(reference.astype(np.int32), reference, DType.INT32, 4096).passed
    assert not compare((reference + np.array([1, 0])).astype(np.int32), reference, DType.INT32, 4096).passed


def test_bounds_are_stated_per_type_and_length() -> None:
    assert bound(DType.FP16) == pytest.approx(2**-11 + 4 * 2**-24)
    assert bound(DType.FP32, 4096) == pytest.approx(2**-24 + 4 * 64 * 2**-24)
    assert bound(DType.INT32, 4096) == 0
    assert [unit_roundoff(dtype) for dtype in (DType.BF16, DType.FP8, DType.BF8)] == [2**-8, 2**-4, 2**-3]


def test_empty_scalar_and_strided_outputs_are_compared_too() -> None:
    assert compare(
        np.zeros((0, 3), np.float32), np.zeros((0, 3)), DType.FP32, poisoned=poison(DType.FP32, (0, 3))
    ).passed
    assert compare(np.array(1.0, np.float32), np.array(1.0), DType.FP32, poisoned=poison(DType.FP32, ())).passed
    reference = truth()
    output = reference.astype(np.float32)
    assert compare(output.T, reference.T, DType.FP32, poisoned=poison(DType.FP32, output.T.shape)).passed
    with pytest.raises(ValueError, match="shape"):
        compare(output, reference.T, DType.FP32)


def test_relative_error_of_zeros() -> None:
    assert relative_error(np.zeros(3), np.zeros(3)) == 0
    assert relative_error(np.ones(3), np.zeros(3)) == np.inf
