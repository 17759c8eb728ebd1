"""Products to measure, as rows of files or of built-in lists, and as requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tilewright_kit.dtypes import DType
from tilewright_kit.errors import InvalidArgumentError
from tilewright_kit.problem import Attribute, OperationRequest
from tilewright_kit.tensor import TensorDesc

__all__ = ["DTYPES", "LAYOUTS", "Case"]

DTYPES = {name: (name, name) for name in ("fp32", "fp16", "bf16", "fp8", "bf8", "int8")} | {"mixed": ("fp8", "bf8")}
"""Names in shape files, and the element types of A and B that they mean."""
LAYOUTS = ("rcr", "rrr", "crr", "ccr")
_NO = ("", "0", "no", "none", "false")
_YES = ("1", "yes", "true")


@dataclass(frozen=True, slots=True)
class Case:
    """C [batch, M, N] = activation(scale_a * scale_b * (A [batch, M, K] x B [batch, K, N]) + bias, D...).

    ``batch`` 0 is a plain product. Every field is a column of shape files.
    """

    m: int
    n: int
    k: int
    dtype: str = "fp32"
    """Element type of A and B; ``mixed``: fp8 and bf8."""
    layout: str = "rcr"
    batch: int = 0
    out_dtype: str = ""
    """Empty: what the operation makes of ``dtype``."""
    bias: str = ""
    """Element type of a row that is added; ``yes`` is the type of C, or fp32 if that is whole numbers."""
    activation: str = ""
    d: int = 0
    """Number of D operands of C's shape."""
    binary: str = ""
    """How D operands are brought in. Empty: they are added."""
    scale_a: str = ""
    """``tensor`` or ``row``."""
    scale_b: str = ""
    """``tensor`` or ``column``."""
    split_k: int = 0
    fast_accumulation: str = ""
    """``yes``: 8-bit floats may be summed with the fewer bits of the matrix unit."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> Case:
        """A case from a row of names and values, which may all be text; columns that are empty take ``defaults``.

        Raises ``InvalidArgumentError`` that names ``where`` and the column.
        """
        values: dict[str, Any] = dict(defaults or {})
        for name, value in record.items():
            column = str(name).strip().lower()
            if column not in _COLUMNS:
                raise _wrong(where, column, value, f"there is no column {column!r}", _suggest(column))
            text = value.strip() if isinstance(value, str) else value
            if text in ("", None):
                continue
            values[column] = _number(text, where, column) if column in _COUNTS else _word(text, where, column)
        for name in ("m", "n", "k"):
            if name not in values:
                raise _wrong(where, name, "", f"the column {name} is missing", "give m, n and k")
        return cls(**values)._checked(where)

    def _checked(self, where: str) -> Case:
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise _wrong(where, name, getattr(self, name), f"{name} must be at least 1", "give a positive number")
        if self.dtype not in DTYPES:
            raise _wrong(where, "dtype", self.dtype, f"there is no type {self.dtype!r}", f"use {', '.join(DTYPES)}")
        if self.layout not in LAYOUTS:
            raise _wrong(
                where, "layout", self.layout, f"there is no layout {self.layout!r}", f"use {', '.join(LAYOUTS)}"
            )
        allowed = {"scale_a": ("", "tensor", "row"), "scale_b": ("", "tensor", "column")}
        for name, words in allowed.items():
            if getattr(self, name) not in words:
                raise _wrong(
                    where, name, getattr(self, name), "there is no such scale", f"use {' or '.join(words[1:])}"
                )
        if self.fast_accumulation.lower() not in _NO + _YES:
            value = self.fast_accumulation
            raise _wrong(where, "fast_accumulation", value, "it is a choice between yes and no", "write yes or no")
        return self

    @property
    def label(self) -> str:
        """For people: ``16 of 64x64x64 fp16 rcr +bias Gelu``."""
        size = f"{self.m}x{self.n}x{self.k}"
        parts = [f"{self.batch} of {size}" if self.batch else size, self.dtype, self.layout]
        parts += [f"+{name}" for name in ("bias", "d", "scale_a", "scale_b") if getattr(self, name)]
        parts += [f"out {self.out_dtype}"] if self.out_dtype else []
        parts += [self.activation] if self.activation else []
        parts += ["fast"] if self.fast else []
        return " ".join(parts)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * max(self.batch, 1)

    @property
    def is_plain(self) -> bool:
        """Whether C is the product and nothing else."""
        return not (self.bias or self.activation or self.d or self.scale_a or self.scale_b)

    @property
    def fast(self) -> bool:
        """Whether sums of 8-bit floats may have fewer bits."""
        return self.fast_accumulation.lower() in _YES

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def request(self) -> OperationRequest:
        """The request of this product."""
        a_type, b_type = DTYPES[self.dtype]
        lead = (self.batch,) if self.batch else ()
        inputs = {
            "a": self._matrix(a_type, self.m, self.k, self.layout[0]),
            "b": self._matrix(b_type, self.k, self.n, self.layout[1]),
        }
        bias = self.bias.lower()
        if bias not in _NO:
            inputs["bias"] = TensorDesc.of(self._float_out if bias in _YES else bias, (self.n,))
        for index in range(self.d):
            inputs[f"d[{index}]"] = TensorDesc.of(self._float_out, (*lead, self.m, self.n))
        if self.scale_a:
            inputs["scale_a"] = TensorDesc.of("fp32", (self.m,) if self.scale_a == "row" else ())
        if self.scale_b:
            inputs["scale_b"] = TensorDesc.of("fp32", (self.n,) if self.scale_b == "column" else ())
        attributes: dict[str, Attribute] = {}
        if self.out_dtype:
            attributes["out_dtype"] = self.out_dtype
        if self.activation:
            attributes["unary"] = self.activation
        if self.d:
            attributes["binary"] = self.binary or "MultiDAdd"
        if self.split_k:
            attributes["split_k"] = self.split_k
        if self.fast:
            attributes["fast_accumulation"] = True
        return OperationRequest("gemm", inputs, {}, attributes)

    @property
    def _float_out(self) -> str:
        """The type of C where that is a float, else fp32."""
        a = DTYPES[self.dtype][0]
        found = self.out_dtype or {"fp8": "fp16", "bf8": "fp16", "int8": "int32"}.get(a, a)
        return found if DType(found).is_float else "fp32"

    def _matrix(self, dtype: str, rows: int, columns: int, letter: str) -> TensorDesc:
        lead = (self.batch,) if self.batch else ()
        strides = (columns, 1) if letter == "r" else (1, rows)
        return TensorDesc.of(dtype, (*lead, rows, columns), (*((rows * columns,) if lead else ()), *strides))


_COLUMNS = tuple(item.name for item in dataclasses.fields(Case))
_COUNTS = frozenset({"m", "n", "k", "batch", "d", "split_k"})


def _number(value: Any, where: str, column: str) -> int:
    try:
        if isinstance(value, (bool, float)) and value != int(value):
            raise ValueError
        number = int(value)
    except (ValueError, TypeError):
        raise _wrong(where, column, value, f"{column} is no whole number", "give a number") from None
    if number < 0:
        raise _wrong(where, column, value, f"{column} cannot be negative", "give zero or more")
    return number


def _word(value: Any, where: str, column: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if not isinstance(value, str):
        raise _wrong(where, column, value, f"{column} is no word", "give text")
    return value


def _suggest(column: str) -> str:
    close = get_close_matches(column, _COLUMNS, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"use {', '.join(_COLUMNS)}"


def _wrong(where: str, column: str, value: object, reason: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{where}: {reason}", field=f"shapes.{column}", value=value, rule="shapes", fix=fix)
