"""`tilewright bench OPERATION`: kernels built, checked and timed on many problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_kit.commands.parameters import Parameter, option
from tilewright_kit.commands.problem_command import ProblemCommand
from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.options import AsJson, FullNames, command_of, parameters_of, taken
from tilewright_tools.cli.console.output import note, print_json, progress, table
from tilewright_tools.cli.problems.parameters import check_words, signature_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from tilewright_kit.commands.cases import Case
    from tilewright_server.engine.engine import Engine
    from tilewright_server.engine.measurements.database import PerfDatabase
    from tilewright_tools.tuning.measure.setup import Setup
    from tilewright_tools.tuning.results import Output, Result
    from tilewright_tools.tuning.spread import Kind
    from tilewright_tools.tuning.sweep import Event, PeerTime, Sweep, SweepOptions

TOLD = 20
"""Failures that are spelled out."""

Configs = Annotated[
    str,
    typer.Option(help="candidates (what would be considered), all, wide, a kernel set, or a file of configurations."),
]
Name = Annotated[str, typer.Option("--filter", help="Only kernels whose names match this shell pattern.")]
Limit = Annotated[int, typer.Option(min=0, help="Kernels of each problem, the model's favourites first; 0: all.")]
Device = Annotated[str, typer.Option(help="Device by id. Default: the first GPU, or else the CPU.")]
Shard = Annotated[str, typer.Option(help="Only this part of the problems, for example 2/8: devices can share a sweep.")]
OutputFile = Annotated[Path | None, typer.Option("--output", "-o", help="Results: a .parquet, .csv or .jsonl file.")]
Resume = Annotated[bool, typer.Option("--resume", help="Skip what the output already has.")]
Record = Annotated[bool, typer.Option("--record", help="Keep the measurements: the server chooses by them.")]
Database = Annotated[Path | None, typer.Option(help="Database of measurements. Default: the server's.")]
Init = Annotated[str, typer.Option(help="Operands: normal, uniform or trunc-int (small whole numbers).")]
Warmup = Annotated[int, typer.Option(min=1, help="Runs before the first sample.")]
Repeat = Annotated[int, typer.Option(min=1, help="Samples of the fastest kernels; the others get a quarter.")]
Rotating = Annotated[
    int,
    typer.Option(min=0, help="Sets of operands that take turns; 0: more than the caches hold (on a CPU: one)."),
]
FlushCache = Annotated[bool, typer.Option("--flush-cache", help="Overwrite the caches before each sample.")]
Timer = Annotated[str, typer.Option(help="device (its own events) or host (launch and wait included).")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds after which a kernel counts as hanging.")]
Seconds = Annotated[float, typer.Option(min=0.0, help="Longest time for the kernels of one problem; 0: no limit.")]
Budget = Annotated[float, typer.Option(min=0.0, help="Longest time for all problems: no other is begun; 0: no limit.")]
CutOff = Annotated[float, typer.Option(min=0.0, help="Give up kernels slower than so many times the best; 0: none.")]
Explore = Annotated[
    int, typer.Option(min=0, help="Rounds in which the fastest kernels are crossed with others, 16 new ones each.")
]
AsOracle = Annotated[
    bool, typer.Option("--oracle", help="Judge the server's choice: the wide space, the fastest in interleaved draws.")
]
Strategies = Annotated[
    str, typer.Option(help="Time what these strategies choose, comma-separated, and compare them with the first.")
]
Draws = Annotated[int, typer.Option(min=1, help="With --oracle: rounds in which the fastest are timed in turns.")]
Ray = Annotated[
    str, typer.Option(help="Spread the problems over the Ray cluster at this address (auto: this machine's).")
]
Finalists = Annotated[int, typer.Option(min=0, help="Kernels that are timed again with all samples.")]
Check = Annotated[bool, typer.Option(help="Compare results with a reference.")]
Peer = Annotated[str, typer.Option(help="Library to compare with: torch.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the operands. Default: another each time.")]
Workers = Annotated[int, typer.Option(min=0, help="Compilers at a time; 0: one per core.")]
Plugins = Annotated[list[str], typer.Option("--plugin", help="Further plugin to load, by import path.")]
CacheDir = Annotated[Path | None, typer.Option(help="Folder of compiled kernels. Default: the server's.")]


@dataclass(frozen=True)
class Problems:
    """Problems as the arguments of a command name them."""

    command: ProblemCommand
    shapes: str
    """As given: files, names of lists, or shapes."""
    columns: Mapping[str, str]
    """The words, comma-separated, of rows that name none; an empty dtype is the device's usual one."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Columns that take the same value in every row."""


def _options(
    configs: Configs = "candidates",
    name: Name = "",
    limit: Limit = 0,
    device: Device = "",
    shard: Shard = "",
    output: OutputFile = None,
    resume: Resume = False,
    record: Record = False,
    database: Database = None,
    init: Init = "normal",
    warmup: Warmup = 3,
    repeat: Repeat = 20,
    rotating_count: Rotating = 0,
    flush_cache: FlushCache = False,
    timer: Timer = "device",
    timeout: Timeout = 30.0,
    seconds: Seconds = 0.0,
    budget: Budget = 0.0,
    cut_off: CutOff = 1.5,
    explore: Explore = 0,
    finalists: Finalists = 4,
    oracle: AsOracle = False,
    draws: Draws = 5,
    strategies: Strategies = "",
    ray: Ray = "",
    check: Check = True,
    peer: Peer = "",
    seed: Seed = None,
    workers: Workers = 0,
    plugin: Plugins = [],  # noqa: B006 (read only, as all defaults of options)
    cache_dir: CacheDir = None,
    full_names: FullNames = False,
    as_json: AsJson = False,
) -> None:
    """The options of every sweep."""


def bench_command(command: ProblemCommand) -> Callable[..., None]:
    """The command that measures kernels on problems of one declaration. It exits with 1 if a kernel failed."""
    replaced = [option(name, 0, command.replaced_help, least=0) for name in command.replaced]
    listed = (*command.columns, *_as_columns(command))
    own = signature_of([Parameter("shapes", str, command.shapes, flags=("--shapes",)), *listed, *replaced])
    shared = parameters_of(_options)

    def run(given: dict[str, Any]) -> None:
        check_words(listed, given)
        columns = {item.name: _text(given[item.name]) for item in listed}
        changed = {column: given[name] for name, column in command.replaced.items() if given[name]}
        sweep(Problems(command, given["shapes"], columns, changed), taken(given, shared))

    text = f"Time kernels on problems of {command.name}; exit code 1 if one is wrong, crashes, hangs or does not build."
    return command_of(run, command.name, text, own, shared)


def _as_columns(command: ProblemCommand) -> list[Parameter]:
    """Steps of ``run`` as options for the rows of a sweep that name none."""
    known = {item.name for item in command.columns} | set(command.replaced)
    return [
        replace(
            item, kind=bool if item.kind is bool else str, default=item.default if item.kind is bool else "", least=None
        )
        for item in command.steps
        if item.name not in known and item.swept
    ]


def _text(value: Any) -> str:
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


def sweep(problems: Problems, given: Mapping[str, Any]) -> None:
    """``given`` are the options by name. Exits with 1 if a kernel failed."""
    from tilewright_tools.tuning.measure.timing import TimingOptions
    from tilewright_tools.tuning.spread import Kind
    from tilewright_tools.tuning.sweep import SweepOptions

    timing = TimingOptions(
        warmup=given["warmup"],
        repeat=given["repeat"],
        rotating=given["rotating_count"],
        flush=given["flush_cache"],
        timer=_one_of("timer", given["timer"], ("device", "host")),
        init=_one_of("init", given["init"], ("normal", "uniform", "trunc-int")),
    )
    same = ("device", "configs", "limit", "check", "finalists", "explore", "cut_off", "seconds", "budget", "seed")
    oracle = bool(given["oracle"])
    if oracle and given["configs"] == "candidates":
        given = {**given, "configs": "wide"}
    options = SweepOptions(
        **{name: given[name] for name in same},
        pattern=given["name"],
        timing=timing,
        timeout_s=given["timeout"],
        peer=_one_of("peer", given["peer"], ("", "torch")),
    )
    setup, path = _setup(given["cache_dir"], given["database"], given["workers"], given["plugin"])
    if given["resume"] and given["output"] is None:
        raise typer.BadParameter("there is nothing to resume without --output", param_hint="--resume")
    kind = Kind(oracle, given["draws"], _words(given["strategies"]))
    run = _Run(setup, options, problems, _shard(given["shard"]), kind, given["ray"])
    with ExitStack() as stack:
        run.open(stack, given["output"], given["resume"], path if given["record"] else None)
        run.all()
    run.show(given["as_json"], given["full_names"])
    if run.failed:
        raise typer.Exit(Exit.FAILED)


def _setup(cache_dir: Path | None, database: Path | None, workers: int, modules: list[str]) -> tuple[Setup, Path]:
    """Setup of both processes, from the server's own settings; and the database."""
    from tilewright_server import settings
    from tilewright_tools.tuning.measure.setup import Setup

    found = settings.load({"cache_dir": cache_dir, "perf_database": database})
    assert found.perf_database is not None, "settings.load always says where"
    setup = Setup(
        cache_dir=str(found.cache_dir),
        plugins=found.plugins,
        disabled_plugins=found.disabled_plugins,
        modules=tuple(modules),
        compiler=found.compiler,
        hip_compiler=found.hip_compiler,
        cpu_arch=found.cpu_arch,
        cpu_threads=found.cpu_threads,
        cpu_isolated=found.cpu_isolated,
        build_workers=workers or found.build_workers,
        build_timeout_s=found.build_timeout_s,
    )
    return setup, found.perf_database


@dataclass
class _Run:
    """One call of the command."""

    setup: Setup
    options: SweepOptions
    problems: Problems
    shard: slice
    kind: Kind
    ray: str = ""
    results: list[Result] = field(default_factory=list)
    peers: dict[Case, PeerTime] = field(default_factory=dict)
    told: int = 0
    """Failures so far."""

    def open(self, stack: ExitStack, output: Path | None, resume: bool, database: Path | None) -> None:
        """Everything that can refuse the request, before anything is built."""
        from tilewright_server.engine.measurements.database import PerfDatabase
        from tilewright_tools.tuning.results import Output

        engine = self.setup.engine()
        stack.callback(engine.close)
        self.sweep: Sweep = self._sweep(engine)
        stack.callback(self.sweep.close)
        self.cases = self._cases()
        self.output: Output | None = stack.enter_context(Output(output, resume=resume)) if output else None
        self.database: PerfDatabase | None = PerfDatabase(database) if database else None
        self.bar: Progress = stack.enter_context(progress())

    def _sweep(self, engine: Engine) -> Sweep:
        for name in self.kind.strategies:
            if name not in engine.strategies:
                known = ", ".join(sorted(engine.strategies))
                raise typer.BadParameter(f"there is no strategy {name}; there are {known}", param_hint="--strategies")
        return self.kind.sweep(engine, self.setup, self.options)

    def _cases(self) -> Sequence[Case]:
        import sys

        from tilewright_tools.tuning.problems.shapes import read_shapes

        usual = "fp32" if self.sweep.device.kind == "cpu" else "bf16"
        given = self.problems
        words = {name: _words(text or (usual if name == "dtype" else "")) for name, text in given.columns.items()}
        words = {name: found for name, found in words.items() if found}
        stdin = sys.stdin if "-" in given.shapes else ()
        cases: list[Any] = read_shapes(given.command.family(), given.shapes, words, stdin)[self.shard]
        return [replace(case, **given.changed) for case in cases] if given.changed else cases

    def all(self) -> None:
        """Measure, and keep every result at once: a sweep may be ended at any time."""
        known: dict[Case, list[Result]] = {}
        for result in self.output.results if self.output else ():
            known.setdefault(result.case, []).append(result)
            self.results.append(result)
        self._every = self.bar.add_task("problems", total=len(self.cases))
        self._kernels = self.bar.add_task("kernels", total=None)
        found = self.sweep.run(self.cases, known, self._heard)
        if self.ray:
            from tilewright_tools.tuning.spread import spread

            found = spread(self.ray, self.kind, self.setup, self.options, self.cases, known)
        for result in found:
            self.results.append(result)
            if self.output is not None:
                self.output.add(result)
            row = result.measurement()
            if self.database is not None and row is not None:
                self.database.record([row])

    def _heard(self, event: Event) -> None:
        self.bar.update(self._every, completed=event.cases_done)
        self.bar.update(self._kernels, description=event.case.label, completed=event.done, total=event.total or None)
        if event.peer is not None:
            self.peers[event.case] = event.peer
        result = event.result
        if result is not None and result.status not in ("ok", "skipped"):
            self.told += 1
            if self.told <= TOLD:
                note(f"{result.status}: {result.case.label}: {result.kernel}: {result.reason}")

    @property
    def failed(self) -> bool:
        """True if a kernel failed, or a problem could not be measured at all."""
        from tilewright_tools.tuning.results import FAILED

        last = {(item.case, item.kernel): item for item in self.results}
        return bool(self._skipped()[1]) or any(item.status in FAILED for item in last.values())

    def _skipped(self) -> tuple[int, Mapping[str, int]]:
        """How many kernels were skipped for want of time, and how many for each other reason."""
        from tilewright_tools.tuning.results import TIME_OVER

        last = {(item.case, item.kernel): item for item in self.results}
        reasons = Counter(
            (f"{item.case.label}: " if not item.reason.endswith(TIME_OVER) else "") + item.reason
            for item in last.values()
            if item.status == "skipped"
        )
        late = [reason for reason in reasons if reason.endswith(TIME_OVER)]
        return sum(reasons.pop(reason) for reason in late), reasons

    def show(self, as_json: bool, full_names: bool) -> None:
        """The summary."""
        from tilewright_tools.tuning.choices import Choices
        from tilewright_tools.tuning.summary import summarise

        lines = summarise(self.cases, self.results, self.peers)
        device = self.sweep.device
        if as_json:
            record: dict[str, Any] = {"device": device.name, "arch": device.arch.id}
            print_json(record | {"problems": [line.to_dict() for line in lines]})
            return
        numbers = ("us", "TFLOP/s", "GB/s", "of peak", "model", "of peer", "tried", "failed")
        columns = ("problem", *numbers[:6], "best kernel", *numbers[6:])
        title = f"{device.name} ({device.arch.id}); model: the best over the model's favourite"
        spare = ("tried", "GB/s", "model", "of peer", "of peak", "TFLOP/s")
        table(title, columns, [line.cells() for line in lines], right=numbers, full_names=full_names, spare=spare)
        for line in lines:
            if line.peer is not None and line.peer.note:
                note(line.peer.note)
        if self.told > TOLD:
            note(f"{self.told} kernels failed; the output has the reasons of those that are not told above")
        if self.kind.oracle:
            from tilewright_tools.tuning.oracle import score

            note(str(score(self.results) or "no problem was timed twice"))
        for told in self.sweep.told(self.results) if isinstance(self.sweep, Choices) else ():
            note(told)
        late, others = self._skipped()
        for reason, count in others.items():
            note(f"{count} kernel{'s' * (count > 1)} skipped: {reason}")
        if late:
            note(f"{late} kernels were skipped; allow more --seconds (or --budget) to have them measured")
        if self.database is not None:
            note(f"recorded in {self.database.path}")


def _shard(text: str) -> slice:
    """Every n-th problem, from the place that ``text`` (``2/8``) says."""
    if not text:
        return slice(None)
    place, _, count = text.partition("/")
    if not (place.isdigit() and count.isdigit() and 1 <= int(place) <= int(count)):
        raise typer.BadParameter("give a part and the number of parts, for example 2/8", param_hint="--shard")
    return slice(int(place) - 1, None, int(count))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        words = ", ".join(word for word in allowed if word)
        raise typer.BadParameter(f"use one of {words}", param_hint=f"--{option}")
    return value
