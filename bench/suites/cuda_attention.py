"""Attention on the GPU against cuDNN through PyTorch, bf16: forward, gradients, steps of decoding, and memory.

Needs an NVIDIA GPU and PyTorch built for it. Kernels are the ones that the selection takes; where cuDNN lacks a form,
PyTorch's flash kernel is the peer. A head of every result is compared with float64 on the GPU before it is timed.
Ratios are ours over the peer's in speed: above 1 we are faster. Gradients are timed with sums in a fixed order, as they
are unless somebody asks for others, and in any order, as cuDNN's are.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import timing
from common.cuda_local import Cuda, Product, describe
from torch.nn.attention import SDPBackend, sdpa_kernel

from suites.base import Options, Table, main
from tilewright_fmha.commands.cases import AttentionCase
from tilewright_kit.commands.cases import read_case
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.engine.call import Call

SHAPES = Path(__file__).resolve().parents[1] / "shapes" / "attention.csv"
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
PAGES = (0, 16, 64, 128)
"""Tokens of a page in steps of decoding; 0: items of one room."""
LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOLERANCE = {"o": 1e-2, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}
Tensors = dict[str, torch.Tensor]


def cases(options: Options) -> list[AttentionCase]:
    with SHAPES.open() as file:
        rows = [{name: text for name, text in row.items() if text} for row in csv.DictReader(file)]
    needed = ("batch", "heads", "seq_k", "hdim")
    found = [read_case(AttentionCase, row, SHAPES.name, {"dtype": "bf16"}, needed) for row in rows]
    return [*found[1:2], *found[-1:]] if options.quick else found


def is_step(case: AttentionCase) -> bool:
    """A step of decoding: one query each."""
    return case.queries == 1


# ---- ours ----


def fresh(case: AttentionCase) -> Tensors:
    """Operands of the forward pass: random numbers; pages in any order, sequences as long as there is room."""
    found = {}
    for name, desc in case.request().inputs.items():
        if desc.dtype.value == "int32":
            continue
        found[name] = torch.randn(desc.shape, device="cuda", dtype=torch.bfloat16)
    if case.page:
        count = case.request().inputs["k"].shape[0]
        found["block_table"] = torch.randperm(count, device="cuda").int().view(case.batch, -1)
        found["seqlens_k"] = torch.full((case.batch,), case.seq_k, dtype=torch.int32, device="cuda")
    return found


@dataclass(frozen=True)
class Asked:
    """A case, and what its request says beyond it."""

    case: AttentionCase
    words: Mapping[str, Any]

    def request(self, cuda: Cuda) -> OperationRequest:
        plain = self.case.request()
        request = replace(plain, attributes={**plain.attributes, **self.words})
        items = cuda.engine.operations[request.operation].parse(request).operands
        return replace(request, outputs={item.name: item.desc for item in items if item.role is Role.OUTPUT})

    def product(self, cuda: Cuda, tensors: Tensors) -> tuple[Product, Tensors]:
        """The kernel that the server would take, bound to operands and to poisoned outputs."""
        request, outputs = self.request(cuda), Tensors()
        for name, desc in request.outputs.items():
            outputs[name] = torch.full(desc.shape, float("nan"), dtype=TORCH[desc.dtype.value], device="cuda")
        request = replace(request, outputs={name: describe(tensor) for name, tensor in outputs.items()})
        return Product(cuda, request, tensors | outputs, ""), outputs

    def plan(self, cuda: Cuda) -> Any:
        request = self.request(cuda)
        operation = cuda.engine.operations[request.operation]
        problem = operation.parse(request)
        return operation.plan(problem, cuda.choose(operation, problem, ""), cuda.info)


FORWARD: Mapping[str, Any] = {}
TRAINING: Mapping[str, Any] = {"return_lse": True}
FIXED: Mapping[str, Any] = {}
ANY_ORDER: Mapping[str, Any] = {"deterministic": False}


def everything(options: Options) -> list[Asked]:
    """All that will be asked for."""
    found = []
    for case in cases(options):
        if is_step(case):
            found += [Asked(replace(case, page=page), FORWARD) for page in pages(options)]
            continue
        found += [Asked(case, FORWARD), Asked(case, TRAINING)]
        found += [Asked(replace(case, direction="bwd"), words) for words in (FIXED, ANY_ORDER)]
    return found


def pages(options: Options) -> tuple[int, ...]:
    return PAGES[::2] if options.quick else PAGES


def kernels_of(cuda: Cuda, asked: Asked) -> tuple[Any, ...]:
    try:
        return tuple(asked.plan(cuda).kernels)
    except TilewrightError:
        return ()


def compiling(cuda: Cuda, options: Options) -> Table:
    """All kernels on all cores, before anything is timed; what cannot be is told where it is asked for."""
    kernels = {config.name: config for asked in everything(options) for config in kernels_of(cuda, asked)}
    begun = time.perf_counter()
    results = cuda.engine.build(list(kernels.values()), cuda.info.arch, lambda _: None, Call())
    table = Table("Attention: compiling what is timed here", ["kernels", "seconds, all cores"])
    table.rows.append([len(kernels), time.perf_counter() - begun])
    table.notes += [f"- {item.config.name}: {item.error}" for item in results if item.error is not None]
    return table


# ---- theirs, and the truth ----


class Peer:
    """PyTorch's attention, by the first of its kernels that takes the case."""

    def __init__(self, cuda: Cuda, case: AttentionCase, tensors: Tensors) -> None:
        self.case, self._stream = case, cuda.torch_stream
        self.leaves = [tensors[name].detach().clone().requires_grad_(not is_step(case)) for name in "qkv"]
        taken = next((name for name in PEERS if self._is_taken_by(PEERS[name])), "")
        if not taken:
            raise ValueError("PyTorch has no fast kernel for it")
        self.name, self.backend = taken, PEERS[taken]

    def _is_taken_by(self, backend: Any) -> bool:
        try:
            with sdpa_kernel(backend):
                self.forward()
        except RuntimeError:
            return False
        return True

    def forward(self) -> torch.Tensor:
        case = self.case
        return torch.nn.functional.scaled_dot_product_attention(
            *self.leaves, is_causal=case.mask == "top_left", enable_gqa=case.kv_heads != case.heads
        )

    def plain(self) -> torch.Tensor:
        """Without what a backward pass needs."""
        with torch.no_grad():
            return self.forward()

    def backward(self, do: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):  # autograd uses the stream of the forward pass
            o = self.forward()
        torch.cuda.synchronize()
        return lambda: torch.autograd.grad(o, self.leaves, do, retain_graph=True)


def truth(case: AttentionCase, tensors: Tensors) -> tuple[Tensors, int]:
    """Float64 results of the query heads of the first key head of the first item; and their number.
    With ``do`` gradients as well.
    """
    group = case.heads // case.kv_heads
    q, k, v = (
        tensors[name][0, :count].double().requires_grad_() for name, count in zip("qkv", (group, 1, 1), strict=True)
    )
    found: Tensors = {}
    outputs = []
    for head in range(group):
        s = (q[head] @ k[0].T) * case.hdim**-0.5
        if case.mask == "top_left":
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -float("inf"))
        outputs.append(torch.softmax(s, 1) @ v[0])
    found["o"] = torch.stack(outputs)
    if "do" in tensors:
        do = tensors["do"][0, :group].double()
        found |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(found["o"], (q, k, v), do), strict=True))
    return {name: tensor.detach() for name, tensor in found.items()}, group


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    part = got[0, : want.shape[0]].double()
    return float(torch.linalg.norm(part - want) / torch.linalg.norm(want))


def checked(product: Product, outputs: Tensors, want: Tensors) -> dict[str, float]:
    """Relative errors of our results. Raises ``ValueError`` if one is wrong."""
    found = {name: error(outputs[name], want[name]) for name in outputs if name in want}
    for name, off in found.items():
        if not off < TOLERANCE[name]:
            raise ValueError(f"{product.config.name}: {name} is off by {off:.1e}")
    return found


def run(cuda: Cuda, asked: Asked, tensors: Tensors) -> tuple[Product, Tensors]:
    torch.cuda.synchronize()
    product, outputs = asked.product(cuda, tensors)
    torch.cuda.synchronize()
    product()
    cuda.stream.synchronize()
    return product, outputs


# ---- tables ----


def brief(name: str) -> str:
    """The part of a kernel's name that says how: pipeline, tile and waves."""
    found = re.search(r"_h\d+x\d+_([^_]+)_([^_]+)_([^_]+)", name)
    return " ".join(found.groups()) if found else name


def label(case: AttentionCase) -> str:
    heads = f"{case.heads}/{case.kv_heads}" if case.kv_heads != case.heads else f"{case.heads}"
    return f"{case.batch}, {heads}, {case.seq_k}, {case.hdim}" + (", causal" if case.mask == "top_left" else "")


def passes(cuda: Cuda, options: Options) -> list[Table]:
    """Forward passes and gradients."""
    forward = Table(
        "Attention on the GPU, forward, bf16 (TFLOP/s, cold caches)",
        ["B, heads, S, D", "ours", "theirs", "ratio", "error / theirs", "peer", "kernel"],
    )
    backward = Table(
        "Attention on the GPU, gradients, bf16 (TFLOP/s, counted as 2.5 times forward)",
        ["B, heads, S, D", "ours", "any order", "theirs", "ratio", "any order / theirs", "error / theirs", "kernel"],
    )
    for case in (item for item in cases(options) if not is_step(item)):
        torch.cuda.empty_cache()
        tensors = fresh(case)
        tensors["do"] = torch.randn_like(tensors["q"])
        try:
            peer = Peer(cuda, case, tensors)
            want, _ = truth(case, tensors)
        except (RuntimeError, ValueError) as refusal:
            forward.notes.append(f"- {label(case)}: {refusal}")
            continue
        for table, part in ((forward, forward_row), (backward, backward_row)):
            try:
                table.rows.append([label(case), *part(cuda, case, tensors, peer, want)])
            except (TilewrightError, ValueError, torch.OutOfMemoryError) as refusal:
                table.notes.append(f"- {label(case)}: {refusal}")
                continue
            print(table.rows[-1], flush=True)
    for table, column, what in ((forward, 3, "forward"), (backward, 4, "gradients"), (backward, 5, "in any order")):
        if ratios := [row[column] for row in table.rows if row[column] is not None]:
            mean = timing.geomean(ratios)
            table.notes.append(
                f"- {what}: geometric mean {mean:.2f} of theirs over {len(ratios)}, least {min(ratios):.2f}"
            )
    return [forward, backward]


def forward_row(cuda: Cuda, case: AttentionCase, tensors: Tensors, peer: Peer, want: Tensors) -> list[Any]:
    product, outputs = run(cuda, Asked(case, FORWARD), {name: tensors[name] for name in "qkv"})
    mine = checked(product, outputs, want)["o"]
    with sdpa_kernel(peer.backend):
        theirs = error(peer.plain(), want["o"])
        measured = cuda.alternate({"ours": product, "theirs": peer.plain})
    rate = {who: case.flops / seconds / 1e12 for who, seconds in measured.items()}
    ratio = rate["ours"] / rate["theirs"]
    return [*rate.values(), ratio, mine / theirs, peer.name, brief(product.config.name)]


def backward_row(cuda: Cuda, case: AttentionCase, tensors: Tensors, peer: Peer, want: Tensors) -> list[Any]:
    _, given = run(cuda, Asked(case, TRAINING), {name: tensors[name] for name in "qkv"})
    tensors, asked = {**tensors, **given}, replace(case, direction="bwd")
    calls, errors = dict[str, Any](), list[dict[str, float]]()
    for who, words in (("ours", FIXED), ("any order", ANY_ORDER)):
        product, outputs = run(cuda, Asked(asked, words), tensors)
        errors.append(checked(product, outputs, want))
        calls[who] = product
    with sdpa_kernel(peer.backend):
        calls["theirs"] = peer.backward(tensors["do"])
        got = dict(zip(("dq", "dk", "dv"), calls["theirs"](), strict=True))
        theirs = {name: error(tensor, want[name]) for name, tensor in got.items()}
        measured = cuda.alternate(calls)
    worst = max(found[name] / theirs[name] for found in errors for name in found)
    rate = {who: asked.flops / seconds / 1e12 for who, seconds in measured.items()}
    ratios = [rate[who] / rate["theirs"] for who in ("ours", "any order")]
    return [*rate.values(), *ratios, worst, brief(calls["ours"].config.name)]


FLUSHES = ("", " (read)")
"""How caches are made cold: by a write, or by reading. What was written last still goes to memory while a launch runs,
up to 50 MiB, for which who reads has to wait; steps of decoding come after reads of weights.
"""
STEP = ("ours", "theirs", "copy", "ours / copy", "ours / theirs")


def decoding(cuda: Cuda, options: Options) -> Table:
    """Bytes of keys and values a second, beside what a copy of as many bytes moves."""
    columns = ["B, heads, keys, D", "form", *(name + flush for flush in FLUSHES for name in STEP), "peer", "kernel"]
    table = Table("Steps of decoding, bf16 (GB/s of keys and values; cold by a write, and by reading)", columns)
    for case in (item for item in cases(options) if is_step(item)):
        for page in pages(options):
            asked = replace(case, page=page)
            torch.cuda.empty_cache()
            try:
                row = step_row(cuda, asked, fresh(asked))
            except (TilewrightError, ValueError) as refusal:
                table.notes.append(f"- {label(case)}, pages of {page}: {refusal}")
                continue
            table.rows.append([label(case), f"pages of {page}" if page else "dense", *row])
            print(table.rows[-1], flush=True)
    for flush in FLUSHES:
        if parts := [row[columns.index(f"ours / copy{flush}")] for row in table.rows]:
            mean = timing.geomean(parts)
            table.notes.append(f"- of a copy's traffic{flush}: geometric mean {mean:.2f}, least {min(parts):.2f}")
    return table


def step_row(cuda: Cuda, case: AttentionCase, tensors: Tensors) -> list[Any]:
    product, outputs = run(cuda, Asked(case, FORWARD), tensors)
    moved = tensors["k"].nbytes + tensors["v"].nbytes
    source, target = (torch.empty(moved // 2, dtype=torch.int8, device="cuda") for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"ours": product, "copy": lambda: target.copy_(source)}
    checked(product, outputs, truth(replace(case, page=0), in_order(case, tensors))[0])
    peer = None if case.page else Peer(cuda, case, tensors)
    row: list[Any] = []
    for flush in FLUSHES:
        if peer is None:
            measured = cuda.alternate(calls, by_reading=bool(flush))
        else:
            with sdpa_kernel(peer.backend):
                measured = cuda.alternate(calls | {"theirs": peer.plain}, by_reading=bool(flush))
        rate = {who: moved / seconds / 1e9 for who, seconds in measured.items()}
        ours, copy, theirs = rate["ours"], rate["copy"], rate.get("theirs")
        row += [ours, theirs, copy, ours / copy, ours / theirs if theirs else None]
    return [*row, peer.name if peer else None, brief(product.config.name)]


def in_order(case: AttentionCase, tensors: Tensors) -> Tensors:
    """Keys and values of the first sequence as an item, whatever pages they are in."""
    if not case.page:
        return tensors
    first = tensors["block_table"][0].long()
    parts = {name: tensors[name][first].flatten(0, 1).transpose(0, 1)[None] for name in "kv"}
    return {"q": tensors["q"], **parts}


def memory(cuda: Cuda, options: Options) -> Table:
    """Memory that passes take beside their operands, as sequences grow."""
    columns = ["S", "operands, MiB", "forward", "gradients", "in any order", "scores would be, MiB"]
    table = Table("Memory of the workspace, 8 heads of 128, bf16 (MiB)", columns)
    for length in LENGTHS[: 2 if options.quick else None]:
        case = AttentionCase(batch=1, heads=8, seq_k=length, hdim=128, dtype="bf16")
        back = replace(case, direction="bwd")
        plans = [Asked(case, FORWARD), Asked(back, FIXED), Asked(back, ANY_ORDER)]
        spaces = [asked.plan(cuda).workspace_bytes for asked in plans]
        scores = 2 * case.heads * length * length
        values = (4 * 2 * case.heads * length * case.hdim, *spaces, scores)
        table.rows.append([length, *(value / 2**20 for value in values)])
    return table


def measure(options: Options) -> list[Table]:
    torch.backends.cuda.matmul.allow_tf32 = False
    with Cuda() as cuda:
        tables = [compiling(cuda, options), *passes(cuda, options), decoding(cuda, options)]
        return [*tables, memory(cuda, options)]


if __name__ == "__main__":
    raise SystemExit(main(measure))
