"""Problems as rows of files, for every operation: the interface of cases, and how they are read and checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import SLOPES

__all__ = [
    "DTYPES",
    "NO",
    "YES",
    "Case",
    "CaseFamily",
    "Part",
    "Projection",
    "add_bias",
    "check_dtype",
    "check_number",
    "check_positive",
    "check_steps",
    "check_words",
    "columns_of",
    "read_case",
    "step_attributes",
    "wrong",
]

Array = npt.NDArray[Any]
C = TypeVar("C")

DTYPES = {name: (name, name) for name in ("fp32", "fp16", "bf16", "fp8", "bf8", "int8")} | {"mixed": ("fp8", "bf8")}
"""Names in shape files, and the element types of the two operands that they mean."""
NO = ("", "0", "no", "none", "false")
YES = ("1", "yes", "true")


class Case(Protocol):
    """One problem. Frozen and hashable; every field is a column of shape files and of results."""

    family: ClassVar[str]
    """Word of its command."""
    sizes_as_text: ClassVar[Sequence[str]]
    """Columns of text in which a single number may stand for ``3x3``."""

    @property
    def dtype(self) -> str:
        """A name of ``DTYPES``."""
        ...

    @property
    def label(self) -> str:
        """For people."""
        ...

    @property
    def flops(self) -> int: ...

    @property
    def depth(self) -> int:
        """Products in the sum of one output element: rounding grows with its root."""
        ...

    @property
    def roundings(self) -> int:
        """How often what becomes an output is rounded to its type: once as the result, and before it is multiplied."""
        ...

    @property
    def is_plain(self) -> bool:
        """True if the output is linear in every operand: then it can be tested by projection."""
        ...

    def to_dict(self) -> dict[str, Any]: ...

    def request(self) -> OperationRequest: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an output that is a smaller problem of the same kind."""

    take: Callable[[Array], Array]
    """That part of the whole output."""
    request: OperationRequest
    """The smaller problem; with ``right`` the whole one."""
    inputs: Mapping[str, Array]
    output: str = ""
    """The output in question, where there are several."""
    right: Callable[[], Mapping[str, Array]] | None = None
    """Whole outputs by name that are right where ``take`` looks, for parts that are no problem of the same kind."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A test of every element of an output at once: its lines times ``signs`` are ``sums``."""

    lines: Callable[[Array], Array]
    """The output with the axis last that is summed over."""
    signs: Array
    sums: Array
    told: str
    """Text for people: the things compared."""


class CaseFamily(Protocol):
    """An operation as sweeps know it."""

    name: str
    operations: Sequence[str]
    case_type: type[Any]
    required: Sequence[str]
    """Columns that every row needs."""
    plain: Sequence[str]
    """Columns of CSV without a line of names."""
    named: Mapping[str, Sequence[Mapping[str, Any]]]
    """Lists by name."""
    example: str
    """A shape as it may be written on the command line."""

    def parse_text(self, text: str) -> Mapping[str, Any] | None:
        """The row that a written shape means; None if it is none."""
        ...

    def from_record(self, record: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> Case:
        """A case from a row of names and values; see ``read_case``."""
        ...

    def settle(self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator) -> None:
        """Write to the inputs that are not free, such as page numbers, what has a meaning."""
        ...

    def parts(self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator, budget: int) -> list[Part]:
        """Parts of a large problem's output that are compared element by element, of ``budget`` products at most where
        that can be."""
        ...

    def projection(
        self, case: Any, inputs: Mapping[str, Array], rng: np.random.Generator, reference: Callable[..., Array]
    ) -> Projection:
        """Result of a plain case. ``reference(request, inputs)`` is the right output of a smaller problem."""
        ...

    def peer_call(self, torch: Any, case: Any, operands: Mapping[str, Any]) -> Callable[[], object]:
        """The same in PyTorch, or the nearest that it has. Raises what PyTorch raises, ``NotImplementedError``."""
        ...


def columns_of(case_type: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(case_type))


def read_case(
    case_type: type[C],
    record: Mapping[str, Any],
    where: str,
    defaults: Mapping[str, Any] | None = None,
    required: Iterable[str] = (),
) -> C:
    """A case from a row of names and values, which may all be text; columns that are empty take ``defaults``.

    Raises ``InvalidArgumentError`` that names ``where`` and the column.
    """
    columns = columns_of(case_type)
    counts = {item.name for item in dataclasses.fields(case_type) if item.type == "int"}  # type: ignore[arg-type]
    given = dict(defaults or {})
    sizes: Sequence[str] = getattr(case_type, "sizes_as_text", ())
    values = {name: _number(value, where, name) if name in counts else value for name, value in given.items()}
    for name, value in record.items():
        column = str(name).strip().lower()
        if column not in columns:
            raise wrong(where, column, value, f"there is no column {column!r}", _suggest(column, columns))
        text = value.strip() if isinstance(value, str) else value
        if text in ("", None):
            continue
        values[column] = _number(text, where, column) if column in counts else _word(text, where, column, sizes)
    needed = list(required)
    for name in needed:
        if name not in values:
            fix = f"give {', '.join(needed[:-1])} and {needed[-1]}"
            raise wrong(where, name, "", f"the column {name} is missing", fix)
    return case_type(**values)


def check_words(case: Any, where: str, allowed: Mapping[str, Sequence[str]]) -> None:
    """Raise ``InvalidArgumentError`` for a column that holds none of its words."""
    for name, words in allowed.items():
        value = getattr(case, name)
        if value.lower() not in words:
            fix = f"use {', '.join(word for word in words if word)}"
            raise wrong(where, name, value, f"{value!r} is no {name.replace('_', ' ')}", fix)


def check_positive(case: Any, where: str, names: Sequence[str]) -> None:
    """Raises ``InvalidArgumentError`` for a column of these that is not a positive number."""
    for name in names:
        if getattr(case, name) < 1:
            raise wrong(where, name, getattr(case, name), f"{name} must be at least 1", "give a positive number")


def check_number(case: Any, where: str, name: str) -> None:
    """Raises ``InvalidArgumentError`` for a column of text that is neither empty nor a finite number."""
    text = getattr(case, name)
    try:
        good = not text or math.isfinite(float(text))
    except ValueError:
        good = False
    if not good:
        raise wrong(where, name, text, f"{name} is no number", "give a number, for example 0.5")


def check_steps(case: Any, where: str) -> None:
    """Raise ``InvalidArgumentError`` for ``alpha``, ``slope`` and ``clamp`` that cannot be read, for a clamp beside
    another activation, a slope without its activation, and for a step that brings in no D.
    """
    check_number(case, where, "alpha")
    check_number(case, where, "slope")
    sloped = [step.value for step in SLOPES]
    if case.slope and case.activation not in sloped:
        fix = f"set activation to {' or '.join(sloped)}, or leave slope out"
        raise wrong(where, "slope", case.slope, "only some activations have a slope", fix)
    if case.clamp:
        try:
            low, high = (float(part) if part else None for part in case.clamp.split(":"))
        except ValueError:
            low = high = None
        if low is None and high is None:
            raise wrong(where, "clamp", case.clamp, "clamp is no range", "write it as low:high, 0: or :6")
        if low is not None and high is not None and low > high:
            raise wrong(where, "clamp", case.clamp, "the range is empty", f"write it as {high:g}:{low:g}")
        if case.activation not in ("", "Clamp"):
            fix = "leave clamp or activation out"
            raise wrong(where, "clamp", case.clamp, "a clamp takes the place of an activation", fix)
    if case.binary and not case.d:
        raise wrong(where, "binary", case.binary, "there is no D that it could bring in", "give d: how many there are")


def check_dtype(case: Any, where: str) -> None:
    """Raises ``InvalidArgumentError`` for a type that is not in ``DTYPES``, and for results of no element type."""
    if case.dtype not in DTYPES:
        raise wrong(where, "dtype", case.dtype, f"there is no type {case.dtype!r}", f"use {', '.join(DTYPES)}")
    for name in ("out_dtype", "bias"):
        word, free = str(getattr(case, name, "")).lower(), (*YES, *NO) if name == "bias" else ("",)
        if word not in free and word not in set(DType):
            raise wrong(where, name, word, f"there is no type {word!r}", f"use {', '.join(DType)}")


def add_bias(case: Any, inputs: dict[str, TensorDesc], size: int) -> None:
    """The operand that the column ``bias`` asks for: of an element type, or with ``yes`` of the output's (fp32 if that
    is whole numbers).
    """
    bias = case.bias.lower()
    if bias not in NO:
        dtype = float_output(case.dtype, case.out_dtype) if bias in YES else bias
        inputs["bias"] = TensorDesc.of(dtype, (size,))


def step_attributes(case: Any) -> dict[str, Attribute]:
    """Attributes from the columns ``out_dtype``, ``activation``, ``clamp``, ``slope``, ``alpha``, ``d`` with
    ``binary``, and ``split_k``.
    """
    words: dict[str, Attribute] = {
        "out_dtype": case.out_dtype,
        "unary": "Clamp" if case.clamp else case.activation,
        "binary": (case.binary or "MultiDAdd") if case.d else "",
        "split_k": case.split_k,
    }
    found = {name: value for name, value in words.items() if value}
    if case.slope:
        found["slope"] = float(case.slope)
    if case.alpha:
        found["alpha"] = float(case.alpha)
    for name, bound in zip(("clamp_lo", "clamp_hi"), case.clamp.split(":"), strict=False):
        if bound:
            found[name] = float(bound)
    return found


def float_output(dtype: str, out_dtype: str) -> str:
    """The type of an output where that is a float, else fp32."""
    first = DTYPES[dtype][0]
    found = out_dtype or {"fp8": "fp16", "bf8": "fp16", "int8": "int32"}.get(first, first)
    return found if DType(found).is_float else "fp32"


def _number(value: Any, where: str, column: str) -> int:
    try:
        if isinstance(value, (bool, float)) and value != int(value):
            raise ValueError
        number = int(value)
    except (ValueError, TypeError):
        raise wrong(where, column, value, f"{column} is no whole number", "give a number") from None
    if number < 0:
        raise wrong(where, column, value, f"{column} cannot be negative", "give zero or more")
    return number


def _word(value: Any, where: str, column: str, sizes: Sequence[str]) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int) and column in sizes:
        return str(value)
    if not isinstance(value, str):
        raise wrong(where, column, value, f"{column} is no word", "give text")
    return value


def _suggest(column: str, columns: Sequence[str]) -> str:
    close = get_close_matches(column, columns, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"use {', '.join(columns)}"


def wrong(where: str, column: str, value: object, reason: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{where}: {reason}", field=f"shapes.{column}", value=value, rule="shapes", fix=fix)
