"""Common parts of the suites: their arguments, and the form of their tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Table:
    """Rows of values for people and programs; floats are rounded only when they are printed."""

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    threads: int
    quick: bool
    sample: bool = False
    """A few rows of each kind, measured as carefully as all: where there is no time for all of them."""


def main(measure: Callable[[Options], list[Table]]) -> int:
    """Run a suite as a program and write its tables where the caller wants them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sample", action="store_true")
    arguments = parser.parse_args()
    tables = measure(Options(arguments.threads, arguments.quick, arguments.sample))
    arguments.result.write_text(json.dumps([asdict(table) for table in tables]))
    return 0
