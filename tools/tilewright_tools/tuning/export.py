"""From a database of measurements to the file that a plugin ships: ``python -m tilewright_tools.tuning.export``.

    python -m tilewright_tools.tuning.export --database perf.sqlite --arch sm_90a \\
        --out plugins/gemm/tilewright_gemm/measured/h200.jsonl

Of every problem the fastest few kernels are kept, with what the strategies read and nothing else; a problem of which
fewer were measured says too little to be shipped. Equal measurements give an equal file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tilewright_arch
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.operation import Operation
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.measurements import Measurement
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError
from tilewright_server.engine.measurements.database import Filter, PerfDatabase, best_rows
from tilewright_server.engine.measurements.exchange import read_file

__all__ = ["compact", "main", "shipped_lines"]

TOP = 3


def shipped_lines(
    rows: Iterable[Measurement], operations: Mapping[str, Operation[Any, Any]], top: int = TOP
) -> tuple[list[str], int]:
    """The lines of the file, and how many rows were left out because today's rules refuse their kernels."""
    usable, refused = [], 0
    for row in rows:
        operation = operations.get(row.operation)
        config = None if operation is None else _valid(row, operation)
        if config is None:
            refused += 1
        else:
            usable.append(replace(row, config=compact(config)))
    kept = [row for group in best_rows(usable, top) if len(group) >= top for row in group]
    return [json.dumps(_lean(row).to_dict(), separators=(",", ":"), sort_keys=True) for row in kept], refused


def compact(config: KernelConfig) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    defaults = type(config)().to_dict()
    return {name: value for name, value in config.to_dict().items() if value != defaults[name]}


def _valid(row: Measurement, operation: Operation[Any, Any]) -> KernelConfig | None:
    try:
        config: KernelConfig = operation.config_type.from_dict(row.config)
    except InvalidArgumentError:
        return None
    return config if operation.rules.allows(config, tilewright_arch.load(row.arch)) else None


def _lean(row: Measurement) -> Measurement:
    """Without what follows from the rest, and what only the machine's own records need."""
    return replace(
        row,
        kernel="",
        key="",
        toolchain="",
        conditions={},
        median_ns=float(round(row.median_ns)),
        p10_ns=0.0,
        p90_ns=0.0,
        error=None,
        date=row.date[:10],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tilewright_tools.tuning.export", description=__doc__)
    parser.add_argument(
        "--database", type=Path, required=True, help="a database, or a .jsonl or .parquet export of one"
    )
    parser.add_argument("--arch", required=True, help="architecture by id, for example sm_90a")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--operation", required=True)
    parser.add_argument("--device", default="", help="only devices whose names match this shell pattern")
    parser.add_argument("--top", type=int, default=TOP, help="kernels of each problem")
    given = parser.parse_args(arguments)
    try:
        rows = _rows(given.database, Filter(operation=given.operation, arch=given.arch, device=given.device))
        plugins = PluginManager()
        plugins.load_entry_points()
        lines, refused = shipped_lines(rows, plugins.operations, given.top)
        if not lines:
            raise NotFoundError(
                "there is nothing to ship",
                field="arch",
                value=given.arch,
                rule="ship",
                fix="sweep on a device of that architecture first, or ask for another one",
            )
    except (TilewrightError, tilewright_arch.ArchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    sys.stderr.write(f"{len(lines)} of {len(rows)} measurements written to {given.out}; {refused} were refused\n")
    return 0


def _rows(source: Path, wanted: Filter) -> list[Measurement]:
    if source.suffix in (".jsonl", ".parquet"):
        fitting = (row for row in read_file(source) if (row.operation, row.arch) == (wanted.operation, wanted.arch))
        return [row for row in fitting if not wanted.device or fnmatchcase(row.device, wanted.device)]
    if not source.is_file():
        raise NotFoundError(
            "there is no such database",
            field="database",
            value=str(source),
            rule="ship",
            fix="name a database or a file of measurements that exists",
        )
    return PerfDatabase(source).select(wanted)


if __name__ == "__main__":
    raise SystemExit(main())
