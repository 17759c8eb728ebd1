"""Measurements in files: JSON lines, which need nothing, and Parquet, which needs ``pyarrow``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright_kit.selection.measurements import Measurement, read_lines
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, UnsupportedError

__all__ = ["parquet", "read_file", "read_parquet", "write_file", "write_parquet"]

_JSON = ("sizes", "config", "conditions")


def write_file(path: Path, rows: Iterable[Measurement]) -> int:
    """Write rows in the format that the name ends in (``.jsonl`` or ``.parquet``); returns how many.

    Raises ``InvalidArgumentError`` for another ending, ``UnsupportedError`` without ``pyarrow``.
    """
    records = [row.to_dict() for row in rows]
    if _is_parquet(path):
        for record in records:
            record.update({name: json.dumps(record[name]) for name in _JSON if name in record})
        write_parquet(path, records)
    else:
        path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records), "utf-8")
    return len(records)


def read_file(path: Path) -> list[Measurement]:
    """The rows of a file that ``write_file`` wrote. Raises ``NotFoundError``, and ``InvalidArgumentError`` that names
    the row and the entry."""
    if not path.is_file():
        raise NotFoundError(
            "there is no such file", field="file", value=str(path), rule="perf_file", fix="name a file that exists"
        )
    if not _is_parquet(path):
        try:
            return list(read_lines(path.read_text("utf-8").splitlines(), path.name))
        except UnicodeDecodeError as error:
            raise _unreadable(path, error) from None
    found = []
    for number, record in enumerate(read_parquet(path), 1):
        plain = {name: value for name, value in record.items() if value is not None}
        try:
            plain.update({name: json.loads(plain[name]) for name in _JSON if name in plain})
        except (ValueError, TypeError) as error:
            raise _unreadable(path, error) from None
        found.append(Measurement.from_dict(plain, f"{path.name}:{number}"))
    return found


def _is_parquet(path: Path) -> bool:
    if path.suffix not in (".jsonl", ".parquet"):
        raise InvalidArgumentError(
            f"measurements are kept in .jsonl or .parquet files, not {path.suffix or 'files without an ending'}",
            field="file",
            value=path.name,
            rule="perf_file",
            fix="name a file that ends in .jsonl or .parquet",
        )
    return path.suffix == ".parquet"


def _unreadable(path: Path, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the file cannot be read: {error}",
        field="file",
        value=path.name,
        rule="perf_file",
        fix="write it anew with `tilewright perf export`",
    )


def parquet() -> tuple[Any, Any]:
    """``pyarrow`` and its Parquet module. Raises ``UnsupportedError`` where it is not installed."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise UnsupportedError(
            "Parquet files need pyarrow, which is not installed",
            field="file",
            rule="parquet",
            fix="pip install 'tilewright[bench]', or use .jsonl",
        ) from None


def write_parquet(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Flat records as a table; a column for every name that any of them has."""
    arrow, files = parquet()
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {name: [record.get(name) for record in records] for name in names}
    files.write_table(arrow.table(columns), str(path), compression="zstd")


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The records of a table. Raises ``InvalidArgumentError`` for a file that is none."""
    arrow, files = parquet()
    try:
        rows: list[dict[str, Any]] = files.read_table(str(path)).to_pylist()
    except (OSError, arrow.ArrowInvalid) as error:
        raise _unreadable(path, error) from None
    return rows
