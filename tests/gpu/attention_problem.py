"""Attention in GPU memory, its truth in float64, and how far PyTorch's own kernels are from it.

The truth is plain: one sequence at a time, every score in memory, gradients by autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpu_cases import relative, torch_dtype

from tilewright_fmha.problem.philox import drop_below, random_bytes

DEVICE = "cuda"
SLACK = 1.2
"""Our relative error may be this much larger than that of the library's kernels on the same operands."""
MORE_SLACK = 1.6
"""And this much where a feature is missing there, so that theirs is of attention without it."""
FLOOR = {"fp32": 2e-6, "fp16": 2.5e-4, "bf16": 2e-3}
"""Rounding of the results alone; of fp32, sums in another order."""
SEED, OFFSET = 2**40 + 12345, 7
DROPOUT = 0.3
MASKS: dict[str, dict[str, Any]] = {
    "no": {},
    "causal": {"is_causal": True},
    "bottom": {"mask": "bottom_right"},
    "window": {"window": (20, 3), "mask_align": "bottom_right"},
    "sink": {"window": (5, 0), "mask_align": "top_left", "sink_size": 3},
}
BIASES = {"full": "bhrc", "keys": "b__c", "head": "_hrc", "rows": "bhr_", "column": "_h_c"}
"""Axes that a bias has of its own; it broadcasts along the others."""


@dataclass(frozen=True)
class Piece:
    """One sequence: its number, its rows of q and k as slices of the first axis of rows, and how many there are."""

    item: int
    q: tuple[int, int]
    k: tuple[int, int]

    @property
    def rows(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def keys(self) -> int:
        return self.k[1] - self.k[0]


def visible(torch: Any, mask: str, rows: int, keys: int) -> Any:
    """Which keys each query sees: [rows, keys]."""
    i, j = (torch.arange(count, device=DEVICE) for count in (rows, keys))
    i = i[:, None] + (keys - rows if mask in ("bottom", "window") else 0)
    if mask in ("causal", "bottom"):
        return j <= i
    if mask == "window":
        return (j <= i + 3) & (j >= i - 20)
    if mask == "sink":
        return (j <= i) & ((j >= i - 5) | (j < 3))
    return torch.ones(rows, keys, dtype=torch.bool, device=DEVICE)


def attend(
    torch: Any, q: Any, k: Any, v: Any, seen: Any, *, bias: Any = None, softcap: float = 0.0, sinks: Any = None,
    kept: Any = None, scale: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """o [Hq, rows, Dv] and lse [Hq, rows] of one sequence: q [Hq, rows, D], k and v [Hk, keys, ...]. ``kept`` has the
    factors of dropout. A row that sees nothing gives zeros and -inf.
    """
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    s = s.masked_fill(~seen, -float("inf"))
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, s.shape[1], 1)], 2)
    if s.shape[2] == 0:
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], -float("inf"))
    most = s.detach().amax(2, keepdim=True)
    e = torch.exp(s - most.masked_fill(most == -float("inf"), 0.0))
    total = e.sum(2, keepdim=True)
    p = e[:, :, : k.shape[1]] / total.clamp_min(1e-300)
    p = p if kept is None else p * kept
    return p @ v, torch.where(total > 0, most + total.log(), -float("inf"))[:, :, 0]


class Attention:
    """A case of tests/fmha/fmha_cases.py with random operands: what a call gets, and what is right."""

    def __init__(self, torch: Any, case: Any, batch: int = 3) -> None:
        torch.manual_seed(11)
        self.torch, self.case, self.batch = torch, case, batch
        self.kind = torch_dtype(torch, case.dtype)
        self.pieces = list(self._pieces())
        self.leaves = self._tensors()
        self.gradient = self._rows(case.heads[0], case.seq[0], case.hdim[1])

    # ---- operands ----

    def _pieces(self) -> Iterator[Piece]:
        """The first sequence is full, the second empty, the third in between."""
        (rows, keys), first = self.case.seq, (0, 0)
        for item in range(self.batch):
            if self.case.mode == "batch":
                yield Piece(item, (0, rows), (0, keys))
                continue
            used = [(rows, keys), (0, 0), (max(rows // 2, 1), keys - keys // 3)][item % 3]
            start = first if self.case.mode == "varlen" else (0, 0)
            first = (start[0] + used[0], start[1] + used[1])
            yield Piece(item, (start[0], first[0]), (start[1], first[1]))

    def _rows(self, heads: int, rows: int, size: int, columns: bool = False) -> Any:
        """Random numbers, laid out as the case says."""
        case, shape = self.case, (self.batch, heads, rows, size)
        order = (0, 1, 2, 3) if case.layout == "bhsd" else (0, 2, 1, 3)
        if case.mode == "varlen":
            shape = (rows * 2 + 3, heads, size)
            order = (1, 0, 2) if case.layout == "bhsd" else (0, 1, 2)
        if columns:
            turned = 0 if case.mode == "varlen" else 2
            order = (*(axis for axis in order if axis != turned), turned)
        values = self.torch.randn([shape[axis] for axis in order], device=DEVICE).to(self.kind)
        return values.permute([order.index(axis) for axis in range(len(order))])

    def _tensors(self) -> dict[str, Any]:
        case, torch = self.case, self.torch
        (hq, hk), (rows, keys), (d, dv) = case.heads, case.seq, case.hdim
        found = {
            "q": self._rows(hq, rows, d), "k": self._rows(hk, keys, d), "v": self._rows(hk, keys, dv, case.columns),
        }  # fmt: skip
        if axes := BIASES.get(case.bias):
            sizes = zip((1 if case.mode == "varlen" else self.batch, hq, rows, keys), axes, strict=True)
            shape = [1 if axis == "_" else size for size, axis in sizes]
            found["bias"] = torch.randn(shape, device=DEVICE).to(self.kind)
        if case.bias == "alibi":
            found["alibi_slopes"] = 2.0 ** -torch.arange(1, hq + 1, device=DEVICE).float()
        if case.sinks:
            found["sinks"] = torch.randn(hq, device=DEVICE)
        return found

    def words(self, seeded: bool = True) -> dict[str, Any]:
        """All that a call gets but q, k, v and its outputs."""
        case, found = self.case, dict(MASKS[self.case.mask])
        found |= {name: self.leaves[name] for name in ("bias", "alibi_slopes", "sinks") if name in self.leaves}
        found |= {"softcap": 2.0} if case.softcap else {}
        found |= {"dropout_p": DROPOUT} if case.drop else {}
        found |= {"seed": SEED, "offset": OFFSET} if case.drop and seeded else {}
        if case.mode == "varlen":
            for name, starts in (
                ("cu_seqlens_q", [p.q for p in self.pieces]),
                ("cu_seqlens_k", [p.k for p in self.pieces]),
            ):
                found[name] = self._ints([0, *(end for _, end in starts)])
            found |= {"max_seqlen_q": case.seq[0], "max_seqlen_k": case.seq[1]}
        elif case.mode == "lengths":
            found["seqlens_q"] = self._ints([p.rows for p in self.pieces])
            found["seqlens_k"] = self._ints([p.keys for p in self.pieces])
        return found

    def _ints(self, values: list[int]) -> Any:
        return self.torch.tensor(values, dtype=self.torch.int32, device=DEVICE)

    def poisoned(self) -> dict[str, Any]:
        """Outputs in which every element that is not written shows."""
        q, dv = self.leaves["q"], self.case.hdim[1]
        o = self.torch.full((*q.shape[:-1], dv), float("nan"), dtype=self.kind, device=DEVICE)
        heads = q.shape[:2][::-1] if self.case.mode == "varlen" else q.shape[:3]
        return {"out": o, "lse": self.torch.full(tuple(heads), float("nan"), device=DEVICE)}

    # ---- truth ----

    def of(self, tensor: Any, piece: Piece, keys: bool = False) -> Any:
        """The rows of one sequence: [heads, rows, ...]."""
        begin, end = piece.k if keys else piece.q
        if self.case.mode == "varlen":
            return tensor[begin:end].transpose(0, 1)
        return tensor[piece.item, :, begin:end]

    def bias_of(self, leaves: dict[str, Any], piece: Piece) -> Any:
        torch = self.torch
        if "bias" in leaves:
            bias = leaves["bias"]
            own = bias[piece.item if bias.shape[0] > 1 else 0]
            own = own[:, : piece.rows] if own.shape[1] > 1 else own
            return own[..., : piece.keys] if own.shape[2] > 1 else own
        if "alibi_slopes" not in leaves:
            return None
        i, j = (torch.arange(count, device=DEVICE) for count in (piece.rows, piece.keys))
        off = piece.keys - piece.rows if self.case.mask in ("bottom", "window") else 0
        return -leaves["alibi_slopes"][:, None, None] * (i[:, None] + off - j).abs()

    def kept_of(self, piece: Piece) -> Any:
        """The factors of dropout."""
        below, heads = drop_below(DROPOUT), self.case.heads[0]
        drawn = [
            self.torch.from_numpy(random_bytes(SEED, OFFSET, piece.item * heads + h, piece.rows, piece.keys).copy())
            for h in range(heads)
        ]
        return (self.torch.stack(drawn).to(DEVICE) >= below).double() * (256 / (256 - below))

    def each(self, leaves: dict[str, Any]) -> Iterator[tuple[Piece, Any, Any]]:
        """What every sequence gives, of operands of any type."""
        for piece in self.pieces:
            q = self.of(leaves["q"], piece)
            k, v = (self.of(leaves[name], piece, keys=True) for name in "kv")
            o, lse = attend(
                self.torch, q, k, v, visible(self.torch, self.case.mask, piece.rows, piece.keys),
                bias=self.bias_of(leaves, piece), softcap=2.0 if self.case.softcap else 0.0, sinks=leaves.get("sinks"),
                kept=self.kept_of(piece) if self.case.drop else None,
            )  # fmt: skip
            yield piece, o, lse

    def doubles(self) -> dict[str, Any]:
        return {name: tensor.detach().double().requires_grad_() for name, tensor in self.leaves.items()}

    def gradients(self) -> dict[str, Any]:
        """The true gradients of every operand that has one."""
        leaves = self.doubles()
        total = self.torch.zeros((), dtype=self.torch.float64, device=DEVICE)
        for piece, o, _ in self.each(leaves):
            total = total + (o * self.of(self.gradient, piece).double()).sum()
        total.backward()
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def saved(self) -> tuple[Any, Any]:
        """What a forward pass keeps for gradients, o and lse; NaN and zeros where no sequence is."""
        outs = self.poisoned()
        outs["lse"].zero_()
        for piece, o, lse in self.each(self.doubles()):
            self.of(outs["out"], piece).copy_(o.detach())
            begin, end = piece.q
            own = outs["lse"][:, begin:end] if self.case.mode == "varlen" else outs["lse"][piece.item, :, begin:end]
            own.copy_(lse.detach())
        return outs["out"], outs["lse"]

    # ---- how far it may be off ----

    @property
    def is_in_library(self) -> bool:
        case = self.case
        return not (case.softcap or case.sinks or case.drop or case.bias == "alibi")

    def limits(self, gradients: bool = False) -> dict[str, float]:
        """The largest relative error of each result: the library's on the same operands, without what it lacks."""
        torch, found = self.torch, dict[str, list[Any]]()
        exact = self.doubles()
        rough = {name: leaf.detach().to(self.kind).requires_grad_() for name, leaf in exact.items()}
        names = ["q", "k", "v", *(["bias"] if "bias" in rough and gradients else [])]
        sums = [torch.zeros((), dtype=torch.float64, device=DEVICE) for _ in range(2)]
        for piece in self.pieces:
            if not piece.rows or not piece.keys:
                continue
            seen = visible(torch, self.case.mask, piece.rows, piece.keys)
            some = seen.any(1)[None, :, None]
            for index, leaves in enumerate((exact, rough)):
                q, k, v = (self.of(leaves[name], piece, keys=name != "q") for name in "qkv")
                bias = self.bias_of(leaves, piece) if "bias" in leaves else None
                if index == 0:
                    o, _ = attend(torch, q, k, v, seen, bias=bias)
                else:
                    o = self._library(q, k, v, seen, bias)
                o = torch.where(some, o, 0.0)
                found.setdefault("o", [[], []])[index].append(o.detach().double().flatten())
                sums[index] = sums[index] + (o.double() * self.of(self.gradient, piece).double()).sum()
        slack = SLACK if self.is_in_library else MORE_SLACK
        pairs = {name: [torch.cat(part) for part in parts] for name, parts in found.items()}
        if gradients:
            grads = [
                torch.autograd.grad(sums[i], [leaves[n] for n in names]) for i, leaves in enumerate((exact, rough))
            ]
            pairs |= {f"d{name}": [grads[0][at], grads[1][at]] for at, name in enumerate(names)}
        floor = FLOOR[self.case.dtype]
        return {name: slack * max(floor, relative(torch, got, want)) for name, (want, got) in pairs.items()}

    def _library(self, q: Any, k: Any, v: Any, seen: Any, bias: Any) -> Any:
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        zeros = self.torch.zeros((q.shape[0], *seen.shape), dtype=self.kind, device=DEVICE)
        mask = (zeros if bias is None else zeros + bias).masked_fill(~seen, -float("inf"))
        # A row that sees nothing has no meaning there: it sees everything, and is left out.
        mask = mask.masked_fill(~seen.any(1)[:, None], 0.0)
        return self.torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None])[0]
