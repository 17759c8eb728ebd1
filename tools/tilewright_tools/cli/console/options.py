"""Commands that share arguments: one declaration of each, put together to what the command line shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

__all__ = ["AsJson", "Device", "FullNames", "Target", "command_of", "parameters_of", "taken"]

Device = Annotated[str, typer.Option(help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's.")]
Target = Annotated[str, typer.Option(help="Server. Default: your own if it runs, else a private one.")]
FullNames = Annotated[bool, typer.Option("--full-names", help="Whole names of kernels, not what fits behind aliases.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Parameters = list[inspect.Parameter]


def parameters_of(function: Callable[..., Any], leaving_out: int = 0) -> Parameters:
    """The parameters of a function, but for its first few."""
    return list(inspect.signature(function, eval_str=True).parameters.values())[leaving_out:]


def taken(given: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """The given arguments that these parameters name."""
    return {item.name: given[item.name] for item in parameters}


def command_of(run: Callable[[dict[str, Any]], None], name: str, text: str, *parts: Parameters) -> Callable[..., None]:
    """A command with a name and a help text that takes all parameters of ``parts`` in their order, and calls ``run``
    with the arguments by name.
    """

    def command(**given: Any) -> None:
        run(given)

    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in parts for item in part]
    command.__name__, command.__doc__ = name, text
    command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    return command
