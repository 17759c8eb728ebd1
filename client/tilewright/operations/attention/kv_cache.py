"""A cache of keys and values that the server keeps for a session: pages, a table of whose they are, and lengths.

It is made of resident buffers and prepared plans, nothing else: pages are handed out here, rows of the table are
written when a sequence gets a page, and lengths advance where they lie, by the kernels that append.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.dispatch.operands.request import spec_of
from tilewright.dispatch.plans.plan import PlanState, prepare, result_of
from tilewright.errors import InvalidArgumentError
from tilewright.operations.attention.attributes import indices, no_effect, window_words
from tilewright.operations.attention.kv_factors import checked_factors, divisors, factors, keep_factors
from tilewright.operations.attention.kv_pages import INT, CacheState
from tilewright.operations.attention.kv_prefix import behind_prefixes, power_of_two, prefix_operands
from tilewright.operations.epilogue import scale_operand
from tilewright.session.state import Core
from tilewright.tensor import resident
from tilewright.tensor.interop import recognise
from tilewright.tensor.resident import ResidentTensor
from tilewright.transport.rpc import Flow
from tilewright.types.arguments import flag
from tilewright.types.dtypes import DTypeLike, element_type
from tilewright.types.report import joint_report
from tilewright.types.spec import Spec

__all__ = ["append", "attend", "create"]

MOST = 1 << 30
_ARGUMENTS = {
    ("page_size_power", ""): "page_size",
    ("hdim_range", "k"): "hdim",
    ("hdim_range", "v"): "hdim_v",
    ("dtype_combination", ""): "dtype",
}
"""Names of a cache's arguments in errors of the server, by rule and the first letter of the operand."""


def create(
    core: Core,
    pages: int,
    page_size: int,
    kv_heads: int,
    hdim: int,
    hdim_v: int | None = None,
    *,
    dtype: DTypeLike = "bf16",
    sequences: int = 64,
    max_pages: int | None = None,
    device: str | None = None,
    layout: str = "linear",
    k_descale: Any = None,
    v_descale: Any = None,
) -> Flow[CacheState]:
    """A cache of ``pages`` pages of ``page_size`` tokens (a power of two up to 1024) for up to ``sequences`` sequences
    of at most ``max_pages`` pages each (all of them, if it is left out), kept by the server on ``device``.

    ``layout="vectorized"`` keeps tokens in chunks of sixteen bytes. A cache of fp8 takes rows of fp16 and bf16 as well:
    they are divided by ``k_descale`` and ``v_descale`` (a number, or one for each head; 1 if left out), rounded, and
    multiplied by them when they are read; what is beyond 448 times its factor becomes that.

    The cache ends with ``close``, with its last reference, or with the session. The kernel that appends rows of the
    cache's own type is built now. Raises ``InvalidArgumentError`` for sizes and types that no kernel reads,
    ``ResourceExhaustedError`` if the session may not have so much.
    """
    sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads, "hdim": hdim, "sequences": sequences}
    sizes |= {"hdim_v": hdim if hdim_v is None else hdim_v, "max_pages": pages if max_pages is None else max_pages}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 < value <= MOST:
            raise InvalidArgumentError(
                f"{name} is a number from 1 to {MOST}",
                field=name,
                value=value,
                rule="size",
                fix="give an int in that range",
            )
    if not isinstance(layout, str) or layout not in ("linear", "vectorized"):
        raise InvalidArgumentError(
            f"there is no layout {layout!r} of caches",
            field="layout",
            value=layout,
            rule="layout_known",
            fix="use linear or vectorized",
        )
    kind = element_type(dtype)
    sizes = {name: int(value) for name, value in sizes.items()}  # NumPy's would overflow
    sizes["max_pages"] = min(sizes["max_pages"], sizes["pages"])
    if sizes["sequences"] * sizes["max_pages"] > MOST:
        raise InvalidArgumentError(
            f"the table of {sequences} sequences with up to {sizes['max_pages']} pages has more than {MOST} entries",
            field="max_pages",
            value=max_pages,
            rule="size",
            fix="give the most pages that one sequence will have, or fewer sequences",
        )
    found = checked_factors(sizes["kv_heads"], kind, {"k_descale": k_descale, "v_descale": v_descale})
    shapes = _shapes(sizes, 16 // kind.itemsize if layout == "vectorized" else 0)
    yield from _check(core, shapes, kind, device, layout)
    buffers = {}
    for name, shape in shapes.items():
        spec = Spec.of(shape, INT if name in ("block_table", "lengths") else kind)
        buffers[name] = yield from resident.create(core, spec.nbytes, device)
    state = CacheState(core, sizes, device, layout)  # now: what the server refuses may be too much here as well
    state.buffers = buffers
    state.k, state.v = (ResidentTensor(buffers[name], Spec.of(shapes[name], kind)) for name in "kv")
    yield from keep_factors(core, state, found, device)
    return state


def _shapes(sizes: dict[str, int], width: int) -> dict[str, tuple[int, ...]]:
    pages, page, heads, k, v = (sizes[name] for name in ("pages", "page_size", "kv_heads", "hdim", "hdim_v"))
    found: dict[str, tuple[int, ...]] = {"k": (pages, page, heads, k), "v": (pages, page, heads, v)}
    if width:
        if page % width or k % width:
            raise InvalidArgumentError(
                f"pages of {page} tokens and heads of {k} elements do not fall into chunks of {width}",
                field="page_size",
                value=page,
                rule="vectorized_page",
                fix=f"use multiples of {width}, or layout=linear",
            )
        found = {"k": (pages, heads, k // width, page, width), "v": (pages, heads, page // width, v, width)}
    return found | {"block_table": (sizes["sequences"], sizes["max_pages"]), "lengths": (sizes["sequences"],)}


def _check(core: Core, shapes: Mapping[str, Any], kind: Any, device: str | None, layout: str) -> Flow[None]:
    """Ask the server whether there are such caches, by a plan that appends no rows. It builds the kernel that the first
    append needs.
    """
    heads = 1 if layout == "vectorized" else 2
    hdims = (shapes["k"][2] * shapes["k"][4], shapes["v"][3]) if heads == 1 else (shapes["k"][3], shapes["v"][3])
    inputs = {
        **{
            f"{name}_new": Spec.of((1, shapes["k"][heads], 0, hdim), kind)
            for name, hdim in zip("kv", hdims, strict=True)
        },
        **{f"{name}_past": Spec.of(shapes[name], kind) for name in "kv"},
        "seqlens_k": Spec.of((1,), INT),
        "block_table": Spec.of((1, shapes["block_table"][1]), INT),
    }
    words = {} if layout == "linear" else {"kv_layout": layout}
    try:
        yield from prepare(core, "kv_append", inputs, {}, words, device=device)
    except InvalidArgumentError as error:
        field = _ARGUMENTS.get((error.rule, error.field[:1]), _ARGUMENTS.get((error.rule, ""), error.field))
        raise InvalidArgumentError(
            error.message, field=field, value=error.value, rule=error.rule, fix=error.fix
        ) from None


def append(
    state: CacheState,
    ids: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary: str = "interleaved",
    k_descale: Any = None,
    v_descale: Any = None,
    timeout: float | None = None,
) -> Flow[None]:
    """Append keys ``[B, Hk, N, D]`` and values ``[B, Hk, N, Dv]`` to sequences ``ids``; or ``[T, Hk, D]``, end to end,
    where ``cu_seqlens`` (a list of B + 1 numbers) says whose is what.

    With ``rotary_cos`` and ``rotary_sin`` keys are rotated by their position. Rows of fp16 and bf16 for a cache of fp8
    are divided by ``k_descale`` and ``v_descale`` (a number, ``[Hk]`` or ``[B, Hk]``; those of the cache if left out).
    Raises ``ResourceExhaustedError`` if there are not enough pages, before anything is written.
    """
    known, rows, starts = _rows(state, ids, "k", k, cu_seqlens)
    rope = behind_prefixes(state, known, {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rope": rotary})
    own = {"k_descale": k_descale, "v_descale": v_descale}
    scales = divisors(state, k, own) or {name: value for name, value in own.items() if value is not None}
    yield from _ready(state, known, rows)
    load, in_place = yield from _append_load(
        state, known, k, v, None, None, starts, rope | scales, max(rows, default=0)
    )
    results = yield from _send(state, [load], timeout)
    result_of(results[0])
    _advance(state, known, rows, in_place)


def attend(
    state: CacheState,
    ids: Any,
    q: Any,
    *,
    k: Any = None,
    v: Any = None,
    cu_seqlens: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary: str = "interleaved",
    mask: str | None = None,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    sink_size: int = 0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    timeout: float | None = None,
) -> Flow[Any]:
    """Attention of queries ``[B, Hq, N, D]`` (``[T, Hq, D]`` with ``cu_seqlens``) over the tokens of sequences ``ids``;
    the result has their shape with Dv.

    With ``k`` and ``v`` these are appended first, in the same message: a step of decoding sends the new token and
    nothing else. Rotary tables then rotate queries too. The last query stands for the last token (``mask`` is
    "bottom_right" unless it is given); the other options are those of ``attention``, and with ``return_lse`` the result
    is a pair of the output and the logarithms ``[B, Hq, N]`` (``[Hq, T]``). A cache of fp8 has its ``k_descale`` and
    ``v_descale``; others that are given here are for this step alone, for its new rows and all that it reads.

    Sequences that rest on a prefix (``add(prefix=...)``) see all of it, and then their own tokens as ``mask`` says. A
    prefix is read once for sequences that share it and are neighbours in ``ids``. Windows and slopes are refused there.
    """
    known, rows, starts = _rows(state, ids, "q", q, cu_seqlens)
    words: dict[str, Any] = {"scale": scale, "softcap": softcap, "num_splits": num_splits}
    longest = max(rows, default=0)
    words["mask"] = mask
    if sink_size and window is None:
        raise no_effect("sink_size", sink_size, "there is no window that hides the first keys", "give window as well")
    words["sink_size"] = sink_size or None
    own = {"k_descale": k_descale, "v_descale": v_descale}
    if window is not None:
        words |= window_words(window) | {"mask_align": "bottom_right"}
    elif mask is None and (longest != 1 or alibi_slopes is not None):
        words["mask"] = "bottom_right"
    loads, turned, in_place = [], q, True
    if (k is None) != (v is None):
        raise InvalidArgumentError(
            "keys and values are appended together", field="v" if v is None else "k", rule="operand_missing",
            fix="give both, or none to attend to what is there",
        )  # fmt: skip
    if k is None and (rotary_cos is not None or rotary_sin is not None):
        raise InvalidArgumentError(
            "queries are rotated with the keys that are appended", field="rotary_cos", rule="rotary_without_keys",
            fix="give k and v, or queries that are rotated already",
        )  # fmt: skip
    if k is not None:
        _check_new(k, q)
        yield from _ready(state, known, rows)
        rope = behind_prefixes(state, known, {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rope": rotary})
        rope |= divisors(state, k, own)
        rotated = None
        if rotary_cos is not None:
            turned = rotated = yield from _scratch(state, spec_of(q, "q"))
        first, in_place = yield from _append_load(
            state, known, k, v, q if rotated is not None else None, rotated, starts, rope, longest
        )
        loads.append(first)
    else:
        yield from _ready(state, known, [0] * len(known))
    table, lengths, _ = state.tables(known)
    if k is not None and not in_place:
        lengths = lengths + np.array(rows, INT)
    inputs = {"q": turned, "k": state.k, "v": state.v, "block_table": table, "seqlens_k": lengths}
    more = {"alibi_slopes": alibi_slopes, "sinks": sinks, "q_descale": q_descale}
    inputs |= {name: scale_operand(value, name) for name, value in more.items() if value is not None}
    inputs |= factors(state, own)
    shared, sizes = prefix_operands(state, known, rows)
    inputs |= shared
    words |= sizes
    outputs = {"o": out}
    if flag("return_lse", return_lse):
        outputs["lse"], words["return_lse"] = None, True
    if starts is not None:
        inputs["cu_seqlens_q"] = starts
        words["max_seqlen_q"] = power_of_two(longest)
    plan = yield from _plan(state, "attention", inputs, dict.fromkeys(outputs), words)
    loads.append((plan, (yield from plan.load((), outputs, inputs))))
    results = yield from _send(state, loads, timeout)
    if k is not None:
        result_of(results[0])
        _advance(state, known, rows, in_place)
    found = result_of(results[-1])
    return (found["o"], found["lse"]) if "lse" in outputs else found


# ---- steps ----


def _check_new(k: Any, q: Any) -> None:
    """Raise ``InvalidArgumentError`` unless there are as many new keys as queries: lengths advance by queries here, and
    by keys on the device. (Rows end to end are as many as ``cu_seqlens`` says, of both.)
    """
    keys, queries = spec_of(k, "k").shape, spec_of(q, "q").shape
    if len(keys) == len(queries) == 4 and keys[2] != queries[2]:
        raise InvalidArgumentError(
            "new keys are as many as queries",
            field="k.shape",
            value=keys,
            rule="rows_agree",
            fix="append them first (append), and attend without k and v",
        )


def _rows(state: CacheState, ids: Any, field: str, tensor: Any, cu_seqlens: Any) -> tuple[list[int], list[int], Any]:
    """Sequences, how many rows each has in ``tensor``, and where they start."""
    state.fresh.clear()
    known, shape = state.known(ids), spec_of(tensor, field).shape or (0,)
    if cu_seqlens is None:
        return known, [shape[2] if len(shape) == 4 else 0] * len(known), None
    starts = np.asarray(indices(cu_seqlens, "cu_seqlens"))
    if starts.shape != (len(known) + 1,) or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > shape[0]:
        raise InvalidArgumentError(
            f"cu_seqlens does not divide {shape[0]} rows among {len(known)} sequences",
            field="cu_seqlens",
            value=starts.tolist(),
            rule="cu_seqlens_ascending",
            fix="give the first row of each sequence in ascending order, and the end of the last",
        )
    return known, np.diff(starts).tolist(), starts


def _ready(state: CacheState, ids: Sequence[int], rows: Sequence[int]) -> Flow[None]:
    """Pages for new rows, and the device's table and lengths as they are here."""
    state.reserve(ids, rows)
    width = state.max_pages * 4
    for item in sorted(state.changed):
        yield from resident.write(state.buffers["block_table"], state.table[item], item * width)
    state.changed.clear()
    if state.stale:
        yield from resident.write(state.buffers["lengths"], state.lengths)
        state.stale = False


def _append_load(
    state: CacheState, ids: Sequence[int], k: Any, v: Any, q: Any, rotated: Any, starts: Any, rope: Any, longest: int
) -> Flow[tuple[tuple[PlanState, Any], bool]]:
    """The execution that appends, and whether it advances the lengths on the device."""
    table, lengths, in_place = state.tables(ids)
    inputs = {"k_new": k, "v_new": v, "k_past": state.k, "v_past": state.v, "seqlens_k": lengths, "block_table": table}
    outputs = {"k_cache": state.k, "v_cache": state.v}
    words: dict[str, Any] = {}
    if starts is not None:
        inputs["cu_seqlens_q"] = starts
        words["max_seqlen_q"] = power_of_two(longest)
    if rope["rotary_cos"] is not None or rope["rotary_sin"] is not None:
        inputs |= {name: rope[name] for name in ("rotary_cos", "rotary_sin") if rope[name] is not None}
        words["rope"] = rope["rope"]
    inputs |= {name: rope[name] for name in ("k_descale", "v_descale") if name in rope}
    if q is not None:
        inputs["q"], outputs["q_out"] = q, rotated
    if in_place:
        outputs["seqlens_out"] = lengths
    plan = yield from _plan(state, "kv_append", inputs, outputs, words)
    load = yield from plan.load((), outputs, inputs)
    return (plan, load), in_place


def _send(state: CacheState, loads: Sequence[tuple[PlanState, Any]], timeout: float | None) -> Flow[list[Any]]:
    try:
        results = yield from loads[-1][0].send([load for _, load in loads], timeout)
    except BaseException:  # whatever was appended does not count: what is known here is sent again
        state.stale = True
        raise
    ran = state.core.report
    if ran is not None:
        made = [plan.report for plan in state.fresh]
        state.core.report = joint_report([plan.report for plan, _ in loads], made, ran)
    return results


def _advance(state: CacheState, ids: Sequence[int], rows: Iterable[int], in_place: bool) -> None:
    state.lengths[list(ids)] += np.array(list(rows), INT)
    state.stale = state.stale or not in_place


def _plan(state: CacheState, operation: str, inputs: Any, outputs: Any, words: Any) -> Flow[PlanState]:
    if state.layout != "linear":
        words["kv_layout"] = state.layout
    given = {name: value for name, value in words.items() if value is not None}
    specs = {name: spec_of(value, name) for name, value in inputs.items()}
    key = (
        operation,
        tuple((name, spec.shape, spec.dtype, spec.strides) for name, spec in specs.items()),
        tuple(outputs),
        repr(given),  # what is no attribute may not be hashable either; the server refuses it
    )
    plan = state.plans.get(key)
    if plan is None:
        device = state.device or state.buffers["k"].device
        if recognise(inputs.get("q"), "q") is not None:
            device = ""  # the one that the queries are on
        described = {name: spec_of(value, name) for name, value in outputs.items() if value is not None}
        plan = yield from prepare(state.core, operation, specs, described, given, device=device or None)
        state.core.remember(state.plans, key, plan)
        state.fresh.append(plan)
    return plan


def _scratch(state: CacheState, spec: Spec) -> Flow[ResidentTensor]:
    key = (spec.shape, spec.dtype)
    found = state.scratch.get(key)
    if found is None:
        plain = Spec.of(spec.shape, spec.dtype)
        buffer = yield from resident.create(state.core, max(plain.nbytes, 1), state.device)
        found = state.scratch[key] = ResidentTensor(buffer, plain)
    return found
