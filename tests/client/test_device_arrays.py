"""Which objects are taken for arrays on a device, what is read off them, and what is refused."""

import sys

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import FakeCuda
from producers import Capsules, Interface, torch_like

import tilewright as tw
from tilewright.gpu import cuda
from tilewright.gpu.streams import current_stream, stream_handle
from tilewright.tensor import dlpack
from tilewright.tensor.interop import alignment, recognise, recognise_output


@pytest.mark.parametrize(
    "value", [np.zeros(3), np.float32(3), 3.0, [1.0, 2.0], None, "text", tw.Spec.of((2,), "fp32"), memoryview(b"abc")]
)
def test_what_is_on_the_host_is_none(value: object) -> None:
    assert recognise(value, "a") is None


def test_dlpack_of_the_host_is_left_to_numpy() -> None:
    assert recognise(Capsules(0x1000, (2,), kind=dlpack.CPU), "a") is None


# ---- the CUDA array interface ----


@pytest.mark.parametrize("version", [2, 3])
def test_an_interface_is_read(version: int) -> None:
    value = Interface(0x1000, (3, 4), "<f2", version=version, stream=7)
    found = recognise(value, "a")
    assert found is not None
    assert (found.address, found.spec) == (0x1000, tw.Spec.of((3, 4), "fp16"))
    assert found.stream == (7 if version == 3 else cuda.LEGACY_STREAM)
    assert found.value is value


def test_strides_of_an_interface_are_in_bytes() -> None:
    found = recognise(Interface(0x1000, (3, 4), strides=(4, 12)), "a")
    assert found is not None
    assert found.spec == tw.Spec.of((3, 4), "fp32", (1, 3))
    plain = recognise(Interface(0x1000, (1, 4), strides=(400, 4)), "a")
    assert plain is not None
    assert plain.spec.strides is None


def test_an_empty_array_may_have_no_address() -> None:
    found = recognise(Interface(0, (0, 4)), "a")
    assert found is not None
    assert (found.address, found.spec.nbytes, found.spec.strides) == (0, 0, None)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"version": 1}, "cuda_array_interface"),
        ({"mask": object()}, "cuda_array_interface"),
        ({"strides": (6, 4)}, "cuda_array_interface"),
        ({"strides": (-16, 4)}, "tensor_strides"),
        ({"stream": 0}, "cuda_array_interface"),
        ({"typestr": "|V2"}, "dtype_known"),
        ({"typestr": "<f8"}, "dtype_known"),
        ({"typestr": ">f4"}, "dtype_known"),
        ({"shape": (1,) * 9}, "tensor_rank"),
    ],
)
def test_an_interface_that_cannot_be_used_is_refused(changes: dict, rule: str) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        recognise(Interface(0x1000, **{"shape": (3, 4), **changes}), "a")
    assert caught.value.rule == rule
    assert caught.value.fix
    assert caught.value.field.startswith("a")


def test_read_only_arrays_are_inputs_only() -> None:
    value = Interface(0x1000, (3,), data=(0x1000, True))
    assert recognise(value, "a") is not None
    with pytest.raises(tw.InvalidArgumentError) as caught:
        recognise_output(value, "out")
    assert caught.value.rule == "output_writable"


# ---- DLPack ----


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_capsules_are_read(versioned: bool, dtype: type) -> None:
    value = Capsules(0x2000, (4, 8), dtype, (1, 4), versioned=versioned, ordinal=1)
    found = recognise(value, "b")
    assert found is not None
    assert (found.address, found.ordinal, found.stream) == (0x2000, 1, cuda.LEGACY_STREAM)
    assert found.spec == tw.Spec.of((4, 8), dtype, (1, 4))
    assert value.asked[-1]["stream"] == cuda.LEGACY_STREAM


@pytest.mark.parametrize("kind", [dlpack.CUDA_HOST, dlpack.CUDA_MANAGED, dlpack.ROCM_HOST, 7])
def test_memory_of_other_kinds_is_refused(kind: int) -> None:
    with pytest.raises(tw.UnsupportedError) as caught:
        recognise(Capsules(0x1000, (2,), kind=kind), "a")
    assert (caught.value.rule, caught.value.field) == ("device_kind", "a")
    assert caught.value.fix


def test_memory_of_amd_gpus_has_its_own_numbers_for_streams() -> None:
    value = Capsules(0x2000, (4, 8), kind=dlpack.ROCM, ordinal=1)
    found = recognise(value, "a")
    assert found is not None
    assert (found.kind, found.ordinal, found.stream) == ("hip", 1, cuda.LEGACY_STREAM)
    assert value.asked[-1]["stream"] == 0


def test_arrays_of_hip_python_are_amd_s() -> None:
    pointer = type("DeviceArray", (Interface,), {"__module__": "rocm.bindings.util.types"})
    found = recognise(pointer(0x1000, (3, 4), stream=0), "a")
    assert found is not None
    assert (found.kind, found.stream) == ("hip", cuda.LEGACY_STREAM)


@pytest.mark.parametrize("flags", [1, 2])  # DLPACK_FLAG_BITMASK_READ_ONLY and _IS_COPIED of dlpack.h
def test_what_is_written_to_a_copy_or_a_constant_would_be_lost(flags: int) -> None:
    value = Capsules(0x1000, (2,), flags=flags)
    assert recognise(value, "a") is not None
    with pytest.raises(tw.InvalidArgumentError):
        recognise_output(value, "out")


def test_a_producer_that_refuses_is_a_typed_error() -> None:
    class Refusing(Capsules):
        def __dlpack__(self, **asked: object) -> object:
            raise BufferError("not today")

    with pytest.raises(tw.InvalidArgumentError, match="not today") as caught:
        recognise(Refusing(0x1000, (2,)), "a")
    assert caught.value.rule == "dlpack_export"


# ---- PyTorch ----


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> object:
    module = torch_like()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("float32", "fp32"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float8_e4m3fn", "fp8"),
        ("float8_e5m2", "bf8"),
        ("int8", "int8"),
    ],
)
def test_torch_tensors_are_read_by_their_attributes(torch, name: str, ours: str) -> None:
    torch.current = 42
    found = recognise(torch.Tensor(0x3000, (4, 6), name, (1, 4), index=1), "a")
    assert found is not None
    assert found.spec == tw.Spec.of((4, 6), ours, (1, 4))
    assert (found.address, found.ordinal, found.stream, found.library) == (0x3000, 1, 42, "torch")


def test_torch_tensors_are_of_the_vendor_that_torch_was_built_for(torch) -> None:
    for version, kind in ((None, "cuda"), ("7.1", "hip")):
        torch.version.hip = version
        found = recognise(torch.Tensor(0x3000, (4,)), "a")
        assert found is not None
        assert (found.kind, found.ordinal) == (kind, 0)


def test_torch_tensors_of_the_cpu_are_left_to_numpy(torch) -> None:
    assert recognise(torch.Tensor(0x3000, (4,), device="cpu"), "a") is None


def test_torch_tensors_that_cannot_be_used_are_refused(torch) -> None:
    with pytest.raises(tw.UnsupportedError):
        recognise(torch.Tensor(0x3000, (4,), device="mps"), "a")
    with pytest.raises(tw.InvalidArgumentError) as caught:
        recognise(torch.Tensor(0x3000, (4,), "complex64"), "a")
    assert caught.value.rule == "dtype_known"
    weights = torch.Tensor(0x3000, (4,), requires_grad=True)
    assert recognise(weights, "a") is not None
    torch.grad = True
    with pytest.raises(tw.InvalidArgumentError) as caught:
        recognise(weights, "a")
    assert caught.value.rule == "autograd"


# ---- streams and addresses ----


def test_streams_are_named_in_many_ways(torch) -> None:
    class Torch:
        cuda_stream = 9

    class Cupy:
        ptr = 10

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 11)

    class HipPython(int):
        def as_c_void_p(self) -> int:
            return self

    named = (0, 1, 5, Torch(), Cupy(), Protocol(), HipPython(12), HipPython(0))
    assert [stream_handle(item) for item in named] == [1, 1, 5, 9, 10, 11, 12, 1]
    for bad in ("main", -1, 1.5, True, object()):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            stream_handle(bad)
        assert caught.value.rule == "stream_handle"
    assert current_stream("torch", 0) == cuda.LEGACY_STREAM
    torch.current = 33
    assert current_stream("torch", 0) == 33
    assert current_stream("", 0) == cuda.LEGACY_STREAM


def test_the_least_alignment_counts() -> None:
    def at(address: int) -> object:
        return recognise(Interface(address, (4,), "|i1"), "a")

    assert alignment([np.zeros(3), at(0x1000), at(0x2010)]) is None
    assert alignment([at(0x1000), at(0x2008), at(0x2004)]) == 4
    assert alignment([at(0x1001)]) == 1
    assert alignment([]) is None


def test_fake_and_client_agree_about_the_c_interface() -> None:
    assert FakeCuda().driver().uuid(0) == bytes(range(16))
