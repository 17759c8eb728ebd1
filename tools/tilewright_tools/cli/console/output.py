"""Output of commands: tables and progress for people, JSON for scripts, errors with field, value, rule and fix.

Results go to standard output, everything else to standard error, so that a pipe gets the result alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

__all__ = [
    "err",
    "examples",
    "kernel_text",
    "note",
    "out",
    "print_error",
    "print_explanation",
    "print_json",
    "progress",
    "table",
    "working",
]

_NAMES = ("kernel", "candidate", "best kernel")
"""Columns of names of kernels."""
_ALIAS = 9
"""Characters of an alias."""
_GAP = 2
"""Blanks between columns."""


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


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    full_names: bool = False,
    spare: Sequence[str] = (),
) -> None:
    """Print a table; the columns named in ``right`` are numbers. Into a pipe it goes as tab-separated values without a
    title.

    On a terminal names of kernels are cut to what the other columns leave, behind their aliases, unless ``full_names``
    are wanted: then they are folded. Of the columns ``spare`` those that are empty are left out there, and of the
    others, the first first, as many as have no room; a note says so.
    """
    cells = [[_cell(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *([cell.plain for cell in row] for row in cells)):
            sys.stdout.write("\t".join(re.sub(r"\s+", " ", str(part)) for part in line) + "\n")
        return
    from rich.table import Table

    console = out()
    left_out = _left_out(columns, cells, console.width, spare)
    kept = [index for index, name in enumerate(columns) if name not in left_out]
    columns, cells = [columns[index] for index in kept], [[row[index] for index in kept] for row in cells]
    if not full_names:
        _cut_names(columns, cells, console.width)
    grid = Table(title=title or None, title_justify="left", header_style="bold", box=None, padding=(0, _GAP, 0, 0))
    for name in columns:
        is_name = name in _NAMES
        grid.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=name in right or (is_name and not full_names),
        )
    for row in cells:
        grid.add_row(*row)
    console.print(grid)
    if any(left_out.values()):
        told = ", ".join(name for name, is_filled in left_out.items() if is_filled)
        note(f"no room for: {told} (pipes and --json have them)")


def kernel_text(name: str) -> str:
    """A kernel's alias and its name."""
    from tilewright_kit.config.naming import alias_of

    return f"{alias_of(name)} {name}"


def _cell(value: object) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text(str(value))


def _left_out(columns: Sequence[str], rows: Sequence[list[Text]], width: int, spare: Sequence[str]) -> dict[str, bool]:
    """Columns to leave out, and whether there is anything in them."""
    widths = {
        name: _ALIAS if name in _NAMES else max([len(name), *(row[index].cell_len for row in rows)])
        for index, name in enumerate(columns)
    }
    widths |= {name: max(widths[name], len(name)) for name in _NAMES if name in widths}
    filled = {name: any(row[columns.index(name)].plain for row in rows) for name in spare if name in widths}
    found = {name: False for name, is_filled in filled.items() if not is_filled}
    for name in filled:
        if sum(widths[item] + _GAP for item in columns if item not in found) <= width:
            break
        found.setdefault(name, True)
    return found


def _cut_names(columns: Sequence[str], rows: Sequence[list[Text]], width: int) -> None:
    """Put aliases before the names of kernels, and cut both to what is left of the line."""
    from rich.text import Text

    def widest(index: int) -> int:
        lines = [columns[index], *(line for row in rows for line in row[index].plain.splitlines())]
        return max(map(len, lines))

    names = [index for index, column in enumerate(columns) if column in _NAMES]
    others = sum(widest(index) for index in range(len(columns)) if index not in names)
    for index in names:
        room = max(_ALIAS, (width - others - _GAP * len(columns)) // len(names))
        for row in rows:
            name = row[index].plain
            text = kernel_text(name) if name and not name.startswith("(") else name
            short = text if len(text) <= room else (text[: room - 1] + "…" if room > _ALIAS + 6 else text[:_ALIAS])
            row[index] = Text(short, "dim")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on standard error what takes its time, for as long as it does; silent where that is not a terminal."""
    console = err()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


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


def print_explanation(found: dict[str, Any], label: str, top: int, *, full_names: bool = False) -> None:
    """The problem; the candidates in their order, with their times and what these come from; the refusals by rule; what
    decided, the runner-up, and what the chosen kernel's time is made of.
    """
    candidates = found["candidates"]
    rows = []
    for item in candidates[:top]:
        spread = item["spread_seconds"]
        rows.append((
            item["place"] or "", item["kernel"], _microseconds(item["predicted_seconds"]),
            " to ".join(map(_microseconds, spread)) if spread else "", item["source"],
            _microseconds(item["modelled_seconds"]),
        ))  # fmt: skip
    columns = ["", "candidate", "us", "10 to 90 %", "source", "model us"]
    useless = {"10 to 90 %": not any(row[3] for row in rows), "model us": all(row[4] == "model" for row in rows)}
    kept = [index for index, name in enumerate(columns) if not useless.get(name)]
    table(
        f"{label} on {found['device']} ({found['arch']})",
        [columns[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
        right=("us", "10 to 90 %", "model us"),
        full_names=full_names,
    )
    note(f"{len(candidates)} candidates considered; {found['refused_total']} kernels refused, by their first reasons:")
    for item in found["refused_by_rule"]:
        _note_folded(f"  {item['count']:>7}  {item['rule']}: {item['example']}", 11)
    out().print(f"decided by {found['decided']}", markup=False)
    if found["runner_up"]:
        slower = found["runner_up"]["slower_by"]
        told = "its time was not what decided" if slower is None else f"{slower * 100:.1f} % slower"
        out().print(f"runner-up {_short(found['runner_up']['kernel'], full_names)}: {told}", markup=False)
    parts = candidates[0]["parts"] if candidates and candidates[0]["source"] == "model" else {}
    if told := ", ".join(f"{name} {_microseconds(value)}" for name, value in parts.items() if value):
        out().print(f"the chosen kernel's time (us): {told}", markup=False)


def _note_folded(text: str, indent: int) -> None:
    """A line of standard error; on a terminal it is folded, what follows being indented."""
    import textwrap

    console = err()
    if console.is_terminal:
        text = textwrap.fill(text, console.width, subsequent_indent=" " * indent, break_on_hyphens=False)
    note(text)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _short(name: str, full_names: bool) -> str:
    """A kernel's name; its alias alone on a terminal, where names are long."""
    from tilewright_kit.config.naming import alias_of

    return name if full_names or not out().is_terminal else alias_of(name)
