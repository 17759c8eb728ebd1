"""Cases of GEMM in sweeps: usual ones by name, read from rows, checked by parts, compared with a peer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_gemm.commands.cases import GemmCase
from tilewright_gemm.config.block_scales import SCALES, columns_of_block
from tilewright_gemm.vocabulary import ScaleBlock
from tilewright_kit.commands.cases import Part, Projection, read_case

__all__ = ["GEMM", "NAMED", "GemmFamily"]

Array = npt.NDArray[Any]

LINES = 24
"""Rows, and columns, of a large product that are compared element by element."""
VECTORS = 2
_CHUNK = 1 << 22
_ALL = slice(None)
_BLOCK_COLUMNS = columns_of_block(SCALES[ScaleBlock.ROWS_AND_SQUARES][1])
_LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
"""(n, k) of linear layers of models with 8 and 70 thousand million weights."""
_WRITTEN = re.compile(r"(?:(\d+)[*:])?(\d+)x(\d+)x(\d+)")


def _rows(*sizes: tuple[int, ...]) -> tuple[Mapping[str, Any], ...]:
    return tuple(dict(zip(("m", "n", "k", "batch"), size, strict=False)) for size in sizes)


NAMED: dict[str, tuple[Mapping[str, Any], ...]] = {
    "tiny": _rows((16, 16, 16), (64, 48, 32), (33, 17, 65)),
    "squares": _rows(*((size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192))),
    "decode": _rows(*((m, n, k) for m, (n, k) in product((1, 4, 16, 64), _LAYERS))),
    "prefill": _rows(*((m, n, k) for m, (n, k) in product((128, 512, 2048, 4096), (*_LAYERS, (28672, 4096))))),
    "skinny": _rows((8192, 64, 4096), (8192, 128, 1024), (64, 8192, 4096), (16384, 32, 2048), (4096, 1, 4096)),
    "deep": _rows((64, 64, 16384), (128, 128, 32768), (256, 512, 16384), (512, 512, 8192)),
    "ragged": _rows((333, 777, 1111), (1000, 1000, 1000), (127, 129, 255), (5000, 3000, 1500), (2047, 2049, 511)),
    "batched": _rows(
        (64, 64, 64, 64), (128, 128, 128, 32), (256, 256, 64, 16), (512, 512, 512, 8), (1024, 1024, 64, 32)
    ),
    "large": _rows((8192, 8192, 28672), (8192, 28672, 8192), (16384, 8192, 8192)),
}
"""Lists by name."""


class GemmFamily:
    name = "gemm"
    operations: Sequence[str] = ("gemm",)
    case_type: type[Any] = GemmCase
    required: Sequence[str] = ("m", "n", "k")
    plain: Sequence[str] = ("m", "n", "k", "batch")
    named: Mapping[str, Sequence[Mapping[str, Any]]] = NAMED
    example = "128x4096x4096"

    def parse_text(self, text: str) -> Mapping[str, Any] | None:
        """``128x4096x4096``, or ``16*64x64x64`` for a batch."""
        written = _WRITTEN.fullmatch(text)
        if written is None:
            return None
        batch, m, n, k = written.groups(default="0")
        return {"m": m, "n": n, "k": k, "batch": batch}

    def from_record(self, record: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> GemmCase:
        return read_case(GemmCase, record, where, defaults, self.required).checked(where)

    def settle(self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator) -> None:
        """All inputs are free."""

    def parts(self, case: GemmCase, inputs: Mapping[str, Array], rng: np.random.Generator, budget: int) -> list[Part]:  # noqa: ARG002
        """Some rows and some columns of C, of one product of a batch or of a group."""
        if case.groups:
            return _of_group(case, inputs, rng)
        lead = int(rng.integers(case.batch)) if case.batch else None
        rows, columns = _some(case.m, rng), _some(case.n, rng)
        by_row, by_column = replace(case, m=len(rows), batch=0), replace(case, n=len(columns), batch=0)
        return [_part(by_row, inputs, lead, rows, _ALL), _part(by_column, inputs, lead, _ALL, columns)]

    def projection(
        self,
        case: GemmCase,
        inputs: Mapping[str, Array],
        rng: np.random.Generator,
        reference: Callable[..., Array],  # noqa: ARG002
    ) -> Projection:
        """C x = A (B x), row by row (Freivalds)."""
        signs = rng.choice(np.array([-1.0, 1.0]), (case.n, VECTORS))
        sums = _times(inputs["a"], _times(inputs["b"], signs))
        return Projection(lambda out: out, signs, sums, "C x is not A (B x)")

    def peer_call(self, torch: Any, case: GemmCase, operands: Mapping[str, Any]) -> Callable[[], object]:
        """The product with its bias, one after the other of a group; other epilogues are left out, which favours the
        peer.

        Raises ``NotImplementedError`` for 4-bit weights.
        """
        if case.groups:
            products = [
                (replace(case, m=rows, groups=""), _of_product(operands, place))
                for place, rows in enumerate(case.rows)
                if rows
            ]
            calls = [self.peer_call(torch, one, mine) for one, mine in products]
            return lambda: [call() for call in calls]
        if case.int4:
            raise NotImplementedError("PyTorch has no product of weights in this format")
        a, b, bias = operands["a"], operands["b"], operands.get("bias")
        if case.dtype == "int8":
            return lambda: torch._int_mm(a, b)
        if case.dtype in ("fp8", "bf8", "mixed"):
            one = torch.ones((), device=a.device)
            out, fast = torch.bfloat16, case.fast
            return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=fast)
        if case.batch:
            out_batch = torch.empty((a.shape[0], a.shape[1], b.shape[2]), dtype=a.dtype, device=a.device)
            return lambda: torch.bmm(a, b, out=out_batch)
        if bias is not None and bias.dtype == a.dtype:
            return lambda: torch.addmm(bias, a, b)
        result = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
        return lambda: torch.mm(a, b, out=result)


GEMM = GemmFamily()


def _some(size: int, rng: np.random.Generator) -> Array:
    picked = rng.choice(size, min(LINES, size), replace=False)
    return np.unique([0, size - 1, *picked])


def _part(case: GemmCase, inputs: Mapping[str, Array], lead: int | None, rows: Any, columns: Any) -> Part:
    """A smaller product of the same kind. Some columns of blocks of 128 have a factor each."""
    squares = case.scale_block == ScaleBlock.ROWS_AND_SQUARES.value and columns is not _ALL
    if squares:
        case = replace(case, scale_block=ScaleBlock.ROWS_AND_COLUMNS.value)
    picked: dict[str, Array] = {}
    for name, array in inputs.items():
        here = array[lead] if lead is not None and array.ndim == 3 else array
        if name == "a" or (name == "scale_a" and here.ndim):
            here = here[rows]
        elif name == "b":
            here = here[:, columns]
        elif name.startswith("d["):
            here = here[rows][:, columns]
        elif name in ("bias", "scale_b", "zero_b") and here.ndim:
            here = here[columns // _BLOCK_COLUMNS if squares and name == "scale_b" else columns]
        picked[name] = here
    return Part(lambda out: (out if lead is None else out[lead])[rows][:, columns], case.request(), picked)


def _of_product(operands: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The operands of one product of a group, by their own names."""
    found = {}
    for name, operand in operands.items():
        base, _, rest = name.partition(f"[{place}]")
        if name != base:
            found[base + rest] = operand
    return found


def _of_group(case: GemmCase, inputs: Mapping[str, Array], rng: np.random.Generator) -> list[Part]:
    """Parts of the first and of the last product that have rows."""
    full = [place for place, rows in enumerate(case.rows) if rows]
    found = []
    for place in sorted({full[0], full[-1]}) if full else ():
        one = replace(case, m=case.rows[place], groups="")
        mine = _of_product(inputs, place)
        rows, columns = _some(one.m, rng), _some(one.n, rng)
        for smaller, some in (
            (replace(one, m=len(rows)), (rows, _ALL)),
            (replace(one, n=len(columns)), (_ALL, columns)),
        ):
            part = _part(smaller, mine, None, *some)
            found.append(replace(part, output=f"out[{place}]"))
    return found


def _times(matrix: Array, vectors: Array) -> Array:
    """``matrix @ vectors`` in float64, a few rows at a time: a copy of the whole in float64 would be large."""
    if matrix.ndim == 3:
        shared = vectors.ndim == 2
        return np.stack([_times(item, vectors if shared else vectors[place]) for place, item in enumerate(matrix)])
    step = max(1, _CHUNK // max(matrix.shape[1], 1))
    parts = [matrix[row : row + step].astype(np.float64) @ vectors for row in range(0, matrix.shape[0], step)]
    return np.concatenate(parts)
