"""`tilewright serve`: the server in the foreground. Its flags are the rows of the settings table."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from tilewright_server.settings import TABLE, Setting
from tilewright_server.settings.reference import default_text
from tilewright_tools.cli.console.output import examples
from tilewright_tools.cli.service.starting import CONFIG, LISTS, names_of, run_server

__all__ = ["EPILOG", "serve"]

EPILOG = examples(
    "tilewright serve",
    "tilewright serve --listen unix:/tmp/tw.sock --listen 127.0.0.1:7070 --insecure",
    "tilewright serve --config server.toml --device cpu:0 --log-level debug",
    "tilewright serve --plugin cpu --plugin gemm",
)


def serve(**flags: Any) -> None:
    """Run the server until SIGINT or SIGTERM, which drain it: what runs is finished, new work is refused. SIGHUP reads
    the settings again.

    Every flag is also a line of the settings file (TOML, same name with underscores) and an environment variable
    (TILEWRIGHT_ and the name in capitals). Flags win over the environment, and that over the file.
    """
    code = run_server(flags)
    if code:
        raise typer.Exit(code)


def _parameter(row: Setting) -> inspect.Parameter:
    annotation: Any
    names = names_of(row)
    if row.kind == "flag":
        annotation, names = bool | None, [f"{row.flag}/--no-{row.flag[2:]}"]
    else:
        annotation = list[str] | None if row.kind in LISTS else str | None
    default = default_text(row)
    shown = f" Default: {default}." if default else ""
    # Values are checked by the settings module, which names the rule, and not twice.
    option = typer.Option(None, *names, help=row.doc.replace("[", "\\[") + shown, metavar=row.kind.upper())
    if row.kind == "flag":
        option = typer.Option(None, *names, help=row.doc + shown)
    return inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _signature() -> inspect.Signature:
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, CONFIG, help="Settings file (TOML).", metavar="FILE"),
        annotation=str | None,
    )
    return inspect.Signature([config, *(_parameter(row) for row in TABLE)])


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {name: parameter.annotation for name, parameter in inspect.signature(serve).parameters.items()}
