"""`tilewright bench`: build, check and time many kernels on many problems; keep what was measured."""

from __future__ import annotations

import typer

from tilewright_server.cli import bench_conv
from tilewright_server.cli import sweeping as o
from tilewright_server.cli.output import examples

__all__ = ["app"]

app = typer.Typer(
    help="Build, check and time kernels on a device of this machine, without a server.",
    no_args_is_help=True,
    epilog=examples(
        "tilewright bench gemm --shapes decode --dtype bf16 --record",
        "tilewright bench conv --shapes resnet50 --direction fwd,bwd_data,bwd_weight --record",
    ),
)

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
    configs: o.Configs = "candidates",
    name: o.Name = "",
    limit: o.Limit = 0,
    device: o.Device = "",
    shard: o.Shard = "",
    output: o.OutputFile = None,
    resume: o.Resume = False,
    record: o.Record = False,
    database: o.Database = None,
    init: o.Init = "normal",
    warmup: o.Warmup = 3,
    repeat: o.Repeat = 20,
    rotating_count: o.Rotating = 0,
    flush_cache: o.FlushCache = False,
    timer: o.Timer = "device",
    timeout: o.Timeout = 30.0,
    seconds: o.Seconds = 0.0,
    cut_off: o.CutOff = 1.5,
    explore: o.Explore = 0,
    finalists: o.Finalists = 4,
    check: o.Check = True,
    peer: o.Peer = "",
    seed: o.Seed = None,
    workers: o.Workers = 0,
    plugin: o.Plugins = [],  # noqa: B006 (read only, as all defaults of options)
    cache_dir: o.CacheDir = None,
    as_json: o.AsJson = False,
) -> None:
    """Time kernels on products; exit code 1 if one gives wrong results, crashes, hangs or does not build."""
    given = dict(locals())
    o.sweep("gemm", {"dtype": dtype, "layout": layout}, given)


app.command("conv", epilog=bench_conv.EPILOG)(bench_conv.conv)
