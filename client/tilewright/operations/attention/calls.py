"""Attention and its gradients: arguments as people write them, turned into the generic call. All rules about shapes and
dtypes are the server's.

Nothing is copied for its layout: strides go to the server, so both orders of heads and rows are read as they lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.errors import InvalidArgumentError
from tilewright.operations.attention.attributes import indices, is_bshd
from tilewright.operations.attention.options import BACKWARD, FORWARD, PAGED, Backward, Forward, Paged
from tilewright.operations.attention.request import asked_for, forward, operands
from tilewright.operations.call import Asked, planning, running
from tilewright.session.state import Core
from tilewright.types.arguments import flag, number, unless

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "plan_attention",
    "plan_attention_backward",
    "plan_attention_paged",
    "plan_attention_varlen",
]

Operand = Any
"""An array, a nested list of numbers that NumPy reads, or a tensor that the server keeps."""


def _attention(
    core: Core,
    /,
    q: Operand,
    k: Operand,
    v: Operand | None,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    layout: str = "bhsd",
    cache_index: Operand | None = None,
    **options: Unpack[Forward],
) -> Asked:
    """``softmax(scale * q @ k.T + bias) @ v`` in one pass; names and meaning are those of PyTorch's
    ``scaled_dot_product_attention``.

    ``q`` is ``[B, Hq, Sq, D]``, ``k`` ``[B, Hk, Sk, D]``, ``v`` ``[B, Hk, Sk, Dv]`` and the result ``[B, Hq, Sq, Dv]``;
    with ``layout="bshd"`` rows come before heads everywhere; three dimensions are those of one sequence. Hk divides Hq.
    ``attn_mask`` is added to scores (of bools: False hides a key), and broadcasts to ``[B, Hq, Sq, Sk]``; so does
    ``bias``. ``scale`` is ``D ** -0.5`` if left out.

    ``is_causal`` hides keys behind the diagonal from the top left, as PyTorch's does; ``mask="bottom_right"`` aligns
    it with the last query and key, as FlashAttention does. ``window=(left, right)`` keeps that many keys beside the
    diagonal, which ``mask_align`` places; the first ``sink_size`` keys stay in sight. ``softcap`` bends scores with
    ``softcap * tanh(score / softcap)``; ``alibi_slopes`` ``[Hq]`` or ``[B, Hq]`` subtract slope times distance;
    ``sinks`` ``[Hq]`` are learned logits that take their part of every row. ``seqlens_q`` and ``seqlens_k`` ``[B]`` are
    true lengths where tensors are longer; ``cache_index`` ``[B]`` says which item of ``k`` and ``v`` is whose.
    ``q_descale`` and the like are factors of fp8 operands: one number, ``[B, H]``, or ``[B, H, blocks]``, one for every
    ``scale_block_q`` rows of ``q`` and ``scale_block_k`` of ``k`` and ``v`` (128, if left out).

    A bias and ``alibi_slopes`` together are both added. ``return_scores`` gives one stage of the scores as fp32
    ``[B, Hq, Sq, Sk]``, last of the results: ``"scaled"`` (``scale * q @ k.T``), ``"softcap"``, ``"masked"`` (with bias
    and slopes, ``-inf`` where a query does not see a key) or ``"probabilities"`` (those before dropout).

    A latent cache (multi-head latent attention) is ``k`` alone: with ``v=None`` and ``head_dim_v`` the values are the
    first so many elements of each key.

    ``dropout_p`` drops weights by ``seed`` and ``offset`` (or ``rng``, as ``return_rng`` gives it): equal ones drop the
    same; without a seed one is drawn. With ``return_lse``, ``return_randval``, ``return_status`` or ``return_rng`` the
    result is a tuple of the output, the logarithms ``[B, Hq, Sq]`` of the rows' sums (those of ``sinks`` included), the
    random bytes as uint8, what the kernel found wrong with lengths and pages, and the seeds, as far as asked for. What
    was wrong is int32 [4]: bits (1: a length, 2: a page, 4: starts that do not ascend, 8: no room to append, 16: no
    angle for a position, 32: an item of a cache), the first sequence concerned, what it has there, and 0; zeros if
    nothing was. ``out`` and ``lse`` are arrays to write into. A row that sees nothing gives zeros, and ``-inf`` in
    ``lse``. The other arguments, and the errors, are those of ``run``.

        >>> y = client.attention(q, k, v, is_causal=True)  # doctest: +SKIP
    """
    given = {**FORWARD, **options, **locals()}
    more = {"cache_index": indices(cache_index, "cache_index")}
    tensors, swapped = {"q": q, "k": k, "v": v}, "qkv" if is_bshd(layout) else ""
    there = {name: item for name, item in tensors.items() if item is not None}
    if not swapped and given["out"] is None and all(getattr(item, "ndim", 0) == 3 for item in there.values()):
        # As PyTorch's: [heads, rows, elements].
        asked = forward(given, {name: item[None] for name, item in there.items()}, "", more)
        return replace(asked, squeezed=(0,))
    return forward(given, tensors, swapped, more)


def _attention_varlen(
    core: Core,
    /,
    q: Operand,
    k: Operand,
    v: Operand | None,
    cu_seqlens_q: Operand,
    cu_seqlens_k: Operand,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    min_seqlen_q: int = 0,
    **options: Unpack[Forward],
) -> Asked:
    """``attention`` of sequences of different lengths, end to end: ``q`` is ``[Tq, Hq, D]``, ``k`` and ``v``
    ``[Tk, Hk, D]``.

    Sequence i has the rows from ``cu_seqlens_q[i]`` to below ``cu_seqlens_q[i + 1]``, and likewise its keys; of these
    ``seqlens_q`` and ``seqlens_k`` may use fewer. ``max_seqlen_q`` and ``max_seqlen_k`` are at least the longest
    lengths: lengths are data, so one plan serves all that fit. Sequences may be empty; those with fewer than
    ``min_seqlen_q`` queries are skipped (zeros). ``lse`` is ``[Hq, Tq]``. Masks count within a sequence. The other
    arguments are those of ``attention``.
    """
    given = {**FORWARD, **options, **locals()}
    more = {
        "cu_seqlens_q": indices(cu_seqlens_q, "cu_seqlens_q"),
        "cu_seqlens_k": indices(cu_seqlens_k, "cu_seqlens_k"),
    }
    words = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "min_seqlen_q": unless(min_seqlen_q, 0)}
    return forward(given, {"q": q, "k": k, "v": v}, "", more, words)


def _attention_paged(
    core: Core,
    /,
    q: Operand,
    k_pages: Operand,
    v_pages: Operand | None,
    block_table: Operand,
    seqlens_k: Operand,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    layout: str = "bhsd",
    page_starts: Operand | None = None,
    cu_seqlens_q: Operand | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    prefix_table: Operand | None = None,
    prefix_seqlens: Operand | None = None,
    prefix_starts: Operand | None = None,
    max_prefix_rows: int | None = None,
    kv_layout: str = "linear",
    kv_lookup: str | None = None,
    dropout_p: float = 0.0,
    **options: Unpack[Paged],
) -> Asked:
    """``attention`` over keys and values in pages: ``k_pages`` is ``[pages, page size, Hk, D]``, ``v_pages``
    ``[pages, page size, Hk, Dv]``.

    ``block_table`` ``[B, n]`` has the pages of each sequence in order, and ``seqlens_k`` ``[B]`` how many tokens it
    has; or (SGLang's way) it is one list, of which sequence i has the part from ``page_starts[i]``. Entries beyond a
    sequence's length may be anything. ``q`` is ``[B, Hq, Sq, D]``, or ``[Tq, Hq, D]`` with ``cu_seqlens_q`` and
    ``max_seqlen_q``. Pages are powers of two up to 1024 tokens; ``kv_layout="vectorized"`` has keys as
    ``[pages, Hk, D / x, page size, x]`` and values as ``[pages, Hk, page size / x, Dv, x]``, x elements being sixteen
    bytes. Queries are as a rule the last tokens of their sequences: ``mask="bottom_right"`` is what is causal then.
    ``k_descale`` and ``v_descale`` may be ``[pages, Hk]`` (``qscale="kv_blockscale"`` says so where there are as many
    pages as sequences).

    Sequences may share prefixes, each of which is read once for all queries of its group (a cascade):
    ``prefix_table`` ``[G, n]`` and ``prefix_seqlens`` ``[G]`` have the prefixes, ``block_table`` and ``seqlens_k`` what
    follows them in each sequence. Group i has the rows of queries from ``prefix_starts[i]`` to below
    ``prefix_starts[i + 1]``, among those of all sequences, at most ``max_prefix_rows`` of them; without
    ``prefix_starts`` all groups have equally many. Every query sees all of its prefix, and masks are of what follows.
    Queries of several rows lie with rows before heads. Windows, biases, slopes and dropout are refused there. The other
    arguments are those of ``attention``.
    """
    if block_table is None:
        raise InvalidArgumentError(
            "pages without a table are nobody's",
            field="block_table",
            rule="operand_missing",
            fix="give the pages of each sequence, int32 [B, n] (caches of items: attention with cache_index)",
        )
    given = {**PAGED, **options, **locals()}
    more = {
        "block_table": indices(block_table, "block_table"),
        "page_starts": indices(page_starts, "page_starts"),
        "cu_seqlens_q": indices(cu_seqlens_q, "cu_seqlens_q"),
        "prefix_table": indices(prefix_table, "prefix_table"),
        "prefix_seqlens": indices(prefix_seqlens, "prefix_seqlens"),
        "prefix_starts": indices(prefix_starts, "prefix_starts"),
    }
    words = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "kv_lookup": kv_lookup}
    words["max_prefix_rows"] = max_prefix_rows
    words["kv_layout"] = unless(kv_layout, "linear")
    tensors = {"q": q, "k": k_pages, "v": v_pages}
    return forward(given, tensors, "q" if is_bshd(layout) and cu_seqlens_q is None else "", more, words)


def _attention_backward(
    core: Core,
    /,
    do: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    lse: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    layout: str = "bhsd",
    cu_seqlens_q: Operand | None = None,
    cu_seqlens_k: Operand | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_dbias: bool = False,
    return_randval: bool = False,
    deterministic: bool = True,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    **options: Unpack[Backward],
) -> Asked:
    """The gradients ``(dq, dk, dv)`` of ``attention`` for the gradient ``do`` of its output ``o``; ``lse`` is what it
    gave with ``return_lse``.

    With ``return_dbias`` the gradient of ``bias`` (or ``attn_mask``), in its shape, comes next, then with ``sinks``
    theirs, and with ``return_randval`` the random bytes, as the forward pass gives them. The other arguments are those
    of the forward pass (of ``attention_varlen``, where ``cu_seqlens_q`` is given): a dropped weight is dropped again
    for the same seeds, so pass ``rng`` as ``return_rng`` gave it, or ``seed``. ``dq``, ``dk`` and ``dv`` are arrays to
    write into. With ``deterministic`` sums are made in a fixed order, so equal calls have equal results; on CPUs they
    always are.
    """
    given = {**BACKWARD, **options, **locals()}
    if given["seed"] is None and given["rng"] is None and number("dropout_p", dropout_p) != 0:
        raise InvalidArgumentError(
            "which weights were dropped follows from the seeds of the forward pass",
            field="rng",
            rule="seed_given_once",
            fix="pass rng, as attention(..., return_rng=True) gave it, or the same seed and offset",
        )
    rows_first = is_bshd(layout) and cu_seqlens_q is None
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do}
    inputs, words = operands(given, tensors, tensors if rows_first else ())
    inputs |= {
        "lse": lse,
        "cu_seqlens_q": indices(cu_seqlens_q, "cu_seqlens_q"),
        "cu_seqlens_k": indices(cu_seqlens_k, "cu_seqlens_k"),
    }
    gives_dbias = flag("return_dbias", return_dbias)
    words |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "return_dbias": gives_dbias or None}
    words["deterministic"] = None if deterministic is None or flag("deterministic", deterministic) else False
    outs = {"dq": dq, "dk": dk, "dv": dv}
    if gives_dbias:
        outs["dbias"] = None
    if given["sinks"] is not None:
        outs["dsinks"] = None
    if flag("return_randval", return_randval):
        outs["randval"], words["return_randval"] = None, True
    return asked_for(given, "attention_backward", inputs, outs, words, ("dq", "dk", "dv") if rows_first else ())


_TAKES = """Lengths, starts, pages and seeds are read anew at every call. The plan takes its tensors by the operation's
    names (``plan(q=q, k=k, v=v, out=o)``), heads before rows also where ``layout="bshd"`` was said: pass
    ``x.swapaxes(1, 2)``. With several outputs it gives a dict."""

attention, plan_attention = running(_attention, FORWARD), planning(_attention, _TAKES, FORWARD)
attention_varlen = running(_attention_varlen, FORWARD)
plan_attention_varlen = planning(_attention_varlen, _TAKES, FORWARD)
attention_paged, plan_attention_paged = running(_attention_paged, PAGED), planning(_attention_paged, _TAKES, PAGED)
attention_backward = running(_attention_backward, BACKWARD)
plan_attention_backward = planning(_attention_backward, _TAKES, BACKWARD)
