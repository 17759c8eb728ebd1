"""`tilewright demo`: a server, a client in another process, every GEMM dtype and layout, layers, attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from tilewright_tools.cli.demo import demo_attention
from tilewright_tools.cli.demo.demo_conv import conv_row, layer_cases
from tilewright_tools.cli.demo.demo_rows import Row, best_of
from tilewright_tools.cli.exits import Exit
from tilewright_tools.cli.output import examples, note, out, print_json, progress
from tilewright_tools.cli.problems import cases

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright

    Array = npt.NDArray[Any]

__all__ = ["EPILOG", "demo"]

EPILOG = examples(
    "tilewright demo",
    "tilewright demo --size 512 --dtype fp32 --dtype bf16",
    "tilewright demo --target unix:/tmp/tw.sock --json",
)


def demo(
    size: int = typer.Option(1024, min=16, max=8192, help="M, N and K of the square products."),
    dtype: list[str] = typer.Option([], help="Only these element types. Repeatable."),
    device: str = typer.Option("", help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's."),
    target: str = typer.Option("", help="Use this server and start none."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show it all in a minute: a server, every GEMM dtype and layout, convolution in every direction and attention from
    another process, checked and timed.

    Operands and results lie in shared memory; each result is compared with float64 NumPy, each time with NumPy's own
    float32 products. Exit code 1 if a result is off.
    """
    from tilewright_tools.cli.private_server import PrivateServer, connected
    from tilewright_tools.cli.service.settings import rerun_with_numpy_at_its_best

    again = ["demo", "--size", str(size), *(part for name in dtype for part in ("--dtype", name))]
    again += [*(["--device", device] if device else []), *(["--target", target] if target else [])]
    code = rerun_with_numpy_at_its_best([*again, "--json"] if as_json else again)
    if code is not None:
        raise typer.Exit(code)
    begun = time.perf_counter()
    if target:
        with connected(target) as client:
            rows = _tour(client, size, dtype, device or None)
    else:
        server = PrivateServer()
        with server as private, connected(private) as client:
            note(f"server: process {server.pid}, ready after {server.start_seconds:.2f} s")
            note("client: another process; operands and results lie in shared memory")
            rows = _tour(client, size, dtype, device or None)
    seconds = time.perf_counter() - begun
    wrong = [row for row in rows if not row.check.ok]
    if as_json:
        print_json({"rows": [_record(row) for row in rows], "seconds": seconds, "ok": not wrong})
    else:
        _show(rows, f"{size} x {size} x {size}")
        verdict = f"{len(rows) - len(wrong)} of {len(rows)} results agree with float64 NumPy, in {seconds:.0f} s"
        style = "bold red" if wrong else "bold green"
        out().print(f"[{style}]{'FAILED' if wrong else 'OK'}[/]: {verdict}")
    if wrong:
        raise typer.Exit(Exit.FAILED)


def _tour(client: tilewright.Client, size: int, dtypes: Sequence[str], device: str | None) -> list[Row]:
    chosen = dtypes or list(cases.DTYPES)
    todo = [cases.Case(size, size, size, dtype, layout) for dtype in chosen for layout in cases.LAYOUTS]
    rows = []
    with progress() as bar:
        task = bar.add_task("building and running", total=len(todo))
        for case in todo:
            bar.update(task, description=f"{case.dtype} {case.layout}")
            rows.append(_square(client, case, device))
            bar.advance(task)
        if not dtypes:
            bar.update(task, description="transformer")
            rows += _transformer(client, device)
            layers = layer_cases()
            attended = demo_attention.cases()
            bar.update(task, total=len(todo) + len(layers) + len(attended))
            for what, layer in layers:
                bar.update(task, description=what)
                rows.append(conv_row(client, what, layer, device))
                bar.advance(task)
            for what, case_of_attention in attended:
                bar.update(task, description=what)
                rows.append(demo_attention.attention_row(client, what, case_of_attention, device))
                bar.advance(task)
    return rows


def _square(client: tilewright.Client, case: cases.Case, device: str | None) -> Row:
    import numpy as np

    a, b = case.operands(client)
    (c,) = client.run("gemm", {"a": a, "b": b}, device=device).values()
    report = client.report
    assert report is not None
    plan = client.plan("gemm", {"a": a, "b": b}, {"out": c}, device=device)
    c.view("u1")[...] = 0xFF  # what is checked is what the plan writes
    plan(a, b, out=c)
    found = cases.check(c, cases.reference(a, b), case.k)
    # NumPy has a fast product for float32 alone; it gets the same numbers, converted beforehand.
    x, y = a.astype(np.float32), b.astype(np.float32)
    seconds, numpy_seconds = best_of(plan.bind(a, b, out=c), lambda: np.matmul(x, y))
    name = report.kernels[0] if report.kernels else ""
    return Row(f"{case.dtype} {case.layout}", name, seconds, numpy_seconds, case.flops, found)


def _transformer(client: tilewright.Client, device: str | None) -> list[Row]:
    """The linear layers of all-MiniLM-L6-v2 on 128 tokens, bias and GELU in the kernel, weights packed once."""
    import numpy as np

    from tilewright_tools.cli.kernels.model import MissingModelError, linear_layers

    try:
        layers = linear_layers()
    except MissingModelError as error:
        note(f"the transformer is left out: {error}")
        return []
    rng = np.random.default_rng(7)
    rows = []
    for layer in layers:
        x = client.empty((128, layer.weight.shape[0]), "fp32")
        x[...] = rng.standard_normal(x.shape, np.float32)
        bias = client.asarray(layer.bias)
        weight = _packed(client, layer.weight, device)
        y = client.empty((128, layer.weight.shape[1]), "fp32")
        attributes = {"unary": "Gelu"} if layer.gelu else {}
        plan = client.plan("gemm", {"a": x, "b": weight, "bias": bias}, {"out": y}, attributes, device=device)
        y.view("u1")[...] = 0xFF
        plan(x, weight, bias, out=y)
        truth = cases.reference(x, layer.weight) + layer.bias
        found = cases.check(y, cases.activate(truth, "Gelu") if layer.gelu else truth, x.shape[1])
        plain = _numpy_linear(np.array(x), layer.weight, layer.bias)
        seconds, numpy_seconds = best_of(plan.bind(x, weight, bias, out=y), plain)
        flops = 2 * x.shape[0] * x.shape[1] * y.shape[1]
        rows.append(Row(f"MiniLM {layer.name}", plan.report.kernels[0], seconds, numpy_seconds, flops, found))
    return rows


def _packed(client: tilewright.Client, weight: Array, device: str | None) -> Any:
    """The weight in the order that kernels read fastest: on a GPU, as it is."""
    from tilewright import UnsupportedError

    try:
        return client.pack_b(weight, device=device)
    except UnsupportedError:
        return client.asarray(weight)


def _numpy_linear(x: Array, weight: Array, bias: Array) -> Callable[[], object]:
    return lambda: x @ weight + bias


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row) | {"gflops": row.gflops, "ratio_to_numpy": row.ratio}
    record["check"]["ok"] = row.check.ok
    return record


def _show(rows: Sequence[Row], size: str) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        title=f"GEMM {size}, a transformer's layers on 128 tokens, convolutions, attention",
        title_justify="left",
        header_style="bold",
    )
    grid.add_column("problem", no_wrap=True)
    grid.add_column("kernel", overflow="ellipsis", no_wrap=True, ratio=1)
    for name in ("ms", "GFLOP/s", "x NumPy", "error"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        error = Text(f"{row.check.error:.0e}" if row.check.error else "exact", "" if row.check.ok else "bold red")
        numbers = (f"{row.seconds * 1e3:.2f}", f"{row.gflops:.0f}", f"{row.ratio:.2f}")
        grid.add_row(row.what, Text(row.kernel, "dim"), *numbers, error)
    out().print(grid)
