"""Tensor maps: descriptors that the driver encodes, 128 bytes each, for the bulk tensor copies of sm_90 and later."""

from __future__ import annotations

import ctypes
from typing import Any

from tilewright_kit.contract.arguments import MAP_BYTES
from tilewright_kit.contract.plan import TensorMap
from tilewright_kit.types.errors import InternalError, InvalidArgumentError
from tilewright_server.devices.gpu.driver import GpuDriver

__all__ = ["CudaMapEncoder"]

_ALIGNMENT = 16
_TYPES = {
    "fp32": "FLOAT32",
    "fp16": "FLOAT16",
    "bf16": "BFLOAT16",
    "int32": "INT32",
    "int8": "UINT8",
    "fp8": "UINT8",
    "bf8": "UINT8",
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_FETCHES = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


def _describes(tensor_map: TensorMap) -> bool:
    """True if the parts of a map fit each other."""
    walk, rank = tensor_map.walk, len(tensor_map.sizes)
    if walk is None:
        return len(tensor_map.box) == rank
    axes = {len(walk.lower), len(walk.upper), len(walk.step)}
    return axes == {rank - 2} and 3 <= rank <= 5 and len(tensor_map.box) == 2


class CudaMapEncoder:
    """One tensor map of a program, to be encoded for one address after the other. Thread-safe."""

    __slots__ = ("_after", "_before", "_driver", "_encode", "_map")

    def __init__(self, driver: GpuDriver, tensor_map: TensorMap) -> None:
        """Raises ``InternalError`` for a map that cannot be described to the driver."""
        api = driver.api.raw
        rank = len(tensor_map.sizes)
        if (
            tensor_map.dtype not in _TYPES
            or tensor_map.swizzle not in _SWIZZLES
            or tensor_map.fetch not in _FETCHES
            or not 1 <= rank <= 5
            or len(tensor_map.strides) != rank - 1
            or not _describes(tensor_map)
        ):
            raise InternalError(
                "a tensor map of the plan cannot be encoded",
                field="plan.args",
                value=tensor_map,
                rule="tensor_map",
                fix="report it as a fault of the operation's plugin",
            )
        self._driver = driver
        self._map = tensor_map
        self._before = (
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[tensor_map.dtype]}"),
            rank,
        )
        walk = tensor_map.walk
        self._encode = api.cuTensorMapEncodeIm2col if walk else api.cuTensorMapEncodeTiled
        # Through im2col maps: corners, then channels and pixels of a copy. Channels and images are not walked.
        moved: tuple[Any, ...] = ([api.cuuint32_t(size) for size in tensor_map.box],)
        if walk:
            moved = (list(walk.lower), list(walk.upper), *tensor_map.box)
        self._after: tuple[Any, ...] = (
            [api.cuuint64_t(size) for size in tensor_map.sizes],
            [api.cuuint64_t(stride) for stride in tensor_map.strides],
            *moved,
            [api.cuuint32_t(step) for step in ((1, *walk.step, 1) if walk else (1,) * rank)],
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[tensor_map.swizzle]}"),
            getattr(api.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_FETCHES[tensor_map.fetch]}"),
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def encode(self, address: int, into: int) -> None:
        """Write the map of a tensor whose operand lies at device address ``address`` to host address ``into``.

        Raises ``InvalidArgumentError`` for a tensor that is not aligned, ``DeviceError``.
        """
        begin = address + self._map.offset
        if begin % _ALIGNMENT:
            raise InvalidArgumentError(
                f"this kernel needs the tensor at a multiple of {_ALIGNMENT} bytes",
                field=self._map.operand,
                value=f"{begin % _ALIGNMENT} bytes after one",
                rule="operand_alignment",
                fix=f"let the tensor begin at a multiple of {_ALIGNMENT} bytes, or name another kernel",
            )
        driver = self._driver
        answer = self._encode(*self._before, begin, *self._after)
        encoded = driver.check(answer, "a tensor map")
        ctypes.memmove(into, int(encoded.getPtr()), MAP_BYTES)
