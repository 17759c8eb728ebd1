"""Groups whose commands are made when they are first asked for, and commands whose options take several values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

__all__ = ["lazy_group", "with_lists"]


def lazy_group(make: Callable[[], typer.Typer]) -> type[TyperGroup]:
    """A class of groups that take the commands of ``make()`` beside their own, at the first look at any of them."""

    class LazyGroup(TyperGroup):
        _made = False

        def __getattribute__(self, name: str) -> Any:
            if name == "commands" and not self._made:
                self._made = True
                made: Any = get_command(make())
                super().__getattribute__("commands").update(made.commands)
            return super().__getattribute__(name)

    return LazyGroup


def with_lists(*options: str) -> type[TyperCommand]:
    """A class of commands without arguments of their own, whose ``options`` may be followed by several values."""

    class ListCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: Sequence[str]) -> list[str]:
            parsed: list[str] = super().parse_args(ctx, list(_spread(args, options)))
            return parsed

    return ListCommand


def _spread(arguments: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """``--name a b`` as ``--name a --name b``."""
    name, values = "", 0
    for argument in arguments:
        if argument.startswith("-"):
            name, values = argument if argument in options else "", 0
        elif name:
            values += 1
            if values > 1:
                yield name
        yield argument
