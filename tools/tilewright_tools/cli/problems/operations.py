"""`tilewright run`, `tilewright explain` and `tilewright bench`: a command for each installed operation."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tilewright_kit.commands.problem_command import ProblemCommand
from tilewright_tools.cli.console.groups import lazy_group
from tilewright_tools.cli.console.output import examples
from tilewright_tools.cli.problems.explaining import explain_command
from tilewright_tools.cli.problems.running import run_command
from tilewright_tools.cli.problems.sweeping import bench_command

__all__ = ["bench_app", "explain_app", "run_app"]

_RUN = "Run one operation on random data."
_EXPLAIN = "Say which kernel a problem would run, what was predicted of the others, and why the rest was rejected."
_BENCH = "Build, check and time kernels on a device of this machine, without a server."


def _app(words: str, text: str, make: Callable[[ProblemCommand], Callable[..., None]], *shown: str) -> typer.Typer:
    """A group of commands, one for each declaration; ``words`` call it, its last word names its examples."""
    kind = words.split()[-1]

    def commands() -> typer.Typer:
        from tilewright_kit.commands.discovery import installed_commands

        app = typer.Typer(rich_markup_mode="rich")
        for name, command in installed_commands().items():
            lines = (f"tilewright {words} {name} {line}" for line in command.examples[kind])
            app.command(name, epilog=examples(*lines))(make(command))
        app.callback()(lambda: None)
        return app

    group = typer.Typer(
        help=text,
        no_args_is_help=True,
        cls=lazy_group(commands),
        epilog=examples(*(f"tilewright {words} {line}" for line in shown)),
    )
    group.callback()(lambda: None)
    return group


run_app = _app("run", _RUN, run_command, "--help", "OPERATION --help")
explain_app = _app("explain", _EXPLAIN, explain_command, "--help", "OPERATION --help")
bench_app = _app("bench", _BENCH, bench_command, "--help", "OPERATION --help")
