"""Times portable GPU kernels beside cuBLAS (through PyTorch); part of gpu_harness.py."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_config import GpuConfig, say

Shape = tuple[int, int, int]
Case = tuple[str, Shape, int]
"""Name of a configuration, shape, slices of k."""

TIMEOUT_S = 60.0


def named(config: GpuConfig) -> str:
    m, n, k = config.tile
    layout = "rc"[config.a_col] + "rc"[config.b_col]
    more = f"{'.p' if config.persistent else ''}.{config.epilogue[:4]}"
    stages = "" if config.pipeline == "compv3" else str(config.stages)
    return f"{config.a} {layout} {config.pipeline}{stages} {m}x{n}x{k} w{config.wave[0]}x{config.wave[1]}{more}"


def base(dtype: str, layout: str) -> GpuConfig:
    results = {"fp8": "bf16", "bf8": "bf16", "int8": "int32"}
    return GpuConfig(a=dtype, b=dtype, c=results.get(dtype, dtype), a_col=layout[0] == "c", b_col=layout[1] == "c")


Tiling = tuple[Shape, tuple[int, int], int]
"""Tile, waves, stages."""


def tilings(dtype: str) -> list[Tiling]:
    if dtype == "fp32":
        return [
            ((128, 128, 16), (2, 4), 3),
            ((128, 128, 16), (4, 2), 3),
            ((128, 128, 32), (2, 4), 3),
            ((128, 128, 16), (2, 2), 3),
            ((128, 64, 16), (2, 2), 3),
            ((64, 64, 16), (2, 2), 3),
            ((64, 64, 16), (1, 2), 3),
        ]
    k = 64 if dtype in ("fp16", "bf16") else 128
    wide: list[Tiling] = [((128, 128, k), (2, 2), 3), ((128, 128, k // 2), (2, 2), 4)]
    narrow: list[Tiling] = [((128, 128, k), (2, 4), 3), ((64, 128, k), (2, 2), 3), ((64, 64, k), (2, 2), 3)]
    return narrow if dtype in ("fp8", "bf8") else wide + narrow


def squares() -> list[tuple[GpuConfig, Shape, int]]:
    """Aligned square products of every type."""
    found = []
    for dtype, layout in itertools.product(("bf16", "fp8", "int8", "fp32"), ("rc", "rr", "cr")):
        if dtype in ("fp8", "int8") and layout != "rc":
            continue
        for tile, wave, stages in tilings(dtype):
            config = base(dtype, layout).replace(tile=tile, wave=wave, stages=stages)
            found += [(config, (size, size, size), 1) for size in ((1024, 2048, 4096) if layout == "rc" else (2048,))]
    return found


def odd() -> list[tuple[GpuConfig, Shape, int]]:
    """Rows that no vector access is aligned to."""
    small: list[Tiling] = [
        ((64, 64, 64), (2, 2), 4),
        ((64, 64, 64), (2, 4), 4),
        ((64, 64, 128), (2, 4), 3),
        ((32, 64, 64), (2, 2), 4),
        ((32, 64, 128), (2, 4), 3),
        ((32, 32, 128), (2, 2), 4),
        ((32, 32, 64), (2, 2), 4),
    ]
    large: list[Tiling] = [((128, 128, 64), (2, 4), 3), ((128, 128, 64), (2, 2), 3), ((64, 128, 64), (2, 2), 3)]
    found = []
    for layout in ("rc", "rr"):
        for tile, wave, stages in small:
            config = base("bf16", layout).replace(tile=tile, wave=wave, stages=stages)
            found.append((config, (333, 777, 1111), 1))
            found += [(config.replace(split_k=4), (333, 777, 1111), split) for split in (2, 3)]
        for tile, wave, stages in large:
            config = base("bf16", layout).replace(tile=tile, wave=wave, stages=stages)
            found.append((config, (2047, 2049, 2051), 1))
    singles: list[Tiling] = [
        ((64, 64, 16), (2, 2), 4),
        ((64, 64, 32), (2, 4), 3),
        ((64, 64, 32), (2, 2), 3),
        ((32, 64, 32), (2, 2), 3),
        ((64, 128, 16), (2, 2), 3),
    ]
    for (tile, wave, stages), layout in itertools.product(singles, ("rc", "rr")):
        config = base("fp32", layout).replace(tile=tile, wave=wave, stages=stages)
        found.append((config, (333, 777, 1111), 1))
        found += [(config.replace(split_k=8), (333, 777, 1111), split) for split in (2, 4, 6)]
    for tile, wave, stages in tilings("fp32")[:3]:
        found.append((base("fp32", "rc").replace(tile=tile, wave=wave, stages=stages), (2047, 2049, 2051), 1))
    return found


def decode() -> list[tuple[GpuConfig, Shape, int]]:
    """Products bound by memory."""
    found = []
    tiles = (((16, 64, 128), 5), ((16, 32, 128), 8), ((16, 64, 64), 8), ((16, 128, 64), 5))
    for m, n, (tile, stages) in itertools.product((1, 16), (4096, 14336), tiles):
        config = base("bf16", "rc").replace(tile=tile, wave=(1, min(4, tile[1] // 16)), stages=stages, pipeline="mem")
        found += [(config, (m, n, 4096), 1), (config.replace(split_k=8), (m, n, 4096), 4 if n == 4096 else 2)]
    return found


def cases() -> tuple[dict[str, GpuConfig], list[Case]]:
    configs: dict[str, GpuConfig] = {}
    found: list[Case] = []
    for config, shape, split in [*squares(), *odd(), *decode()]:
        name = named(config) + (".split" if config.split_k > 1 else "")
        configs.setdefault(name, config)
        found.append((name, shape, split))
    return configs, list(dict.fromkeys(found))


def work() -> None:
    """The worker: reads cases, writes a line each."""
    import torch
    from gpu_device import Kernel, Product, time_each

    request = json.load(sys.stdin)
    configs, _ = cases()
    product, last, peer_seconds = None, None, None
    deadline = time.monotonic() + request["seconds"]
    for name, shape, split, variant in request["cases"]:
        say(json.dumps({"begin": [name, shape, split, variant]}))
        config = configs[name]
        key = (config.a, config.c, config.a_col, config.b_col, *shape)
        if product is None or key != last:
            product, last = Product(config, tuple(shape)), key
            peer = product.peer()
            peer_seconds = time_each({"peer": peer})["peer"] if peer else None
        kernel = Kernel(config, Path(request["cubins"][name + variant]).read_bytes())
        seconds = time_each({"own": product.launcher(kernel, split)})["own"]
        answer = {"end": [name, shape, split, variant], "seconds": seconds, "peer": peer_seconds}
        say(json.dumps({**answer, "error": product.error()}))
        if time.monotonic() > deadline:
            break
    torch.cuda.synchronize()


def main(folder: Path, only: str, variants: list[str], seconds: float = 100.0) -> int:
    """Builds and times the cases whose line contains one of the comma-separated words of ``only``.

    Each with every variant: macros for the compiler, separated by commas. Returns how many were wrong or lost.
    """
    from gpu_harness import build

    configs, found = cases()
    words = only.split(",")
    found = [case for case in found if any(word in f"{case[0]} {case[1]}" for word in words)]
    found.sort(key=lambda case: (configs[case[0]].a, configs[case[0]].a_col, configs[case[0]].b_col, case[1]))
    used = {case[0] for case in found}
    began = time.monotonic()
    cubins = {}
    for variant in variants:
        options = tuple(f"-D{macro}" for macro in variant.split(",") if macro)
        place = folder / str(len(cubins))
        place.mkdir()
        built = build({name: config for name, config in configs.items() if name in used}, place, options)
        cubins |= {name + variant: str(path) for name, path in built.items()}
    say(f"{len(cubins)} kernels in {time.monotonic() - began:.1f} s")
    left = [[*case, variant] for case in found for variant in variants if case[0] + variant in cubins]
    bad = 0
    while left:
        request = {"cases": left, "cubins": cubins, "seconds": seconds}
        process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            out, _ = process.communicate(json.dumps(request), timeout=seconds + TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        done = [line for line in lines if "end" in line]
        bad += report(done)
        names = [line["end"] for line in done]
        lost = [line["begin"] for line in lines if "begin" in line and line["begin"] not in names]
        if not lost:
            break
        say(f"FAULT {lost}")
        bad += 1
        left = [case for case in left if [case[0], list(case[1]), *case[2:]] not in [*names, *lost]]
    return bad


def report(done: list[dict[str, Any]]) -> int:
    """A line for every case; how many were wrong."""
    bad = 0
    for line in done:
        (name, (m, n, k), split, variant), seconds, peer = line["end"], float(line["seconds"]), line["peer"]
        rate = 2 * m * n * k / seconds / 1e12
        parts = [f"{m}x{n}x{k} {name} /{split} {variant}: {seconds * 1e6:8.1f} us {rate:6.1f} TFLOP/s"]
        if m <= 16:
            parts.append(f"{(m * k + k * n) * 2 / seconds / 1e9:6.0f} GB/s")
        if peer:
            parts.append(f"{float(peer) / seconds:5.2f} of cuBLAS ({float(peer) * 1e6:.1f} us)")
        if float(line["error"]) > 0.02:
            bad += 1
            parts.append(f"WRONG {float(line['error']):.1e}")
        say(" ".join(parts))
    return bad


if __name__ == "__main__":
    work()
