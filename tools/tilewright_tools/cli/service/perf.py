"""`tilewright perf`: the database of measurements. Works on the file itself, so no server has to run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright_tools.cli.console.options import FullNames
from tilewright_tools.cli.console.output import examples, note, print_json, table
from tilewright_tools.cli.service.learning import evaluate, train

if TYPE_CHECKING:
    from tilewright_kit.selection.measurements import Measurement
    from tilewright_server.engine.measurements.database import Filter, PerfDatabase

__all__ = ["app"]

app = typer.Typer(
    help="What was measured on this machine (`tilewright bench --record`), by which the server chooses kernels.",
    no_args_is_help=True,
    epilog=examples(
        "tilewright perf best --operation gemm",
        "tilewright perf export h200.parquet --arch sm_90a",
        "tilewright perf import h200.parquet other.jsonl",
        "tilewright perf prune --superseded",
        "tilewright perf evaluate bench/data/gemm_h200_bf16.parquet",
    ),
)
app.command("train", epilog=examples("tilewright perf train oracle.parquet --out h200.npz"))(train)
app.command("evaluate", epilog=examples("tilewright perf evaluate oracle.parquet --holdout other.parquet"))(evaluate)

_DATABASE = typer.Option(None, "--database", help="The file. Default: the one that the server uses.")
_OPERATION = typer.Option("", "--operation", help="Only this operation.")
_ARCH = typer.Option("", "--arch", help="Only this architecture.")
_DEVICE = typer.Option("", "--device", help="Only devices whose names match this shell pattern.")
_KERNEL = typer.Option("", "--kernel", help="Only kernels whose names match this shell pattern.")
_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command(
    "list", epilog=examples("tilewright perf list --limit 20", "tilewright perf list --kernel '*_ws_*' --json")
)
def list_rows(
    operation: str = _OPERATION,
    arch: str = _ARCH,
    device: str = _DEVICE,
    kernel: str = _KERNEL,
    limit: int = typer.Option(0, min=0, help="At most so many; 0: all."),
    database: Path | None = _DATABASE,
    full_names: FullNames = False,
    as_json: bool = _JSON,
) -> None:
    """List measurements, oldest first."""
    rows = _open(database).select(_filter(operation, arch, device, kernel), limit)
    if as_json:
        print_json([row.to_dict() for row in rows])
        return
    _print(rows, full_names)
    note(f"{len(rows)} measurements")


@app.command("best", epilog=examples("tilewright perf best --arch sm_90a", "tilewright perf best --top 3 --json"))
def best(
    operation: str = _OPERATION,
    arch: str = _ARCH,
    device: str = _DEVICE,
    kernel: str = _KERNEL,
    top: int = typer.Option(1, min=1, help="Kernels of each problem."),
    database: Path | None = _DATABASE,
    full_names: FullNames = False,
    as_json: bool = _JSON,
) -> None:
    """Show the fastest kernels of every problem."""
    from tilewright_server.engine.measurements.database import best_rows

    groups = best_rows(_open(database).select(_filter(operation, arch, device, kernel)), top)
    if as_json:
        print_json([[row.to_dict() for row in rows] for rows in groups])
        return
    _print([row for rows in groups for row in rows], full_names)
    note(f"{len(groups)} problems")


@app.command("export", epilog=examples("tilewright perf export today.jsonl", "tilewright perf export h200.parquet"))
def export(
    file: Path = typer.Argument(help="File to write, .jsonl or .parquet."),
    operation: str = _OPERATION,
    arch: str = _ARCH,
    device: str = _DEVICE,
    kernel: str = _KERNEL,
    database: Path | None = _DATABASE,
) -> None:
    """Write measurements to a file, for other machines."""
    from tilewright_server.engine.measurements.exchange import write_file

    count = write_file(file, _open(database).select(_filter(operation, arch, device, kernel)))
    note(f"{count} measurements written to {file}")


@app.command("import", epilog=examples("tilewright perf import h200.parquet today.jsonl"))
def import_(
    files: list[Path] = typer.Argument(help="Files that `tilewright perf export` wrote, or other databases."),
    database: Path | None = _DATABASE,
) -> None:
    """Add the measurements of files; one of the same kernel, problem, device and second takes the other's place."""
    rows = [row for file in files for row in _read(file)]
    added = _open(database).record(rows)
    note(f"{added} measurements added, {len(rows) - added} were there already")


@app.command("prune", epilog=examples("tilewright perf prune --superseded", "tilewright perf prune --older 90"))
def prune(
    operation: str = _OPERATION,
    arch: str = _ARCH,
    device: str = _DEVICE,
    kernel: str = _KERNEL,
    older: float = typer.Option(0.0, min=0.0, help="Only what was measured so many days ago or earlier."),
    superseded: bool = typer.Option(False, "--superseded", help="Only what was measured again later."),
    everything: bool = typer.Option(False, "--all", help="Needed to remove all there is."),
    database: Path | None = _DATABASE,
) -> None:
    """Remove measurements."""
    from dataclasses import replace

    wanted = _filter(operation, arch, device, kernel)
    if older:
        wanted = replace(wanted, before=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - older * 86400)))
    if not (superseded or everything or wanted.where()[1]):
        raise typer.BadParameter("say what to remove: a filter, --older, --superseded or --all")
    removed = _open(database).prune(wanted, superseded=superseded)
    note(f"{removed} measurements removed")


def _read(file: Path) -> list[Measurement]:
    from tilewright_server.engine.measurements.database import PerfDatabase
    from tilewright_server.engine.measurements.exchange import read_file

    is_database = file.suffix in (".sqlite", ".db") and file.is_file()
    return PerfDatabase(file).select() if is_database else read_file(file)


def _open(database: Path | None) -> PerfDatabase:
    from tilewright_server import settings
    from tilewright_server.engine.measurements.database import PerfDatabase

    found = settings.load({"perf_database": database}).perf_database
    assert found is not None, "settings.load always says where"
    return PerfDatabase(found)


def _filter(operation: str, arch: str, device: str, kernel: str) -> Filter:
    from tilewright_server.engine.measurements.database import Filter

    if arch:
        import tilewright_arch

        tilewright_arch.load(arch)  # raises for one that nothing can have been measured on
    return Filter(operation, arch, device, kernel)


def _print(rows: list[Measurement], full_names: bool) -> None:
    columns = ("problem", "kind", "us", "TFLOP/s", "kernel", "device", "date")
    table("", columns, [_cells(row) for row in rows], right=("us", "TFLOP/s"), full_names=full_names)


def _cells(row: Measurement) -> tuple[str, ...]:
    rate = f"{row.flops / row.median_ns / 1e3:.4g}" if row.flops else ""
    us = f"{row.median_ns / 1e3:.4g}"
    # Steps that are left out are no news.
    kind = " ".join(word for word in row.signature.split(" ") if not word.endswith(("=none", "=PassThrough")))
    return (row.point.text, kind, us, rate, row.kernel, f"{row.device} ({row.arch})", row.date[:10])
