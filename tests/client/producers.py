"""Objects that say they are arrays on a device, in every way that libraries say it. Their memory is the host's."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from tilewright.tensor import dlpack


class Interface:
    """Has a ``__cuda_array_interface__``."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str = "<f4", **other: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (address, False), "version": 3, "strides": None, **other,
        }  # fmt: skip


class Capsules:
    """Has ``__dlpack__``; ``asked`` has the streams and versions that it was asked for."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: Any = np.float32,
        strides: tuple[int, ...] | None = None,
        *,
        kind: int = dlpack.CUDA,
        ordinal: int = 0,
        versioned: bool = True,
        flags: int = 0,
    ) -> None:
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)
        plain = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        self.strides = plain if strides is None else strides
        self.kind, self.ordinal, self.versioned, self.flags = kind, ordinal, versioned, flags
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.ordinal

    def __dlpack__(self, **asked: Any) -> Any:
        if not self.versioned and "max_version" in asked:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked.append(asked)
        capsule = dlpack.make_capsule(
            self, self.kind, self.ordinal, self.address, self.dtype, self.shape, self.strides, versioned=self.versioned
        )
        if self.flags:
            place = dlpack._api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
            dlpack._Versioned.from_address(place).flags = self.flags
        return capsule


def torch_like(current: int = 0) -> Any:
    """A module with as much of PyTorch as is looked at. ``module.current`` is the current stream."""
    module: Any = types.ModuleType("torch")
    module.current = current
    module.grad = False
    module.made = []
    module.strided = "strided"
    module.version = types.SimpleNamespace(hip=None)
    module.is_grad_enabled = lambda: module.grad
    module._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: module.current)

    class Tensor:
        def __init__(
            self,
            address: int,
            shape: tuple[int, ...],
            dtype: str = "float32",
            strides: tuple[int, ...] | None = None,
            device: str = "cuda",
            index: int = 0,
            requires_grad: bool = False,
        ) -> None:
            self.address, self.shape, self.dtype = address, shape, f"torch.{dtype}"
            plain = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
            self.strides = plain if strides is None else strides
            self.device = types.SimpleNamespace(type=device, index=index)
            self.requires_grad, self.layout = requires_grad, "strided"

        def data_ptr(self) -> int:
            return self.address

        def stride(self) -> tuple[int, ...]:
            return self.strides

        def is_neg(self) -> bool:
            return False

        @property
        def is_cuda(self) -> bool:
            return bool(self.device.type == "cuda")

        def get_device(self) -> int:
            return int(self.device.index)

        def contiguous(self) -> Any:
            module.made.append("contiguous")
            return type(self)(self.address, self.shape, self.dtype.removeprefix("torch."))

        def copy_(self, source: Any) -> None:
            module.made.append(("copy", source))

    module.Tensor = Tensor
    module.device = lambda kind, index: f"{kind}:{index}"
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32"):
        setattr(module, name, name)
    return module
