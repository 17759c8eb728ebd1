"""Attention over latent caches (multi-head latent attention) on a machine with a Hopper GPU and PyTorch.

    python bench/sm90/latent.py [check|fast] ...

``check`` compares results with float64; ``fast`` says how long a step takes beside a copy of as many bytes as the cache
has, in turns, with cold caches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.cuda_local import Cuda, Product, describe

from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import TilewrightError

KEYS, VALUES = 576, 512
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Relative difference in norm."""


@dataclass(frozen=True)
class Step:
    batch: int
    heads: int
    keys: int
    queries: int = 1
    page: int = 64
    """Tokens of a page; 0: items of one room."""
    ragged: bool = False
    dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, int] = (KEYS, VALUES)
    splits: int = 0
    causal: bool = False
    lse: bool = False
    softcap: float = 0.0
    sinks: bool = False

    @property
    def title(self) -> str:
        words = [f"{self.batch} x {self.heads} heads x {self.queries} x {self.keys} keys"]
        words += [f"{name}={getattr(self, name)}" for name in ("page", "splits", "softcap") if getattr(self, name)]
        words += [name for name in ("ragged", "causal", "lse", "sinks") if getattr(self, name)]
        words += [str(self.dtype)[6:]] * (self.dtype != torch.bfloat16)
        return " ".join(words + [str(self.sizes)] * (self.sizes != (KEYS, VALUES)))


CHECKS = (
    Step(3, 16, 1000), Step(3, 16, 1000, splits=1), Step(2, 8, 333, page=0), Step(3, 128, 700, ragged=True),
    Step(2, 64, 640, 2, causal=True, lse=True), Step(4, 40, 515, page=16, ragged=True, lse=True),
    Step(2, 32, 4000, page=8, dtype=torch.float16), Step(3, 128, 1000, 4, causal=True, ragged=True, splits=3, lse=True),
    Step(2, 16, 300, sizes=(320, 256)), Step(2, 16, 300, sizes=(520, 504), page=0),
    Step(3, 64, 200, sinks=True, lse=True),
    Step(3, 64, 900, sinks=True, splits=1, lse=True), Step(2, 24, 64, softcap=20.0), Step(1, 128, 1), Step(5, 1, 130),
    Step(2, 20, 777, page=128, ragged=True, splits=7, lse=True, softcap=30.0, sinks=True, causal=True, queries=3),
)  # fmt: skip
STEPS = (
    *(Step(batch, heads, 4096) for heads in (16, 32, 64, 128) for batch in (64, 256)),
    *(Step(batch, heads, keys) for heads in (16, 128) for batch, keys in ((1, 65536), (16, 16384), (128, 2048))),
    *(Step(256, heads, 4096, ragged=True) for heads in (16, 128)),
    *(Step(64, heads, 4096, 2) for heads in (16, 128)), Step(256, 16, 4096, page=0),
)  # fmt: skip


def tensors_of(step: Step) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[int]]:
    """Operands, the cache with its keys in order ``[batch, keys, elements]``, and lengths."""
    torch.manual_seed(11)
    wide, _ = step.sizes
    room = -(-step.keys // max(step.page, 1)) * max(step.page, 1)
    cache = torch.randn(step.batch, room, wide, device="cuda").to(step.dtype)
    lengths = [step.keys] * step.batch
    if step.ragged:
        lengths = torch.randint(0, step.keys + 1, (step.batch,)).tolist()
        lengths[: min(3, step.batch)] = [0, step.keys, 1][: min(3, step.batch)]
    for b, length in enumerate(lengths):
        cache[b, length:] = math.nan
    tensors = {"q": torch.randn(step.batch, step.heads, step.queries, wide, device="cuda").to(step.dtype)}
    if step.page:
        count = step.batch * room // step.page
        order = torch.randperm(count, device="cpu").to("cuda")
        paged = torch.empty(count, step.page, 1, wide, device="cuda", dtype=step.dtype)
        paged[order] = cache.view(count, step.page, 1, wide)
        tensors |= {"k": paged, "block_table": order.view(step.batch, -1).int()}
        tensors["seqlens_k"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    else:
        tensors["k"] = cache[:, None, : step.keys]
    if step.sinks:
        tensors["sinks"] = torch.randn(step.heads, device="cuda") * 2
    return tensors, cache, lengths


def made(cuda: Cuda, step: Step, tensors: dict[str, torch.Tensor]) -> Product:
    words: dict[str, Any] = {"head_dim_v": step.sizes[1], "num_splits": step.splits}
    words |= {"causal": True, "mask_align": "bottom_right"} if step.causal else {}
    words |= {"softcap": step.softcap} if step.softcap else {}
    shape = (step.batch, step.heads, step.queries)
    outputs = {"o": torch.full((*shape, step.sizes[1]), math.nan, device="cuda", dtype=step.dtype)}
    if step.lse:
        outputs["lse"] = torch.full(shape, math.nan, device="cuda")
    inputs = {name: describe(item) for name, item in tensors.items()}
    given = {name: describe(item) for name, item in outputs.items()}
    tensors |= outputs
    return Product(cuda, OperationRequest("attention", inputs, given, words), tensors, "")


def truth(step: Step, q: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """One sequence, in float64: results [heads, queries, elements] and logarithms."""
    q, keys = q.double(), keys.double()
    s = q @ keys.T * step.sizes[0] ** -0.5
    if step.softcap:
        s = step.softcap * torch.tanh(s / step.softcap)
    if step.causal:
        i, j = torch.arange(q.shape[1], device="cuda")[:, None], torch.arange(len(keys), device="cuda")
        s = s.masked_fill(j > i + len(keys) - q.shape[1], -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], 2)
    lse = torch.logsumexp(s, 2)
    p = torch.exp(s - lse.clamp(min=-1e300)[..., None])[..., : len(keys)]
    return p @ keys[:, : step.sizes[1]], lse


def check(cuda: Cuda, step: Step) -> bool:
    tensors, cache, lengths = tensors_of(step)
    try:
        product = made(cuda, step, tensors)
    except TilewrightError as error:
        print(f"FAIL {step.title}: {error}")
        return False
    worst, told = 0.0, ""
    for turn in range(2):
        for name in ("o", "lse"):
            if name in tensors:
                tensors[name].fill_(math.nan)
        torch.cuda.synchronize()
        product()
        torch.cuda.synchronize()
        for b, length in enumerate(lengths):
            want, lse = truth(step, tensors["q"][b], cache[b, :length], tensors.get("sinks"))
            have = tensors["o"][b].double()
            error = float((have - want).norm() / want.norm().clamp(min=1e-6))
            worst = max(worst, error if error == error else math.inf)
            if "lse" in tensors:
                own, same = tensors["lse"][b].double(), tensors["lse"][b].isinf() == lse.isinf()
                off = (own - lse)[lse.isfinite()].abs().max() if lse.isfinite().any() else torch.zeros(())
                if not bool(same.all()) or not float(off) < 2e-3:
                    told = f", turn {turn}, sequence {b}: lse off by {float(off):.1e}"
    good = worst < TOLERANCE[step.dtype] and not told
    print(f"{'ok  ' if good else 'FAIL'} {step.title}: {worst:.1e}{told}  {product.config.m0} rows")
    return good


def fast(cuda: Cuda, step: Step) -> None:
    tensors, _, lengths = tensors_of(step)
    calls: dict[str, Callable[[], object]] = {"ours": made(cuda, step, tensors)}
    rows = sum(lengths)
    traffic = rows * step.sizes[0] * 2
    words = torch.empty(traffic // 4, dtype=torch.int32, device="cuda").zero_()
    half = words.numel() // 2
    calls["copy"] = lambda: words[:half].copy_(words[half : 2 * half])
    times = cuda.alternate(calls, 0.1)
    flops = 2.0 * step.heads * step.queries * rows * sum(step.sizes)
    print(
        f"{step.title}: {times['ours'] * 1e6:.1f} us, {times['copy'] / times['ours']:.2f} of a copy, "
        f"{flops / times['ours'] / 1e12:.0f} TFLOP/s",
        flush=True,
    )


def main() -> int:
    suites = sys.argv[1:] or ["check", "fast"]
    with Cuda() as cuda:
        bad = sum(not check(cuda, step) for step in CHECKS) if "check" in suites else 0
        for step in STEPS if "fast" in suites else ():
            fast(cuda, step)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
