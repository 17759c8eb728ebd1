"""Element types, in the names of the field: fp32, fp16, bf16, fp8 (E4M3), bf8 (E5M2), int8, int32."""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DType"]


class DType(str, Enum):
    """An element type. Its value is the name used in kernel names, arch tables and the protocol."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    BF8 = "bf8"
    INT8 = "int8"
    INT32 = "int32"

    def __str__(self) -> str:
        return self.value

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype with the same bits (``ml_dtypes`` for bf16, fp8 and bf8)."""
        # Here, for processes that name types but hold no arrays: to import both is half of a device worker's start.
        import ml_dtypes
        import numpy as np

        name = _NUMPY[self.value]
        dtype: np.dtype[Any] = np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
        return dtype

    @cached_property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return _BYTES[self.value]

    @cached_property
    def is_float(self) -> bool:
        return self not in (DType.INT8, DType.INT32)

    @classmethod
    def from_numpy(cls, dtype: Any) -> DType:
        """The element type of a NumPy dtype; ``KeyError`` names the dtype if there is none."""
        import numpy as np

        wanted = np.dtype(dtype)
        for member in cls:
            if member.numpy == wanted:
                return member
        raise KeyError(f"no element type for NumPy dtype {wanted.name}")


_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "bf8": 1, "int8": 1, "int32": 4}
_NUMPY = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "bf8": "float8_e5m2",
    "int8": "int8",
    "int32": "int32",
}
