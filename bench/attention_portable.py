"""Portable kernels of attention on the GPU, one by one: right, and how fast, by tile and by number of parts.

Not a suite: ``python bench/attention_portable.py [decode|prefill] ...`` says for a handful of problems what every
kernel takes that is worth trying, beside cuDNN and PyTorch's flash kernel. Results are compared with float32 first,
some of lengths that no tile divides: rows and chunks that do not exist are to be zeros.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from cuda_local import Cuda, Product, describe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewright_fmha.candidates import fmha_candidates
from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.parse import parse_attention
from tilewright_fmha.splits import FEW_ROWS
from tilewright_kit.errors import TilewrightError
from tilewright_kit.problem import OperationRequest

Tensors = dict[str, torch.Tensor]
STEPS = (
    (64, 32, 8, 4096, 128, 0), (64, 32, 8, 4096, 128, 16), (64, 32, 8, 4096, 128, 128), (1, 32, 8, 65536, 128, 0),
    (1, 32, 8, 65536, 128, 16), (64, 32, 8, 4096, 64, 0), (64, 16, 4, 4096, 256, 0), (1, 32, 8, 4096, 128, 0),
    (3, 32, 8, 1001, 128, 0), (3, 32, 8, 1008, 72, 16),
)  # fmt: skip
"""Batch, heads of queries and of keys, keys, elements, tokens of a page (0: items of one room)."""
PREFILLS: tuple[tuple[int, int, int, int, Mapping[str, Any]], ...] = (
    (2, 16, 4096, 128, {}), (2, 16, 4096, 128, {"causal": True}), (2, 32, 4096, 64, {}), (2, 8, 4096, 256, {}),
    (2, 16, 4096, 128, {"softcap": 30.0}), (2, 16, 4096, 128, {"dropout_p": 0.1, "seed": 3}),
    (2, 16, 4096, 128, {"bias": True}), (1, 3, 1001, 128, {}), (1, 3, 777, 64, {"causal": True}),
    (1, 3, 333, 256, {"causal": True}), (1, 3, 1001, 72, {"bias": True}),
)  # fmt: skip
"""Batch, heads, queries and keys, elements, attributes."""


def request_of(tensors: Tensors, words: Mapping[str, Any]) -> OperationRequest:
    inputs = {name: describe(tensor) for name, tensor in tensors.items() if name != "o"}
    return OperationRequest("attention", inputs, {"o": describe(tensors["o"])}, dict(words))


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: Mapping[str, Any], bias: Any) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if cap := words.get("softcap"):
        scores = torch.tanh(scores / cap) * cap
    if bias is not None:
        scores = scores + bias.float()
    if words.get("causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], device="cuda").triu(1).bool(), -math.inf)
    return torch.softmax(scores, -1) @ v


def report(
    cuda: Cuda, title: str, runs: Mapping[str, Product], peers: Mapping[str, Callable[[], object]],
    tensors: Tensors, want: torch.Tensor | None, said: Callable[[float], str],
) -> None:  # fmt: skip
    errors = {}
    for name, product in runs.items():
        tensors["o"].fill_(math.nan)
        torch.cuda.synchronize()
        product()
        torch.cuda.synchronize()
        got = tensors["o"].float()
        error = math.nan if want is None else float((got - want).norm() / want.norm())
        errors[name] = error if torch.isfinite(got).all() else math.inf
    seconds = cuda.alternate({**runs, **peers}, 0.06)
    print(title)
    for name, value in seconds.items():
        print(f"  {name:28} {value * 1e6:8.1f} us {said(value):14} error {errors.get(name, 0.0):.1e}", flush=True)


def built(
    cuda: Cuda, pool: ThreadPoolExecutor, wanted: Mapping[str, tuple[OperationRequest, FmhaConfig]], tensors: Tensors
) -> dict[str, Product]:
    jobs = {
        name: pool.submit(Product, cuda, request, tensors, config.name) for name, (request, config) in wanted.items()
    }
    wait(jobs.values())
    for name, job in jobs.items():
        if isinstance(error := job.exception(), TilewrightError):
            print(f"  {name}: {str(error)[:160]}")
    return {name: job.result() for name, job in jobs.items() if not isinstance(job.exception(), TilewrightError)}


def library(tensors: Tensors, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Iterator[tuple[str, Any]]:
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

        def call(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(tensors["q"], k, v, is_causal=causal, enable_gqa=True)

        try:
            call()
        except RuntimeError:
            continue
        yield name, call


def decode(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    for batch, heads, heads_k, keys, hdim, page in STEPS:
        k, v = (torch.randn(batch, keys, heads_k, hdim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(batch, heads, 1, hdim, device="cuda", dtype=torch.bfloat16)
        tensors = {"q": q, "o": torch.empty_like(q), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        if page:
            order = torch.randperm(batch * keys // page, device="cuda")
            for name, whole in (("k", k), ("v", v)):
                tensors[name] = torch.empty(len(order), page, heads_k, hdim, device="cuda", dtype=torch.bfloat16)
                tensors[name][order] = whole.view(-1, page, heads_k, hdim)
            tensors["block_table"] = order.view(batch, -1).int()
            tensors["seqlens_k"] = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        plain = request_of(tensors, {})
        problem = parse_attention(plain)
        chosen = cuda.choose(cuda.engine.operations["attention"], problem, "")
        few = next(c for c in fmha_candidates(problem, cuda.info) if c.pipeline == FEW_ROWS and c.pack_gqa)
        wanted = {f"chosen: {chosen.pipeline}": (plain, chosen)}
        for parts in (1, 2, 4) if batch > 1 else (16, 32, 33, 64):
            wanted[f"{parts} parts"] = (request_of(tensors, {"num_splits": parts}), few)
        want = truth(q, k.transpose(1, 2), v.transpose(1, 2), {}, None)
        traffic = 2 * k.numel() * k.element_size()
        peers = {} if page else dict(library(tensors, tensors["k"], tensors["v"], False))
        title = f"decode {batch}x{heads}/{heads_k}x{keys}x{hdim}" + (f" pages of {page}" if page else "")
        runs = built(cuda, pool, wanted, tensors)
        report(cuda, title, runs, peers, tensors, want, lambda s, traffic=traffic: f"{traffic / s / 1e9:.0f} GB/s")


def prefill(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    for batch, heads, length, hdim, given in PREFILLS:
        q, k, v = (torch.randn(batch, heads, length, hdim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        tensors, words = {"q": q, "k": k, "v": v, "o": torch.empty_like(q)}, dict(given)
        if words.pop("bias", False):
            tensors["bias"] = torch.randn(1, heads, length, length, device="cuda", dtype=torch.bfloat16)
        request = request_of(tensors, words)
        found = fmha_candidates(parse_attention(request), cuda.info)
        wanted = {
            f"{c.pipeline} {c.m0}x{c.n0}, {c.wave[0]} waves": (request, c)
            for c in found
            if c.pipeline == "qr_async" and not c.pack_gqa
        }
        want = None if "dropout_p" in words else truth(q, k, v, words, tensors.get("bias"))
        flops = 4.0 * batch * heads * length**2 * hdim / (2 if words.get("causal") else 1)
        peers = dict(library(tensors, k, v, bool(words.get("causal"))))
        title = f"prefill {batch}x{heads}x{length}x{hdim} {given or ''}"
        runs = built(cuda, pool, wanted, tensors)
        report(cuda, title, runs, peers, tensors, want, lambda s, flops=flops: f"{flops / s / 1e12:.0f} TFLOP/s")


def copy_rate(cuda: Cuda) -> float:
    """Bytes read and written in a second."""
    source = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / cuda.alternate({"copy": lambda: target.copy_(source)}, 0.1)["copy"]


def main() -> None:
    parts = {"decode": decode, "prefill": prefill}
    with Cuda() as cuda, ThreadPoolExecutor(12) as pool:
        print(f"a copy moves {copy_rate(cuda) / 1e9:.0f} GB/s")
        for name in sys.argv[1:] or parts:
            parts[name](cuda, pool)


if __name__ == "__main__":
    main()
