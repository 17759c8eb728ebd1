"""Attention for `run attention`, `kernels explain attention` and `demo`: the arguments that say which, operands in
shared memory, and the truth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_tools.cli.problems import cases

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright
    from tilewright_kit.contract.operation import Operation
    from tilewright_kit.contract.problem import OperationRequest
    from tilewright_tools.tuning.problems.families.attention import AttentionCase

    Array = npt.NDArray[Any]

__all__ = [
    "arguments",
    "case_of",
    "check",
    "load",
    "operands",
    "truth",
]

_EIGHT_BIT = 8e-3

Batch = Annotated[int, typer.Argument(metavar="B", help="Sequences.")]
Heads = Annotated[int, typer.Argument(metavar="HEADS", help="Heads of queries.")]
Keys = Annotated[int, typer.Argument(metavar="KEYS", help="Keys of a sequence.")]
Hdim = Annotated[int, typer.Argument(metavar="D", help="Elements of a head.")]
HeadsK = Annotated[int, typer.Option("--heads-k", help="Heads of keys and values; 0: as many as of queries.")]
Queries = Annotated[int, typer.Option(help="Queries of a sequence; 0: as many as keys.")]
HdimV = Annotated[int, typer.Option("--hdim-v", help="Elements of a head of values; 0: as many as of keys.")]
Causal = Annotated[bool, typer.Option("--causal", help="Hide keys behind the query, from the top left.")]
Mask = Annotated[str, typer.Option(help="top_left (as --causal) or bottom_right.")]
Window = Annotated[str, typer.Option(help="Keys that are seen to the left and right of the query: 128,0 (-1: all).")]
Varlen = Annotated[bool, typer.Option("--varlen", help="Sequences of different lengths, end to end.")]
Paged = Annotated[int, typer.Option(help="Keys and values in pages of so many tokens.")]
Backward = Annotated[bool, typer.Option("--backward", help="The gradients of queries, keys and values.")]
Dtype = Annotated[str, typer.Option(help="Element type: fp32, fp16, bf16, fp8.")]
Layout = Annotated[str, typer.Option(help="bhsd: heads before rows; bshd: rows before heads.")]


def arguments(
    batch: Batch,
    heads: Heads,
    keys: Keys,
    hdim: Hdim,
    heads_k: HeadsK = 0,
    queries: Queries = 0,
    hdim_v: HdimV = 0,
    causal: Causal = False,
    mask: Mask = "",
    window: Window = "",
    varlen: Varlen = False,
    paged: Paged = 0,
    backward: Backward = False,
    dtype: Dtype = "fp32",
    layout: Layout = "bhsd",
) -> dict[str, Any]:
    """What a command's arguments say, as ``case_of`` takes it."""
    return {
        "batch": batch, "heads": heads, "seq_k": keys, "hdim": hdim, "heads_k": heads_k, "seq_q": queries,
        "hdim_v": hdim_v, "causal": causal, "mask": mask, "window": window, "varlen": varlen, "page": paged,
        "backward": backward, "dtype": dtype, "layout": layout,
    }  # fmt: skip


def case_of(causal: bool = False, backward: bool = False, varlen: bool = False, **fields: Any) -> AttentionCase:
    """The case, in words that mean something; whether it can be computed is the operation's to say.

    Raises ``InvalidArgumentError`` with the option's name.
    """
    from tilewright_kit.types.errors import InvalidArgumentError
    from tilewright_tools.tuning.problems.families.attention import AttentionCase

    if causal and not fields.get("mask"):
        fields["mask"] = "top_left"
    fields |= {"direction": "bwd" if backward else "fwd", "varlen": "yes" if varlen else ""}
    try:
        return AttentionCase(**fields).checked("the command line")
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            error.reason,
            field=error.field.removeprefix("shapes."),
            value=error.value,
            rule="attention_arguments",
            fix=error.fix,
        ) from None


def load(case: AttentionCase) -> tuple[Operation[Any, Any], Any, OperationRequest]:
    """The operation, the problem and its request. Raises what the operation refuses."""
    from tilewright_tools.cli.kernels.generate import load_operation

    operation = load_operation(case.operation)
    request = case.request()
    return operation, operation.parse(request), request


def operands(
    client: tilewright.Client, operation: Operation[Any, Any], request: OperationRequest, seed: int = 0
) -> dict[str, Array]:
    """The inputs in the client's shared memory, laid out as the request says: what must mean something (lengths, pages,
    what the forward pass gave) as the operation makes it up, the rest at random.
    """
    import numpy as np

    from tilewright_kit.contract.abilities import SamplesInputs
    from tilewright_tools.tuning.measure.data import contents, view

    rng = np.random.default_rng(seed)
    meant = operation.sample_inputs(request, rng) if isinstance(operation, SamplesInputs) else {}
    found = {}
    for name, desc in request.inputs.items():
        memory: Array = client.empty((desc.span,), desc.dtype.value)
        found[name] = view(memory, desc)
        if name in meant:
            found[name][...] = meant[name]
        else:
            memory[...] = contents(desc, "normal", rng)
    return found


def truth(operation: Operation[Any, Any], problem: Any, inputs: dict[str, Array]) -> dict[str, Array]:
    """The right outputs, in float64."""
    found = operation.reference(problem, inputs)
    return {name: found[name] for name in found if any(item.name == name for item in problem.operands)}


def check(
    case: AttentionCase, inputs: dict[str, Array], outputs: dict[str, Array], right: dict[str, Array]
) -> cases.Check:
    """The worst of all outputs. Rows behind the last sequence are nobody's, and not written."""
    from dataclasses import replace

    found = []
    for name, want in right.items():
        have = outputs[name]
        if case.is_varlen:
            rows = int(inputs["cu_seqlens_k" if name in ("dk", "dv") else "cu_seqlens_q"][-1])
            part = (slice(None), slice(rows)) if name == "lse" else (slice(rows),)
            have, want = have[part], want[part]
        result = cases.check(have, want, case.depth)
        # Weights of 8-bit operands are rounded to bf16 for the second product.
        found.append(replace(result, tolerance=max(result.tolerance, _EIGHT_BIT)) if case.dtype == "fp8" else result)
    return max(found, key=lambda item: item.error / max(item.tolerance, 1e-30))
