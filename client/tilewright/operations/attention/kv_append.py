"""New rows for a cache of keys and values, in place; see ``attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright.operations.attention.attributes import indices, is_bshd
from tilewright.operations.attention.request import asked_for
from tilewright.operations.call import CHOICE, Asked, Choice, planning, running
from tilewright.operations.epilogue import scale_operand
from tilewright.operations.layouts import heads_first
from tilewright.session.state import Core
from tilewright.tensor.interop import recognise_output
from tilewright.types.arguments import flag, unless

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["kv_append", "plan_kv_append"]

Operand = Any


def _kv_append(
    core: Core,
    /,
    k_new: Operand,
    v_new: Operand,
    k_cache: Operand,
    v_cache: Operand,
    seqlens_k: Operand,
    *,
    layout: str = "bhsd",
    block_table: Operand | None = None,
    page_starts: Operand | None = None,
    cache_index: Operand | None = None,
    cu_seqlens_q: Operand | None = None,
    max_seqlen_q: int | None = None,
    kv_layout: str = "linear",
    kv_lookup: str | None = None,
    q: Operand | None = None,
    rotary_cos: Operand | None = None,
    rotary_sin: Operand | None = None,
    rotary: str = "interleaved",
    k_descale: Operand | None = None,
    v_descale: Operand | None = None,
    return_status: bool = False,
    seqlens_out: Any = None,
    q_out: Any = None,
    **options: Unpack[Choice],
) -> Asked:
    """Write new keys and values behind those that a cache holds, in place: row n of sequence b becomes its token
    ``seqlens_k[b] + n``. Returns ``(k_cache, v_cache)``, the rotated queries next if ``q`` is given, and with
    ``return_status`` what the kernel found wrong, as ``attention`` gives it.

    ``k_new`` and ``v_new`` are ``[B, Hk, N, D]`` (or ``[Tn, Hk, D]`` with ``cu_seqlens_q`` and ``max_seqlen_q``), the
    caches ``[items, Hk, room, D]`` (``cache_index`` says which item is whose), or pages with a ``block_table``, as for
    ``attention_paged``. ``layout="bshd"`` is for new rows, queries and caches of items. With ``rotary_cos`` and
    ``rotary_sin`` ``[positions, R / 2]`` the first R elements of keys (and of ``q``) are rotated by their token's
    position: ``rotary="interleaved"`` turns neighbours, ``"half"`` element t with t + R / 2.

    Rows are of the cache's type; for a cache of fp8 they may be fp16 or bf16, which are divided by ``k_descale``
    and ``v_descale`` (a number, ``[Hk]`` or ``[B, Hk]``; 1 if left out) and rounded, as ``attention_paged`` multiplies
    them again: what lies beyond 448 times its factor becomes that.

    ``seqlens_k`` holds lengths from before; new ones go to ``seqlens_out`` if that is given, which may be the same
    array. The caches must be arrays that the server can write in place (of ``empty``, on a GPU, or resident); others
    are copied there and back.
    """
    given = {**CHOICE, **options, "core": core}
    swapped = is_bshd(layout) and cu_seqlens_q is None
    turned = ("k_new", "v_new", "q", "q_out", *(("k_cache", "v_cache") if block_table is None else ()))

    def put(value: Any, name: str) -> Any:
        return heads_first(value, name) if swapped and name in turned else value

    lengths = indices(seqlens_k, "seqlens_k")
    inputs = {
        "k_new": put(k_new, "k_new"), "v_new": put(v_new, "v_new"), "q": put(q, "q"),
        "k_past": put(k_cache, "k_cache"), "v_past": put(v_cache, "v_cache"), "seqlens_k": lengths,
        "block_table": indices(block_table, "block_table"), "page_starts": indices(page_starts, "page_starts"),
        "cache_index": indices(cache_index, "cache_index"), "cu_seqlens_q": indices(cu_seqlens_q, "cu_seqlens_q"),
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "k_descale": scale_operand(k_descale, "k_descale"),
        "v_descale": scale_operand(v_descale, "v_descale"),
    }  # fmt: skip
    words = {"max_seqlen_q": max_seqlen_q, "kv_lookup": kv_lookup}
    words["kv_layout"] = unless(kv_layout, "linear")
    words["rope"] = None if rotary_cos is None and rotary_sin is None else rotary
    outs: dict[str, Any] = {"k_cache": k_cache, "v_cache": v_cache}
    if q is not None:
        outs["q_out"] = q_out
    if flag("return_status", return_status):
        outs["status"], words["return_status"] = None, True
    asked = asked_for(given, "kv_append", inputs, outs, words, turned if swapped else ())
    if seqlens_out is not None:
        tensor = recognise_output(seqlens_out, "seqlens_out")
        asked.targets["seqlens_out"] = seqlens_out if tensor is None else tensor
    return asked


_TAKES = """Lengths, pages and tables are read anew at every call. The plan takes its tensors by the operation's names,
    and gives a dict."""

kv_append, plan_kv_append = running(_kv_append), planning(_kv_append, _TAKES)
