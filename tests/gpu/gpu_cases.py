"""Products on the GPU against float64, with the error of the vendor's library on the same inputs as the yardstick."""

from __future__ import annotations

from typing import Any

SLACK = 1.2
"""Our relative error may be this much larger than the library's."""
FLOOR = {"float32": 3e-7, "float16": 2.5e-4, "bfloat16": 2e-3, "int32": 0.0}
"""Rounding of the result alone: what no library can be blamed for."""


def matrix(torch: Any, rows: int, cols: int, dtype: str, *, transposed: bool = False, pitch: int = 0) -> Any:
    """A random matrix [rows, cols] on the GPU; ``pitch`` extra elements follow each stored row."""
    stored = (cols, rows) if transposed else (rows, cols)
    shape = (stored[0], stored[1] + pitch)
    if dtype == "int8":
        made = torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
    else:
        made = torch.randn(shape, dtype=torch.float32, device="cuda").to(torch_dtype(torch, dtype))
    made = made[:, : stored[1]]
    return made.t() if transposed else made


def torch_dtype(torch: Any, name: str) -> Any:
    return {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "bf8": torch.float8_e5m2,
        "int8": torch.int8,
        "int32": torch.int32,
    }[name]


def poisoned(torch: Any, rows: int, cols: int, dtype: str, pitch: int = 0) -> Any:
    """An output in which every element that is not written shows."""
    kind = torch_dtype(torch, dtype)
    fill = -(2**31) + 7 if dtype == "int32" else float("nan")
    return torch.full((rows, cols + pitch), fill, dtype=kind, device="cuda")[:, :cols]


def truth(torch: Any, a: Any, b: Any) -> Any:
    return a.to(torch.float64) @ b.to(torch.float64)


def relative(torch: Any, got: Any, want: Any) -> float:
    """Norm of the difference over the norm of the truth."""
    difference = got.to(torch.float64) - want
    return float(torch.linalg.norm(difference) / torch.linalg.norm(want).clamp_min(1e-300))


def bound(torch: Any, a: Any, b: Any, out: Any, want: Any) -> float:
    """The largest error accepted for ``out``: the library's on the same inputs, or plain rounding, with slack."""
    floor = FLOOR[str(out.dtype).removeprefix("torch.")]
    if a.dtype == torch.int8:
        return max(floor, 1e-12)
    if a.dtype.itemsize == 1:
        # Tensor cores keep some 14 bits of a sum of 8-bit products; the library takes whole multiples of 16 only.
        return SLACK * max(floor, _scaled(torch, a, b, out, want), 2e-4)
    theirs = relative(torch, (a @ b).to(out.dtype), want)
    return SLACK * max(theirs, floor)


def _scaled(torch: Any, a: Any, b: Any, out: Any, want: Any) -> float:
    one = torch.ones((), device="cuda")
    try:
        made = torch._scaled_mm(a.contiguous(), b.t().contiguous().t(), one, one, out_dtype=out.dtype)
    except (RuntimeError, ValueError):
        return 0.0
    return relative(torch, made, want)
