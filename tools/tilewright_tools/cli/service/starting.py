"""The work of `tilewright serve`, and reading of flags that are written out: the parser of all commands, which knows
more, takes a quarter of a server's start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tilewright_server import settings
from tilewright_server.settings import TABLE, Setting

__all__ = ["CONFIG", "LISTS", "names_of", "plain_flags", "run_server"]

CONFIG = "--config"
LISTS = ("names", "addresses")
"""Kinds of settings that may be given several times."""


def run_server(flags: Mapping[str, Any]) -> int:
    """Serve with the settings that flags, the environment and the file of ``config`` give; returns the exit status.

    Raises ``InvalidArgumentError``.
    """
    from tilewright_server.hosting.lifecycle.first_process import below_first_process

    given = {name: value for name, value in flags.items() if value not in (None, [], ())}
    file = given.pop("config", None)
    return below_first_process(partial(_serve, partial(settings.load, given, None if file is None else Path(file))))


def _serve(load: Callable[[], settings.Settings]) -> int:
    from tilewright_server.app import Application

    return Application(load(), load).run()


def names_of(row: Setting) -> list[str]:
    """Flags of a setting; names of lists read better in the singular where one is given at a time."""
    if row.kind in LISTS and row.flag.endswith("s"):
        return [row.flag[:-1], row.flag]
    return [row.flag]


def plain_flags(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Values by setting of flags as ``--name value``, ``--name=value``, ``--switch`` or ``--no-switch``; None if there
    is anything else, which is for the parser of all commands: it helps, completes and tells errors.
    """
    rows = {name: row for row in TABLE for name in names_of(row)}
    found: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        row = rows.get(name) or rows.get("--" + name.removeprefix("--no-"))
        if row is not None and row.kind == "flag" and not equals:
            found[row.name] = name == row.flag
            continue
        if name not in rows and name != CONFIG:
            return None
        text = value if equals else next(rest, "-")
        if (row is not None and row.kind == "flag") or text.startswith("-"):
            return None
        if row is not None and row.kind in LISTS:
            found.setdefault(row.name, []).append(text)
        else:
            found["config" if row is None else row.name] = text
    return found
