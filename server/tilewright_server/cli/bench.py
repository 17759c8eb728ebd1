"""`tilewright bench`: build, check and time many kernels on many problems; keep what was measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright_server.cli.exits import Exit
from tilewright_server.cli.output import examples, note, print_json, progress, table

if TYPE_CHECKING:
    from rich.progress import Progress

    from tilewright_server.perf.database import PerfDatabase
    from tilewright_server.tuning.cases import Case
    from tilewright_server.tuning.results import Output, Result
    from tilewright_server.tuning.setup import Setup
    from tilewright_server.tuning.sweep import Event, PeerTime, Sweep, SweepOptions

__all__ = ["app"]

app = typer.Typer(
    help="Build, check and time kernels on a device of this machine, without a server.",
    no_args_is_help=True,
    epilog=examples("tilewright bench gemm --shapes decode --dtype bf16 --record"),
)

TOLD = 20
"""Failures that are spelled out."""
_SHAPES = (
    "Comma-separated: files (CSV or JSON lines with m, n, k and more), built-in lists (tiny, squares, decode, prefill, "
    "skinny, deep, ragged, batched, large), shapes such as 128x4096x4096 or 16*64x64x64, or - for standard input."
)


@app.callback()
def root() -> None:
    """Build, check and time kernels on a device of this machine, without a server."""


@app.command(
    "gemm",
    epilog=examples(
        "tilewright bench gemm --shapes decode,squares --dtype bf16 --device cuda:0 --record",
        "tilewright bench gemm --shapes layers.csv --configs all --seconds 60 -o layers.parquet",
        "tilewright bench gemm --shapes 4096x4096x4096 --configs configs.jsonl --peer torch",
        "tilewright bench gemm --shapes prefill --limit 20 --resume -o prefill.csv",
        "tilewright bench gemm --shapes prefill --shard 2/8 --device cuda:1 --record",
        "tilewright bench gemm --shapes 1x4096x4096 --filter '*_mem_*' --flush-cache --json",
    ),
)
def gemm(
    shapes: str = typer.Option(..., "--shapes", help=_SHAPES),
    dtype: str = typer.Option("", help="Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),
    layout: str = typer.Option("rcr", help="Layouts of rows that name none, comma-separated."),
    configs: str = typer.Option(
        "candidates", help="candidates (what would be considered), all, a kernel set, or a file of configurations."
    ),
    name: str = typer.Option("", "--filter", help="Only kernels whose names match this shell pattern."),
    limit: int = typer.Option(0, min=0, help="Kernels of each problem, the model's favourites first; 0: all."),
    device: str = typer.Option("", help="Device by id. Default: the first GPU, or else the CPU."),
    shard: str = typer.Option("", help="Only this part of the problems, for example 2/8: devices can share a sweep."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Results: a .parquet, .csv or .jsonl file."),
    resume: bool = typer.Option(False, "--resume", help="Skip what the output already has."),
    record: bool = typer.Option(False, "--record", help="Keep the measurements: the server chooses by them."),
    database: Path | None = typer.Option(None, help="Database of measurements. Default: the server's."),
    init: str = typer.Option("normal", help="Operands: normal, uniform or trunc-int (small whole numbers)."),
    warmup: int = typer.Option(3, min=1, help="Runs before the first sample."),
    repeat: int = typer.Option(20, min=1, help="Samples of the fastest kernels; the others get a quarter."),
    rotating_count: int = typer.Option(
        0, min=0, help="Sets of operands that take turns; 0: more than the caches hold (on a CPU: one)."
    ),
    flush_cache: bool = typer.Option(False, "--flush-cache", help="Overwrite the caches before each sample."),
    timer: str = typer.Option("device", help="device (its own events) or host (launch and wait included)."),
    timeout: float = typer.Option(30.0, min=0.1, help="Seconds after which a kernel counts as hanging."),
    seconds: float = typer.Option(0.0, min=0.0, help="Longest time for the kernels of one problem; 0: no limit."),
    cut_off: float = typer.Option(1.5, min=0.0, help="Give up kernels slower than so many times the best; 0: none."),
    explore: int = typer.Option(
        0, min=0, help="Rounds in which the fastest kernels are crossed with others, 16 new ones each."
    ),
    finalists: int = typer.Option(4, min=0, help="Kernels that are timed again with all samples."),
    check: bool = typer.Option(True, help="Compare results with a reference."),
    peer: str = typer.Option("", help="Library to compare with: torch."),
    seed: int | None = typer.Option(None, help="Seed of the operands. Default: another each time."),
    workers: int = typer.Option(0, min=0, help="Compilers at a time; 0: one per core."),
    plugin: list[str] = typer.Option([], help="Further plugin to load, by import path."),
    cache_dir: Path | None = typer.Option(None, help="Folder of compiled kernels. Default: the server's."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Time kernels on products; exit code 1 if one gives wrong results, crashes, hangs or does not build."""
    from tilewright_server.tuning.sweep import SweepOptions
    from tilewright_server.tuning.timing import TimingOptions

    timing = TimingOptions(
        warmup=warmup,
        repeat=repeat,
        rotating=rotating_count,
        flush=flush_cache,
        timer=_one_of("timer", timer, ("device", "host")),
        init=_one_of("init", init, ("normal", "uniform", "trunc-int")),
    )
    options = SweepOptions(
        device=device, configs=configs, pattern=name, limit=limit, timing=timing, check=check, finalists=finalists,
        explore=explore,
        cut_off=cut_off, seconds=seconds, timeout_s=timeout, seed=seed, peer=_one_of("peer", peer, ("", "torch")),
    )  # fmt: skip
    setup, path = _setup(cache_dir, database, workers, plugin)
    if resume and output is None:
        raise typer.BadParameter("there is nothing to resume without --output", param_hint="--resume")
    run = _Run(setup, options, shapes, dtype, layout, _shard(shard))
    with ExitStack() as stack:
        run.open(stack, output, resume, path if record else None)
        run.all()
    run.show(as_json)
    if run.failed:
        raise typer.Exit(Exit.FAILED)


def _setup(cache_dir: Path | None, database: Path | None, workers: int, modules: list[str]) -> tuple[Setup, Path]:
    """What both processes share, from the server's own settings; and the database."""
    from tilewright_server import settings
    from tilewright_server.tuning.setup import Setup

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
    shapes: str
    dtypes: str
    layouts: str
    shard: slice
    results: list[Result] = field(default_factory=list)
    peers: dict[Case, PeerTime] = field(default_factory=dict)
    told: int = 0
    """Failures so far."""

    def open(self, stack: ExitStack, output: Path | None, resume: bool, database: Path | None) -> None:
        """Everything that can refuse the request, before anything is built."""
        from tilewright_server.perf.database import PerfDatabase
        from tilewright_server.tuning.results import Output
        from tilewright_server.tuning.sweep import Sweep

        engine = self.setup.engine()
        stack.callback(engine.close)
        self.sweep: Sweep = Sweep(engine, self.setup, self.options)
        stack.callback(self.sweep.close)
        self.cases = self._cases()
        self.output: Output | None = stack.enter_context(Output(output, resume=resume)) if output else None
        self.database: PerfDatabase | None = PerfDatabase(database) if database else None
        self.bar: Progress = stack.enter_context(progress())

    def _cases(self) -> list[Case]:
        import sys

        from tilewright_server.tuning.shapes import read_shapes

        dtypes = self.dtypes or ("fp32" if self.sweep.device.kind == "cpu" else "bf16")
        stdin = sys.stdin if "-" in self.shapes else ()
        return read_shapes(self.shapes, _words(dtypes), _words(self.layouts), stdin)[self.shard]

    def all(self) -> None:
        """Measure, and keep every result at once: a sweep may be ended at any time."""
        known: dict[Case, list[Result]] = {}
        for result in self.output.results if self.output else ():
            known.setdefault(result.case, []).append(result)
            self.results.append(result)
        self._every = self.bar.add_task("problems", total=len(self.cases))
        self._kernels = self.bar.add_task("kernels", total=None)
        for result in self.sweep.run(self.cases, known, self._heard):
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
        from tilewright_server.tuning.results import FAILED

        last = {(item.case, item.kernel): item for item in self.results}
        return any(item.status in FAILED for item in last.values())

    def show(self, as_json: bool) -> None:
        """The summary."""
        from tilewright_server.tuning.summary import summarise

        lines = summarise(self.cases, self.results, self.peers)
        device = self.sweep.device
        if as_json:
            record: dict[str, Any] = {"device": device.name, "arch": device.arch.id}
            print_json(record | {"problems": [line.to_dict() for line in lines]})
            return
        numbers = ("us", "TFLOP/s", "GB/s", "of peak", "model", "of peer", "tried", "failed")
        columns = ("problem", *numbers[:6], "best kernel", *numbers[6:])
        title = f"{device.name} ({device.arch.id}); model: the best over the model's favourite"
        table(title, columns, [line.cells() for line in lines], right=numbers)
        for line in lines:
            if line.peer is not None and line.peer.note:
                note(line.peer.note)
        if self.told > TOLD:
            note(f"{self.told} kernels failed; the output has the reasons of those that are not told above")
        skipped = sum(line.skipped for line in lines)
        if skipped:
            note(f"{skipped} kernels were skipped; allow more --seconds to have them measured")
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
