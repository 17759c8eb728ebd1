"""Groups whose commands are made when they are first asked for, commands whose options take several values, and ones
that take their options as they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

__all__ = ["AsGiven", "Root", "lazy_group", "with_lists"]


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


class AsGiven(TyperCommand):
    """A command that checks the values of its options itself: strings, lists of strings, and flags; None or an empty
    list where nothing was given.

    Typer makes a validator for every option, given or not: longer than all else that such a command does at its start.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)
        for parameter in found:
            parameter.process_value = partial(_as_given, parameter)
        return found


class Root(TyperGroup):
    """A group that makes validators only for those of its own options that are given."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)
        for parameter in found:
            parameter.process_value = partial(_if_given, parameter, type(parameter).process_value)
        return found


def _as_given(parameter: Any, ctx: Any, value: Any) -> Any:
    value = value if isinstance(value, (str, bool, list, tuple)) else None
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _if_given(parameter: Any, process: Callable[[Any, Any, Any], Any], ctx: Any, value: Any) -> Any:
    return _as_given(parameter, ctx, value) if value is None else process(parameter, ctx, value)


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
