"""Hopper convolution kernels, instantiated from the template itself: compiled, checked against float64, timed beside
cuDNN (PyTorch) with cold caches.

``--compile-only`` needs no GPU. A problem is N, C, K, image, filter, stride, padding, dilation, groups; a kernel is a
``Config`` of config.py with a direction. Needs PyTorch and ``cuda-bindings`` otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sm90.config import Built, compile_source
from sm90.conv_kernels import LAYOUTS, UNITS, Case, Kernel, kernels_for, sizes_of, source

FLUSH_BYTES = 400 << 20
SAMPLES = 15


# ---- launches ----


def launcher(kernel: Kernel, cubin: bytes, case: Case, x: Any, w: Any, y: Any) -> Callable[[], None]:
    """Launches over x, weights and y as they lie: (n, *size, c), (k, *filter, c / groups), (n, *out, k)."""
    import torch
    from cuda.bindings import driver

    from sm90.launch import check, operand_bytes, tensor_map

    direction, config = kernel.direction, kernel.config
    (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = config.tile, config.cluster
    ndim, dtype = kernel.ndim, config.a
    cg, kg = case.c // case.groups, case.k // case.groups
    backward, weight = direction == "backward_data", direction == "backward_weight"
    image, sizes, rows = (y, case.out, case.size) if backward else (x, case.size, case.out)
    walk, lower, upper, steps = [], [], [], []
    for size, count, taps, stride, pad, dilation in zip(
        sizes, rows, case.filter, case.stride, case.pad, case.dilation, strict=True
    ):
        reach, step = (taps - 1) * dilation, 1 if backward else stride
        origin = pad - reach if backward else -pad
        walk.append((count, taps, step, origin, reach if backward else 0, -dilation if backward else dilation))
        lower.append(origin)
        upper.append((count - 1) * step + 1 + origin - size)
        steps.append(step)
    walk = [(1, 1, 1, 0, 0, 0)] * (3 - ndim) + walk

    def pixels_map(tensor: Any, channels: int, column: int) -> bytes:
        dims = (channels, *reversed(tensor.shape[1:-1]), tensor.shape[0])
        strides = [tensor.stride(axis) * 2 for axis in range(ndim, -1, -1)]
        kind = getattr(
            driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{'BFLOAT16' if dtype == 'bf16' else 'FLOAT16'}"
        )
        encoded = check(
            driver.cuTensorMapEncodeIm2col(
                kind, ndim + 2, tensor.data_ptr(), [driver.cuuint64_t(v) for v in dims],
                [driver.cuuint64_t(v) for v in strides], list(reversed(lower)), list(reversed(upper)), 64, column,
                [driver.cuuint32_t(v) for v in (1, *reversed(steps), 1)],
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )  # fmt: skip
        return ctypes.string_at(int(encoded.getPtr()), 128)

    m, n, k_steps, items = sizes_of(direction, case)
    result = w if weight else x if backward else y
    if weight:
        tap_items = cg % 64 != 0
        a = tensor_map(dtype, y, 0, (case.k, case.n * math.prod(case.out), 1),
                       (case.k * 2, case.k * 2), (64, tile_k, 1))  # fmt: skip
        b = pixels_map(x, case.c, tile_k)
        k, ldc = case.n * math.prod(case.out), case.taps * cg
        stride_c = cg if tap_items else kg * case.taps * cg
    else:
        tap_items = False
        a = pixels_map(image, image.shape[-1], tile_m // cluster_n)
        alone = (cluster_m, cluster_n) == (1, 1) and tile_n % 64 == 0
        box = (64, tile_k, 1) if backward else (64, 64 if alone else tile_n // cluster_m, 1)
        b = tensor_map(dtype, w, 0, (cg, case.k, case.taps), (case.taps * cg * 2, cg * 2), box)
        k, ldc, stride_c = k_steps * 64, result.shape[-1], n
    size_c = (n, m, items)
    strides_c = (ldc * 2, max(stride_c * 2, 16) if items > 1 else ldc * 2)
    c = tensor_map(config.c, result, 0, size_c, strides_c, (64, 64, 1)) if config.epilogue == "cshuffle" else bytes(128)
    body = struct.pack("<QQQ", 0, 0, result.data_ptr()) + struct.pack("<qqq", m, n, k)
    body += struct.pack("<qqq", 0, 0, ldc) + struct.pack("<qqqq", items, 0, 0, stride_c)
    body += struct.pack("<ddd", 1.0, 0.0, 0.0) + operand_bytes(None, 0, 0) * 3 + struct.pack("<Qq", 0, 0)
    task = a + b + c + body
    task += bytes(-len(task) % 64)
    channels = kg if backward else cg
    tail = b"".join(struct.pack("<6q", *axis) for axis in walk)
    tail += struct.pack("<4q", channels, -(-channels // 64), int(tap_items), 0)

    across = -(-n // (tile_n * cluster_n)) * cluster_n
    count = -(-m // (tile_m * cluster_m)) * cluster_m * across * items
    cluster = cluster_m * cluster_n
    units = UNITS // cluster * cluster
    grid = count * kernel.slices
    if config.persistent:
        grid = units if config.stream else min(units, grid)
    slots = grid * 2 if config.stream else count * kernel.slices
    partial = config.stream or kernel.slices > 1
    workspace = torch.empty(slots * tile_m * tile_n if partial else 1, device="cuda")
    workspace.fill_(float("nan"))
    counters = torch.zeros(count, device="cuda", dtype=torch.int32)
    head = struct.pack("<QqqQQqqq", 0, 1, count, workspace.data_ptr(), counters.data_ptr(), kernel.slices,
                       workspace.numel() * 4, 0)  # fmt: skip
    params = head + task + tail
    raw = ctypes.create_string_buffer(len(params) + 64)
    address = (ctypes.addressof(raw) + 63) & ~63
    ctypes.memmove(address, params, len(params))
    arguments = (ctypes.c_void_p * 1)(address)
    module = check(driver.cuModuleLoadData(cubin))
    function = check(driver.cuModuleGetFunction(module, b"kernel"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, config.shared_bytes))
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = grid, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.threads, 1, 1
    launch.sharedMemBytes = config.shared_bytes
    if cluster > 1:
        one = driver.CUlaunchAttribute()
        one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        one.value.clusterDim.x, one.value.clusterDim.y, one.value.clusterDim.z = cluster, 1, 1
        launch.attrs, launch.numAttrs = [one], 1
    keep = (raw, workspace, counters, module)

    def run(_: object = keep) -> None:
        launch.hStream = torch.cuda.current_stream().cuda_stream
        check(driver.cuLaunchKernelEx(launch, function, ctypes.addressof(arguments), 0))

    return run


def tensors(case: Case, dtype: str, seed: int = 0) -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(seed)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    cg = case.c // case.groups

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(kind)

    return random(case.n, *case.size, case.c), random(case.k, *case.filter, cg), random(case.n, *case.out, case.k)


def peer(direction: str, case: Case, x: Any, w: Any, y: Any) -> Callable[[], Any]:
    """PyTorch's convolution on the same memory; one axis as an image of one row."""
    import torch

    def spatial(values: tuple[int, ...], absent: int) -> list[int]:
        return [absent, *values] if len(values) == 1 else list(values)

    def first(t: Any) -> Any:
        t = t.unsqueeze(1) if t.dim() == 3 else t
        return t.movedim(-1, 1)

    xs, ws, ys = first(x), first(w), first(y)
    options = (
        None, spatial(case.stride, 1), spatial(case.pad, 0), spatial(case.dilation, 1), False,
        [0] * max(len(case.size), 2), case.groups,
    )  # fmt: skip
    if direction == "forward":
        return lambda: torch.ops.aten.convolution(xs, ws, *options)
    mask = [direction == "backward_data", direction == "backward_weight", False]
    at = 0 if mask[0] else 1
    return lambda: torch.ops.aten.convolution_backward(ys, xs, ws, None, *options[1:], mask)[at]


def error_of(got: Any, want: Any) -> float:
    """``want`` has its channels second."""
    want = want.movedim(1, -1)
    want = want.reshape(got.shape).double()
    got = got.double()
    if not bool(got.isfinite().all()):
        return math.inf
    return float((got - want).norm() / want.norm())


def correct(cases: list[Case], built: dict[str, Built], dtype: str) -> tuple[int, list[dict[str, Any]]]:
    """Every kernel on every small case, twice, against float64."""
    import torch

    failures, records = 0, []
    for case in cases:
        x, w, y = tensors(case, dtype)
        for direction in LAYOUTS:
            if direction == "backward_data" and max(case.stride) > 1:
                continue
            want = peer(direction, case, x.double(), w.double(), y.double())()
            worst, bad, repeat = 0.0, [], True
            kernels = kernels_for(direction, case)
            for kernel in kernels:
                xs, ws, ys = x.clone(), w.clone(), y.clone()
                result = {"forward": ys, "backward_data": xs, "backward_weight": ws}[direction]
                run = launcher(kernel, built[source(kernel)].cubin, case, xs, ws, ys)
                result.fill_(float("nan"))
                run()
                torch.cuda.synchronize()
                one = result.clone()
                result.fill_(float("nan"))
                run()
                torch.cuda.synchronize()
                repeat = repeat and bool(torch.equal(one, result))
                error = error_of(result, want)
                worst = max(worst, error)
                if not error < (4e-3 if dtype == "bf16" else 6e-4):
                    bad.append(f"{kernel.label}:{error:.1e}")
            failures += bool(bad) + (not repeat)
            text = "" if not bad else f" WRONG {len(bad)}: " + " ".join(bad[:6])
            print(f"{case.label:40} {direction:16} {len(kernels):2} kernels worst {worst:.1e}{text}"
                  f"{'' if repeat else ' NOT REPEATABLE'}", flush=True)  # fmt: skip
            records.append({"case": case.label, "direction": direction, "worst": worst, "bad": bad, "repeat": repeat})
    return failures, records


def timed(cases: list[Case], built: dict[str, Built], dtype: str, directions: list[str]) -> list[dict[str, Any]]:
    import torch

    flush = torch.empty(FLUSH_BYTES, device="cuda", dtype=torch.uint8)
    records = []
    for case in cases:
        x, w, y = tensors(case, dtype)
        for direction in directions:
            if direction == "backward_data" and max(case.stride) > 1:
                continue
            call = peer(direction, case, x, w, y)
            want = call().clone()
            calls: dict[str, Callable[[], Any]] = {"peer": call}
            xs, ws, ys = x.clone(), w.clone(), y.clone()
            result = {"forward": ys, "backward_data": xs, "backward_weight": ws}[direction]
            wrong = []
            for kernel in kernels_for(direction, case):
                run = launcher(kernel, built[source(kernel)].cubin, case, xs, ws, ys)
                result.fill_(float("nan"))
                run()
                torch.cuda.synchronize()
                if not error_of(result, want) < 8e-3:
                    wrong.append(kernel.label)
                calls[kernel.label] = run
            events: dict[str, list[Any]] = {name: [] for name in calls}
            for _ in range(SAMPLES + 1):
                for name, one in calls.items():
                    flush.fill_(1)
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    one()
                    end.record()
                    events[name].append((begin, end))
                torch.cuda.synchronize()
            times = {
                name: sorted(begin.elapsed_time(end) for begin, end in pairs[1:])[SAMPLES // 2] * 1e-3
                for name, pairs in events.items()
            }
            rate = case.flops * 1e-12
            ours = {name: t for name, t in times.items() if name != "peer" and name not in wrong}
            order = sorted(ours, key=lambda name: ours[name])
            best = order[0]
            record = {"case": case.label, "direction": direction, "flops": case.flops, "times": times, "wrong": wrong}
            records.append({**record, "best": best, "ratio": times["peer"] / times[best]})
            text = " ".join(f"{name}={times['peer'] / times[name]:.2f}" for name in order[:4])
            rates = f"peer {rate / times['peer']:4.0f} ours {rate / times[best]:4.0f}"
            print(f"{case.label:36} {direction[:13]:13} {rates} {text} {'WRONG' if wrong else ''}", flush=True)
    return records


CORRECT = (
    "2,64,64,9x11,3,1,1", "3,72,136,13x7,3,1,1", "1,200,104,17x19,3x5,1,1x2", "2,64,128,21x23,3,2,1",
    "2,128,72,15x30,5,3,2", "1,64,64,33x37,3,1,2,2", "2,128,192,16x16,1,1,0", "4,96,80,14x14,1,2,0",
    "2,64,64,5x9x7,3,1,1", "1,136,72,6x10x9,3x1x2,1,1x0x1", "2,64,80,6x8x10,3,2,1", "3,128,64,301,5,1,2",
    "2,72,200,777,7,2,3,3", "2,128,256,12x13,3,1,1,1,2", "9,128,64,7x7,7,1,3", "2,64,192,8x8,3,1,0",
    "1,8,16,40x40,3,1,1", "2,256,256,10x10,3,1,1,1,4", "1,64,64,150x3,3,1,1,4x1",
)  # fmt: skip
FAST = (
    "2,512,512,128x128,3,1,1", "32,64,64,56x56,3,1,1", "32,256,64,56x56,1,1,0", "32,128,128,28x28,3,1,1",
    "32,256,256,14x14,3,1,1", "32,512,512,7x7,3,1,1", "128,128,128,28x28,3,1,1", "4,64,64,16x56x56,3,1,1",
    "1,128,128,32x64x64,3,1,1", "2,320,320,64x64,3,1,1", "2,640,640,32x32,3,1,1", "2,1280,1280,16x16,3,1,1",
    "2,256,256,100x152,3,1,1", "16,512,512,3000,3,1,1", "32,256,512,56x56,3,2,1", "32,512,1024,28x28,1,2,0",
)  # fmt: skip
UNSEEN = (
    "4,256,256,128x128,3,1,1", "1,512,512,128x128,3,1,1", "8,320,320,64x64,3,1,1", "8,640,640,32x32,3,1,1",
    "8,1280,1280,16x16,3,1,1", "2,960,640,32x32,3,1,1", "4,256,256,50x76,3,1,1", "4,512,512,25x38,3,1,1",
    "2,128,128,16x64x64,3,1,1", "1,256,256,16x32x32,3,1,1", "8,384,384,1500,5,1,2", "8,768,768,1500,3,1,1",
    "32,128,128,56x56,3,2,1", "32,64,256,56x56,1,1,0", "32,1024,256,14x14,1,1,0", "64,192,192,28x28,3,1,1",
    "16,96,96,56x56,3,1,1",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--suite", action="append", choices=("correct", "fast", "unseen"))
    parser.add_argument("--direction", action="append", choices=tuple(LAYOUTS))
    parser.add_argument("--case", action="append", help="in place of the suites: times it")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log", type=Path, help="write the records as JSON")
    args = parser.parse_args()
    directions = args.direction or list(LAYOUTS)
    suites = args.suite or ([] if args.case else ["correct", "fast"])
    checked = [Case.of(text) for text in CORRECT] if "correct" in suites else []
    texts = (args.case or []) + list(FAST if "fast" in suites else ()) + list(UNSEEN if "unseen" in suites else ())
    fast = [Case.of(text) for text in texts]
    wanted: dict[str, str] = {}
    for case in (*checked, *fast):
        for direction in LAYOUTS if case in checked else directions:
            for kernel in kernels_for(direction, case):
                wanted[source(kernel)] = f"{direction} {kernel.ndim}d {kernel.label}"
    if args.dtype != "bf16":
        raise SystemExit("kernels are listed for bf16")
    with ThreadPoolExecutor(args.jobs) as pool:
        built = dict(zip(wanted, pool.map(compile_source, wanted), strict=True))
    dirty = [name for text, name in wanted.items() if built[text].spills or built[text].warnings]
    slowest = max((one.seconds for one in built.values()), default=0.0)
    print(f"{len(built)} kernels, slowest {slowest:.2f} s, spills or warnings: {dirty or 'none'}", flush=True)
    if args.compile_only:
        return 1 if dirty else 0
    import torch

    torch.backends.cudnn.benchmark = True
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    records: list[dict[str, Any]] = []
    failures = 0
    if checked:
        failures, found = correct(checked, built, args.dtype)
        records += found
    rows = timed(fast, built, args.dtype, directions)
    records += rows
    for direction in directions:
        ratios = [row["ratio"] for row in rows if row["direction"] == direction]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{direction}: geometric mean {mean:.3f}, least {min(ratios):.3f} of {len(ratios)}")
    print(f"{failures} failures")
    if args.log:
        args.log.write_text(json.dumps(records))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
