"""The structs that every operation's kernels read, as ``ctypes`` sees them: mirrors of ``core/args/gemm.h``."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "native" / "include" / "tilewright" / "core" / "args"


class OperandArgs(ctypes.Structure):
    """``tw_gemm_operand``."""

    _fields_ = (
        ("ptr", ctypes.c_uint64),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
        ("batch_stride", ctypes.c_int64),
    )


class ProductArgs(ctypes.Structure):
    """``tw_gemm_problem``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("a", "b", "c")),
        *(
            (name, ctypes.c_int64)
            for name in ("m", "n", "k", "lda", "ldb", "ldc", "batch", "stride_a", "stride_b", "stride_c")
        ),
        *((name, ctypes.c_double) for name in ("alpha", "clamp_lo", "clamp_hi")),
        *((name, OperandArgs) for name in ("scale_a", "scale_b", "bias")),
        ("d", ctypes.c_uint64),
    )


class CpuLaunch(ctypes.Structure):
    """``tw_gemm_args`` and ``tw_conv_args``."""

    _fields_ = (
        ("problems", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("workspace", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_int64),
        ("split_k", ctypes.c_int64),
    )


class GpuLaunch(ctypes.Structure):
    """``tw_gemm_launch``."""

    _fields_ = (
        ("tasks", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("workspace", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("split_k", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("reserved", ctypes.c_int64),
    )


def declared_fields(struct: str, header: str) -> list[str]:
    """Names of a struct's fields in a header of ``core``, in order."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", (CORE / header).read_text(), re.DOTALL)
    assert body
    text = re.sub(r"//[^\n]*", "", body[1])
    return [
        re.sub(r"\[\d+\]", "", name).strip(" *\n").split()[-1].strip("*")
        for line in text.split(";")
        if line.strip()
        for name in line.split(",")
    ]
