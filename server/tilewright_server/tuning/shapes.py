"""Lists of products: from files (CSV, JSON, JSON lines), by name, or written out."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tilewright_kit.errors import InvalidArgumentError
from tilewright_server.tuning.cases import Case

__all__ = ["NAMED", "read_shapes"]

Row = tuple[int, ...]

_LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
"""(n, k) of linear layers of models with 8 and 70 thousand million weights."""

NAMED: dict[str, tuple[Row, ...]] = {
    "tiny": ((16, 16, 16), (64, 48, 32), (33, 17, 65)),
    "squares": tuple((size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192)),
    "decode": tuple((m, n, k) for m, (n, k) in product((1, 4, 16, 64), _LAYERS)),
    "prefill": tuple((m, n, k) for m, (n, k) in product((128, 512, 2048, 4096), (*_LAYERS, (28672, 4096)))),
    "skinny": ((8192, 64, 4096), (8192, 128, 1024), (64, 8192, 4096), (16384, 32, 2048), (4096, 1, 4096)),
    "deep": ((64, 64, 16384), (128, 128, 32768), (256, 512, 16384), (512, 512, 8192)),
    "ragged": ((333, 777, 1111), (1000, 1000, 1000), (127, 129, 255), (5000, 3000, 1500), (2047, 2049, 511)),
    "batched": ((64, 64, 64, 64), (128, 128, 128, 32), (256, 256, 64, 16), (512, 512, 512, 8), (1024, 1024, 64, 32)),
    "large": ((8192, 8192, 28672), (8192, 28672, 8192), (16384, 8192, 8192)),
}  # fmt: skip
"""Lists by name: (m, n, k), and the batch if there is one."""

_WRITTEN = re.compile(r"(?:(\d+)[*:])?(\d+)x(\d+)x(\d+)")


def read_shapes(
    wanted: str, dtypes: Sequence[str] = ("fp32",), layouts: Sequence[str] = ("rcr",), stdin: Iterable[str] = ()
) -> list[Case]:
    """Cases from a comma-separated list of files, names of built-in lists, and shapes such as ``128x4096x4096`` or
    ``16*64x64x64``. ``-`` reads JSON lines or CSV from ``stdin``.

    Every row that names no type or layout stands for one case of each of ``dtypes`` and ``layouts``. Raises
    ``InvalidArgumentError`` that names file, line and column.
    """
    found: dict[Case, None] = {}
    for part in filter(None, (item.strip() for item in wanted.split(","))):
        for record, where in _records(part, stdin):
            present = {str(name).strip().lower() for name, value in record.items() if value not in ("", None)}
            for dtype in [""] if "dtype" in present else dtypes:
                for layout in [""] if "layout" in present else layouts:
                    defaults = {name: value for name, value in (("dtype", dtype), ("layout", layout)) if value}
                    found[Case.from_record(record, where, defaults)] = None
    if not found:
        raise InvalidArgumentError(
            "there are no shapes", field="shapes", value=wanted, rule="shapes", fix=f"use a file or {', '.join(NAMED)}"
        )
    return list(found)


def _records(part: str, stdin: Iterable[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    written = _WRITTEN.fullmatch(part)
    if written is not None:
        batch, m, n, k = written.groups(default="0")
        yield {"m": m, "n": n, "k": k, "batch": batch}, part
    elif part in NAMED:
        for row in NAMED[part]:
            yield dict(zip(("m", "n", "k", "batch"), row, strict=False)), part
    elif part == "-":
        yield from _parse("".join(stdin), "standard input", "")
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
                fix=f"name a file, a shape such as 128x4096x4096, or one of {', '.join(NAMED)}",
            ) from None
        yield from _parse(text, path.name, path.suffix)


def _parse(text: str, name: str, suffix: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    start = text.lstrip()[:1]
    if suffix in (".json", ".jsonl") or (not suffix and start in ("{", "[")):
        yield from _json(text, name)
    else:
        yield from _csv(text, name)


def _json(text: str, name: str) -> Iterator[tuple[Mapping[str, Any], str]]:
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
                lines.append((_object(line, f"{name}:{number}"), f"{name}:{number}"))
    for record, where in lines:
        if not isinstance(record, Mapping):
            raise _damaged(where, record, "is no JSON object")
        yield record, where


def _object(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _damaged(where, line, f"is no JSON ({error})") from None


def _csv(text: str, name: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows under a line of column names; without one, the columns are m, n, k and batch."""
    columns: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if columns is None:
            if not cells[0].isdigit():
                columns = cells
                continue
            columns = ["m", "n", "k", "batch"]
        if len(cells) > len(columns):
            raise _damaged(f"{name}:{number}", line, f"has {len(cells)} cells under {len(columns)} columns")
        yield dict(zip(columns, cells, strict=False)), f"{name}:{number}"


def _damaged(where: str, value: object, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{where}: the row {reason}",
        field="shapes",
        value=value,
        rule="shapes",
        fix='write CSV with the columns m,n,k, or JSON lines such as {"m": 128, "n": 4096, "k": 4096}',
    )
