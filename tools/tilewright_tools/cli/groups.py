"""Groups whose commands are made when they are first asked for: one for each operation that is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

__all__ = ["lazy_group"]


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
