"""Portable kernels of attention on the GPU, one by one: right, and how fast, by tile and by number of parts.

Not a suite: ``python bench/lab/attention_portable.py [decode|prefill] ...`` says for a handful of problems what every
kernel takes that is worth trying, beside cuDNN and PyTorch's flash kernel. Results are compared with float32 first,
some of lengths that no tile divides: rows and chunks that do not exist are to be zeros. Of decoding also: how many
parts of the keys pay, whether one kernel or a second stage should add them, and how long it takes to copy or read as
many bytes as the cache has.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.cuda_local import Cuda, Product, describe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewright_arch
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes
from tilewright_fmha.launch.splits import FEW_ROWS, choose_splits
from tilewright_fmha.pipelines.candidates import fmha_candidates
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import TilewrightError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One query for each sequence against a cache of bf16 or fp8."""

    batch: int
    heads: int
    heads_k: int
    keys: int
    hdim: int
    page: int = 0
    """Tokens of a page; 0: items of one room."""
    cache: str = "bf16"
    ragged: bool = False
    """Lengths differ: what lies behind them is NaN (of pages)."""

    @property
    def title(self) -> str:
        words = [f"decode {self.batch}x{self.heads}/{self.heads_k}x{self.keys}x{self.hdim}"]
        words += [f"pages of {self.page}"] * bool(self.page) + ["fp8 cache"] * (self.cache == "fp8")
        return " ".join(words + ["ragged"] * self.ragged)


LONG, WIDE = (1, 32, 8, 65536, 128), (64, 32, 8, 4096, 128)
STEPS = (
    Step(*LONG), Step(*LONG, page=16), Step(*WIDE), Step(*WIDE, page=16), Step(*WIDE, page=128),
    Step(*WIDE, cache="fp8"), Step(*WIDE, cache="fp8", page=16), Step(*LONG, cache="fp8"), Step(64, 32, 8, 4096, 64),
    Step(64, 32, 8, 4096, 64, cache="fp8"), Step(64, 16, 4, 4096, 256), Step(1, 32, 8, 4096, 128),
    Step(*WIDE, page=16, ragged=True),
)  # fmt: skip
CHECKS = (
    Step(3, 32, 8, 1001, 128), Step(3, 32, 8, 1008, 72, page=16), Step(3, 8, 8, 1001, 80, cache="fp8"),
    Step(5, 32, 8, 1040, 128, page=16, ragged=True), Step(5, 32, 8, 1040, 64, page=16, cache="fp8", ragged=True),
    Step(5, 32, 4, 1040, 128, page=4, cache="fp8", ragged=True),
)  # fmt: skip
"""Too small to be worth timing."""
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


def checked(runs: Mapping[str, Product], tensors: Tensors, want: torch.Tensor | None) -> dict[str, float]:
    """Relative errors of each; of two launches in one workspace, which have to agree to the last bit."""
    errors = {}
    for name, product in runs.items():
        results = []
        for _ in range(2):
            tensors["o"].fill_(math.nan)
            torch.cuda.synchronize()
            product()
            torch.cuda.synchronize()
            results.append(tensors["o"].clone())
        got = results[1].float()
        error = math.nan if want is None else float((got - want).norm() / want.norm())
        errors[name] = error if torch.isfinite(got).all() and torch.equal(*results) else math.inf
    return errors


def report(
    cuda: Cuda, title: str, runs: Mapping[str, Product], peers: Mapping[str, Callable[[], object]],
    tensors: Tensors, want: torch.Tensor | None, said: Callable[[float], str], *, both: bool = False,
) -> None:  # fmt: skip
    """``both``: times after a flush by reading as well."""
    errors = checked(runs, tensors, want)
    print(title)
    seconds = [cuda.alternate({**runs, **peers}, 0.05, by_reading=reading) for reading in (False, True)[: 1 + both]]
    for name in seconds[0]:
        times = "   ".join(f"{value[name] * 1e6:8.1f} us {said(value[name]):14}" for value in seconds)
        print(f"  {name:28} {times} error {errors.get(name, 0.0):.1e}", flush=True)


def built(
    cuda: Cuda, pool: ThreadPoolExecutor, wanted: Mapping[str, tuple[OperationRequest, FmhaConfig]], tensors: Tensors,
    plan_of: Callable[[Any, Any, DeviceInfo], ExecutionPlan] | None = None,
) -> dict[str, Product]:  # fmt: skip
    jobs = {
        name: pool.submit(Product, cuda, request, tensors, config.name, plan_of)
        for name, (request, config) in wanted.items()
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


def two_stages(problem: Any, config: Any, device: DeviceInfo) -> ExecutionPlan:
    """Parts of the keys are added by a second launch: what the kernel still knows, but no plan asks for."""
    with patch("tilewright_fmha.plan.plan.tickets_of", lambda *_: 0):
        return plan_fmha(problem, config, device)


def tensors_of(step: Step, device: str) -> tuple[Tensors, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Operands of the kernel: keys and values in heads, in bf16; lengths."""
    room = (step.batch, step.keys, step.heads_k, step.hdim)
    kept = torch.float8_e4m3fn if step.cache == "fp8" else torch.bfloat16
    lengths = None
    if step.page:
        lengths = torch.full((step.batch,), step.keys, dtype=torch.int32)
    if lengths is not None and step.ragged:
        lengths = torch.randint(0, step.keys + 1, (step.batch,), dtype=torch.int32)
        lengths[:3] = torch.tensor([0, 1, step.keys])
    k, v = (torch.randn(room, device=device, dtype=torch.bfloat16) for _ in range(2))
    for b, length in enumerate([] if lengths is None else lengths.tolist()):
        k[b, length:], v[b, length:] = math.nan, math.nan
    k, v = k.to(kept), v.to(kept)
    q = torch.randn(step.batch, step.heads, 1, step.hdim, device=device, dtype=torch.bfloat16)
    tensors = {"q": q, "o": torch.empty_like(q), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    if lengths is not None:
        count = step.batch * step.keys // step.page
        order = torch.randperm(count, device="cpu").to(device)
        for name, whole in (("k", k), ("v", v)):
            paged = torch.empty(count, step.page, step.heads_k, step.hdim, device=device, dtype=kept)
            paged.view(torch.uint8)[order] = whole.view(torch.uint8).view(count, step.page, step.heads_k, -1)
            tensors[name] = paged
        tensors["block_table"] = order.view(step.batch, -1).int()
        tensors["seqlens_k"] = lengths.to(device)
    return tensors, k.to(torch.bfloat16).transpose(1, 2), v.to(torch.bfloat16).transpose(1, 2), lengths


def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    if lengths is None:
        return torch.cat([truth(q[b : b + 1], k[b : b + 1], v[b : b + 1], {}, None) for b in range(len(q))])
    found = torch.zeros_like(q, dtype=torch.float32)
    for b, length in enumerate(lengths.tolist()):
        if length:
            found[b] = truth(q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length], {}, None)[0]
    return found


def few_rows(problem: FmhaProblem, device: DeviceInfo) -> FmhaConfig:
    group = problem.group > 1
    return next(c for c in fmha_candidates(problem, device) if c.pipeline == FEW_ROWS and c.pack_gqa == group)


def decode(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    for step in (*CHECKS, *STEPS):
        tensors, k, v, lengths = tensors_of(step, "cuda")
        plain = request_of(tensors, {})
        problem = parse_attention(plain)
        few = few_rows(problem, cuda.info)
        planned = choose_splits(problem, few, cuda.info)
        wanted = {f"{planned} parts, planned": (plain, few)}
        for parts in (1, 2, 3, 4) if step.batch > 1 else (16, 32, 33, 64, 66):
            if parts != planned:
                wanted[f"{parts} parts"] = (request_of(tensors, {"num_splits": parts}), few)
        runs = built(cuda, pool, wanted, tensors)
        if planned > 1:
            runs |= built(cuda, pool, {f"{planned} parts, two stages": (plain, few)}, tensors, two_stages)
        chosen = cuda.choose(cuda.engine.operations["attention"], problem, "")
        own = next(filter(decodes, fmha_candidates(problem, cuda.info)), chosen)
        for item in dict.fromkeys((own, chosen)):
            if item != few:
                name = "Hopper's own" if decodes(item) else item.pipeline
                label = f"{name}, {choose_splits(problem, item, cuda.info)} parts" + ", chosen" * (item == chosen)
                runs |= built(cuda, pool, {label: (plain, item)}, tensors)
        want = decoded(tensors["q"], k, v, lengths)
        if step in CHECKS:
            errors = checked(runs, tensors, want)
            print(step.title, *(f"{name}: {error:.1e};" for name, error in errors.items()))
            continue
        rows = step.batch * step.keys if lengths is None else int(lengths.sum())
        traffic = 2 * rows * step.heads_k * step.hdim * tensors["k"].element_size()
        peers: dict[str, Callable[[], object]] = {}
        if not step.page and step.cache == "bf16":
            peers |= dict(library(tensors, tensors["k"], tensors["v"], False))
        peers |= same_bytes(traffic)
        report(
            cuda, step.title, runs, peers, tensors, want,
            lambda s, traffic=traffic: f"{traffic / s / 1e9:.0f} GB/s", both=True,
        )  # fmt: skip


def same_bytes(traffic: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Time to move as many bytes, the beginning and the end of a launch included."""
    words = torch.empty(traffic // 4, dtype=torch.int32, device="cuda").zero_()
    half = words.numel() // 2
    yield "copy of as many bytes", lambda: words[:half].copy_(words[half : 2 * half])
    yield "reading as many bytes", lambda: words.amax()


def dry_run() -> None:
    """Plans and sources of every kernel of ``decode``, without a GPU."""
    arch = tilewright_arch.load("sm_90a")
    device = replace(device_of(arch), units=132)
    for step in (*CHECKS, *STEPS):
        small = replace(step, batch=min(step.batch, 3), keys=min(step.keys, 2048)) if step in STEPS else step
        tensors, k, v, lengths = tensors_of(small, "cpu")
        decoded(tensors["q"], k, v, lengths)
        problem = parse_attention(request_of(tensors, {}))
        few = few_rows(problem, device)
        generate(few, arch)
        plans = [plan_of(problem, few, device) for plan_of in (plan_fmha, two_stages)]
        print(step.title, few.name, *([stage.name for stage in plan.stages] for plan in plans))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="decode|prefill", help="what is measured (all of it)")
    parser.add_argument("--dry-run", action="store_true", help="only plan and generate the kernels of decoding; no GPU")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    if given.dry_run:
        dry_run()
        return
    with Cuda() as cuda, ThreadPoolExecutor(12) as pool:
        print(f"a copy moves {copy_rate(cuda) / 1e9:.0f} GB/s; times: after a flush by writing, after one by reading")
        for name in given.parts or parts:
            parts[name](cuda, pool)


if __name__ == "__main__":
    main()
