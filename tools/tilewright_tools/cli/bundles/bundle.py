"""`tilewright bundle`: files of launch plans with their code, which run without a server and a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright_tools.cli.bundles import building, running
from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.groups import lazy_group
from tilewright_tools.cli.console.output import examples, note, out, print_json, table
from tilewright_tools.cli.console.signing import KEY, check_signer

if TYPE_CHECKING:
    from tilewright_kit.contract.bundle import BundleIndex

__all__ = ["app"]


def _build_app() -> typer.Typer:
    """The command whose options are those of the installed operations."""
    made = typer.Typer(rich_markup_mode="rich")
    made.command("build", epilog=building.epilog())(building.build_command())
    made.callback()(lambda: None)
    return made


app = typer.Typer(
    cls=lazy_group(_build_app),
    help="Files of launch plans with their code, which run without a server and a compiler (docs/launching.md).",
    no_args_is_help=True,
    epilog=examples(
        "tilewright bundle build --journal server.journal -o model.twb",
        "tilewright bundle show model.twb",
        "tilewright bundle run model.twb",
    ),
)
app.command("run", epilog=running.EPILOG)(running.run)

_FILE = typer.Argument(help="Bundle.")
_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command("show", epilog=examples("tilewright bundle show model.twb", "tilewright bundle show model.twb --json"))
def show(file: Path = _FILE, as_json: bool = _JSON) -> None:
    """List the problems of a bundle with their architectures and kernels."""
    from tilewright_kit.contract.bundle import read_bundle_index

    index = read_bundle_index(file)
    if as_json:
        print_json(_record(index))
        return
    rows = [
        (item.name, item.arch, "\n".join(item.details.get("kernels", ())), item.details.get("count", ""))
        for item in index.entries
    ]
    table("", ("problem", "arch", "kernels", "asked for"), rows, right=("asked for",))
    note(f"{len(rows)} plans, {len(index.objects)} code objects, {index.nbytes / 1024:.0f} KiB")


def _record(index: BundleIndex) -> dict[str, object]:
    return {
        "bytes": index.nbytes,
        "problems": [
            {"name": item.name, "arch": item.arch, "plan_bytes": item.nbytes, **item.details} for item in index.entries
        ],
        "objects": [{"sha256": sha256.hex(), "bytes": size} for sha256, size in index.objects.items()],
    }


@app.command(
    "verify",
    epilog=examples("tilewright bundle verify model.twb", "tilewright bundle verify model.twb --key key.pub"),
)
def verify(file: Path = _FILE, key: Path | None = KEY) -> None:
    """Read all of a bundle, check every digest, and who signed it; exit code 1 if it is damaged or not signed so."""
    import tilewright
    from tilewright_kit.types.errors import AccessError
    from tilewright_tools.cli.console.output import print_error

    try:
        check_signer(file, key)
        with tilewright.load_bundle(file) as bundle:
            bundle.verify()
            count = len(bundle.problems)
    except (AccessError, tilewright.InvalidArgumentError) as error:
        print_error(error)
        raise typer.Exit(Exit.FAILED) from None
    out().print(f"whole: {count} plans", markup=False)
