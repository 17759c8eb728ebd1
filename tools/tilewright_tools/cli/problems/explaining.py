"""`tilewright explain OPERATION`: which kernel a problem would run, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_kit.commands.problem_command import ProblemCommand
from tilewright_tools.cli.console.options import AsJson, Device, FullNames, Target, command_of, parameters_of, taken
from tilewright_tools.cli.console.output import print_explanation, print_json, working
from tilewright_tools.cli.problems.parameters import check_words, signature_of

if TYPE_CHECKING:
    from tilewright_tools.cli.problems.loading import Loaded

__all__ = ["explain_command"]


def _options(
    strategy: Annotated[str, typer.Option(help="Way to choose a kernel.")] = "",
    kernel: Annotated[str, typer.Option(help="Why, or why not, this kernel.")] = "",
    config: Annotated[str, typer.Option(help="Why, or why not, this configuration: a file or JSON.")] = "",
    device: Device = "",
    top: Annotated[int, typer.Option(min=1, help="Candidates to print.")] = 10,
    target: Target = "",
    full_names: FullNames = False,
    as_json: AsJson = False,
) -> None:
    """The options of every command."""


def explain_command(command: ProblemCommand) -> Callable[..., None]:
    """The command that explains the choice of a kernel for problems of one declaration."""
    declared = (*command.problem, *command.steps)
    own, shared = signature_of(declared), parameters_of(_options)

    def run(given: dict[str, Any]) -> None:
        from tilewright_tools.cli.problems.loading import case_of, load

        check_words(declared, given)
        problem = taken(given, own)
        _explain(load(command, case_of(command, problem)), **taken(given, shared))

    text = (
        f"Say which kernel {command.noun} would run, what was predicted of the others, and why the rest was rejected."
    )
    return command_of(run, command.name, text, own, shared)


def _explain(
    loaded: Loaded,
    strategy: str,
    kernel: str,
    config: str,
    device: str,
    top: int,
    target: str,
    full_names: bool,
    as_json: bool,
) -> None:
    from tilewright_tools.cli.private_server import connected
    from tilewright_tools.cli.problems.config_file import fields_of
    from tilewright_tools.cli.problems.loading import prepared, specs

    with connected(target) as client, working("asking every kernel"):
        found = client.explain(
            loaded.operation.name,
            prepared(client, loaded, specs(loaded.request), device or None),
            attributes=loaded.request.attributes,
            strategy=strategy or None,
            kernel=kernel or None,
            device=device or None,
            config=fields_of(config, loaded) if config else None,
        )
    if as_json:
        print_json(found)
        return
    print_explanation(found, f"{loaded.command.name} {loaded.case.label}", top, full_names=full_names)
