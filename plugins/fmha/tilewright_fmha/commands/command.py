"""Attention on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.commands.parameters import argument, flag, option
from tilewright_kit.commands.problem_command import Example, ProblemCommand

if TYPE_CHECKING:
    from tilewright_fmha.commands.cases import AttentionCase
    from tilewright_kit.commands.cases import CaseFamily

__all__ = ["COMMAND", "SHOWN"]

_EIGHT_BIT = 8e-3
"""Weights of 8-bit operands are rounded to bf16 for the second product."""
_STORED = 4e-2
"""New rows of a cache of 8 bits are rounded to 3 bits of mantissa."""
_HIDDEN = -32.0
"""Far below the scores of random queries and keys, and not so far that it would hide how wrong these are."""
_PLACES = tuple(f"{axis}{product}" for product in range(3) for axis in "mnk")
_TUPLES = {"wave": "wave", "warp_tile": "warp"}
"""Options of several numbers, by the prefix of each in ``select_set``: wave_m0, wave_n0, ..., wave_k2."""
_PREFILL = {"batch": 2, "heads": 8, "seq_k": 256, "hdim": 64}
SHOWN: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("attention fp32", _PREFILL),
    ("attention bf16 causal", {**_PREFILL, "dtype": "bf16", "causal": True}),
    ("attention fp16 8/2 heads", {**_PREFILL, "dtype": "fp16", "heads_k": 2}),
    ("attention fp32 varlen", {**_PREFILL, "varlen": True, "mask": "bottom_right"}),
    ("attention fp32 gradients", {**_PREFILL, "backward": True}),
    ("attention bf16 gradients", {**_PREFILL, "backward": True, "dtype": "bf16", "causal": True}),
    (
        "decoding fp16, pages of 64",
        {"batch": 4, "heads": 8, "heads_k": 2, "seq_q": 1, "seq_k": 1024, "hdim": 64, "page": 64, "dtype": "fp16"},
    ),
)
"""Rows of the demonstration: title, and values of the command."""


class AttentionCommand(ProblemCommand):
    name = "attention"
    rank = 2
    noun = "attention"
    examples: Mapping[str, Sequence[str]] = {
        "run": (
            "2 8 128 64 --validate",
            "1 16 1024 128 --causal --dtype bf16",
            "1 32 8192 128 --heads-k 8 --queries 1 --paged 64 --dtype bf16    a step of decoding",
            "4 8 512 64 --varlen --mask bottom_right --validate",
            "2 8 256 64 --backward --causal --validate --json",
            "2 8 128 64 --bias alibi --softcap 30 --sinks --dropout 0.1 --lse --validate",
            "1 32 4096 128 --queries 1 --splits 4 --dtype bf16 --validate",
            "2 8 128 100 --bias both --scores probabilities --causal --validate    heads of any size",
            "2 8 256 64 --queries 3 --append --rope half --paged 16 --validate    new rows of a cache",
            "2 8 256 64 --queries 3 --append --dtype fp8 --descale --validate    the same, rounded to fp8",
        ),
        "explain": (
            "1 16 2048 128 --causal --dtype bf16",
            "8 32 8192 128 --heads-k 8 --queries 1 --paged 64 --json",
        ),
        "bench": (
            "--shapes performance --dtype fp32,bf16 --peer torch",
            "--shapes decode --dtype bf16 --page 0,64 --record",
            "--shapes performance --direction bwd --dtype bf16 --device cuda:0 --record",
            "--shapes 1x16x2048x128c,4x32/8x1/4096x128 --configs all --seconds 60",
            "--shapes 2x8x512x64 --varlen no,yes --dropout 0.1 --bias alibi",
            "--shapes 8x8/8x1/4096x128 --direction append --page 0,64 --rope half",
        ),
    }
    problem = (
        argument("batch", int, "Sequences.", "B"),
        argument("heads", int, "Heads of queries.", "HEADS"),
        argument("seq_k", int, "Keys of a sequence.", "KEYS"),
        argument("hdim", int, "Elements of a head.", "D"),
        option("heads_k", 0, "Heads of keys and values; 0: as many as of queries.", "--heads-k"),
        option("seq_q", 0, "Queries of a sequence; 0: as many as keys.", "--queries"),
        option("hdim_v", 0, "Elements of a head of values; 0: as many as of keys.", "--hdim-v"),
        flag("causal", "Hide keys behind the query, from the top left.", "--causal"),
        option("mask", "", "top_left (as --causal) or bottom_right."),
        option("window", "", "Keys that are seen to the left and right of the query: 128,0 (-1: all)."),
        flag("varlen", "Sequences of different lengths, end to end.", "--varlen"),
        option("page", 0, "Keys and values in pages of so many tokens.", "--paged"),
        flag("backward", "The gradients of queries, keys and values.", "--backward"),
        option("dtype", "fp32", "Element type: fp32, fp16, bf16, fp8."),
        option("layout", "bhsd", "bhsd: heads before rows; bshd: rows before heads."),
    )
    steps = (
        option("scale", "", "Factor of the scores. Default: D ** -0.5.", metavar="NUMBER"),
        option(
            "bias",
            "",
            "yes: a matrix is added to the scores; alibi: slopes; both: a matrix and slopes.",
            words=("yes", "alibi", "both"),
            strict=True,
        ),
        option("softcap", "", "Bend scores to below so much.", metavar="NUMBER"),
        flag("latent", "Values are the first elements of keys (--hdim-v of them).", "--latent"),
        flag("sinks", "A learned logit for each head takes its part of every row.", "--sinks"),
        option("sink_size", 0, "First keys that a window leaves in sight.", least=0),
        option("dropout", "", "Probability with which weights are dropped.", metavar="NUMBER"),
        option("splits", 0, "Parts that the keys are cut into; 0: the planner decides.", "--splits", least=0),
        flag("lse", "Logarithms of the rows' sums as another result.", "--lse"),
        option(
            "scores",
            "",
            "A stage of the scores as another result: scaled, softcap, masked or probabilities.",
            words=("scaled", "softcap", "masked", "probabilities"),
            strict=True,
        ),
        flag(
            "descale", "A factor for each of the 8-bit operands; rows to append are bf16, divided by it.", "--descale"
        ),
        flag("append", "Add as many rows as queries to a cache with room for KEYS.", "--append", swept=False),
        option(
            "rope",
            "",
            "Rotate what is appended: interleaved or half.",
            words=("interleaved", "half"),
            strict=True,
        ),
    )
    columns = (
        option("direction", "fwd", "Directions of rows that name none, comma-separated: fwd, bwd, append."),
        option("dtype", "", "Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),
        option("mask", "no", "Masks of rows that name none, comma-separated: no, top_left, bottom_right."),
        option("layout", "bhsd", "Layouts of rows that name none, comma-separated: bhsd, bshd."),
        option("page", "0", "Tokens of a page of rows that name none, comma-separated; 0: no pages."),
        option("varlen", "no", "Whether rows that do not tell are of sequences end to end, comma-separated: no, yes."),
    )
    replaced: Mapping[str, str] = {"batch": "batch"}
    replaced_help = "Sequences of every problem; 0: as its row says."
    shapes = (
        "Comma-separated: files (CSV or JSON lines with batch, heads, seq_k, hdim and more), built-in lists (tiny, "
        "performance, decode), shapes such as 2x32/8x1/4096x128b (batch, heads of queries and of keys, queries and "
        "keys, elements of a head; c: causal, b: causal from the bottom right), or - for standard input."
    )
    generated = (
        option("family", "", "Only this family: fwd, fwd_splitkv, fwd_pagedkv, batch_prefill, bwd_dq_dk_dv, ..."),
        option("receipt", "", "Kernels of this receipt, by its number: 2, 4, 100, ..."),
        option("profile", "", "The same by name: flash_fwd, pytorch, aiter_batch, fp8_test, all, ..."),
        option("hdim", (), "Only heads of so many elements. Repeatable.", "--hdim", kind=int, repeated=True),
        option("hdim_v", (), "Likewise heads of v.", "--hdim-v", kind=int, repeated=True),
        option("mask", "", "Only this mask: no, causal, bottom_right, generic."),
        option("bias", "", "Only this bias: no, bias, alibi.", "--attention-bias"),
        option("mode", "", "Only batch, or only group: sequences of different lengths."),
        option("tile_m0", None, "Only tiles of so many rows of queries.", "--tile-m0", kind=int),
        option("tile_n0", None, "Only tiles of so many columns of keys.", "--tile-n0", kind=int),
        option("tile_k0", None, "Only steps of so many elements in the first product.", "--tile-k0", kind=int),
        option("tile_n1", None, "Only so many columns of values in the second product.", "--tile-n1", kind=int),
        option("tile_k1", None, "Only steps of so many keys in the second product.", "--tile-k1", kind=int),
        option("tile_k0max", None, "Only tiles that keep so many elements of queries.", "--tile-k0max", kind=int),
        option(
            "wave",
            "",
            "Only these waves, as names have them: rows x columns x depth of each product, 4x1x1x4x1x1; * is any "
            "number, and what is left out too.",
            "--wave",
            metavar="NxNx...",
        ),
        option("warp_tile", "", "Likewise matrix instructions: 16x16x16, *x*x32.", "--warp-tile", metavar="NxNx..."),
        option("rope", "", "Only this rotation of appended keys: none, interleaved, half."),
        option("qscale", "", "Only these factors of 8-bit operands: no, pertensor, blockscale, kv_blockscale."),
        option("sink", None, "Only kernels whose windows always show the first keys, or do not.", kind=bool),
        option("learned_sinks", None, "Only kernels with, or without, a learned logit for each head.", kind=bool),
        option("lse", None, "Only kernels that write logarithms of sums, or do not.", kind=bool),
        option("dropout", None, "Only kernels with, or without, dropout.", kind=bool),
        option("softcap", None, "Only kernels with, or without, a soft cap.", kind=bool),
        option("paged", None, "Only kernels over pages, or others.", kind=bool),
        option("deterministic", None, "Only gradients in a fixed order, or others.", kind=bool),
    )

    def family(self) -> CaseFamily:
        from tilewright_fmha.commands.family import ATTENTION

        return ATTENTION

    def case(self, given: Mapping[str, Any]) -> AttentionCase:
        from tilewright_fmha.commands.cases import AttentionCase
        from tilewright_kit.commands.cases import wrong

        fields = dict(given)
        causal, backward, varlen, append = (
            fields.pop(name, False) for name in ("causal", "backward", "varlen", "append")
        )
        if append and backward:
            raise wrong("the command line", "append", True, "what is appended has no gradients", "leave one out")
        if fields.get("descale") and fields.get("dtype") != "fp8":
            fix = "add --dtype fp8"
            raise wrong("the command line", "descale", True, "only operands of 8 bits have factors", fix)
        fields |= {
            name: "yes" if fields[name] else "" for name in ("latent", "sinks", "lse", "descale") if name in fields
        }
        if causal and not fields.get("mask"):
            fields["mask"] = "top_left"
        direction = "append" if append else "bwd" if backward else "fwd"
        fields |= {"direction": direction, "varlen": "yes" if varlen else ""}
        return AttentionCase(**fields).checked("the command line")

    def describe(self, case: AttentionCase) -> Mapping[str, Any]:
        return {
            "batch": case.batch, "heads": case.heads, "heads_k": case.kv_heads, "queries": case.queries,
            "keys": case.seq_k, "D": case.hdim, "Dv": case.values, "mask": case.mask, "window": case.window,
            "varlen": case.is_varlen, "page": case.page, "direction": case.direction, "dtype": case.dtype,
            "layout": case.layout,
        }  # fmt: skip

    def compared(self, case: AttentionCase, inputs: Mapping[str, Any], name: str, output: Any) -> Any:
        """Rows behind the last sequence belong to none, and are not written; of a cache the new rows are. What no query
        sees is ``-inf`` among scores: a number that no score has here stands for it.
        """
        if name == "scores":
            output = _finite(output)
        if case.direction == "append":
            return _appended(case, inputs, output) if name in ("k_cache", "v_cache") else output
        if not case.is_varlen:
            return output
        rows = int(inputs["cu_seqlens_k" if name in ("dk", "dv") else "cu_seqlens_q"][-1])
        return output[:, :rows] if name in ("lse", "scores") else output[:rows]

    def least_tolerance(self, case: AttentionCase) -> float:
        if case.direction == "append" and case.dtype == "fp8":
            return _STORED
        return _EIGHT_BIT if case.dtype == "fp8" else 0.0

    def shown_kernel(self, kernels: Sequence[str]) -> str:
        return next((name for name in kernels if "dq-dk-dv" in name), kernels[0] if kernels else "")

    def demonstrated(self, size: int) -> Sequence[Example]:  # noqa: ARG002
        return [Example(title, self.case(fields)) for title, fields in SHOWN]

    def numpy_call(self, case: AttentionCase, inputs: Mapping[str, Any]) -> Callable[[], object]:
        from tilewright_fmha.commands.numpy_peer import numpy_attention

        return numpy_attention(case, inputs)

    def generate_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        plain = {name: value for name, value in given.items() if name not in _TUPLES}
        found = {
            item.name: plain[item.name]
            for item in self.generated
            if item.name in plain and plain[item.name] not in (None, "", [], ())
        }
        for name, prefix in _TUPLES.items():
            if given[name]:
                found |= {f"{prefix}_{place}": size for place, size in _numbers(name, given[name])}
        return found


def _numbers(name: str, text: str) -> list[tuple[str, int]]:
    """Places and sizes of ``4x1x1``; those of ``*`` are left out. Raises ``InvalidArgumentError``."""
    from tilewright_kit.types.errors import InvalidArgumentError

    sizes = text.strip().split("x")
    if len(sizes) > len(_PLACES) or not all(size == "*" or (size.isascii() and size.isdigit()) for size in sizes):
        raise InvalidArgumentError(
            f"--{name.replace('_', '-')} takes at most {len(_PLACES)} numbers",
            field=name,
            value=text,
            rule="numbers_joined",
            fix="join them by x, with * for any: 4x1x1x4x1x1 or 4x*x1",
        )
    return [(place, int(size)) for place, size in zip(_PLACES, sizes, strict=False) if size != "*"]


def _finite(scores: Any) -> Any:
    import numpy as np

    return np.where(np.isneginf(scores), _HIDDEN, scores)


def _appended(case: AttentionCase, inputs: Mapping[str, Any], cache: Any) -> Any:
    """The new rows of a cache: [rows of all sequences, heads, elements]."""
    import numpy as np

    found = []
    for item, length in enumerate(inputs["seqlens_k"]):
        rows = np.arange(int(length), int(length) + case.queries)
        if case.page:
            found.append(cache[inputs["block_table"][item][rows // case.page], rows % case.page])
        else:
            found.append(cache[item, :, rows])
    return np.concatenate(found)


COMMAND = AttentionCommand()
