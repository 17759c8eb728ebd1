"""True if a kernel's output is right, fast enough to ask it of every kernel of a sweep.

A small problem is compared with the operation's float64 reference in every element. Of a large one the reference is
made for some parts (rows and columns of a product, channels and images of a convolution, first and last among them),
and every element of those is compared; and, where the output is linear in its operands, its sums with random signs
along one axis are tested in float64 (Freivalds): an error in any element moves its line's sum, which is compared line
by line. Bounds are those of ``tilewright_kit.numerics.compare``; in lines of n elements an error larger than about six
roundings of a whole line (6 * u * sqrt(n) times the size of an element) is seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.commands.cases import DTYPES, Case, Part, Projection
from tilewright_kit.commands.discovery import command_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import OperationRequest, Problem, Role
from tilewright_kit.numerics.compare import bound, compare, unit_roundoff
from tilewright_kit.types.dtypes import DType
from tilewright_tools.tuning.problems.families import family_of

__all__ = ["Truth", "Verdict"]

Array = npt.NDArray[Any]

WHOLE = 1 << 27
"""Most multiply-adds of a problem that is compared as a whole."""
PART = 1 << 28
"""About the most multiply-adds of a part of a large problem that is compared element by element."""
_CHUNK = 1 << 22
_OUTLIER = 6.0
EIGHT_BIT_GPU = 1.5e-2
"""Relative error that matrix units of GPUs may add in sums of 4096 products of 8-bit floats: they keep some 14 bits of
them (DeepSeek-V3, section 3.3.2, saw up to 2 percent)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``error`` is relative, in the norm of what was compared; ``reason`` says what is wrong, empty if nothing is."""

    error: float
    reason: str = ""


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
        self._parts: list[tuple[Part, Array]] = []
        self._projection: Projection | None = None
        self.is_whole = case is None or case.flops <= 2 * WHOLE

    def prepare(self) -> None:
        """Compute what is compared with, which may take seconds; else the first ``check`` does it."""
        if self.is_whole:
            if self._whole is None:
                self._whole = self._operation.reference(self._problem, self._inputs)
        elif not self._parts:
            assert self._case is not None
            family = family_of(self._problem.operation)
            right: dict[int, Mapping[str, Array]] = {}  # parts of several outputs may have the same inputs
            for part in family.parts(self._case, self._inputs, self._rng, PART):
                if part.right is not None:
                    self._parts.append((part, part.take(part.right()[self._name_of(part)])))
                    continue
                if id(part.inputs) not in right:
                    right[id(part.inputs)] = self._references(part.request, part.inputs)
                self._parts.append((part, right[id(part.inputs)][self._name_of(part)]))
            if self._case.is_plain:
                self._projection = family.projection(self._case, self._inputs, self._rng, self._reference)

    def _name_of(self, part: Part) -> str:
        return part.output or next(iter(self._outputs))

    def _references(self, request: OperationRequest, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The right outputs of a smaller problem of the same kind."""
        return self._operation.reference(self._operation.parse(request), inputs)

    def _reference(self, request: OperationRequest, inputs: Mapping[str, Array]) -> Array:
        """The only one."""
        (out,) = self._references(request, inputs).values()
        return np.asarray(out)

    def check(self, outputs: Mapping[str, Array], poisoned: Mapping[str, Array]) -> Verdict:
        """Compare what a kernel wrote over ``poisoned``."""
        self.prepare()
        if self._whole is not None:
            return self._check_whole(self._whole, outputs, poisoned)
        return self._check_parts(outputs, poisoned)

    def _check_whole(
        self, whole: Mapping[str, Array], outputs: Mapping[str, Array], poisoned: Mapping[str, Array]
    ) -> Verdict:
        worst = 0.0
        for name, desc in self._outputs.items():
            have, want, before = (self._defined(name, array[name]) for array in (outputs, whole, poisoned))
            verdict = self._compare(have, want, before, desc.dtype, name)
            if verdict.reason:
                return verdict
            worst = max(worst, verdict.error)
        return Verdict(worst)

    def _defined(self, name: str, output: Array) -> Array:
        """The part of an output that the operation defines."""
        if self._case is None:
            return output
        return command_of(self._problem.operation).compared(self._case, self._inputs, name, output)

    def _compare(self, have: Array, want: Array, poisoned: Array, dtype: DType, where: str) -> Verdict:
        k = self._case.depth if self._case is not None else 4096
        found = compare(have, want, dtype, k, poisoned=poisoned)
        limit = max(found.bound, self._bound(dtype))
        right = found.unwritten == 0 and found.misplaced == 0 and found.error <= limit
        return Verdict(found.error, "" if right else f"{where}: {replace(found, bound=limit)}")

    def _bound(self, dtype: DType) -> float:
        """Allowed relative error of the norm."""
        if self._case is None:
            return bound(dtype, 4096)
        limit = bound(dtype, self._case.depth) + (self._case.roundings - 1) * unit_roundoff(dtype)
        if self._device.kind != "cpu" and DTYPES[self._case.dtype][0] in ("fp8", "bf8"):
            limit += EIGHT_BIT_GPU * math.sqrt(self._case.depth / 4096)
        return max(limit, command_of(self._problem.operation).least_tolerance(self._case))

    # ---- large problems ----

    def _check_parts(self, outputs: Mapping[str, Array], poisoned: Mapping[str, Array]) -> Verdict:
        worst = 0.0
        for part, want in self._parts:
            name = self._name_of(part)
            where = f"some rows and columns{f' of {name}' if part.output else ''}"
            have, before = part.take(outputs[name]), part.take(poisoned[name])
            verdict = self._compare(have, want, before, self._outputs[name].dtype, where)
            if verdict.reason:
                return verdict
            worst = max(worst, verdict.error)
        for name, desc in self._outputs.items():
            if self._projection is not None:
                verdict = self._project(outputs[name], desc.dtype, self._projection)
            else:
                verdict = _written(outputs[name], poisoned[name], desc.dtype)
            worst = max(worst, verdict.error)
            if verdict.reason:
                return Verdict(worst, verdict.reason)
        return Verdict(worst)

    def _project(self, out: Array, dtype: DType, projection: Projection) -> Verdict:
        """The output's lines times signs against what they should be, line by line."""
        signs, sums = projection.signs, projection.sums
        with np.errstate(invalid="ignore", over="ignore"):  # a wrong result may hold anything
            found, norms = _times_and_norms(projection.lines(out), signs)
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
                error, f"{projection.told}: error {error:.3g} (bound {limit:.3g}), {count} rows, first {row}"
            )
        return Verdict(error)


def _chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, _CHUNK // max(columns, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _times_and_norms(out: Array, vectors: Array) -> tuple[Array, Array]:
    """``out @ vectors``, and the norm of every row."""
    if out.ndim > 2:
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
    if out.ndim > 2:
        parts = [_unwritten(item, before, dtype) for item, before in zip(out, poisoned, strict=True)]
        left = sum(parts)
    else:
        left = _unwritten(out, poisoned, dtype)
    # A few whole numbers may rightly be what the poison was.
    allowed = 0 if dtype.is_float else out.size >> 16
    return Verdict(0.0, f"{left} elements were not written, or are not numbers" if left > allowed else "")


def _unwritten(out: Array, poisoned: Array, dtype: DType) -> int:
    flat, before = out.reshape(-1, out.shape[-1]), poisoned.reshape(-1, out.shape[-1])
    left = 0
    for rows in _chunks(*flat.shape):
        block = flat[rows]
        left += int(np.count_nonzero(np.isnan(block.astype(np.float32)) if dtype.is_float else block == before[rows]))
    return left
