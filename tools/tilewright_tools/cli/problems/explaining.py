"""What every command of `tilewright kernels explain` takes and does; the operation says what its problems are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from tilewright_tools.cli.options import AsJson, Device, Target, command_of, parameters_of, taken
from tilewright_tools.cli.output import print_explanation, print_json

__all__ = ["Question", "explained"]


@dataclass(frozen=True)
class Question:
    """What a command asks of."""

    operation: str
    inputs: Mapping[str, Any]
    """Descriptions, without memory."""
    attributes: Mapping[str, Any] = field(default_factory=dict)


def _options(
    strategy: Annotated[str, typer.Option(help="Way to choose a kernel.")] = "",
    kernel: Annotated[str, typer.Option(help="Why, or why not, this kernel.")] = "",
    device: Device = "",
    top: Annotated[int, typer.Option(min=1, help="Candidates to print.")] = 10,
    target: Target = "",
    as_json: AsJson = False,
) -> None:
    """The options of every command."""


def explained(problem: Callable[..., Any]) -> Callable[[Callable[[Any], Question]], Callable[..., None]]:
    """Makes a command of a function that makes a question of what ``problem`` returns. The command takes what
    ``problem`` takes, and the options of every command.
    """

    def wrap(command: Callable[[Any], Question]) -> Callable[..., None]:
        first, shared = parameters_of(problem), parameters_of(_options)

        def run(given: dict[str, Any]) -> None:
            _explain(command(problem(**taken(given, first))), **taken(given, shared))

        return command_of(run, command, first, shared)

    return wrap


def _explain(asked: Question, strategy: str, kernel: str, device: str, top: int, target: str, as_json: bool) -> None:
    from tilewright_tools.cli.private_server import connected

    with connected(target) as client:
        found = client.explain(
            asked.operation,
            asked.inputs,
            attributes=asked.attributes,
            strategy=strategy or None,
            kernel=kernel or None,
            device=device or None,
        )
    if as_json:
        print_json(found)
        return
    print_explanation(found, top)
