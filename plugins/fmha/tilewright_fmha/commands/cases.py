"""Attention and its gradients as rows of files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewright_kit.commands.cases import (
    NO,
    YES,
    check_number,
    check_positive,
    check_words,
    wrong,
)
from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["DIRECTIONS", "DTYPES", "MASKS", "AttentionCase"]

Array = npt.NDArray[Any]

DIRECTIONS = {"fwd": "attention", "bwd": "attention_backward", "append": "kv_append"}
"""Names in shape files, and the operations that they mean."""
MASKS = ("", "no", "top_left", "bottom_right")
DTYPES = ("fp32", "fp16", "bf16", "fp8")
STAGES = ("scaled", "softcap", "masked", "probabilities")
_WINDOW = re.compile(r"-?\d+,-?\d+")


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """o [B, Hq, Sq, Dv] = softmax(q [B, Hq, Sq, D] x k [B, Hk, Sk, D]) x v [B, Hk, Sk, Dv], or its gradients."""

    family: ClassVar[str] = "attention"
    sizes_as_text: ClassVar[Sequence[str]] = ()

    batch: int
    heads: int
    seq_k: int
    hdim: int
    seq_q: int = 0
    """0: as many as keys."""
    heads_k: int = 0
    """0: as many as heads of queries."""
    hdim_v: int = 0
    mask: str = ""
    """``top_left`` or ``bottom_right``: what is causal, and from which corner."""
    window: str = ""
    """``left,right``."""
    direction: str = "fwd"
    dtype: str = "fp32"
    layout: str = "bhsd"
    """``bshd``: rows lie before heads."""
    varlen: str = ""
    """``yes``: sequences of different lengths, end to end."""
    page: int = 0
    """Tokens of a page; 0: keys and values are not in pages."""
    lse: str = ""
    scale: str = ""
    """Factor of the scores; empty: hdim ** -0.5."""
    bias: str = ""
    """``yes``: a matrix [Sq, Sk] is added to the scores; ``alibi``: slopes of the heads; ``both``: these together."""
    softcap: str = ""
    latent: str = ""
    """``yes``: values are the first elements of keys."""
    sinks: str = ""
    """``yes``: a learned logit for each head."""
    sink_size: int = 0
    """First keys that a window leaves in sight."""
    dropout: str = ""
    """Probability with which weights are dropped."""
    splits: int = 0
    """Parts that the keys are cut into; 0: the planner decides."""
    descale: str = ""
    """``yes``: a factor for each of the 8-bit operands; of rows that are appended, which are bf16 then, divisors."""
    scores: str = ""
    """Stage of the scores that is another result: ``scaled``, ``softcap``, ``masked`` or ``probabilities``."""
    rope: str = ""
    """Rotation of appended keys: ``interleaved`` or ``half``."""

    def checked(self, where: str) -> AttentionCase:
        """Itself, if its words can be read. Raises ``InvalidArgumentError``."""
        check_positive(self, where, ("batch", "heads", "seq_k", "hdim"))
        words = {"direction": tuple(DIRECTIONS), "mask": MASKS, "layout": ("bhsd", "bshd"), "dtype": DTYPES}
        switches = dict.fromkeys(("varlen", "lse", "sinks", "descale"), (*YES, *NO))
        steps = {"bias": ("alibi", "both", *YES, *NO), "scores": (*STAGES, *NO), "rope": ("interleaved", "half", *NO)}
        check_words(self, where, words | switches | steps)
        for name in ("scale", "softcap", "dropout"):
            check_number(self, where, name)
        self._check_direction(where)
        if self.window and not _WINDOW.fullmatch(self.window):
            raise wrong(where, "window", self.window, "window is no pair of numbers", "write it as 128,0 (-1: all)")
        if self.sink_size and not self.window:
            reason, fix = "sink_size has no effect: no window hides the first keys", "give window, or leave it out"
            raise wrong(where, "sink_size", self.sink_size, reason, fix)
        if self.window and self.mask not in ("", "no"):
            left, right = self.window.split(",")
            if int(right) > 0:
                reason = f"the mask {self.mask} hides the keys behind a query, of which the window shows {right}"
                raise wrong(where, "window", self.window, reason, f"write it as {left},0, or leave mask out")
        if self.direction == "bwd" and self.page:
            raise wrong(where, "page", self.page, "there are no gradients of pages", "leave page out, or use fwd")
        return self

    def _check_direction(self, where: str) -> None:
        """Raise ``InvalidArgumentError`` for columns that the direction has no use for."""
        unused = {
            "fwd": ("rope",),
            "bwd": ("rope", "lse", "splits", "descale", "scores"),
            "append": (
                "mask", "window", "lse", "scale", "bias", "softcap", "sinks", "sink_size", "dropout", "splits",
                "varlen", "scores",
            ),
        }[self.direction]  # fmt: skip
        for name in unused:
            value = getattr(self, name)
            if value and str(value).lower() not in NO:
                reason = f"{name} has no effect in the direction {self.direction}"
                raise wrong(where, name, value, reason, "leave it out")
        if self.direction == "append" and self.queries > self.seq_k:
            fix = f"append {self.seq_k} rows or fewer"
            raise wrong(where, "seq_q", self.seq_q, f"a cache of {self.seq_k} rows has no room", fix)

    # ---- sizes ----

    @property
    def queries(self) -> int:
        return self.seq_q or self.seq_k

    @property
    def kv_heads(self) -> int:
        return self.heads_k or self.heads

    @property
    def values(self) -> int:
        return self.hdim_v or self.hdim

    @property
    def is_varlen(self) -> bool:
        return self.varlen.lower() in YES

    def is_on(self, name: str) -> bool:
        """True if a column of words says more than no."""
        return getattr(self, name).lower() not in NO

    # ---- what sweeps ask ----

    @property
    def operation(self) -> str:
        return DIRECTIONS[self.direction]

    @property
    def label(self) -> str:
        """For people: ``fwd 2x8/2x128/4096x64 bf16 top_left``."""
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else f"{self.heads}"
        rows = f"{self.queries}/{self.seq_k}" if self.queries != self.seq_k else f"{self.seq_k}"
        dims = f"{self.hdim}/{self.values}" if self.values != self.hdim else f"{self.hdim}"
        parts = [self.direction, f"{self.batch}x{heads}x{rows}x{dims}", self.dtype]
        parts += [self.mask] if self.mask not in ("", "no") else []
        parts += [f"window {self.window}"] if self.window else []
        parts += ["varlen"] if self.is_varlen else []
        parts += [f"pages of {self.page}"] if self.page else []
        parts += [f"{name} {getattr(self, name)}" for name in ("scale", "softcap", "dropout") if getattr(self, name)]
        parts += [self.bias if self.bias == "alibi" else "+bias"] if self.is_on("bias") else []
        parts += ["+sinks"] if self.is_on("sinks") else []
        parts += [f"+{name}" for name in ("latent", "lse", "descale") if self.is_on(name)]
        parts += [f"scores {self.scores}"] if self.is_on("scores") else []
        parts += [f"sink {self.sink_size}"] if self.sink_size else []
        parts += [f"{self.splits} splits"] if self.splits else []
        parts += [f"rope {self.rope}"] if self.is_on("rope") else []
        return " ".join([*parts, *([self.layout] if self.layout != "bhsd" else [])])

    @property
    def flops(self) -> int:
        """2 (D + Dv) for every query and key that it sees; of gradients two and a half times that; 0 of appending."""
        if self.direction == "append":
            return 0
        pairs = self.batch * self.heads * self._seen()
        if self.direction == "bwd":
            return 2 * pairs * (3 * self.hdim + 2 * self.values)
        return 2 * pairs * (self.hdim + self.values)

    def _seen(self) -> int:
        """Pairs of a query and a key that it sees, of sequences as long as there is room."""
        return int(self.seen_by_row().sum())

    def seen_by_row(self) -> Array:
        """Keys that each query sees."""
        rows = np.arange(self.queries) + (self.seq_k - self.queries if self.mask == "bottom_right" else 0)
        left, right = map(int, self.window.split(",")) if self.window else (-1, -1)
        right = 0 if self.mask not in ("", "no") else right
        first = np.clip(rows - left, 0, self.seq_k) if left >= 0 else np.zeros_like(rows)
        last = np.clip(rows + right + 1, 0, self.seq_k) if right >= 0 else np.full_like(rows, self.seq_k)
        seen: Array = np.maximum(last - first, 0) + np.minimum(np.minimum(first, last), self.sink_size)
        return seen

    @property
    def depth(self) -> int:
        return self.hdim + self.seq_k

    @property
    def roundings(self) -> int:
        """Gradients of the scores are operands, in the type of queries and keys."""
        return 2 if self.direction == "bwd" else 1

    @property
    def is_plain(self) -> bool:
        """Scores are not linear in queries and keys."""
        return False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def tensor(self, heads: int, rows: int, columns: int, dtype: str = "") -> TensorDesc:
        shape = (self.batch, heads, rows, columns)
        kind = dtype or self.dtype
        if self.is_varlen:
            return TensorDesc.of(kind, (self.batch * rows, heads, columns))
        if self.layout == "bhsd":
            return TensorDesc.of(kind, shape)
        return TensorDesc.of(kind, shape, (rows * heads * columns, columns, heads * columns, 1))

    def request(self) -> OperationRequest:
        if self.direction == "append":
            return self._append()
        q = self.tensor(self.heads, self.queries, self.hdim)
        inputs, attributes = {"q": q}, self._words()
        if self.is_varlen:
            starts = TensorDesc.of("int32", (self.batch + 1,))
            inputs["cu_seqlens_q"] = starts
            attributes["max_seqlen_q"] = self.queries
            if not self.page:
                inputs["cu_seqlens_k"] = starts
                attributes["max_seqlen_k"] = self.seq_k
        if self.page:
            pages = -(-self.seq_k // self.page)
            for name, columns in (("k", self.hdim), ("v", self.values)):
                inputs[name] = TensorDesc.of(self.dtype, (self.batch * pages, self.page, self.kv_heads, columns))
            inputs["block_table"] = TensorDesc.of("int32", (self.batch, pages))
            inputs["seqlens_k"] = TensorDesc.of("int32", (self.batch,))
        else:
            inputs["k"] = self.tensor(self.kv_heads, self.seq_k, self.hdim)
            inputs["v"] = self.tensor(self.kv_heads, self.seq_k, self.values)
        if self.is_on("latent"):
            del inputs["v"]
            attributes["head_dim_v"] = self.values
        if self.direction == "bwd":
            inputs["o"] = inputs["do"] = self.tensor(self.heads, self.queries, self.values)
            lse = (self.heads, self.batch * self.queries) if self.is_varlen else (self.batch, self.heads, self.queries)
            inputs["lse"] = TensorDesc.of("fp32", lse)
        elif self.lse.lower() in YES:
            attributes["return_lse"] = True
        self._scores(inputs)
        return OperationRequest(self.operation, inputs, {}, attributes)

    def _scores(self, inputs: dict[str, TensorDesc]) -> None:
        """Operands of the scores, and factors of 8-bit ones."""
        if self.bias in ("alibi", "both"):
            inputs["alibi_slopes"] = TensorDesc.of("fp32", (self.heads,))
        if self.bias != "alibi" and self.is_on("bias"):
            dtype = "fp32" if self.dtype == "fp8" else self.dtype
            inputs["bias"] = TensorDesc.of(dtype, (1, 1, self.queries, self.seq_k))
        if self.is_on("sinks"):
            inputs["sinks"] = TensorDesc.of("fp32", (self.heads,))
        if self.is_on("descale"):
            inputs |= {f"{name}_descale": TensorDesc.of("fp32", ()) for name in "qkv"}

    def _append(self) -> OperationRequest:
        """New rows, as many as queries, for a cache with room for ``seq_k`` of each sequence."""
        inputs, attributes = {}, dict[str, Attribute]()
        for name, columns in (("k", self.hdim), ("v", self.values)):
            rounded = self.is_on("descale")
            inputs[f"{name}_new"] = self.tensor(self.kv_heads, self.queries, columns, "bf16" if rounded else "")
            inputs |= {f"{name}_descale": TensorDesc.of("fp32", ())} if rounded else {}
            shape: tuple[int, ...] = (self.batch, self.kv_heads, self.seq_k, columns)
            if self.page:
                shape = (self.batch * -(-self.seq_k // self.page), self.page, self.kv_heads, columns)
            inputs[f"{name}_past"] = TensorDesc.of(self.dtype, shape)
        inputs["seqlens_k"] = TensorDesc.of("int32", (self.batch,))
        if self.page:
            inputs["block_table"] = TensorDesc.of("int32", (self.batch, -(-self.seq_k // self.page)))
        if self.is_on("rope"):
            attributes["rope"] = self.rope
            for name in ("rotary_cos", "rotary_sin"):
                inputs[name] = TensorDesc.of("fp32", (self.seq_k, self.hdim // 2))
        return OperationRequest(self.operation, inputs, {}, attributes)

    def _words(self) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {}
        if self.window:
            found["window_left"], found["window_right"] = map(int, self.window.split(","))
            if self.mask not in ("", "no"):
                found["mask_align"] = self.mask
                found["causal"] = True
        elif self.mask not in ("", "no"):
            found["mask"] = self.mask
        for column, name in (("scale", "scale"), ("softcap", "softcap"), ("dropout", "dropout_p")):
            if getattr(self, column):
                found[name] = float(getattr(self, column))
        if self.sink_size:
            found["sink_size"] = self.sink_size
        if self.is_on("scores"):
            found["return_scores"] = self.scores
        if self.splits:
            found["num_splits"] = self.splits
        return found
