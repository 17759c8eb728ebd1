"""How good the heuristic's choice is: every candidate of many problems is timed in this process.

The efficiency of a choice is the time of the fastest candidate over the time of the chosen one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common import local, peers, timing

from suites.base import Options, Table, main
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.strategies import Selector


@dataclass(frozen=True)
class Case:
    """A problem: ``batch`` products [m, k] x [k, n]; ``packed``: B was packed ahead of time."""

    family: str
    dtype: str
    m: int
    n: int
    k: int
    layout: str = "rcr"
    batch: int = 0
    packed: bool = False

    def __str__(self) -> str:
        return f"{f'{self.batch} of ' if self.batch else ''}{self.m}x{self.n}x{self.k}"


FINALISTS = 4
TRIED = 3
"""Candidates of each form of B in a check, beside the chosen one."""
DTYPES = ("fp32", "bf16", "int8", "fp16", "fp8")
SQUARE = (16, 32, 48, 64, 96, 128, 200, 256, 384, 512, 777, 1024, 1536, 2048)
TALL = ((4096, 64, 1024), (8192, 128, 512), (2048, 32, 2048), (1000, 48, 300), (3000, 500, 700))
DECODE = tuple((m, n, k) for m in (1, 2, 4, 8) for n, k in ((4096, 4096), (1024, 2048)))
FEW_ROWS = ((12, 2048, 2048), (16, 4096, 1024), (32, 2048, 2048), (64, 4096, 1024), (128, 2048, 2048))
BATCHED = (
    (16, 64, 64, 64),
    (64, 32, 32, 32),
    (8, 128, 128, 128),
    (4, 256, 256, 64),
    (12, 128, 128, 64),
    (3, 100, 40, 500),
)
PACKED = tuple((m, 2048, 2048) for m in (1, 4, 8, 16, 32, 64, 128, 256, 1024))


def cases(quick: bool) -> Iterator[Case]:
    for dtype in DTYPES[:1] if quick else DTYPES:
        for size in (32,) if quick else SQUARE:
            yield Case("square", dtype, size, size, size)
        if quick:
            yield Case("packed", dtype, 16, 256, 256, packed=True)
            yield Case("batched", dtype, 32, 32, 32, batch=4)
            continue
        for m, n, k in TALL:
            yield Case("tall", dtype, m, n, k)
            yield Case("wide", dtype, n, m, k)
        for m, n, k in DECODE:
            yield Case("decode", dtype, m, n, k)
            yield Case("columns", dtype, n, m, k)
        for m, n, k in FEW_ROWS:
            yield Case("few rows", dtype, m, n, k)
        for batch, m, n, k in BATCHED:
            yield Case("batched", dtype, m, n, k, batch=batch)
        for m, n, k in PACKED:
            yield Case("packed", dtype, m, n, k, packed=True)
        for layout in ("rrr", "crr", "ccr"):
            for m, n, k in ((64, 64, 64), (512, 512, 512), (1024, 1024, 1024), (8, 2048, 2048), (2048, 8, 2048)):
                yield Case(layout, dtype, m, n, k, layout)


def _matrix(rows: int, cols: int, batch: int, letter: str, dtype: str, seed: int) -> peers.Array:
    """Random [batch,] rows x cols, row-major or column-major."""
    lead = (batch,) if batch else ()
    stored = (*lead, rows, cols) if letter == "r" else (*lead, cols, rows)
    array = local.aligned(stored, peers.NUMPY_DTYPES[dtype])
    array[...] = peers.random(stored, dtype, seed)
    return array if letter == "r" else array.swapaxes(-1, -2)


def measure_case(here: local.Local, case: Case, *, quick: bool) -> tuple[dict[KernelConfig, float], KernelConfig]:
    """Seconds of every candidate, and the one that the server would take.

    A heat of all of them, then a final of the fastest and the chosen: what other work did to one must not make it lose.
    """
    a = _matrix(case.m, case.k, case.batch, case.layout[0], case.dtype, 1)
    b = _matrix(case.k, case.n, case.batch, case.layout[1], case.dtype, 2)
    desc_a, chosen_b = local.describe(a, case.dtype), local.describe(b, case.dtype)
    forms = [(chosen_b, b)]  # in which B may be given; with kernels for each of its own
    if case.packed:
        packing = OperationRequest("gemm_pack_b", {"b": chosen_b}, {}, {"m": case.m})
        forms = [here.packed(b, case.dtype, case.m, config.name) for config in here.candidates(packing)]
        chosen_b = here.packed(b, case.dtype, case.m)[0]
    candidates: dict[str, timing.Timed] = {}
    configs: dict[str, KernelConfig] = {}
    chosen: KernelConfig | None = None
    operation = here.engine.operations["gemm"]
    for desc_b, data_b in forms:
        request = OperationRequest("gemm", {"a": desc_a, "b": desc_b})
        offered = here.candidates(request)
        if desc_b == chosen_b:
            chosen = Selector().select(operation, operation.parse(request), here.device).config
        if quick:
            offered = [config for config in offered if config == chosen or config in offered[:TRIED]]
        here.build(offered)
        out = next(item.desc for item in operation.parse(request).operands if item.name == "out")
        c = local.aligned(out.shape, out.dtype.numpy)
        for config in offered:
            product = here.product(request, {"a": a, "b": data_b, "out": c}, config.name)
            candidates[config.name], configs[config.name] = product.timed, config
    assert chosen is not None
    heat = timing.alternate(candidates, rounds=2 if quick else 4, round_s=0.002, settle_s=0.0)
    seconds = {name: item.best for name, item in heat.items()}
    finalists = {*sorted(seconds, key=seconds.__getitem__)[:FINALISTS], chosen.name}
    final = timing.alternate(
        {name: candidates[name] for name in finalists}, rounds=2 if quick else 16, round_s=0.001, settle_s=0.0
    )
    for name, item in final.items():
        seconds[name] = min(seconds[name], item.best)
    return {configs[name]: value for name, value in seconds.items()}, chosen


def measure(options: Options) -> list[Table]:
    families: dict[tuple[str, str], list[tuple[float, str]]] = {}
    table = Table(
        f"Selection of GEMM kernels, {options.threads} thread{'s' if options.threads > 1 else ''} "
        "(time of the fastest candidate over time of the chosen one)",
        ["dtype", "problems", "count", "geometric mean", "worst", "where"],
    )
    with local.Local(options.threads) as here:
        for case in cases(options.quick):
            seconds, chosen = measure_case(here, case, quick=options.quick)
            efficiency = min(seconds.values()) / seconds[chosen]
            families.setdefault((case.dtype, case.family), []).append((efficiency, str(case)))
    every: list[tuple[float, str]] = []
    for (dtype, family), found in families.items():
        every += found
        table.rows.append([dtype, family, len(found), timing.geomean(item[0] for item in found), *min(found)])
    table.rows.append(["all", "all", len(every), timing.geomean(item[0] for item in every), *min(every)])
    return [table]


if __name__ == "__main__":
    raise SystemExit(main(measure))
