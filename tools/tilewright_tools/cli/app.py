"""The tree of commands. What is imported here imports nothing heavy, so that `--help` and completion stay quick."""

from __future__ import annotations

import typer

from tilewright_tools.cli.bundles import bundle
from tilewright_tools.cli.console.exits import EXIT_CODES_HELP
from tilewright_tools.cli.console.groups import AsGiven, Root
from tilewright_tools.cli.console.output import examples
from tilewright_tools.cli.demo import demo
from tilewright_tools.cli.kernels import kernels
from tilewright_tools.cli.machine import arch, cache, describe, doctor, plugins
from tilewright_tools.cli.problems.operations import bench_app, explain_app, run_app
from tilewright_tools.cli.service import health, perf, serve, sessions, stop, top

__all__ = ["app"]

app = typer.Typer(
    name="tilewright",
    help="Tilewright: a resident service for JIT-compiled tile kernels.",
    epilog=examples(
        "tilewright demo                                a tour in a minute",
        "tilewright serve                               serve on the default Unix socket",
        "tilewright run gemm 512 512 512 --validate     one product, checked",
        "tilewright doctor                              what this machine has and lacks",
    )
    + "\n\n"
    + EXIT_CODES_HELP,
    cls=Root,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve", cls=AsGiven, epilog=serve.EPILOG)(serve.serve)
app.command("stop", epilog=stop.EPILOG)(stop.stop)
app.command("demo", epilog=demo.EPILOG)(demo.demo)
app.add_typer(run_app, name="run")
app.add_typer(explain_app, name="explain")
app.add_typer(kernels.app, name="kernels")
app.add_typer(bench_app, name="bench")
app.add_typer(bundle.app, name="bundle")
app.add_typer(perf.app, name="perf")
app.add_typer(cache.app, name="cache")
app.add_typer(arch.app, name="arch")
app.command("health", epilog=health.HEALTH_EPILOG)(health.health)
app.command("status", epilog=health.STATUS_EPILOG)(health.status)
app.command("sessions", epilog=sessions.EPILOG)(sessions.sessions)
app.command("top", epilog=top.TOP_EPILOG)(top.top)
app.command("describe", epilog=describe.EPILOG)(describe.describe)
app.command("plugins", epilog=plugins.EPILOG)(plugins.plugins)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tilewright {version('tilewright')}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Tilewright: a resident service for JIT-compiled tile kernels."""
