"""`tilewright bundle run`: the plans of a bundle that run here, on random data, checked and timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.options import AsJson
from tilewright_tools.cli.console.output import examples, note, print_json, table
from tilewright_tools.cli.console.signing import check_signer
from tilewright_tools.cli.problems.checks import Check, check
from tilewright_tools.cli.problems.running import poison

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright

    Array = npt.NDArray[Any]

__all__ = ["EPILOG", "run"]

EPILOG = examples("tilewright bundle run model.twb", "tilewright bundle run model.twb --repeat 100")


def run(
    file: Annotated[Path, typer.Argument(help="Bundle.")],
    name: Annotated[str, typer.Option(help="Only problems whose names match this shell pattern.")] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Timed launches.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run the plans of a bundle that are for this machine's CPU, on random data, and compare them with float64 NumPy.

    Exit code 1 if a result is off, or if no plan runs here.
    """
    import tilewright
    from tilewright_kit.contract.bundle import read_bundle_index

    check_signer(file)
    details = {(item.name, item.arch): item.details for item in read_bundle_index(file).entries}
    records: list[dict[str, Any]] = []
    with tilewright.load_bundle(file) as bundle:
        for problem in bundle:
            if name and not fnmatch(problem, name):
                continue
            try:
                plan = bundle[problem]
            except tilewright.UnsupportedError as error:
                note(f"not for this CPU: {problem}: {error.message}")
                continue
            found, taken_ns = _checked(plan, details[plan.name, plan.arch], repeat, seed)
            records.append(
                {
                    "name": problem,
                    "arch": plan.arch,
                    "time_us": taken_ns / 1e3,
                    "gflops": plan.flops / max(taken_ns, 1),
                    "relative_error": found.error,
                    "tolerance": found.tolerance,
                    "status": "success" if found.ok else "failed",
                }
            )
    if as_json:
        print_json(records)
    else:
        rows = [
            (item["name"], item["arch"], f"{item['time_us']:.1f}", f"{item['gflops']:.1f}", item["status"])
            for item in records
        ]
        table("", ("problem", "arch", "us", "GFLOP/s", "check"), rows, right=("us", "GFLOP/s"))
    if not records:
        note("no plan of the bundle runs on this CPU")
    if not records or any(item["status"] != "success" for item in records):
        raise typer.Exit(Exit.FAILED)


def _checked(plan: tilewright.BundlePlan, details: Mapping[str, Any], repeat: int, seed: int) -> tuple[Check, float]:
    """The worst of all outputs, and the median time of a launch in nanoseconds."""
    import numpy as np

    from tilewright_kit.contract.abilities import SamplesInputs
    from tilewright_kit.numerics.contents import contents, view
    from tilewright_kit.requests.record import request_from_dict
    from tilewright_tools.cli.problems.loading import load_operation

    request = request_from_dict(details.get("request"))
    operation = load_operation(request.operation)
    problem = operation.parse(request)
    rng = np.random.default_rng(seed)
    sampled = operation.sample_inputs(request, rng) if isinstance(operation, SamplesInputs) else {}
    inputs: dict[str, Array] = {}
    for key, desc in request.inputs.items():
        inputs[key] = view(contents(desc, "normal", rng), desc)
        if key in sampled:
            inputs[key][...] = sampled[key]
    bound = plan.bind(*(inputs[key] for key in plan.inputs))
    outputs = bound.out if isinstance(bound.out, Mapping) else dict(zip(plan.outputs, [bound.out], strict=True))
    for array in outputs.values():
        poison(array)  # only what the plan writes can pass the check
    samples = []
    for _ in range(repeat):
        begin = time.perf_counter_ns()
        bound()
        samples.append(time.perf_counter_ns() - begin)
    truth = operation.reference(problem, inputs)
    products = sum(desc.size for desc in request.inputs.values())  # more than any sum has
    checks = [check(array, truth[key], products) for key, array in outputs.items()]
    return max(checks, key=lambda item: item.error / max(item.tolerance, 1e-30)), median(samples)
