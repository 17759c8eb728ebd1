"""What the documents say of commands is what the commands are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tilewright_tools.cli.app import app
from tilewright_tools.cli.console.exits import Exit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "command-line.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINE = re.compile(r"(?:^\$ |^|`)(tilewright [a-z][^\n`|]*)", re.MULTILINE)


def tree(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command under its words."""
    yield path, command
    shown = {name: part for name, part in getattr(command, "commands", {}).items() if not part.hidden}
    for name, part in shown.items():
        yield from tree(part, (*path, name))


COMMANDS = dict(tree(get_command(app)))
LEAVES = [path for path, command in COMMANDS.items() if not getattr(command, "commands", None)]


def test_the_page_of_commands_has_all_of_them_and_no_others() -> None:
    rows = re.findall(r"^\| `tilewright ([a-z ]+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(" ".join(path) for path in LEAVES)


def test_the_page_of_commands_has_every_exit_code() -> None:
    codes = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert [int(code) for code in codes] == [int(code) for code in Exit]


def fault(line: str) -> str:
    """What a command line says that no command knows; empty if it knows all."""
    words = shlex.split(line.partition("#")[0].rstrip("\\ &"))[1:]
    path: tuple[str, ...] = ()
    while words and (*path, words[0]) in COMMANDS:
        path = (*path, words.pop(0))
    if not path:
        return "no such command"
    if "..." in words:  # stands for several commands
        return ""
    known = {"-h", "--help"} | {name for item in COMMANDS[path].params for name in (*item.opts, *item.secondary_opts)}
    unknown = [word for word in words if len(word) > 1 and word[0] == "-" and word.partition("=")[0] not in known]
    return f"no option {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_in_documents_name_commands_and_options_that_exist(page: Path) -> None:
    wrong = {line: why for line in LINE.findall(page.read_text("utf-8")) if (why := fault(line))}
    assert wrong == {}


@pytest.mark.parametrize(
    "line", ["tilewright sing", "tilewright run gemm 1 1 1 --loudly", "tilewright serve --devices x"]
)
def test_what_does_not_exist_is_noticed(line: str) -> None:
    assert fault(line)
