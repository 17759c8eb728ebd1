"""GEMM against NumPy and PyTorch: the kernel that the server would take, run by an engine in this very process.

All contenders of a shape take turns on the same memory. Figures are of the fastest round, since other work on the
machine only ever adds time; ratios are ours over the peer's: above 1 we are faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import local, peers, timing

from suites.base import Options, Table, main
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import TilewrightError

LAYOUTS = ("rcr", "rrr", "crr", "ccr")


def operands(shape: peers.Shape, dtype: str) -> tuple[peers.Array, peers.Array]:
    """A [m, k] and B, stored as [n, k]."""
    found = []
    for seed, rows in enumerate((shape.m, shape.n), 1):
        array = local.aligned((rows, shape.k), peers.NUMPY_DTYPES[dtype])
        array[...] = peers.random(array.shape, dtype, seed)
        found.append(array)
    return found[0], found[1]


def product(
    here: local.Local, a: peers.Array, b: peers.Array, dtype: str, *, packed: bool = False
) -> tuple[local.Product, peers.Array]:
    """``a @ b``, planned as the server would, and checked; with the array that it fills."""
    desc_b, data_b = here.packed(b, dtype, a.shape[0]) if packed else (local.describe(b, dtype), b)
    request = OperationRequest("gemm", {"a": local.describe(a, dtype), "b": desc_b})
    operation = here.engine.operations["gemm"]
    desc_out = next(item.desc for item in operation.parse(request).operands if item.name == "out")
    out = local.aligned(desc_out.shape, desc_out.dtype.numpy)
    made = here.product(request, {"a": a, "b": data_b, "out": out})
    made.timed(1)
    want = a[:4].astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(out[:4].astype(np.float64) - want) / np.linalg.norm(want)
    if not error < 2e-2:
        raise ValueError(f"{made.kernel}: the result is off by {error:.1e}")
    return made, out


def compare(here: local.Local, options: Options, packed: bool) -> Table:
    names = ["torch packed"] if packed else ["numpy", "torch"]
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    table = Table(
        f"GEMM, {'B packed beforehand' if packed else 'B as it lies (rcr)'}, {threads} (GFLOP/s)",
        ["dtype", "M x N x K", "", "ours", *names, *(f"ours / {name}" for name in names), "kernel"],
    )
    ratios: dict[tuple[str, str], list[float]] = {}
    shapes = peers.PACKED_SHAPES if packed else peers.SHAPES
    if options.quick:
        shapes = tuple(peers.Shape(shape.m, min(shape.n, 512), min(shape.k, 512)) for shape in shapes[:1])
    for dtype in peers.DTYPES[: 1 if packed else 2] if options.quick else peers.DTYPES:
        for shape in shapes:
            a, b = operands(shape, dtype)
            try:
                ours, _ = product(here, a, b.T, dtype, packed=packed)
            except TilewrightError as error:
                table.notes.append(f"- {dtype} {shape}: {error}")
                continue
            others = peers.peers(dtype, a, b, packed=packed)
            table.notes += [f"- {text}" for text in others.left_out]
            candidates = {"ours": ours.timed} | {name: timing.wall(call) for name, call in others.calls.items()}
            measured = timing.alternate(candidates, rounds=3 if options.quick else 11)
            rate = {name: shape.flops / item.best / 1e9 for name, item in measured.items()}
            against = {name: rate["ours"] / rate[name] for name in names if name in rate}
            for name, ratio in against.items():
                ratios.setdefault((dtype, name), []).append(ratio)
            row: list[Any] = [dtype, str(shape), shape.note, rate["ours"], *map(rate.get, names)]
            table.rows.append([*row, *map(against.get, names), brief(ours.kernel)])
    for (dtype, name), values in ratios.items():
        table.notes.append(
            f"- {dtype}, {threads}: geometric mean {timing.geomean(values):.2f} of {name} "
            f"over {len(values)} shapes, least {min(values):.2f}"
        )
    return table


def brief(kernel: str) -> str:
    """Distinctions of kernels of one signature: pipeline, tile, wave, warp tile."""
    words = kernel.split("_")
    return " ".join([words[3], *words[10:13]]) if len(words) > 12 else kernel


def layouts(here: local.Local, options: Options) -> Table:
    """Cost of packing each layout."""
    size = 256 if options.quick else 1024
    table = Table(
        f"Layouts, {size} cubed, {options.threads} thread{'s' if options.threads > 1 else ''} (GFLOP/s)",
        ["dtype", *LAYOUTS],
    )
    shape = peers.Shape(size, size, size)
    for dtype in ("fp32", "bf16", "fp16", "fp8", "int8")[: 1 if options.quick else None]:
        kept, candidates = [], {}
        for layout in LAYOUTS:
            a, b = operands(shape, dtype)
            made = product(here, a if layout[0] == "r" else a.T, b if layout[1] == "r" else b.T, dtype)
            kept.append(made)
            candidates[layout] = made[0].timed
        measured = timing.alternate(candidates, rounds=3 if options.quick else 9, round_s=0.02)
        table.rows.append([dtype, *(shape.flops / measured[layout].best / 1e9 for layout in LAYOUTS)])
    return table


def measure(options: Options) -> list[Table]:
    peers.set_threads(options.threads)
    with local.Local(options.threads) as here:
        tables = [compare(here, options, packed=False)]
        if peers.torch() is not None:
            tables.append(compare(here, options, packed=True))
        else:
            tables[0].notes.append("- PyTorch is not installed: not compared with it")
        tables.append(layouts(here, options))
    return tables


if __name__ == "__main__":
    raise SystemExit(main(measure))
