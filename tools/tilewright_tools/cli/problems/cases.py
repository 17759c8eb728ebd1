"""GEMM problems for `run gemm`, `kernels explain gemm` and `demo`: the arguments that say which, operands in shared
memory, the float64 truth, and the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_kit.types.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    import tilewright

    Array = npt.NDArray[Any]

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "LAYOUTS",
    "Case",
    "Check",
    "activate",
    "arguments",
    "check",
    "reference",
    "tolerance",
]

DTYPES = {
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8"),
    "bf8": ("bf8", "bf8"),
    "int8": ("int8", "int8"),
    "mixed": ("fp8", "bf8"),
}
"""Names on the command line, and the element types of A and B that they mean."""

LAYOUTS = ("rcr", "rrr", "crr", "ccr")
ACTIVATIONS = ("Relu", "Gelu", "FastGelu", "Silu", "Sigmoid", "Tanh", "HardSwish")

# Rounding of the result to its own type, and of the sums to fp32: relative to the norm of the whole result.
_TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3, "int32": 0.0}
# What the seeds' helper counts as a right element.
_ELEMENT = 0.02


def arguments(
    m: Annotated[int, typer.Argument(help="Rows of A and C.")],
    n: Annotated[int, typer.Argument(help="Columns of B and C.")],
    k: Annotated[int, typer.Argument(help="Columns of A, rows of B.")],
    dtype: Annotated[str, typer.Option(help=f"Element type: {', '.join(DTYPES)} (mixed: A fp8, B bf8).")] = "fp32",
    layout: Annotated[str, typer.Option(help="Layouts of A, B, C: r row-major, c column-major; C is r.")] = "rcr",
) -> dict[str, Any]:
    """What a command's arguments say, as ``Case`` takes it."""
    return {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout}


@dataclass(frozen=True)
class Case:
    """One problem: C [batch, M, N] = activation(A [batch, M, K] x B [batch, K, N]); ``batch`` 0 is a plain product."""

    m: int
    n: int
    k: int
    dtype: str = "fp32"
    layout: str = "rcr"
    batch: int = 0
    activation: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("layout", self.layout, LAYOUTS)
        for name in ("m", "n", "k"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(
                    f"{name.upper()} must be at least 1",
                    field=name,
                    value=getattr(self, name),
                    rule="positive_size",
                    fix="give a positive number",
                )

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * max(self.batch, 1)

    def specs(self) -> tuple[Any, Any]:
        """Descriptions of A and B, without memory."""
        from tilewright import Spec

        a_dtype, b_dtype = DTYPES[self.dtype]
        lead = (self.batch,) if self.batch else ()
        a_strides = (self.k, 1) if self.layout[0] == "r" else (1, self.m)
        b_strides = (self.n, 1) if self.layout[1] == "r" else (1, self.k)
        return (
            Spec.of((*lead, self.m, self.k), a_dtype, (*((self.m * self.k,) if lead else ()), *a_strides)),
            Spec.of((*lead, self.k, self.n), b_dtype, (*((self.k * self.n,) if lead else ()), *b_strides)),
        )

    def operands(self, client: tilewright.Client) -> tuple[Array, Array]:
        """A and B in the client's shared memory, filled at random, laid out as the case says."""
        import numpy as np

        rng = np.random.default_rng(self.seed)
        a_dtype, b_dtype = DTYPES[self.dtype]
        a = self._operand(client, rng, (self.m, self.k), a_dtype, self.layout[0])
        b = self._operand(client, rng, (self.k, self.n), b_dtype, self.layout[1])
        return a, b

    def _operand(
        self, client: tilewright.Client, rng: np.random.Generator, shape: tuple[int, int], dtype: str, letter: str
    ) -> Array:
        import numpy as np

        stored = shape if letter == "r" else shape[::-1]
        if self.batch:
            stored = (self.batch, *stored)  # type: ignore[assignment]
        array: Array = client.empty(stored, dtype)
        if dtype == "int8":
            array[...] = rng.integers(-128, 128, stored, np.int8)
        else:
            array[...] = rng.standard_normal(stored, np.float32).astype(array.dtype)
        return array if letter == "r" else array.swapaxes(-1, -2)


@dataclass(frozen=True)
class Check:
    """A result against the truth. ``error`` is the norm of the difference over the norm of the truth."""

    error: float
    tolerance: float
    accuracy: float
    """Percent of elements within 2 % of the truth."""
    max_error: float
    correct: int
    total: int

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def reference(a: Array, b: Array, activation: str = "") -> Array:
    """The product in float64 (of int8: the exact integers), through the activation."""
    import numpy as np

    # Products of int8 are exact in float64: below 2**14 each, so 2**39 of them fit its 53 bits.
    product = np.matmul(a.astype(np.float64), b.astype(np.float64))
    return activate(product, activation) if activation else product


def activate(x: Array, name: str) -> Array:
    """An activation, in float64."""
    import numpy as np

    _one_of("activation", name, ACTIVATIONS)
    if name == "Relu":
        rectified: Array = np.maximum(x, 0.0)
        return rectified
    if name == "Tanh":
        bent: Array = np.tanh(x)
        return bent
    if name == "HardSwish":
        return x * np.clip(x + 3.0, 0.0, 6.0) / 6.0
    if name == "Gelu":
        import math

        erf: Array = np.vectorize(math.erf)(x * math.sqrt(0.5))
        return 0.5 * x * (1.0 + erf)
    if name == "FastGelu":
        return 0.5 * x * (1.0 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    logistic: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return logistic if name == "Sigmoid" else x * logistic


def tolerance(dtype: str, k: int) -> float:
    """How far a result of a dtype may be off, as a fraction of its norm: its rounding, and sums of length ``k``."""
    base = _TOLERANCE.get(dtype, 1e-2)
    return base if base == 0.0 else base + 6e-8 * k**0.5


def check(result: Array, truth: Array, k: int) -> Check:
    """Compare a result with the truth. A result with NaN or infinity where the truth has none is off by infinity."""
    import numpy as np

    got = result.astype(np.float64)
    difference = np.abs(got - truth)
    scale = float(np.linalg.norm(truth))
    error = float(np.linalg.norm(difference)) / scale if scale else float(np.linalg.norm(difference))
    correct = int(np.count_nonzero(difference <= _ELEMENT * (np.abs(truth) + 1e-5)))
    total = int(truth.size)
    return Check(
        error=error if np.isfinite(error) else float("inf"),
        tolerance=tolerance(result.dtype.name, k),
        accuracy=100.0 * correct / total if total else 100.0,
        max_error=float(difference.max()) if total else 0.0,
        correct=correct,
        total=total,
    )


def _one_of(field: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise InvalidArgumentError(
            f"{value!r} is not a known {field}",
            field=field,
            value=value,
            rule=f"{field}_known",
            fix=f"use one of {', '.join(allowed)}",
        )
