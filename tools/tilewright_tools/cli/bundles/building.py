"""`tilewright bundle build`: plan and compile problems, for machines that need not be this one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_kit.commands.parameters import Parameter
from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.options import AsJson, command_of, parameters_of, taken
from tilewright_tools.cli.console.output import examples, note, print_json, progress
from tilewright_tools.cli.console.signing import SIGN_HELP, sign_file
from tilewright_tools.cli.problems.parameters import signature_of

if TYPE_CHECKING:
    from tilewright_kit.contract.bundle import BundlePlan
    from tilewright_kit.contract.device import DeviceInfo
    from tilewright_kit.contract.problem import OperationRequest
    from tilewright_kit.types.errors import TilewrightError
    from tilewright_server.engine.engine import Engine
    from tilewright_server.engine.types import Selection

__all__ = ["build_command", "epilog"]


def epilog() -> str:
    """Examples, with shapes of the installed operations."""
    from tilewright_kit.commands.discovery import installed_commands

    shapes = [f"--{name} {command.family().example}" for name, command in installed_commands().items()]
    lines = [f"tilewright bundle build {text} --dtype bf16 -o model.twb" for text in shapes[:1]]
    lines += [f"tilewright bundle build {' '.join(shapes)} --arch sm_90a --arch x86-64-v4 -o model.twb"]
    return examples(*lines, "tilewright bundle build --journal server.journal -o model.twb")


def _options(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    sign: Annotated[Path | None, typer.Option("--sign", help=SIGN_HELP)] = None,
    journal: Annotated[Path | None, typer.Option(help="Problems that `serve --journal` recorded.")] = None,
    dtype: Annotated[str, typer.Option(help="Element types, comma-separated, of shapes that name none.")] = "",
    arch: Annotated[
        list[str], typer.Option("--arch", help="Architecture. Repeatable. Default: the one of this machine's device.")
    ] = [],  # noqa: B006 (read only, as all defaults of options)
    threads: Annotated[
        int, typer.Option(min=0, help="Threads that plans of CPUs are made for. 0: as many as this machine has.")
    ] = 0,
    strategy: Annotated[str, typer.Option(help="Way to choose kernels: auto, measured, heuristic, first_fit.")] = "",
    workers: Annotated[int, typer.Option(min=0, help="Compilers at a time; 0: one per core.")] = 0,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of compiled kernels. Default: the server's.")] = None,
    as_json: AsJson = False,
) -> None:
    """The options beside those of the operations."""


@dataclass(frozen=True)
class _Problem:
    """A problem as it was named, with what its entry keeps beside the plan."""

    request: OperationRequest
    selection: Selection
    label: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Refused:
    """A problem that is not in the bundle."""

    label: str
    arch: str
    error: TilewrightError


def build_command() -> Callable[..., None]:
    """The command, with the shapes of every installed operation."""
    from tilewright_kit.commands.discovery import installed_commands

    commands = installed_commands()
    shapes = [Parameter(item.name, str, item.shapes, "", (f"--{item.name}",)) for item in commands.values()]
    own, shared = signature_of(shapes, "Problems"), parameters_of(_options)

    def run(given: dict[str, Any]) -> None:
        _run({name: given[name] for name in commands if given[name]}, **taken(given, shared))

    text = (
        "Plan and compile problems into a file, for this machine and others.\n\n"
        "What one of the architectures cannot do is left out and named; exit code 1 then."
    )
    return command_of(run, "build", text, own, shared)


def _run(
    shapes: dict[str, str],
    *,
    output: Path,
    sign: Path | None,
    journal: Path | None,
    dtype: str,
    arch: list[str],
    threads: int,
    strategy: str,
    workers: int,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    from tilewright_kit.contract.bundle import write_bundle
    from tilewright_server.app import Application
    from tilewright_server.settings import load

    if not shapes and journal is None:
        raise typer.BadParameter("say what to build: shapes of an operation, or --journal")
    settings = load({"cache_dir": cache_dir, "build_workers": workers or None})
    server = Application(settings)
    engine = server.make_engine(server.load_plugins())
    try:
        devices = _devices(engine, arch, threads)
        problems = [*_from_shapes(shapes, dtype, strategy), *_from_journal(journal, strategy)]
        plans, refused = _compiled(engine, problems, devices)
    finally:
        engine.close()
    for item in refused:
        note(f"left out on {item.arch}: {item.label}: {item.error}")
    index = write_bundle(output, plans) if plans else None
    if index:
        sign_file(output, sign)
    if as_json:
        print_json(
            {
                "output": str(output) if index else None,
                "bytes": index.nbytes if index else 0,
                "problems": [{"name": item.name, "arch": item.arch} for item in (index.entries if index else ())],
                "left_out": [
                    {"problem": item.label, "arch": item.arch, "code": item.error.code, "rule": item.error.rule}
                    for item in refused
                ],
            }
        )
    elif index:
        note(f"{len(index.entries)} plans, {len(index.objects)} code objects, {index.nbytes / 1024:.0f} KiB: {output}")
    else:
        note("there is no plan, so nothing was written")
    if refused or index is None:
        raise typer.Exit(Exit.FAILED)


def _devices(engine: Engine, archs: Sequence[str], threads: int) -> list[DeviceInfo]:
    """A device of each architecture: this machine's if it has one, else one of the usual size."""
    import tilewright_arch
    from tilewright_kit.conformance.check_plugin import device_of

    there = {item.arch.id: item for item in reversed(engine.devices.infos())}
    cores = next((item.units for item in there.values() if item.kind == "cpu"), 0)
    found = []
    for name in dict.fromkeys(archs) or (engine.devices.info().arch.id,):
        spec = tilewright_arch.load(name)
        info = there.get(spec.id) or device_of(spec, cores if spec.kind == "cpu" else 0)
        found.append(replace(info, units=threads) if threads and info.kind == "cpu" else info)
    return found


def _from_shapes(shapes: dict[str, str], dtype: str, strategy: str) -> Iterator[_Problem]:
    from tilewright_kit.commands.discovery import installed_commands
    from tilewright_server.engine.types import Selection
    from tilewright_tools.tuning.problems.shapes import read_shapes

    defaults = {"dtype": [item.strip() for item in dtype.split(",")]} if dtype else {}
    for name, wanted in shapes.items():
        command = installed_commands()[name]
        for case in read_shapes(command.family(), wanted, defaults, sys.stdin if "-" in wanted.split(",") else ()):
            command.screen(case)
            yield _Problem(case.request(), Selection(strategy), f"{name} {case.label}")


def _from_journal(path: Path | None, strategy: str) -> Iterator[_Problem]:
    from tilewright_server.engine.planning.journal import read_journal

    if path is None:
        return
    problems, skipped = read_journal(path)
    for line in skipped:
        note(f"line {line.line} of the journal is skipped: {line.reason}")
    for item in problems:
        chosen = replace(item.selection, strategy=strategy or item.selection.strategy, device="")
        yield _Problem(item.request, chosen, item.request.operation, {"count": item.count})


def _compiled(
    engine: Engine, problems: Sequence[_Problem], devices: Sequence[DeviceInfo]
) -> tuple[list[BundlePlan], list[_Refused]]:
    from tilewright_kit.contract.bundle import BundlePlan
    from tilewright_kit.requests.record import request_to_dict
    from tilewright_kit.types.errors import TilewrightError
    from tilewright_server.engine.call import Call

    def compiled(work: tuple[_Problem, DeviceInfo]) -> BundlePlan | _Refused:
        problem, device = work
        try:
            made = engine.ahead.compile(problem.request, problem.selection, device, Call())
        except TilewrightError as error:
            return _Refused(problem.label, device.arch.id, error)
        details = {
            "request": request_to_dict(problem.request),
            "strategy": problem.selection.strategy,
            "kernel": problem.selection.kernel,
            "config": problem.selection.config,
            "kernels": [config.name for config in made.plan.kernels],
            **problem.details,
        }
        return BundlePlan(made.name, made.plan.arch, made.data, made.objects, details)

    work = [(problem, device) for device in devices for problem in problems]
    with ThreadPoolExecutor(16, "tilewright-bundle") as pool, progress() as bar:
        results = list(bar.track(pool.map(compiled, work), total=len(work), description="building"))
    plans = [item for item in results if not isinstance(item, _Refused)]
    return plans, [item for item in results if isinstance(item, _Refused)]
