"""`tilewright perf train` and `perf evaluate`: learned models from the results of oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright_tools.cli.console.output import note, print_json, table

if TYPE_CHECKING:
    from tilewright_kit.contract.device import DeviceInfo
    from tilewright_kit.contract.operation import Operation
    from tilewright_tools.tuning.results import Result

__all__ = ["evaluate", "train"]

_OPERATION = typer.Option("", "--operation", help="Operation, of files that have several of them.")
_FILES = typer.Argument(help="Results of `tilewright bench OPERATION --oracle`: .parquet, .jsonl or .csv.")


def train(
    files: list[Path] = _FILES,
    wanted: str = _OPERATION,
    out: Path = typer.Option(..., "--out", help="Model to write, .npz; plugins ship it in their folder `measured`."),
    checked: list[Path] = typer.Option(
        [], "--checked", help="Results with checks: the model may choose only kernels that were right there."
    ),
    classes: list[str] = typer.Option(
        [], "--class", help="Class of problems that the model may choose for, of those measured. Default: all of them."
    ),
) -> None:
    """Fit a learned model to measurements of one device."""
    from tilewright_kit.selection.trees import write_model
    from tilewright_tools.tuning.training import lessons_of
    from tilewright_tools.tuning.training import train as fit

    if out.suffix != ".npz":
        raise typer.BadParameter("models are kept in .npz files", param_hint="--out")
    results, operation, device = _read(files, wanted)
    lessons = lessons_of(results, operation, device)
    model = fit(lessons, operation, device, _read(checked, operation.name)[0] if checked else ())
    if unknown := set(classes) - set(model.spaces):
        raise typer.BadParameter(
            f"nothing was measured of {', '.join(sorted(unknown))}; there is {', '.join(sorted(model.spaces))}",
            param_hint="--class",
        )
    if classes:
        model = replace(model, spaces={name: model.spaces[name] for name in classes})
    write_model(out, model)
    kernels = sum(len(item.configs) for item in lessons)
    note(
        f"{out}: {len(lessons)} problems, {kernels} kernels, {len(model.forest.root)} trees, {out.stat().st_size} bytes"
    )


def evaluate(
    files: list[Path] = _FILES,
    wanted: str = _OPERATION,
    holdout: list[Path] = typer.Option(
        [], "--holdout", help="Results that models are judged by and never trained with."
    ),
    folds: int = typer.Option(5, min=2, help="Parts of the cross-validation; all kernels of a shape are in one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Judge learned models by the time of the kernels that they choose, on problems that they did not see."""
    from tilewright_tools.tuning.training import by_folds, by_holdout, by_layer, lessons_of

    results, operation, device = _read(files, wanted)
    lessons = lessons_of(results, operation, device)
    rows = [
        {"data": kind, **score.to_dict()}
        for kind, scores in (("folds by shape", by_folds(lessons, folds)), ("layers left out", by_layer(lessons)))
        for score in scores
    ]
    if holdout:
        judged = lessons_of(_read(holdout, wanted)[0], operation, device)
        rows += [{"data": "hold-out", **score.to_dict()} for score in by_holdout(lessons, judged)]
    if as_json:
        print_json({"operation": operation.name, "device": device.name, "scores": rows})
        return
    columns = ("data", "choice", "problems", "mean", "median", "p10", "least")
    cells = [tuple(f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in columns)
             for row in rows]  # fmt: skip
    table(f"{operation.name} on {device.name}: best time over chosen time", columns, cells, right=columns[2:])


def _read(files: Sequence[Path], wanted: str = "") -> tuple[list[Result], Operation[Any, Any], DeviceInfo]:
    """Results of one operation on one device, and these. The device need not be there."""
    import tilewright_arch
    from tilewright_kit.contract.device import DeviceInfo
    from tilewright_kit.loading.loader import PluginManager
    from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
    from tilewright_tools.tuning.results import read_results

    found = [item for file in files for item in read_results(file)]
    results = [item for item in found if not wanted or item.stamp.operation == wanted]
    stamps = {(item.stamp.operation, item.stamp.arch, item.stamp.device) for item in results}
    if not stamps:
        raise NotFoundError(
            "there are no results in the files", field="files", value=", ".join(map(str, files)), rule="train",
            fix="measure with `tilewright bench OPERATION --oracle -o FILE`",
        )  # fmt: skip
    if len(stamps) > 1:
        told = ", ".join(sorted(" ".join(item) for item in stamps))
        raise InvalidArgumentError(
            f"the results are of several operations or devices: {told}", field="files", value=told, rule="train",
            fix="give files of one operation on one device, or name the operation with --operation",
        )  # fmt: skip
    operation, arch_id, name = stamps.pop()
    plugins = PluginManager()
    plugins.load_entry_points()
    if operation not in plugins.operations:
        raise NotFoundError(
            f"no plugin offers {operation}", field="files", value=operation, rule="train", fix="install its plugin"
        )
    arch = tilewright_arch.load(arch_id)
    device = DeviceInfo(f"{arch.kind}:0", arch.kind, name, arch, arch.throughput.units, 0)
    return results, plugins.operations[operation], device
