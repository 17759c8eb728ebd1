"""`tilewright kernels validate`, `correct`, `register`, `unregister` and `import`: kernels that users declare."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.options import FullNames
from tilewright_tools.cli.console.output import (
    examples,
    note,
    out,
    print_error,
    print_json,
    progress,
    table,
    violation_line,
)
from tilewright_tools.cli.problems.config_file import configuration, configurations

if TYPE_CHECKING:
    import tilewright
    from tilewright import Kernel
    from tilewright.operations.kernels import Correction, Validation

__all__ = [
    "CORRECT",
    "IMPORT",
    "REGISTER",
    "UNREGISTER",
    "VALIDATE",
    "correct",
    "import_kernels",
    "register",
    "registered",
    "unregister",
    "validate",
]

VALIDATE = examples(
    "tilewright kernels validate config.json --arch gfx942",
    'echo \'{"dtype_a": "fp32", "tile": [100, 64, 64]}\' | tilewright kernels validate -',
)
CORRECT = examples("tilewright kernels correct config.json", "tilewright kernels correct config.json --json")
REGISTER = examples(
    "tilewright kernels register config.json",
    "tilewright kernels list --set registered",
    "tilewright run gemm 512 512 512 --dtype fp32 --kernel NAME --validate",
)
UNREGISTER = examples("tilewright kernels unregister NAME")
IMPORT = examples(
    "tilewright kernels export --name 'gemm_fp32_rcr*' -o kernels.json",
    "tilewright kernels import kernels.json",
    "tilewright kernels import dispatcher_registry.json --operation gemm",
)

_CONFIG = typer.Argument(help="JSON: a file, the text itself, or - for standard input.")
_OPERATION = typer.Option("", "--operation", help="Operation. Default: the one that the configuration tells.")
_NAMED = typer.Option("", "--operation", help="Operation. Default: whichever has the kernel.")
_ARCH = typer.Option("", "--arch", help="Architecture. Default: that of the server's device.")
_TARGET = typer.Option("", "--target", help="Server. Default: your own if it runs, else a private one.")
_JSON = typer.Option(False, "--json", help="Print JSON.")


def validate(
    config: str = _CONFIG,
    arch: str = _ARCH,
    operation: str = _OPERATION,
    target: str = _TARGET,
    as_json: bool = _JSON,
) -> None:
    """Check a configuration against every rule; exit code 1 if it breaks one."""
    from tilewright_tools.cli.private_server import connected

    name, record = configuration(config, operation)
    with connected(target) as client:
        found = client.kernels.validate(name, record, arch=arch)
    if not as_json:
        out().print(f"{'valid' if found.valid else 'invalid'}: {found.name}", markup=False)
        for item in found.violations:
            out().print(violation_line(item), markup=False)
    _judged(found, as_json)


def correct(
    config: str = _CONFIG,
    arch: str = _ARCH,
    operation: str = _OPERATION,
    target: str = _TARGET,
    as_json: bool = _JSON,
) -> None:
    """Mend a configuration by the fixes of the rules that it breaks; exit code 1 if none helps."""
    from tilewright_tools.cli.private_server import connected

    name, record = configuration(config, operation)
    with connected(target) as client:
        found = client.kernels.correct(name, record, arch=arch)
    if not as_json:
        for done, items in (("applied", found.applied), ("remaining", found.remaining)):
            for item in items:
                note(done + violation_line(item).removeprefix("  -"))
        note(f"{'valid' if found.valid else 'still invalid'}: {found.name}")
        print_json(found.config)
    _judged(found, as_json)


def _judged(found: Validation | Correction, as_json: bool) -> None:
    """End with what was found as JSON, if that is wanted, and with the exit code."""
    if as_json:
        print_json(asdict(found))
    if not found.valid:
        raise typer.Exit(Exit.FAILED)


def register(
    config: str = _CONFIG,
    arch: str = _ARCH,
    operation: str = _OPERATION,
    target: str = _TARGET,
    as_json: bool = _JSON,
) -> None:
    """Make a valid configuration a kernel that its name stands for, for all of your servers and programs.

    `run --kernel`, `kernels build`, `show`, `list`, `explain` and `export` know it from then on, and so does every
    client (`kernel="NAME"`), until it is unregistered. It is built at its first use.
    """
    from tilewright_tools.cli.private_server import connected

    name, record = configuration(config, operation)
    with connected(target) as client:
        found = client.kernels.register(record, name, arch=arch, shared=True)
    print_json(asdict(found)) if as_json else out().print(found.name, markup=False)


def unregister(
    name: str = typer.Argument(help="Kernel, by name."),
    operation: str = _NAMED,
    target: str = _TARGET,
) -> None:
    """Forget a kernel that was registered. What was built of it stays in the cache."""
    from tilewright_tools.cli.private_server import connected

    with connected(target) as client:
        client.kernels.unregister(name, operation)


def import_kernels(
    catalog: str = typer.Argument(help="What `kernels export` wrote, or Composable Kernel's JSON: a file, text, or -."),
    arch: str = typer.Option("", "--arch", help="Architecture. Default: each entry's own."),
    operation: str = typer.Option("", "--operation", help="Operation. Default: the one that each entry tells."),
    target: str = _TARGET,
    full_names: FullNames = False,
    as_json: bool = _JSON,
) -> None:
    """Register every kernel of a catalog; exit code 1 if one is not valid on its architecture.

    It reads what `tilewright kernels export` writes, the registry that Composable Kernel's dispatcher exports, lists of
    configurations, and single ones.
    """
    from tilewright import ConfigInvalidError, NotFoundError
    from tilewright_tools.cli.private_server import connected

    entries = configurations(catalog, operation)
    results: list[dict[str, Any]] = []
    with connected(target) as client, progress() as bar:
        for name, record, own in bar.track(entries, description="importing"):
            try:
                found = client.kernels.register(record, name, arch=arch or own, shared=True)
            except (ConfigInvalidError, NotFoundError) as error:  # noqa: PERF203 (each may be refused)
                results.append({"name": "", "arch": arch or own, "state": "refused", "reason": error.message})
                if not as_json:
                    print_error(error)
            else:
                results.append({"name": found.name, "arch": found.arch, "state": "registered", "reason": ""})
    refused = sum(item["state"] == "refused" for item in results)
    if as_json:
        print_json(results)
    else:
        rows = [(item["name"], item["arch"]) for item in results if item["state"] == "registered"]
        table("", ("kernel", "arch"), rows, full_names=full_names)
        note(f"{len(rows)} of {len(results)} kernels are registered")
    if refused:
        raise typer.Exit(Exit.FAILED)


def registered(client: tilewright.Client, operation: str, record: dict[str, Any], arch: str) -> Kernel | None:
    """The kernel of a configuration, registered for all; None where the server lets nobody share kernels."""
    from tilewright import AccessError

    try:
        return client.kernels.register(record, operation, arch=arch, shared=True)
    except AccessError as error:
        note(f"not registered: {error.message}")
        return None
