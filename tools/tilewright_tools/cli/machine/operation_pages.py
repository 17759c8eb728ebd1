"""Reference of operations, for terminals and as a page of the documents, from what their plugins declare."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilewright_kit.contract.abilities import Declared
from tilewright_kit.contract.declaration import AttributeSpec, Declaration, Example, OperandSpec
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Attribute, Operand, Role, problem_name

__all__ = ["operation_record", "operation_text", "reference_page"]

COLUMNS = 100
INTRODUCTION = (
    "All operations of the server with their operands and attributes, as requests of the protocol name them "
    "([protocol.md](protocol.md)). The same comes from the server (`Dispatch.DescribeOperation`) and from `tilewright "
    "describe`. Generated from the declarations of the plugins, by which requests are read: `tilewright describe "
    "--page > docs/operations.md`."
)


def reference_page(operations: Iterable[Operation[Any, Any]]) -> str:
    """``docs/operations.md``."""
    lines = ["# Operations", "", *_wrapped(INTRODUCTION)]
    for operation in operations:
        if isinstance(operation, Declared):
            lines += ["", f"## {operation.name}", "", *_section(operation.declaration)]
    return "\n".join(lines) + "\n"


def operation_text(operation: Operation[Any, Any]) -> str:
    """The section of one operation."""
    if not isinstance(operation, Declared):
        return f"# {operation.name}\n\nIts plugin declares no operands and attributes.\n"
    return "\n".join([f"# {operation.name}", "", *_section(operation.declaration)]) + "\n"


def operation_record(operation: Operation[Any, Any]) -> dict[str, Any]:
    """For scripts, as JSON."""
    record: dict[str, Any] = {"name": operation.name, "version": operation.version}
    if not isinstance(operation, Declared):
        return record
    declaration = operation.declaration
    return record | {
        "summary": declaration.summary,
        "inputs": [_operand_record(item) for item in declaration.of_role(Role.INPUT)],
        "outputs": [_operand_record(item) for item in declaration.of_role(Role.OUTPUT)],
        "attributes": [_attribute_record(item) for item in declaration.attributes],
        "examples": [{"title": item.title, "request": _call(item)} for item in declaration.examples],
        "notes": list(declaration.notes),
    }


def _section(declaration: Declaration) -> Iterator[str]:
    yield from _wrapped(declaration.summary)
    for note in declaration.notes:
        yield ""
        yield from _wrapped(note)
    for title, role in (("Inputs", Role.INPUT), ("Outputs", Role.OUTPUT)):
        yield from _table(
            (title.lower()[:-1], "shape", "element types", "meaning"),
            [(_name(item), _shapes(item), _dtypes(item), _meaning(item)) for item in declaration.of_role(role)],
        )
    yield from _table(
        ("attribute", "type", "left out", "values", "meaning"),
        [
            (f"`{item.name}`", _types(item), _default(item), _values(item), _sense(item))
            for item in declaration.attributes
        ],
    )
    if declaration.examples:
        yield ""
        for item in declaration.examples:
            yield from _wrapped(f"- {item.title}: `{_call(item)}`", "  ")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield ""
        for row in (columns, ["---"] * len(columns), *rows):
            cells = " | ".join(cell.replace("|", "\\|") for cell in row) if "---" not in row else "|".join(row)
            yield f"| {cells} |" if "---" not in row else f"|{cells}|"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# ---- operands ----


def _name(item: OperandSpec) -> str:
    return f"`{item.name}[0]`, `{item.name}[1]`, ..." if item.is_list else f"`{item.name}`"


def _shapes(item: OperandSpec) -> str:
    return " or ".join(f"`{shape}`" for shape in item.shapes)


def _dtypes(item: OperandSpec) -> str:
    return ", ".join(dtype.value for dtype in item.dtypes)


def _meaning(item: OperandSpec) -> str:
    absent = "Optional." if item.role is Role.INPUT else "On request."
    return " ".join(filter(None, (item.summary, absent if item.optional else "", item.constraint)))


def _operand_record(item: OperandSpec) -> dict[str, Any]:
    return {
        "name": item.name,
        "summary": item.summary,
        "shapes": list(item.shapes),
        "ranks": list(item.ranks),
        "dtypes": [dtype.value for dtype in item.dtypes],
        "optional": item.optional,
        "list": item.is_list,
        "constraint": item.constraint,
    }


# ---- attributes ----


def _types(item: AttributeSpec) -> str:
    return ", ".join(kind.value for kind in item.types)


def _default(item: AttributeSpec) -> str:
    return item.absent if item.default is None else f"`{_value(item.default)}`"


def _values(item: AttributeSpec) -> str:
    parts = []
    if item.lowest is not None and item.highest is not None:
        parts.append(f"{_bound(item.lowest)} to {_bound(item.highest)}" + (f" {item.unit}" if item.unit else ""))
    if item.choices:
        parts.append(", ".join(f"`{choice}`" for choice in item.choices))
    if item.aliases:
        parts.append("also " + ", ".join(f"`{name}` for `{choice}`" for name, choice in item.aliases.items()))
    return "; ".join(parts)


def _bound(value: float) -> str:
    power = int(value).bit_length()
    if value > 2**16 and int(value) + 1 == 1 << power:
        return f"2^{power} - 1"
    return f"2^{power - 1}" if value > 2**16 and int(value) == 1 << (power - 1) else f"{value:g}"


def _sense(item: AttributeSpec) -> str:
    return " ".join(filter(None, (item.summary, item.constraint)))


def _value(value: Attribute) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value).strip('"')


def _attribute_record(item: AttributeSpec) -> dict[str, Any]:
    return {
        "name": item.name,
        "summary": item.summary,
        "types": [kind.value for kind in item.types],
        "default": item.default,
        "absent": item.absent,
        "lowest": item.lowest,
        "highest": item.highest,
        "choices": list(item.choices),
        "aliases": dict(item.aliases),
        "unit": item.unit,
        "constraint": item.constraint,
    }


def _call(item: Example) -> str:
    """The request in the form that names problems: ``gemm(a: fp32[64, 32], ...; unary=Relu)``."""
    request = item.request
    operands = [
        *(Operand(name, desc, Role.INPUT) for name, desc in request.inputs.items()),
        *(Operand(name, desc, Role.OUTPUT) for name, desc in request.outputs.items()),
    ]
    return problem_name(request.operation, operands, request.attributes)
