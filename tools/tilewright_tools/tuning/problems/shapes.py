"""Lists of problems: from files (CSV, JSON, JSON lines), by name, or written out."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tilewright_kit.commands.cases import Case, CaseFamily
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["read_shapes"]


def read_shapes(
    family: CaseFamily, wanted: str, defaults: Mapping[str, Sequence[str]] | None = None, stdin: Iterable[str] = ()
) -> list[Case]:
    """Cases from a comma-separated list of files, names of the family's lists, and written shapes. ``-`` reads JSON
    lines or CSV from ``stdin``.

    Every row stands for one case of each combination of ``defaults`` for the columns that it does not name. Raises
    ``InvalidArgumentError`` that names file, line and column.
    """
    columns = defaults or {}
    found: dict[Case, None] = {}
    for part in filter(None, (item.strip() for item in wanted.split(","))):
        for record, where in _records(family, part, stdin):
            present = {str(name).strip().lower() for name, value in record.items() if value not in ("", None)}
            open_columns = {name: values for name, values in columns.items() if name not in present}
            for values in product(*open_columns.values()):
                chosen = {name: value for name, value in zip(open_columns, values, strict=True) if value}
                found[family.from_record(record, where, chosen)] = None
    if not found:
        fix = f"use a file or {', '.join(family.named)}"
        raise InvalidArgumentError("there are no shapes", field="shapes", value=wanted, rule="shapes", fix=fix)
    return list(found)


def _records(family: CaseFamily, part: str, stdin: Iterable[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    written = family.parse_text(part)
    if written is not None:
        yield written, part
    elif part in family.named:
        for row in family.named[part]:
            yield row, part
    elif part == "-":
        yield from _parse(family, "".join(stdin), "standard input", "")
    else:
        path = Path(part)
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "there is no such file or list" if isinstance(error, FileNotFoundError) else str(error)
            raise InvalidArgumentError(
                f"{part}: {reason}",
                field="shapes",
                value=part,
                rule="shapes",
                fix=f"name a file, a shape such as {family.example}, or one of {', '.join(family.named)}",
            ) from None
        yield from _parse(family, text, path.name, path.suffix)


def _parse(family: CaseFamily, text: str, name: str, suffix: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    start = text.lstrip()[:1]
    if suffix in (".json", ".jsonl") or (not suffix and start in ("{", "[")):
        yield from _json(family, text, name)
    else:
        yield from _csv(family, text, name)


def _json(family: CaseFamily, text: str, name: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """One object a line, or one list of objects."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, list):
        lines = [(item, f"{name}: item {place}") for place, item in enumerate(whole, 1)]
    else:
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                lines.append((_object(family, line, f"{name}:{number}"), f"{name}:{number}"))
    for record, where in lines:
        if not isinstance(record, Mapping):
            raise _damaged(family, where, record, "is no JSON object")
        yield record, where


def _object(family: CaseFamily, line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _damaged(family, where, line, f"is no JSON ({error})") from None


def _csv(family: CaseFamily, text: str, name: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows under a line of column names; without one, the columns are the family's plain ones."""
    columns: Sequence[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if columns is None:
            if not cells[0].isdigit():
                columns = cells
                continue
            columns = family.plain
        if len(cells) > len(columns):
            raise _damaged(family, f"{name}:{number}", line, f"has {len(cells)} cells under {len(columns)} columns")
        yield dict(zip(columns, cells, strict=False)), f"{name}:{number}"


def _damaged(family: CaseFamily, where: str, value: object, reason: str) -> InvalidArgumentError:
    row = {name: family.named["tiny"][0][name] for name in family.required}
    return InvalidArgumentError(
        f"{where}: the row {reason}",
        field="shapes",
        value=value,
        rule="shapes",
        fix=f"write CSV with the columns {','.join(family.required)}, or JSON lines such as {json.dumps(row)}",
    )
