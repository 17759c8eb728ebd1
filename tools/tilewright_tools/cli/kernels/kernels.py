"""`tilewright kernels`: what there is, how it is built, shown and exported."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.groups import lazy_group, with_lists
from tilewright_tools.cli.console.options import FullNames
from tilewright_tools.cli.console.output import (
    examples,
    note,
    out,
    print_error,
    print_json,
    progress,
    table,
)
from tilewright_tools.cli.kernels import analyze, declaring, generate
from tilewright_tools.cli.problems.config_file import configuration
from tilewright_tools.cli.problems.loading import default_operation
from tilewright_tools.cli.problems.operations import explain_app

__all__ = ["app"]


def _generate_app() -> typer.Typer:
    """The commands whose options are those of the installed operations."""
    made = typer.Typer(rich_markup_mode="rich")
    made.command("generate", cls=with_lists("--variants"), epilog=generate.EPILOG)(generate.generate_command())
    made.callback()(lambda: None)
    return made


app = typer.Typer(
    cls=lazy_group(_generate_app),
    help="What kernels there are, whether a configuration is valid, how it is built and why it is chosen.",
    no_args_is_help=True,
    epilog=examples(
        "tilewright kernels list --name 'gemm_bf16_rcr*'",
        "tilewright explain gemm 128 4096 4096 --dtype bf16",
        "tilewright kernels build --set default --name 'gemm_fp32_rcr*'",
    ),
)

app.add_typer(explain_app, name="explain", hidden=True)  # `tilewright explain`, which is meant, had this name

_OPERATION = typer.Option("", "--operation", help="Operation. Default: the first that is installed.")
_ANY_OPERATION = typer.Option("", "--operation", help="Operation. Default: whichever has the kernel.")
_ARCH = typer.Option("", "--arch", help="Architecture. Default: that of the server's device.")
_TARGET = typer.Option("", "--target", help="Server. Default: your own if it runs, else a private one.")
_JSON = typer.Option(False, "--json", help="Print JSON.")
_NAME = typer.Option("", "--name", help="Only names that match this shell pattern.")
_SET = typer.Option("", "--set", help="Only this kernel set.")


@app.command(
    "list",
    epilog=examples(
        "tilewright kernels list",
        "tilewright kernels list --sets",
        "tilewright kernels list --arch gfx942 --set fp16_rcr_essential --json",
    ),
)
def list_kernels(
    name: str = _NAME,
    kernel_set: str = _SET,
    arch: str = _ARCH,
    operation: str = _OPERATION,
    limit: int = typer.Option(0, help="At most so many; 0: all."),
    sets: bool = typer.Option(False, "--sets", help="Print the names of the kernel sets instead."),
    target: str = _TARGET,
    full_names: FullNames = False,
    as_json: bool = _JSON,
) -> None:
    """List kernels, and which of them are built."""
    from tilewright_tools.cli.private_server import connected

    with connected(target) as client:
        if sets:
            names = client.kernels.sets(operation or default_operation())
            print_json(names) if as_json else sys.stdout.write("".join(f"{item}\n" for item in names))
            return
        found = client.kernels.list(
            operation or default_operation(), kernel_set=kernel_set, arch=arch, name=name, limit=limit
        )
    if as_json:
        print_json([asdict(kernel) for kernel in found])
        return
    rows = [(item.name, item.arch, "yes" if item.built else "", "yes" if item.registered else "") for item in found]
    table("", ("kernel", "arch", "built", "registered"), rows, full_names=full_names)
    note(f"{len(found)} kernels, {sum(item.built for item in found)} of them built")


@app.command(
    "show", epilog=examples("tilewright kernels show NAME", "tilewright kernels show NAME --source > kernel.cpp")
)
def show(
    name: str = typer.Argument(help="Kernel, by name."),
    arch: str = _ARCH,
    operation: str = _ANY_OPERATION,
    source: bool = typer.Option(False, "--source", help="Print its generated source alone."),
    config: bool = typer.Option(False, "--config", help="Print its configuration alone, as JSON, to be edited."),
    target: str = _TARGET,
    as_json: bool = _JSON,
) -> None:
    """Show a kernel's configuration, source and build log."""
    from tilewright_kit.config.naming import alias_of
    from tilewright_tools.cli.private_server import connected

    with connected(target) as client:
        found = client.kernels.describe(name, operation=operation, arch=arch, source=True)
    if as_json:
        print_json(asdict(found))
    elif source:
        sys.stdout.write(found.source)
    elif config:
        print_json({"operation": found.kernel.operation, **found.config})
    else:
        rows = [
            ("name", found.kernel.name),
            ("alias", alias_of(found.kernel.name)),
            ("arch", found.kernel.arch),
            ("key", found.kernel.key),
        ]
        rows += [("built", "yes" if found.kernel.built else "no")]
        table("", ("field", "value"), [*rows, *((key, _plain(value)) for key, value in found.config.items())])
        out().print(found.source, markup=False)
        if found.log:
            note(found.log)


@app.command(
    "build",
    epilog=examples(
        "tilewright kernels build NAME NAME",
        "tilewright kernels build --name 'gemm_fp32_rcr*'",
        "tilewright kernels build --config config.json --retry-failed",
    ),
)
def build(
    names: list[str] = typer.Argument(None, help="Kernels, by name."),
    name: str = _NAME,
    kernel_set: str = _SET,
    config: str = typer.Option("", "--config", help="Build this configuration: a file, JSON text, or -."),
    arch: str = _ARCH,
    operation: str = _ANY_OPERATION,
    retry_failed: bool = typer.Option(False, "--retry-failed", help="Forget cached failures and try again."),
    target: str = _TARGET,
    full_names: FullNames = False,
    as_json: bool = _JSON,
) -> None:
    """Build kernels into the cache, with progress; exit code 1 if one fails. A configuration is registered as well, so
    that its kernel can be named from then on.
    """
    from tilewright_tools.cli.private_server import connected

    if not (names or name or kernel_set or config):
        raise typer.BadParameter("say what to build: names, --name, --set or --config")
    chosen, record = list(names or ()), None
    if config:
        operation, record = configuration(config, operation)
    with connected(target) as client, progress() as bar:
        if record is not None and (declared := declaring.registered(client, operation, record, arch)):
            chosen, record = [*chosen, declared.name], None  # its name works from now on
        task = bar.add_task("building", total=None)
        results = client.kernels.build(
            chosen,
            operation=operation,
            kernel_set=kernel_set,
            arch=arch,
            pattern=name,
            config=record,
            retry_failed=retry_failed,
            progress=lambda event: bar.update(task, total=event.total or None, completed=event.done),
        )
    failed = [event for event in results if event.state == "failed"]
    if as_json:
        print_json(
            [
                {"name": event.name, "state": event.state, "seconds": event.seconds, "error": _error(event.error)}
                for event in results
            ]
        )
    else:
        rows = [(event.name, event.state, f"{event.seconds * 1e3:.0f}") for event in results]
        table("", ("kernel", "state", "ms"), rows, right=("ms",), full_names=full_names)
        for event in failed:
            if event.error is not None:
                print_error(event.error)
        note(f"{len(results) - len(failed)} of {len(results)} kernels are built")
    if failed:
        raise typer.Exit(Exit.FAILED)


@app.command("export", epilog=examples("tilewright kernels export --statistics > kernels.json"))
def export(
    name: str = _NAME,
    kernel_set: str = _SET,
    arch: str = _ARCH,
    operation: str = _OPERATION,
    statistics: bool = typer.Option(
        False, "--statistics", help="Add counts by element type, pipeline, layout and arch."
    ),
    output: Path | None = typer.Option(None, "--output", "-o", help="File to write. Default: standard output."),
    target: str = _TARGET,
) -> None:
    """Write the catalog as JSON, in Composable Kernel's schema."""
    from tilewright_tools.cli.private_server import connected

    with connected(target) as client:
        found = client.kernels.export(
            operation or default_operation(), kernel_set=kernel_set, arch=arch, name=name, statistics=statistics
        )
    if output is None:
        print_json(found)
    else:
        output.write_text(json.dumps(found, indent=2) + "\n")
        note(f"written to {output}")


app.command("validate", epilog=declaring.VALIDATE)(declaring.validate)
app.command("correct", epilog=declaring.CORRECT)(declaring.correct)
app.command("register", epilog=declaring.REGISTER)(declaring.register)
app.command("unregister", epilog=declaring.UNREGISTER)(declaring.unregister)
app.command("import", epilog=declaring.IMPORT)(declaring.import_kernels)
app.command("analyze", epilog=analyze.EPILOG)(analyze.analyze)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " x ".join(str(item) for item in value)
    return str(value)


def _error(error: Any) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"code": error.code, "message": error.message, "fix": error.fix, "log_tail": error.log_tail}
