"""`tilewright run attention`: attention or its gradients on random data, timed, and checked if asked."""

from __future__ import annotations

from typing import Any

import typer

from tilewright_server.cli import attention_cases as a
from tilewright_server.cli import running
from tilewright_server.cli.output import examples

__all__ = ["EPILOG", "attention"]

EPILOG = examples(
    "tilewright run attention 2 8 128 64 --validate",
    "tilewright run attention 1 16 1024 128 --causal --dtype bf16",
    "tilewright run attention 1 32 8192 128 --heads-k 8 --queries 1 --paged 64 --dtype bf16    a step of decoding",
    "tilewright run attention 4 8 512 64 --varlen --mask bottom_right --validate",
    "tilewright run attention 2 8 256 64 --backward --causal --validate --json",
)


def attention(
    batch: a.Batch,
    heads: a.Heads,
    keys: a.Keys,
    hdim: a.Hdim,
    heads_k: a.HeadsK = 0,
    queries: a.Queries = 0,
    hdim_v: a.HdimV = 0,
    causal: a.Causal = False,
    mask: a.Mask = "",
    window: a.Window = "",
    varlen: a.Varlen = False,
    paged: a.Paged = 0,
    backward: a.Backward = False,
    dtype: a.Dtype = "fp32",
    layout: a.Layout = "bhsd",
    kernel: str = typer.Option("", help="Run this kernel, by name."),
    strategy: str = typer.Option("", help="Way to choose a kernel: auto, measured, heuristic, first_fit."),
    validate: bool = typer.Option(False, "--validate", help="Compare with float64 NumPy; exit code 1 if it is off."),
    repeat: int = typer.Option(20, min=1, help="Timed executions."),
    device: str = typer.Option("", help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's."),
    seed: int = typer.Option(0, help="Seed of the data."),
    target: str = typer.Option("", help="Server. Default: your own if it runs, else a private one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Attend with random queries to random keys and values, or compute the gradients of that."""
    from tilewright_server.cli.private import connected

    case = a.case_of(
        batch=batch, heads=heads, seq_k=keys, hdim=hdim, heads_k=heads_k, seq_q=queries, hdim_v=hdim_v, causal=causal,
        mask=mask, window=window, varlen=varlen, page=paged, backward=backward, dtype=dtype, layout=layout,
    )  # fmt: skip
    operation, problem, request = a.load(case)
    chosen: dict[str, Any] = {"kernel": kernel or None, "strategy": strategy or None, "device": device or None}

    def run() -> dict[str, Any]:
        with connected(target) as client:
            inputs = a.operands(client, operation, request, seed)
            record, outputs = running.execute_all(
                client, case.operation, inputs, request.attributes, chosen, case.flops, repeat
            )
            if validate:
                running.note_check(record, a.check(case, inputs, outputs, a.truth(operation, problem, inputs)))
            return record

    words = {
        "batch": batch, "heads": heads, "heads_k": case.kv_heads, "queries": case.queries, "keys": keys, "D": hdim,
        "Dv": case.values, "mask": case.mask, "window": window, "varlen": varlen, "page": paged,
        "direction": case.direction, "dtype": dtype, "layout": layout,
    }  # fmt: skip
    running.report({"problem": words}, run, as_json, case.operation, case.label)
