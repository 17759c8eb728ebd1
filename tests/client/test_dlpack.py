"""DLPack capsules: taken apart as any producer makes them, made as any consumer takes them, and never leaked."""

import ctypes
import gc
import sys

import ml_dtypes
import numpy as np
import pytest
from producers import Capsules

import tilewright as tw
from tilewright.tensor import dlpack


@pytest.mark.parametrize("arguments", [{}, {"max_version": (1, 0)}])
@pytest.mark.extended
def test_a_capsule_of_numpy_is_read_and_given_back(arguments: dict) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1::2]
    before = sys.getrefcount(array)
    found = dlpack.take(array.__dlpack__(**arguments), "a")
    assert (found.kind, found.shape, found.strides, found.dtype) == (dlpack.CPU, (3, 2), (4, 2), np.float32)
    assert found.address == array.ctypes.data
    assert sys.getrefcount(array) > before
    del found
    gc.collect()
    assert sys.getrefcount(array) == before


def test_a_capsule_is_taken_once() -> None:
    capsule = np.zeros(3, np.float32).__dlpack__()
    kept = dlpack.take(capsule, "a")
    with pytest.raises(tw.InvalidArgumentError, match="fresh") as caught:
        dlpack.take(capsule, "a")
    assert caught.value.rule == "dlpack_capsule"
    del capsule  # its destructor must not touch what was taken
    kept.owner.release()
    kept.owner.release()


@pytest.mark.parametrize("thing", [None, 3, object()])
def test_what_is_no_capsule_is_refused(thing: object) -> None:
    with pytest.raises(tw.InvalidArgumentError):
        dlpack.take(thing, "a")


def test_the_deleter_is_called_once_with_the_managed_tensor() -> None:
    called: list[int] = []
    deleter = dlpack._Deleter(called.append)
    shape = (ctypes.c_int64 * 1)(4)
    managed = dlpack._Managed()
    managed.tensor.data, managed.tensor.ndim = 0x1000, 1
    managed.tensor.byte_offset = 64
    managed.tensor.device.kind = dlpack.CUDA
    managed.tensor.dtype.code, managed.tensor.dtype.bits, managed.tensor.dtype.lanes = 2, 32, 1
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = deleter
    place = ctypes.addressof(managed)
    found = dlpack.take(dlpack._new_capsule(place, b"dltensor", None), "a")
    assert (found.address, found.shape, found.strides, found.kind) == (0x1040, (4,), None, dlpack.CUDA)
    assert called == []
    del found
    gc.collect()
    assert called == [place]


@pytest.mark.parametrize("versioned", [True, False])
def test_a_tensor_that_cannot_be_used_is_given_back_at_once(versioned: bool) -> None:
    maker = Capsules(0x1000, (2, 2), np.float32, versioned=versioned)
    before = sys.getrefcount(maker)
    capsule = maker.__dlpack__()
    name, layout = (b"dltensor_versioned", dlpack._Versioned) if versioned else (b"dltensor", dlpack._Managed)
    layout.from_address(dlpack._api.PyCapsule_GetPointer(capsule, name)).tensor.dtype.lanes = 4
    with pytest.raises(tw.InvalidArgumentError) as caught:
        dlpack.take(capsule, "a")
    assert caught.value.rule == "dtype_known"
    assert sys.getrefcount(maker) == before
    assert not dlpack._exports


def test_a_version_to_come_is_refused() -> None:
    capsule = Capsules(0x1000, (2,)).__dlpack__()
    dlpack._Versioned.from_address(dlpack._api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")).major = 2
    with pytest.raises(tw.InvalidArgumentError) as caught:
        dlpack.take(capsule, "a")
    assert caught.value.rule == "dlpack_version"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int32])
@pytest.mark.parametrize("versioned", [True, False])
def test_numpy_reads_the_capsules_that_are_made(dtype: type, versioned: bool) -> None:
    memory = np.arange(6).astype(dtype)
    maker = Capsules(memory.ctypes.data, (2, 3), dtype, kind=dlpack.CPU, versioned=versioned)
    before = sys.getrefcount(maker)
    view = np.from_dlpack(maker)
    assert (view == memory.reshape(2, 3)).all()
    assert sys.getrefcount(maker) == before + 1
    del view
    assert sys.getrefcount(maker) == before
    unused = maker.__dlpack__()
    assert len(dlpack._exports) == 1
    del unused
    assert sys.getrefcount(maker) == before
    assert not dlpack._exports


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_that_numpy_has_not_go_round(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    found = dlpack.take(Capsules(0x1000, (4,), dtype).__dlpack__(), "a")
    assert found.dtype == dtype
