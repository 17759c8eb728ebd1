"""`tilewright kernels explain attention`: which kernel attention or its gradients would run, and why."""

from __future__ import annotations

import typer

from tilewright_server.cli import attention_cases as a
from tilewright_server.cli.conv_cases import specs
from tilewright_server.cli.output import examples, print_explanation, print_json

__all__ = ["EPILOG", "explain_attention"]

EPILOG = examples(
    "tilewright kernels explain attention 1 16 2048 128 --causal --dtype bf16",
    "tilewright kernels explain attention 8 32 8192 128 --heads-k 8 --queries 1 --paged 64 --json",
)


def explain_attention(
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
    strategy: str = typer.Option("", help="Way to choose a kernel."),
    kernel: str = typer.Option("", help="Why, or why not, this kernel."),
    device: str = typer.Option("", help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's."),
    top: int = typer.Option(10, min=1, help="Candidates to print."),
    target: str = typer.Option("", help="Server. Default: your own if it runs, else a private one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say which kernel attention would run, what was predicted of the others, and why the rest was refused."""
    from tilewright_server.cli.private import connected

    case = a.case_of(
        batch=batch, heads=heads, seq_k=keys, hdim=hdim, heads_k=heads_k, seq_q=queries, hdim_v=hdim_v, causal=causal,
        mask=mask, window=window, varlen=varlen, page=paged, backward=backward, dtype=dtype, layout=layout,
    )  # fmt: skip
    _, _, request = a.load(case)
    with connected(target) as client:
        found = client.explain(
            case.operation,
            specs(request),
            attributes=request.attributes,
            strategy=strategy or None,
            kernel=kernel or None,
            device=device or None,
        )
    if as_json:
        print_json(found)
        return
    print_explanation(found, top)
