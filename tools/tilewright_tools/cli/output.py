"""Output of commands: tables and progress for people, JSON for scripts, errors with field, value, rule and fix.

Results go to standard output, everything else to standard error, so that a pipe gets the result alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["err", "examples", "note", "out", "print_error", "print_explanation", "print_json", "progress", "table"]


def out() -> Console:
    """The console of results. Does not wrap what goes into a pipe."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200, highlight=False)


def err() -> Console:
    """The console of notes, progress and errors."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def note(text: str) -> None:
    """A line for people, on standard error."""
    err().print(text, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table; the columns named in ``right`` are numbers."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title or None, title_justify="left", header_style="bold")
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    out().print(grid)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on standard error; silent where that is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def examples(*lines: str) -> str:
    """Text for the end of a command's help."""
    # A blank line is a line break there, and an opening bracket would be markup.
    return "\n\n".join(["Examples:", *(f"  {line}".replace("[", "\\[") for line in lines)])


def print_error(error: Any) -> None:
    """An error in full: reason, field, value, rule, fix, every violation, and the end of a compiler's output."""
    console = err()
    console.print("[bold red]error:[/] ", end="")
    console.print(str(getattr(error, "reason", "") or getattr(error, "message", "") or error), markup=False)
    for name in ("code", "field", "value", "rule", "fix"):
        value = getattr(error, name, "")
        if value not in ("", None):
            console.print(f"  {name + ':':6} {value}", markup=False)
    for violation in getattr(error, "violations", ()):
        console.print(violation_line(violation), markup=False)
    retry = getattr(error, "retry_after_s", None) or getattr(error, "retry_after", None)  # the kit's name, the client's
    if retry:
        console.print(f"  retry: in {retry:g} s", markup=False)
    log = str(getattr(error, "log_tail", "") or "").strip()
    if log:
        console.print("  log:", markup=False)
        for line in log.splitlines():
            console.print(f"    {line}", markup=False)


def violation_line(violation: Any) -> str:
    """A broken rule on one line. Takes the kit's form and the protocol's."""
    fix = ", ".join(f"{name}={value}" for name, value in dict(violation.fix).items())
    text = f"  - {violation.rule}: {violation.field} = {violation.value}: {violation.reason}"
    return f"{text} (fix: {fix})" if fix else text


def print_explanation(found: dict[str, Any], top: int) -> None:
    """The candidates in their order with what their time is made of, a few refusals, and what decided."""
    parts = list(dict.fromkeys(name for item in found["candidates"] for name in item["parts"]))
    rows = []
    for item in found["candidates"][:top]:
        seconds = [item["predicted_seconds"], *(item["parts"].get(name) for name in parts)]
        rows.append(
            (item["place"] or "", item["kernel"], *(f"{value * 1e6:.1f}" if value else "" for value in seconds))
        )
    columns = ("", "candidate", "us", *parts)
    table(f"{len(found['candidates'])} candidates on {found['device']}", columns, rows, right=("us", *parts))
    refused = found["refused"]
    if refused:
        note(f"{found['refused_total']} refused, for example:")
        for item in refused[:3]:
            note(f"  {item['kernel']}: {'; '.join(part['reason'] for part in item['violations'])}")
    out().print(f"decided by {found['decided']}", markup=False)
