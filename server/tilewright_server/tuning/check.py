"""Whether a kernel's output is right, fast enough to ask it of every kernel of a sweep.

A small problem is compared with the operation's float64 reference in every element. Of a large product the reference is
made for some rows and some columns, first and last among them, and every element of those is compared; and, where C is
the product and nothing else, C x = A (B x) is tested in float64 for random signs x (Freivalds): an error in any element
moves its row's sum, which is compared row by row. Bounds are those of ``tilewright_kit.compare``; in rows of n
elements an error larger than about six roundings of a whole row (6 * u * sqrt(n) times the size of an element) is seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.compare import bound, compare
from tilewright_kit.device import DeviceInfo
from tilewright_kit.dtypes import DType
from tilewright_kit.operation import Operation
from tilewright_kit.problem import Problem, Role
from tilewright_server.tuning.cases import DTYPES, Case

__all__ = ["Truth", "Verdict"]

Array = npt.NDArray[Any]

WHOLE = 1 << 27
"""Most multiply-adds of a problem that is compared as a whole."""
LINES = 24
"""Rows, and columns, of a large product that are compared element by element."""
VECTORS = 2
_CHUNK = 1 << 22
_ALL = slice(None)
_OUTLIER = 6.0
EIGHT_BIT_GPU = 1.5e-2
"""Relative error that matrix units of GPUs may add in sums of 4096 products of 8-bit floats: they keep some 14 bits of
them (DeepSeek-V3, section 3.3.2, saw up to 2 percent)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``error`` is relative, in the norm of what was compared; ``reason`` says what is wrong, empty if nothing is."""

    error: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows or columns of C; ``lead`` is a product of a batch."""

    lead: int | None
    rows: Any
    columns: Any

    def of(self, out: Array) -> Array:
        found: Array = (out if self.lead is None else out[self.lead])[self.rows][:, self.columns]
        return found


class Truth:
    """The right outputs of one problem on given inputs; asked once for each kernel."""

    def __init__(
        self,
        operation: Operation[Any, Any],
        problem: Problem,
        case: Case | None,
        inputs: Mapping[str, Array],
        device: DeviceInfo,
        rng: np.random.Generator,
    ) -> None:
        self._operation, self._problem, self._inputs = operation, problem, inputs
        self._case, self._device, self._rng = case, device, rng
        self._outputs = {item.name: item.desc for item in problem.operands if item.role is Role.OUTPUT}
        self._whole: Mapping[str, Array] | None = None
        self._parts: list[tuple[_Part, Array]] = []
        self._signs: Array | None = None
        self._sums: Array | None = None
        self.is_whole = case is None or case.flops <= 2 * WHOLE

    def prepare(self) -> None:
        """Compute what is compared with, which may take seconds; else the first ``check`` does it."""
        if self.is_whole:
            if self._whole is None:
                self._whole = self._operation.reference(self._problem, self._inputs)
        elif not self._parts:
            assert self._case is not None
            self._parts = self._references(self._case)
            if self._case.is_plain:
                width = self._outputs["out"].shape[-1]
                self._signs = self._rng.choice(np.array([-1.0, 1.0]), (width, VECTORS))
                self._sums = _times(self._inputs["a"], _times(self._inputs["b"], self._signs))

    def check(self, outputs: Mapping[str, Array], poisoned: Mapping[str, Array]) -> Verdict:
        """Compare what a kernel wrote over ``poisoned``."""
        self.prepare()
        if self._whole is not None:
            return self._check_whole(self._whole, outputs, poisoned)
        return self._check_parts(outputs["out"], poisoned["out"])

    def _check_whole(
        self, whole: Mapping[str, Array], outputs: Mapping[str, Array], poisoned: Mapping[str, Array]
    ) -> Verdict:
        worst = 0.0
        for name, desc in self._outputs.items():
            verdict = self._compare(outputs[name], whole[name], poisoned[name], desc.dtype, name)
            if verdict.reason:
                return verdict
            worst = max(worst, verdict.error)
        return Verdict(worst)

    def _compare(self, have: Array, want: Array, poisoned: Array, dtype: DType, where: str) -> Verdict:
        k = self._case.k if self._case is not None else 4096
        found = compare(have, want, dtype, k, poisoned=poisoned)
        limit = max(found.bound, self._bound(dtype))
        right = found.unwritten == 0 and found.misplaced == 0 and found.error <= limit
        return Verdict(found.error, "" if right else f"{where}: {replace(found, bound=limit)}")

    def _bound(self, dtype: DType) -> float:
        """Allowed relative error of the norm."""
        if self._case is None:
            return bound(dtype, 4096)
        limit = bound(dtype, self._case.k)
        if self._device.kind != "cpu" and DTYPES[self._case.dtype][0] in ("fp8", "bf8"):
            limit += EIGHT_BIT_GPU * math.sqrt(self._case.k / 4096)
        return limit

    # ---- large products ----

    def _check_parts(self, out: Array, poisoned: Array) -> Verdict:
        dtype = self._outputs["out"].dtype
        worst = 0.0
        for place, want in self._parts:
            verdict = self._compare(place.of(out), want, place.of(poisoned), dtype, "some rows and columns")
            if verdict.reason:
                return verdict
            worst = max(worst, verdict.error)
        if self._signs is not None and self._sums is not None:
            verdict = self._project(out, dtype, self._signs, self._sums)
        else:
            verdict = _written(out, poisoned, dtype)
        return Verdict(max(worst, verdict.error), verdict.reason)

    def _references(self, case: Case) -> list[tuple[_Part, Array]]:
        """Some rows and some columns of C (of one product of a batch), by the operation's own reference."""
        lead = int(self._rng.integers(case.batch)) if case.batch else None
        rows, columns = _Part(lead, self._some(case.m), _ALL), _Part(lead, _ALL, self._some(case.n))
        by_row, by_column = replace(case, m=len(rows.rows), batch=0), replace(case, n=len(columns.columns), batch=0)
        return [(rows, self._reference(by_row, rows)), (columns, self._reference(by_column, columns))]

    def _some(self, size: int) -> Array:
        picked = self._rng.choice(size, min(LINES, size), replace=False)
        return np.unique([0, size - 1, *picked])

    def _reference(self, case: Case, part: _Part) -> Array:
        """C for a part of it: a smaller problem of the same kind."""
        picked: dict[str, Array] = {}
        for name, array in self._inputs.items():
            here = array[part.lead] if part.lead is not None and array.ndim == 3 else array
            if name == "a" or (name == "scale_a" and here.ndim):
                here = here[part.rows]
            elif name == "b":
                here = here[:, part.columns]
            elif name.startswith("d["):
                here = here[part.rows][:, part.columns]
            elif name in ("bias", "scale_b") and here.ndim:
                here = here[part.columns]
            picked[name] = here
        problem = self._operation.parse(case.request())
        return np.asarray(self._operation.reference(problem, picked)["out"])

    def _project(self, out: Array, dtype: DType, signs: Array, sums: Array) -> Verdict:
        """C x against A (B x), row by row."""
        with np.errstate(invalid="ignore", over="ignore"):  # a wrong result may hold anything
            found, norms = _times_and_norms(out, signs)
            gap = np.abs(found - sums)
        if not dtype.is_float:
            wrong = np.any(gap % 2**32 != 0, axis=-1)  # sums of int32 wrap around
            return Verdict(float(np.mean(wrong)), f"{np.count_nonzero(wrong)} rows are off" if wrong.any() else "")
        limit = self._bound(dtype)
        # A row that is all but empty, or should be, is judged by the size of the others.
        scale = np.maximum(norms, math.sqrt(float(np.mean(sums**2))))[..., None]
        with np.errstate(invalid="ignore", over="ignore"):
            relative = gap / scale
            wrong = ~(relative <= _OUTLIER * limit)
            error = float(np.sqrt(np.mean(np.square(relative))))
        if wrong.any() or not error <= limit:
            row = tuple(int(place) for place in np.argwhere(wrong.any(axis=-1))[0]) if wrong.any() else ()
            count = np.count_nonzero(wrong.any(axis=-1))
            return Verdict(
                error, f"C x is not A (B x): error {error:.3g} (bound {limit:.3g}), {count} rows, first {row}"
            )
        return Verdict(error)


def _chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, _CHUNK // max(columns, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _times(matrix: Array, vectors: Array) -> Array:
    """``matrix @ vectors`` in float64, a few rows at a time: a copy of the whole in float64 would be large."""
    if matrix.ndim == 3:
        shared = vectors.ndim == 2
        return np.stack([_times(item, vectors if shared else vectors[place]) for place, item in enumerate(matrix)])
    parts = [matrix[rows].astype(np.float64) @ vectors for rows in _chunks(*matrix.shape)]
    return np.concatenate(parts)


def _times_and_norms(out: Array, vectors: Array) -> tuple[Array, Array]:
    """``out @ vectors``, and the norm of every row."""
    if out.ndim == 3:
        pairs = [_times_and_norms(item, vectors) for item in out]
        return np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])
    sums, norms = [], []
    for rows in _chunks(*out.shape):
        block = out[rows].astype(np.float64)
        sums.append(block @ vectors)
        norms.append(np.linalg.norm(block, axis=1))
    return np.concatenate(sums), np.concatenate(norms)


def _written(out: Array, poisoned: Array, dtype: DType) -> Verdict:
    """For outputs that no projection can judge: no element still holds its poison."""
    flat, before = out.reshape(-1, out.shape[-1]), poisoned.reshape(-1, out.shape[-1])
    left = 0
    for rows in _chunks(*flat.shape):
        block = flat[rows]
        left += int(np.count_nonzero(np.isnan(block.astype(np.float32)) if dtype.is_float else block == before[rows]))
    # A few whole numbers may rightly be what the poison was.
    allowed = 0 if dtype.is_float else flat.size >> 16
    return Verdict(0.0, f"{left} elements were not written, or are not numbers" if left > allowed else "")
