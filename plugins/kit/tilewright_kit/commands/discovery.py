"""The commands about problems that are installed, by entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from tilewright_kit.commands.problem_command import ENTRY_POINT_GROUP, ProblemCommand

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["command_of", "installed_commands"]


@cache
def installed_commands() -> Mapping[str, ProblemCommand]:
    """Declarations by their words, in the order in which they are shown. One that cannot be imported is left out with a
    warning, so that a broken plugin breaks no other command.
    """
    found: list[ProblemCommand] = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            command = entry.load()
        except Exception as error:  # whatever a foreign module raises
            import warnings

            warnings.warn(f"the command {entry.name!r} cannot be loaded: {error}", RuntimeWarning, stacklevel=2)
            continue
        if isinstance(command, ProblemCommand):
            found.append(command)
    return {command.name: command for command in sorted(found, key=lambda item: (item.rank, item.name))}


def command_of(operation: str) -> ProblemCommand:
    """The declaration that knows the problems of an operation. Raises ``NotFoundError``."""
    commands = installed_commands()
    for command in commands.values():
        if operation in command.family().operations:
            return command
    from tilewright_kit.types.errors import NotFoundError

    known = [name for command in commands.values() for name in command.family().operations]
    raise NotFoundError(
        f"no command knows problems of {operation!r}",
        field="operation",
        value=operation,
        rule="command_known",
        fix=f"use one of {', '.join(known)}",
    )
