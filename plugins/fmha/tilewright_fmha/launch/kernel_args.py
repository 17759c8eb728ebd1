"""``tw_fmha_args`` of ``tilewright/core/args/fmha.h``, field for field; a test compares."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.problem.problem import FmhaProblem, Strides
from tilewright_fmha.vocabulary import KV_APPEND, QScale
from tilewright_kit.contract.plan import COUNTERS, F64, I64, WORKSPACE, Arg, Pointer, Struct

__all__ = [
    "ARRAYS", "JOINT_BIAS", "OWN_LSE", "POINTERS", "SCALARS", "SCALES", "TENSORS", "args_of", "joint_items",
    "own_tensor", "tensor_args",
]  # fmt: skip

TENSORS: Mapping[str, str] = {
    name: {"d_o": "do"}.get(name, name)
    for name in (
        "q", "k", "v", "o", "lse", "bias", "randval", "d_o", "dq", "dk", "dv", "dbias", "k_new", "v_new", "k_past",
        "v_past",
    )
}  # fmt: skip
"""Fields of type ``tw_fmha_tensor`` in order, and the operands that they are."""

_APPENDED = {"k": "k_cache", "v": "v_cache", "o": "q_out"}
"""Values of these fields for ``kv_append``."""

SCALES = ("q_scale", "k_scale", "v_scale")

POINTERS: Mapping[str, str] = {
    "cu_q": "cu_seqlens_q",
    "cu_k": "cu_seqlens_k",
    "len_q": "seqlens_q",
    "len_k": "seqlens_k",
    "block_table": "block_table",
    "page_starts": "page_starts",
    "cache_index": "cache_index",
    "slopes": "alibi_slopes",
    "sinks": "sinks",
    "dsinks": "dsinks",
    "rot_cos": "rotary_cos",
    "rot_sin": "rotary_sin",
    "rng": "rng",
    "status": "status",
    "lens_out": "seqlens_out",
}
"""Pointers to operands, in order."""

OWN_LSE, JOINT_BIAS = "own_lse", "joint_bias"
OWN: Mapping[str, str] = {"lse": OWN_LSE, "bias": JOINT_BIAS}
"""Operands whose place parts of the workspace take: logarithms of sums that nobody asked for, and the sum of a bias and
slopes.
"""

ARRAYS = ("delta", "dq_acc", "dbias_acc", "o_acc", "lse_acc")
"""Parts of the workspace that have a pointer of their own, in order; ``workspace`` and ``counters`` follow."""

SCALARS = (
    "batch", "heads_q", "heads_k", "seq_q", "seq_k", "hdim_q", "hdim_v", "total_q", "total_k", "table_stride",
    "page_size", "num_pages", "cache_items", "slope_batch", "left", "right", "bottom_right", "sink_size", "seed",
    "offset", "drop_below", "splits", "split_rows", "q_tiles", "k_tiles", "tiles", "new_rows", "rotary_dim",
    "rotary_stride", "workspace_bytes", "min_q",
)  # fmt: skip


def args_of(
    problem: FmhaProblem,
    *,
    parts: Mapping[str, int] | None = None,
    counters: bool = False,
    first_value: int = 0,
    **numbers: float,
) -> Struct:
    """The arguments of a launch. ``parts`` are the offsets of what the plan keeps in the workspace, by name (those of
    ``ARRAYS``, those of ``OWN`` that take an operand's place, and ``workspace`` for scratch memory); ``numbers`` are
    what the cut into tiles and splits decides. ``first_value``: element of values that the launch begins with.
    """
    append = problem.operation == KV_APPEND
    parts = parts or {}
    fields: list[Arg] = [
        own_tensor(problem, OWN[name], parts[OWN[name]])
        if OWN.get(name) in parts
        else tensor_args(problem, _APPENDED.get(name, name) if append else name, first_value * (name in ("v", "o")))
        for name in _names()
    ]
    fields += [_scale(problem, name[0]) for name in SCALES]
    absent = {"alibi_slopes"} if JOINT_BIAS in parts else set()  # they are part of it
    fields += [Pointer(name) if problem.has(name) and name not in absent else Pointer() for name in POINTERS.values()]
    fields += [Pointer(WORKSPACE, parts[name]) if name in parts else Pointer() for name in (*ARRAYS, "workspace")]
    fields.append(Pointer(COUNTERS) if counters else Pointer())
    scalars = {**_scalars(problem), **numbers}
    fields += [I64(int(scalars[name])) for name in SCALARS]
    p_scale = numbers.get("p_scale", 1.0)
    fields += [F64(value) for value in (problem.scale, problem.softcap, problem.keep_scale, float(p_scale))]
    return Struct(tuple(fields))


def own_tensor(problem: FmhaProblem, part: str, offset: int) -> Struct:
    """``tw_fmha_tensor`` of a part of the workspace, without gaps: rows [items, heads, queries] of logarithms of sums,
    as ``lse`` has them, or a bias [items or 1, heads, queries, keys].
    """
    heads, rows, columns = problem.heads_q, problem.seq_q, problem.seq_k
    if part == OWN_LSE:
        steps = (0, problem.total_q, 1, 1) if problem.varlen else (heads * rows, rows, 1, 1)
    else:
        steps = (heads * rows * columns if joint_items(problem) > 1 else 0, rows * columns, columns, 1)
    return Struct((Pointer(WORKSPACE, offset), *(I64(step) for step in (*steps, 0))))


def joint_items(problem: FmhaProblem) -> int:
    """Items that the sum of a bias and slopes, or a bias of all scores, differs between: 1 if all have the same."""
    if problem.open_bias:
        return problem.batch
    slopes = problem.operand("alibi_slopes").desc.shape
    ragged = problem.varlen or problem.has("seqlens_q") or problem.has("seqlens_k") or problem.paged
    same = problem.place("bias").batch == 0 and len(slopes) == 1 and not (problem.mask.bottom_right and ragged)
    return 1 if same else problem.batch


def _names() -> tuple[str, ...]:
    return tuple(TENSORS.values())


def tensor_args(problem: FmhaProblem, name: str, column: int = 0) -> Struct:
    """``tw_fmha_tensor``, from ``column`` on; zeros for what is not there."""
    place = problem.place(name)
    if not place.operand:
        return Struct((Pointer(), *(I64(0),) * 5))
    steps = (place.batch, place.head, place.row, place.col, place.chunk)
    offset = column * place.col * problem.operand(place.operand).desc.dtype.bytes if column else 0
    return Struct((Pointer(problem.source(place.operand), offset), *(I64(step) for step in steps)))


def _scale(problem: FmhaProblem, letter: str) -> Struct:
    """``tw_fmha_scale``."""
    scaling = problem.scaling
    place = getattr(scaling, letter) if scaling else Strides()
    if scaling is None or not place.operand:
        return Struct((Pointer(), *(I64(0),) * 4))
    rows = (scaling.block_q if letter == "q" else scaling.block_k) if scaling.kind is QScale.BLOCKSCALE else 0
    return Struct((Pointer(place.operand), I64(place.batch), I64(place.head), I64(place.row), I64(rows)))


def _scalars(problem: FmhaProblem) -> dict[str, int]:
    paging, mask = problem.paging, problem.mask
    found = dict.fromkeys(SCALARS, 0)
    for name in (
        "batch", "heads_q", "heads_k", "seq_q", "seq_k", "hdim_q", "hdim_v", "total_q", "total_k", "cache_items",
        "seed", "offset", "new_rows", "rotary_dim", "min_q",
    ):  # fmt: skip
        found[name] = getattr(problem, name)
    if paging is not None:
        found |= {"table_stride": paging.table_stride, "page_size": paging.page_size, "num_pages": paging.pages}
    if problem.has("alibi_slopes"):
        desc = problem.operand("alibi_slopes").desc
        found["slope_batch"] = desc.strides[0] if len(desc.shape) == 2 and desc.shape[0] > 1 else 0
    if problem.has("rotary_cos"):
        found["rotary_stride"] = problem.operand("rotary_cos").desc.strides[0]
    found |= {"left": mask.left, "right": mask.right, "bottom_right": int(mask.bottom_right), "sink_size": mask.sink}
    found |= {"drop_below": problem.dropout, "splits": 1}
    return found
