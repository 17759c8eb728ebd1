"""Attention on a CPU: forward and backward against PyTorch's ``scaled_dot_product_attention`` (its flash kernel), steps
of decoding against a copy of the cache, and what memory a forward pass takes as sequences grow.

The kernel is the one that the server would take, run by an engine in this very process. All contenders of a row take
turns on the same memory; figures are of the fastest round, since other work on the machine only ever adds time, and
ratios are ours over the peer's in speed: above 1 we are faster. With one thread it is the processor's time that counts,
of both. PyTorch's backward pass is its flash kernel alone, called as autograd calls it, without a forward pass. Every
result is compared with the peer's before it is timed, and errors of both with float64.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import local, peers, timing

from suites.base import Options, Table, main
from tilewright_fmha.commands.cases import AttentionCase
from tilewright_fmha.commands.family import ATTENTION
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.errors import TilewrightError

SHAPES: tuple[dict[str, Any], ...] = (
    {"batch": 2, "heads": 8, "seq_k": 1024, "hdim": 128},
    {"batch": 2, "heads": 8, "seq_k": 1024, "hdim": 128, "mask": "top_left"},
    {"batch": 2, "heads": 8, "seq_k": 1024, "hdim": 64},
    {"batch": 4, "heads": 12, "seq_k": 128, "hdim": 64},
    {"batch": 8, "heads": 12, "seq_k": 512, "hdim": 32},
    {"batch": 1, "heads": 8, "seq_k": 2048, "hdim": 64, "mask": "top_left"},
    {"batch": 1, "heads": 16, "heads_k": 4, "seq_k": 1024, "hdim": 128, "mask": "top_left"},
    {"batch": 1, "heads": 4, "seq_k": 1000, "hdim": 72},
)
DECODE = (
    {"batch": 1, "heads": 32, "heads_k": 32, "seq_q": 1, "seq_k": 4096, "hdim": 128},
    {"batch": 1, "heads": 32, "heads_k": 8, "seq_q": 1, "seq_k": 16384, "hdim": 128},
    {"batch": 8, "heads": 32, "heads_k": 8, "seq_q": 1, "seq_k": 2048, "hdim": 128},
)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
DTYPES = ("fp32", "bf16")
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative difference, in norm, beyond which one of the two computed something else."""


@dataclass(frozen=True)
class Attended:
    """A case, its request with outputs described, and memory for every operand."""

    case: AttentionCase
    request: OperationRequest
    arrays: Mapping[str, peers.Array]

    @classmethod
    def of(cls, here: local.Local, case: AttentionCase, given: Mapping[str, peers.Array] | None = None) -> Attended:
        """Random operands, each in memory that begins at a page, but for those given; outputs are poisoned."""
        request = case.request()
        operation: Any = here.engine.operations[request.operation]
        arrays, described = {}, {}
        meant = {} if not case.page else operation.sample_inputs(request, np.random.default_rng(5))
        for seed, item in enumerate(operation.parse(request).operands):
            dtype = np.dtype(item.desc.dtype.numpy)
            arrays[item.name] = array = local.aligned(item.desc.shape, dtype)
            if item.role is Role.OUTPUT:
                array[...] = np.nan
                described[item.name] = item.desc
            elif given is not None and item.name in given:
                array[...] = given[item.name]
            elif item.name in meant:
                array[...] = meant[item.name]
            else:
                array[...] = peers.random(item.desc.shape, item.desc.dtype.value, seed)
        return cls(case, replace(request, outputs=described), arrays)

    def filled(self) -> Attended:
        """Itself, with a cache of pages that is full and has each page once, in no order."""
        if self.case.page:
            table = self.arrays["block_table"]
            table[...] = np.random.default_rng(7).permutation(table.size).reshape(table.shape)
            self.arrays["seqlens_k"][...] = self.case.seq_k
        return self

    def ours(self, here: local.Local) -> local.Product:
        return here.product(self.request, self.arrays)

    def tensor(self, torch: Any, name: str) -> Any:
        array = self.arrays[name]
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def relative(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def processor_time(call: timing.Timed) -> timing.Timed:
    """The time that this thread had a processor for: what others take meanwhile does not count."""

    def timed(repeat: int) -> float:
        begun = time.thread_time()
        call(repeat)
        return time.thread_time() - begun

    return timed


def race(options: Options, ours: timing.Timed, theirs: Callable[[], object]) -> tuple[float, float]:
    """The fastest round of each, in seconds."""
    calls = {"ours": ours, "theirs": timing.wall(theirs)}
    if options.threads == 1:
        calls = {name: processor_time(call) for name, call in calls.items()}
    found = timing.alternate(calls, rounds=3 if options.quick else 7, round_s=0.02)
    return found["ours"].best, found["theirs"].best


def forward(here: local.Local, torch: Any, case: AttentionCase, options: Options) -> tuple[list[Any], Attended]:
    """Our GFLOP/s, the ratio to PyTorch's, and our error over PyTorch's; and what was computed."""
    item = Attended.of(here, replace(case, lse="yes"))
    product = Attended.of(here, case, item.arrays)
    operands = {name: product.tensor(torch, name) for name in "qkv"}
    theirs: Callable[[], Any] = ATTENTION.peer_call(torch, case, operands)
    item.ours(here).timed(1)
    ours = product.ours(here)
    ours.timed(1)
    o, peer = product.tensor(torch, "o"), theirs()
    off = relative(o, peer)
    if not off < TOLERANCE[case.dtype]:
        raise ValueError(f"{case.label}: {ours.kernel} is off by {off:.1e}")
    truth = ATTENTION.peer_call(torch, case, {name: tensor.double() for name, tensor in operands.items()})()
    mine, other = race(options, ours.timed, theirs)
    return [case.flops / mine / 1e9, other / mine, relative(o, truth) / relative(peer, truth)], item


def backward(here: local.Local, torch: Any, done: Attended, options: Options) -> list[Any]:
    """Our GFLOP/s, and the ratio to PyTorch's flash kernel; of as many heads of keys as of queries only."""
    case = replace(done.case, direction="bwd", lse="")
    item = Attended.of(here, case, done.arrays)
    ours = item.ours(here)
    ours.timed(1)
    do, q, k, v = (item.tensor(torch, name) for name in ("do", "q", "k", "v"))
    if case.kv_heads != case.heads:
        return [case.flops / race(options, ours.timed, lambda: None)[0] / 1e9, None]
    causal = case.mask == "top_left"
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    peer_o, peer_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    theirs = lambda: kernel(do, q, k, v, peer_o, peer_lse, 0.0, causal)  # noqa: E731
    for name, got in zip(("dq", "dk", "dv"), theirs(), strict=True):
        off = relative(item.tensor(torch, name), got)
        if not off < 5 * TOLERANCE[case.dtype]:
            raise ValueError(f"{case.label}: {name} of {ours.kernel} is off by {off:.1e}")
    mine, other = race(options, ours.timed, theirs)
    return [case.flops / mine / 1e9, other / mine]


def compare(here: local.Local, torch: Any, options: Options) -> list[Table]:
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    columns = ["problem", "dtype", "forward", "ratio", "error / PyTorch's", "backward", "ratio"]
    table = Table(f"Attention, {threads} (ours in GFLOP/s, and ours / PyTorch)", columns)
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in SHAPES[3:5] if options.quick else SHAPES:
        for dtype in DTYPES:
            case = ATTENTION.from_record({**row, "dtype": dtype}, "suite")
            try:
                found, done = forward(here, torch, case, options)
                ratios.setdefault((dtype, "forward"), []).append(found[1])
                found += backward(here, torch, done, options)
                if found[4] is not None:
                    ratios.setdefault((dtype, "backward"), []).append(found[4])
            except (TilewrightError, ValueError) as error:
                table.notes.append(f"- {case.label}: {error}")
                continue
            table.rows.append([case.label.removeprefix("fwd "), dtype, *found])
            print(case.label, *found, file=sys.stderr, flush=True)
    summary = Table(f"Attention against PyTorch, {threads}", ["dtype", "direction", "rows", "geometric mean", "least"])
    for (dtype, way), values in sorted(ratios.items()):
        summary.rows.append([dtype, way, len(values), timing.geomean(values), min(values)])
    return [summary, table]


def decode(here: local.Local, torch: Any, options: Options) -> Table:
    """Bytes of keys and values a second, against a copy of as many bytes (which reads and writes: half of it each)."""
    columns = ["problem", "dtype", "form", "GB/s", "of a copy's", "ours / PyTorch"]
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    table = Table(f"Decoding, {threads} (bytes of the cache a second, beside a copy's traffic)", columns)
    for row in DECODE[:1] if options.quick else DECODE:
        for dtype in DTYPES:
            for page in (0, 64):
                case = AttentionCase(**row, dtype=dtype, page=page)
                item = Attended.of(here, case).filled()
                ours = item.ours(here)
                ours.timed(1)
                nbytes = item.arrays["k"].nbytes + item.arrays["v"].nbytes
                source, target = local.aligned((nbytes // 2,), np.uint8), local.aligned((nbytes // 2,), np.uint8)
                source[...] = 7
                copy = functools.partial(torch.from_numpy(target).copy_, torch.from_numpy(source))
                calls = {"ours": ours.timed, "copy": timing.wall(copy)}
                if not page:
                    operands = {name: item.tensor(torch, name) for name in "qkv"}
                    calls["PyTorch"] = timing.wall(ATTENTION.peer_call(torch, case, operands))
                if options.threads == 1:
                    calls = {name: processor_time(call) for name, call in calls.items()}
                found = timing.alternate(calls, rounds=3 if options.quick else 9, round_s=0.02)
                mine = found["ours"].best
                ratio = found["PyTorch"].best / mine if not page else None
                form = f"pages of {page}" if page else "dense"
                table.rows.append(
                    [
                        case.label.removeprefix("fwd "),
                        dtype,
                        form,
                        nbytes / mine / 1e9,
                        found["copy"].best / mine,
                        ratio,
                    ]
                )
                print(*table.rows[-1], file=sys.stderr, flush=True)
    return table


def peak_bytes(call: Callable[[], object]) -> int | None:
    """How far the memory of this process rises at its highest while ``call`` runs; None where Linux does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status_bytes("VmRSS")
        call()
        return max(status_bytes("VmHWM") - before, 0)
    except OSError:
        return None


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def memory(here: local.Local, torch: Any, options: Options) -> Table:
    """Memory that a forward pass takes beside its operands: as planned, and by how much the process grew meanwhile."""
    columns = ["keys", "operands, MiB", "workspace, MiB", "peak, MiB", "PyTorch's peak, MiB", "scores would be, MiB"]
    table = Table("Memory of a forward pass, 8 heads of 64, fp32", columns)
    for length in LENGTHS[:2] if options.quick else LENGTHS:
        case = AttentionCase(batch=1, heads=8, seq_k=length, hdim=64)
        item = Attended.of(here, case)
        ours = item.ours(here)
        peak = peak_bytes(functools.partial(ours.timed, 1))
        theirs = peak_bytes(ATTENTION.peer_call(torch, case, {name: item.tensor(torch, name) for name in "qkv"}))
        operands = sum(array.nbytes for array in item.arrays.values())
        values = (operands, ours.prepared.workspace_bytes, peak, theirs, 4 * case.heads * length * length)
        table.rows.append([length, *(None if value is None else value / 2**20 for value in values)])
        print(*table.rows[-1], file=sys.stderr, flush=True)
    table.notes.append(
        "PyTorch's peak has its result in it, which we write where we are told to; our workspace stays for later calls."
    )
    return table


def measure(options: Options) -> list[Table]:
    torch = peers.torch()
    if torch is None:
        return [Table("Attention", [""], [["PyTorch is not installed: there is nothing to compare with"]])]
    peers.set_threads(options.threads)
    with local.Local(options.threads) as here, torch.inference_mode():
        if options.sample:
            return [decode(here, torch, options)]
        found = [*compare(here, torch, options), decode(here, torch, options)]
        return [*found, memory(here, torch, options)] if options.threads == 1 else found


if __name__ == "__main__":
    raise SystemExit(main(measure))
