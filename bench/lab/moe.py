"""Products of experts on the GPU: every kernel that is worth trying, right, and how fast.

Not a suite: ``python bench/lab/moe.py [PART ...]``. ``correct`` compares every kernel with float64 on counts of all
kinds, wrong ones too; rows of no expert have to stay as they were; ``blocks`` does so with factors of blocks. ``graph``
replays a CUDA graph with other counts. ``fast`` times layers of 8 of 256 experts beside PyTorch: a product for each
expert, and its grouped one; ``fast8`` times fp8 with factors of blocks, ``gated`` both with a gate, which ``gates``
checks. The goal is the larger of the time to copy as many bytes and the time of the products at a dense kernel's speed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.cuda_local import NAMES, Cuda, Product, describe

from tilewright_gemm.fusion import Shape
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import TilewrightError
from tilewright_moe.candidates import moe_candidates, with_room
from tilewright_moe.config import RULES, MoeConfig, fused_with
from tilewright_moe.kernel_sets import KERNEL_SETS
from tilewright_moe.plugin import MoeGemm

MOE = MoeGemm()
COUNTS: tuple[Sequence[int], ...] = (
    (0, 1, 63, 64, 65, 129, 300, 78), (700, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 700), (0,) * 8,
    (1, 2, 3, 4, 5, 6, 7, 8), (-5, 100, 800, 3, 0, 9, 1, 1), (2**31 - 1, 2**31 - 1, -(2**31), 1, 1, 1, 1, 1),
)  # fmt: skip
DENSE_FLOPS = {torch.bfloat16: 700e12, torch.float8_e4m3fn: 1400e12}
BLOCK = 128
BLOCKS = {1: "1x128_1x128", 128: "1x128_128x128"}
"""Names of blocks by columns of those of weights."""
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Relative errors, of norms, by type of result."""
TOKENS = [64, 256, 1024, 4096]
"""Tokens of the layers that are timed (``--tokens``)."""
HEIGHTS = (64, 80, 96, 112, 128, 144, 160, 176, 192)
ROWS = (64, 128, 192, 256)
"""Rows of transposed tiles of all cuts, and of others."""
EVERY: list[bool] = []
"""Not empty: results of every cut are compared (``--every``)."""
Tensors = dict[str, torch.Tensor]


def tensors_of(dtype: torch.dtype, out: torch.dtype, x: Sequence[int], experts: int, n: int) -> Tensors:
    k = x[-1]
    made = [torch.randn(*x, device="cuda") / math.sqrt(k), torch.empty(experts, n, k, device="cuda", dtype=dtype)]
    for expert in range(experts):
        made[1][expert] = torch.randn(n, k, device="cuda").to(dtype)
    return {
        "x": made[0].to(dtype),
        "w": made[1],
        "counts": torch.zeros(experts, dtype=torch.int32, device="cuda"),
        "scale_w": torch.rand(experts, device="cuda") + 0.5,
        "out": torch.empty(*x[:-1], n, device="cuda", dtype=out),
        "status": torch.zeros(4, dtype=torch.int32, device="cuda"),
    }


def with_blocks(tensors: Tensors, columns: int) -> Tensors:
    """The same with factors of blocks of orders of magnitude, as kernels and as the truth take them."""
    x, w = tensors["x"], tensors["w"]
    blocks, k = -(-x.shape[-1] // BLOCK), x.shape[-1]
    scale_x = torch.exp2(4 * torch.randn(*x.shape[:-1], blocks, device="cuda"))
    scale_w = torch.exp2(4 * torch.randn(w.shape[0], -(-w.shape[1] // columns), blocks, device="cuda"))
    lines = scale_w.repeat_interleave(columns, 1)[:, : w.shape[1]]
    return tensors | {
        "scale_x": scale_x,
        "scale_w": scale_w,
        "wide x": x.double() * scale_x.repeat_interleave(BLOCK, -1)[..., :k],
        "wide w": w.double() * lines.repeat_interleave(BLOCK, -1)[..., :k],
    }


def request_of(tensors: Tensors, **words: Any) -> OperationRequest:
    outputs = {name: describe(tensors[name]) for name in ("out", "out_scale", "status") if name in tensors}
    inputs = {name: describe(tensor) for name, tensor in tensors.items() if name not in outputs and " " not in name}
    return OperationRequest("moe_gemm", inputs, outputs, words)


def built(
    cuda: Cuda, pool: ThreadPoolExecutor, request: OperationRequest, tensors: Tensors, configs: Sequence[MoeConfig]
) -> dict[str, Product]:
    jobs = {config.name: pool.submit(Product, cuda, request, tensors, config) for config in configs}
    wait(jobs.values())
    for name, job in jobs.items():
        if isinstance(error := job.exception(), TilewrightError):
            print(f"  {name}: {str(error)[:200]}")
    return {name: job.result() for name, job in jobs.items() if not job.exception()}


def rows_of(counts: Sequence[int], room: int, masked: bool) -> list[tuple[int, int]]:
    """First row and number of rows of each expert, cut as kernels cut them."""
    found, first = [], 0
    for count in counts:
        rows = min(max(count, 0), room - (0 if masked else first))
        found.append((first, rows))
        first += 0 if masked else rows
    return found


def fault_of(product: Product, tensors: Tensors, counts: Sequence[int]) -> tuple[float, int]:
    """Relative error of experts' rows, and how many other rows were written."""
    x, w, out = tensors.get("wide x", tensors["x"]), tensors.get("wide w", tensors["w"]), tensors["out"]
    masked = x.dim() == 3
    tensors["counts"].copy_(torch.tensor(counts, dtype=torch.int32))
    out.view(torch.uint8).fill_(255)  # NaN
    if (scales := tensors.get("out_scale")) is not None:
        scales.fill_(math.nan)
    torch.cuda.synchronize()
    product()
    torch.cuda.synchronize()
    if scales is not None:
        out = out.double() * scales.repeat_interleave(BLOCK, -1)[..., : out.shape[-1]].double()
    wrong, total, own = 0.0, 0.0, torch.zeros(out.shape[:-1], dtype=torch.bool, device="cuda")
    for expert, (first, rows) in enumerate(rows_of(counts, x.shape[-2], masked)):
        place: Any = (expert, slice(0, rows)) if masked else slice(first, first + rows)
        factor = 1.0 if "wide w" in tensors else tensors["scale_w"][expert].double()
        want = factor * (x[place].double() @ w[expert].double().T)
        if out.shape[-1] * 2 == w.shape[1]:  # both projections, in turns of eight
            gate, up = want.reshape(rows, out.shape[-1] // 8, 2, 8).unbind(2)
            want = (torch.nn.functional.silu(gate) * up).reshape(rows, -1) if rows else out[place].double()
        wrong += float((out[place].double() - want).square().sum())
        total += float(want.square().sum())
        own[place] = True
    kept = out[~own]
    return math.sqrt(wrong / total) if total else wrong, int((~torch.isnan(kept)).any(-1).sum()) if kept.numel() else 0


def correct(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    cases = (
        (torch.bfloat16, torch.bfloat16, 328, 264), (torch.float16, torch.float32, 136, 1096),
        (torch.float8_e4m3fn, torch.bfloat16, 328, 272), (torch.bfloat16, torch.bfloat16, 333, 259),
    )  # fmt: skip
    default = KERNEL_SETS["default"].expand(cuda.info.arch, MOE.rules)
    for dtype, out, n, k in cases:
        for shape in ((700, k), (8, 320, k)):
            tensors = tensors_of(dtype, out, shape, 8, n)
            request = request_of(tensors)
            problem = MOE.parse(request)
            kinds = [item for item in default if item.a == NAMES[dtype] and item.c in (NAMES[out], "")]
            wanted = {*kinds, *proposed(problem, cuda)}
            fitting = [config for config in wanted if not MOE.mismatches(problem, config, cuda.info)]
            runs = built(cuda, pool, request, tensors, sorted(fitting, key=lambda config: config.name))
            bad = wrong(runs, problem, tensors, LIMITS[out])
            print(f"{NAMES[dtype]} to {NAMES[out]}, x {shape}, n {n}: {len(runs)} kernels, {bad} wrong", flush=True)


def wrong(runs: Mapping[str, Product], problem: Any, tensors: Tensors, limit: float) -> int:
    """How many runs of all counts are wrong; tells which."""
    bad = 0
    for name, product in runs.items():
        for counts in COUNTS:
            error, written = fault_of(product, tensors, counts)
            want = MOE.reference(problem, {"counts": counts, **_empty(problem)})["status"].tolist()
            status = tensors["status"].tolist()
            if not error < limit or written or status != want:
                bad += 1
                print(f"  WRONG {name} {counts}: error {error:.2e}, {written} rows, status {status} not {want}")
    return bad


def blocks(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Kernels with factors of blocks."""
    default = KERNEL_SETS["default"].expand(cuda.info.arch, MOE.rules)
    for (columns, word), (n, k) in zip(BLOCKS.items(), ((328, 272), (200, 1040)), strict=True):
        for shape in ((700, k), (8, 320, k)):
            tensors = with_blocks(tensors_of(torch.float8_e4m3fn, torch.bfloat16, shape, 8, n), columns)
            request = request_of(tensors, scale_block=word)
            problem = MOE.parse(request)
            kinds = [item for item in default if (item.scale_a, item.scale_b) == problem.scales]
            wanted = {*kinds, *proposed(problem, cuda)}
            fitting = [config for config in wanted if not MOE.mismatches(problem, config, cuda.info)]
            runs = built(cuda, pool, request, tensors, sorted(fitting, key=lambda config: config.name))
            bad = wrong(runs, problem, tensors, LIMITS[torch.bfloat16])
            print(f"blocks {word}, x {shape}, n {n}: {len(runs)} kernels, {bad} wrong", flush=True)


def gates(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Kernels with a gate's activation."""
    for dtype, out, n, k in (
        (torch.bfloat16, torch.bfloat16, 336, 264), (torch.float8_e4m3fn, torch.float32, 656, 272),
    ):  # fmt: skip
        for shape in ((700, k), (8, 320, k)):
            tensors = tensors_of(dtype, out, shape, 8, n)
            tensors["out"] = torch.empty(*shape[:-1], n // 2, device="cuda", dtype=out)
            request = request_of(tensors, activation="swiglu")
            problem = MOE.parse(request)
            runs = built(cuda, pool, request, tensors, proposed(problem, cuda))
            # The matrix unit keeps some 14 bits of sums of 8-bit floats.
            bad = wrong(runs, problem, tensors, max(LIMITS[out], 1e-3 if dtype.itemsize == 1 else 0.0))
            print(f"gates, {NAMES[dtype]} to {NAMES[out]}, x {shape}: {len(runs)} kernels, {bad} wrong", flush=True)


def eights(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Kernels with results in fp8 and factors of their blocks."""
    for dtype, n, k in ((torch.bfloat16, 336, 264), (torch.float8_e4m3fn, 656, 272)):
        for shape, steps in itertools.product(((700, k), (8, 320, k)), ({}, {"activation": "swiglu"})):
            scaled, columns = dtype.itemsize == 1, n // 2 if steps else n
            tensors = tensors_of(dtype, torch.bfloat16, shape, 8, n)
            if scaled:
                tensors = with_blocks(tensors, BLOCK)
            tensors["out"] = torch.zeros(*shape[:-1], columns, device="cuda").to(torch.float8_e4m3fn)
            tensors["out_scale"] = torch.zeros(*shape[:-1], -(-columns // BLOCK), device="cuda")
            words = {**steps, "out_scale_block": "1x128", **({"scale_block": BLOCKS[BLOCK]} if scaled else {})}
            request = request_of(tensors, **words)
            problem = MOE.parse(request)
            runs = built(cuda, pool, request, tensors, proposed(problem, cuda))
            bad = wrong(runs, problem, tensors, 0.04)
            special = sum("_ws_" in name for name in runs)
            print(
                f"{NAMES[dtype]} to fp8, x {shape}, {steps}: {len(runs)} kernels ({special} ws), {bad} wrong",
                flush=True,
            )


def _empty(problem: Any) -> dict[str, Any]:
    """Inputs of the reference where only its status is asked for."""
    import numpy as np

    names = ("x", "w", "scale_x", "scale_w") if problem.block_scaled else ("x", "w")
    return {name: np.zeros(problem.desc(name).shape) for name in names}


def graph(cuda: Cuda, pool: ThreadPoolExecutor) -> None:  # noqa: ARG001 (as the others)
    tensors = tensors_of(torch.bfloat16, torch.bfloat16, (700, 512), 8, 256)
    product = Product(cuda, request_of(tensors), tensors, "")
    product()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=cuda.torch_stream):
        product()

    class Replay:
        def __call__(self) -> None:
            captured.replay()

    for counts in COUNTS:
        error, written = fault_of(Replay(), tensors, counts)  # type: ignore[arg-type]
        print(f"graph of {product.config.name}, {counts}: error {error:.1e}, {written} other rows written", flush=True)


def peers_of(tensors: Tensors, counts: Sequence[int]) -> Mapping[str, Callable[[], object]]:
    x, w, out = tensors["x"], tensors["w"], tensors["out"]
    rows = rows_of(counts, x.shape[0], False)
    busy = [(expert, slice(first, first + count)) for expert, (first, count) in enumerate(rows) if count]
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()

    def each() -> None:
        for expert, place in busy:
            torch.mm(x[place], w[expert].T, out=out[place])

    return {"torch.mm of each": each, "torch._grouped_mm": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)}


def fast(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Layers in bf16, beside PyTorch's."""
    layers(cuda, pool, torch.bfloat16)


def fast8(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Layers in fp8 with factors of blocks of 1x128 and 128x128."""
    layers(cuda, pool, torch.float8_e4m3fn)


def gated(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Layers of both projections in bf16, and in fp8 with factors of blocks."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        layers(cuda, pool, dtype, ((4096, 7168),), activation="swiglu")


def gated8(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Layers of both projections in fp8 with factors of blocks, to fp8."""
    layers(cuda, pool, torch.float8_e4m3fn, ((4096, 7168),), activation="swiglu", out_scale_block="1x128")


def layers(
    cuda: Cuda,
    pool: ThreadPoolExecutor,
    dtype: torch.dtype,
    sizes: Sequence[tuple[int, int]] = ((2048, 7168), (7168, 2048)),
    every: bool = False,
    scaled: bool = True,
    **words: Any,
) -> None:
    rate, scaled, most = copy_rate(cuda), scaled and dtype.itemsize == 1, 40 if every else 6
    print(f"{NAMES[dtype]}; a copy moves {rate / 1e9:.0f} GB/s")
    for n, k in sizes:
        for tokens in TOKENS:
            rows = 8 * tokens
            tensors = tensors_of(dtype, torch.bfloat16, (rows, k), 256, n)
            del tensors["status"], tensors["scale_w"]
            if scaled:
                tensors["scale_x"] = torch.rand(rows, -(-k // BLOCK), device="cuda") + 0.5
                tensors["scale_w"] = torch.rand(256, -(-n // BLOCK), -(-k // BLOCK), device="cuda") + 0.5
            columns = n // 2 if "activation" in words else n
            eight = "out_scale_block" in words
            out = torch.float8_e4m3fn if eight else torch.bfloat16
            tensors["out"] = torch.empty(rows, columns, device="cuda", dtype=out)
            if eight:
                tensors["out_scale"] = torch.empty(rows, -(-columns // BLOCK), device="cuda")
            request = request_of(tensors, **words, **({"scale_block": BLOCKS[BLOCK]} if scaled else {}))
            counts = torch.bincount(torch.randint(0, 256, (rows,)), minlength=256).tolist()
            tensors["counts"].copy_(torch.tensor(counts, dtype=torch.int32))
            problem = MOE.parse(request)
            chosen = cuda.choose(MOE, problem, "")
            found = [config for config in moe_candidates(problem, cuda.info) if config.pipeline == "ws"]
            if every:
                found = list(dict.fromkeys([*found, *every_shape(problem, cuda)]))
            portable = [config for config in moe_candidates(problem, cuda.info) if config.pipeline != "ws"]
            best = sorted(portable, key=lambda config: MOE.predict(problem, config, cuda.info).seconds)[:1]
            runs: dict[str, Any] = {**built(cuda, pool, request, tensors, [*found, *best])}
            peers = {} if scaled or words else working_peers(tensors, counts)
            times = cuda.alternate({**runs, **peers}, 0.02)
            busy = sum(count > 0 for count in counts)
            nbytes = busy * n * k * dtype.itemsize + rows * (out.itemsize * columns + k * dtype.itemsize)
            nbytes += sum(4 * tensors[name].numel() for name in ("scale_x", "scale_w", "out_scale") if name in tensors)
            least = max(nbytes / rate, 2.0 * rows * n * k / DENSE_FLOPS[dtype])
            print(f"{tokens} tokens, n {n}, k {k}: at least {least * 1e3:.3f} ms ({busy} experts have rows)")
            for name, seconds in sorted(times.items(), key=lambda item: item[1])[:most]:
                mark = " (chosen)" if name == chosen.name else ""
                print(f"  {seconds * 1e3:8.3f} ms  {seconds / least:5.2f} of the least  {name[:160]}{mark}", flush=True)
            if chosen.name in times:
                print(f"  chosen: {times[chosen.name] / least:.2f} of the least", flush=True)
            del tensors, runs, peers
            torch.cuda.empty_cache()


def proposed(problem: Any, cuda: Cuda) -> list[MoeConfig]:
    """Kernels whose results are compared."""
    return list(
        dict.fromkeys(
            [*moe_candidates(problem, cuda.info), *(every_shape(problem, cuda, (16, 80, 160)) if EVERY else ())]
        )
    )


def every_shape(
    problem: Any, cuda: Cuda, heights: Sequence[int] = HEIGHTS, rows: Sequence[int] = ROWS
) -> list[MoeConfig]:
    """All cuts of the warp-specialised pipeline that its rules allow, whether or not they are proposed."""
    kind, arch = problem.typical, cuda.info.arch
    swapped = [
        Shape((height, columns), (1, waves), (1, pair), swapped=True)
        for height, (columns, waves), pair in itertools.product(heights, ((128, 2), (256, 2)), (1, 2))
    ]
    plain = [
        Shape((m, n), waves, (1, pair))
        for m, n in itertools.product(rows, (128, 192, 256))
        for waves in ((1, 2), (2, 1))
        for pair in (1, 2)
    ]
    pairs = [Shape((m, n), (1, 1), pingpong=True) for m, n in ((64, 128), (64, 256), (128, 128), (128, 192))]
    found = []
    exact = kind.dtype_a.bytes == 1 and not (kind.fast_accumulation or kind.block_scaled)
    for shape in (*swapped, *plain, *pairs):
        config = MoeConfig(
            dtype_a=kind.dtype_a, dtype_b=kind.dtype_b.value, dtype_c=kind.dtype_c.value, layout=kind.layout,
            scale_a=kind.scale_a, scale_b=kind.scale_b, promote=4 if exact else 0, **shape.fields(kind.dtype_a),
        )  # fmt: skip
        config = with_room(problem, fused_with(problem, config, arch), arch)
        if not RULES.allows(config, arch) or MOE.mismatches(problem, config, cuda.info):
            continue
        found.append(config)
    return found


def sweep(cuda: Cuda, pool: ThreadPoolExecutor) -> None:
    """Every cut there is, in fp8 with factors of blocks, to bf16, with a gate, and to fp8; and without factors."""
    eight, gate = torch.float8_e4m3fn, ((4096, 7168),)
    layers(cuda, pool, eight, every=True)
    layers(cuda, pool, eight, gate, every=True, activation="swiglu")
    layers(cuda, pool, eight, gate, every=True, activation="swiglu", out_scale_block="1x128")
    layers(cuda, pool, eight, ((2048, 7168),), every=True, scaled=False, fast_accumulation=True)


def working_peers(tensors: Tensors, counts: Sequence[int]) -> Mapping[str, Callable[[], object]]:
    """PyTorch's products, as far as this PyTorch has them."""
    found: dict[str, Callable[[], object]] = {}
    for name, call in peers_of(tensors, counts).items():
        try:
            call()
            found[name] = call
        except (RuntimeError, AttributeError) as error:  # noqa: PERF203
            print(f"  {name}: {str(error)[:120]}")
    return found


def copy_rate(cuda: Cuda) -> float:
    """Bytes read and written in a second."""
    source = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / cuda.alternate({"copy": lambda: target.copy_(source)}, 0.1)["copy"]


def main() -> None:
    parts = {
        "correct": correct,
        "blocks": blocks,
        "gates": gates,
        "graph": graph,
        "fast": fast,
        "fast8": fast8,
        "gated": gated,
        "eights": eights,
        "gated8": gated8,
        "sweep": sweep,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="what is done (all of it)")
    parser.add_argument("--tokens", type=int, action="append", help="tokens of the layers that are timed (several)")
    parser.add_argument("--every", action="store_true", help="compare results of every cut, not of those proposed")
    given = parser.parse_args()
    TOKENS[:] = given.tokens or TOKENS
    EVERY[:] = [True] if given.every else []
    if unknown := set(given.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    torch.backends.cuda.matmul.allow_tf32 = False
    with Cuda() as cuda, ThreadPoolExecutor(12) as pool:
        for name in given.parts or parts:
            parts[name](cuda, pool)


if __name__ == "__main__":
    main()
