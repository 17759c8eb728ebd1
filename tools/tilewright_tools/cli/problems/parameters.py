"""Options of the command line from parameters that operations declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from tilewright_kit.commands.parameters import REQUIRED, Parameter

__all__ = ["check_words", "signature_of"]


def signature_of(parameters: Iterable[Parameter], panel: str | None = None) -> list[inspect.Parameter]:
    """Parameters of a function that is called with the values of ``parameters``; ``panel`` heads them in help texts."""
    return [_parameter(item, panel) for item in parameters]


def check_words(parameters: Sequence[Parameter], given: Mapping[str, Any]) -> None:
    """Raise ``typer.BadParameter`` for a value that is none of a parameter's words."""
    for item in parameters:
        value = given[item.name]
        if item.strict and value not in ("", None) and value not in item.words:
            raise typer.BadParameter(f"use one of {', '.join(item.words)}", param_hint=_flag(item))


def _parameter(item: Parameter, panel: str | None) -> inspect.Parameter:
    more: dict[str, Any] = {"help": item.help}
    if item.metavar:
        more["metavar"] = item.metavar
    if item.least is not None:
        more["min"] = item.least
    if item.words:
        more["autocompletion"] = _completing(item.words)
    if item.positional:
        mark: Any = typer.Argument(**more)
    else:
        mark = typer.Option(*item.flags, rich_help_panel=panel, show_default=panel is None, **more)
    kind: Any = list[item.kind] if item.repeated else item.kind  # type: ignore[name-defined]
    if item.default is None:
        kind = kind | None
    default: Any = list(item.default) if item.repeated else item.default
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is REQUIRED else default,
        annotation=Annotated[kind, mark],
    )


def _completing(words: Sequence[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def _flag(item: Parameter) -> str:
    return item.flags[0] if item.flags else f"--{item.name.replace('_', '-')}"
