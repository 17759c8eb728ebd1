"""Checks convolution kernels on an NVIDIA GPU against float64, then times them beside cuDNN (PyTorch, channels-last).

python tests/native/conv_gpu_harness.py [--check] [--speed] [--filter WORD,WORD] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from conv_gpu_case import ConvCase
from conv_gpu_cases import CASES
from conv_gpu_config import ConvGpuConfig
from conv_gpu_truth import Shape
from gpu_config import compile_text, say

UNITS = 132


def square(size: int, filter: int, stride: int, pad: int, **more: Any) -> dict[str, Any]:
    """Sizes of a two-dimensional convolution whose axes are alike."""
    return {
        "size": (1, size, size), "filter": (1, filter, filter), "stride": (1, stride, stride), "begin": (0, pad, pad),
        "end": (0, pad, pad), **more,
    }  # fmt: skip


def cube(size: tuple[int, int, int]) -> dict[str, Any]:
    return {"size": size, "filter": (3, 3, 3), "begin": (1, 1, 1), "end": (1, 1, 1), "ndim": 3}


SHAPES: dict[str, Shape] = {
    "64_56": Shape(32, 64, 64, **square(56, 3, 1, 1)),
    "256to64_56_1x1": Shape(32, 256, 64, **square(56, 1, 1, 0)),
    "128_28": Shape(32, 128, 128, **square(28, 3, 1, 1)),
    "256_14": Shape(32, 256, 256, **square(14, 3, 1, 1)),
    "512_7": Shape(32, 512, 512, **square(7, 3, 1, 1)),
    "first_7x7": Shape(32, 3, 64, **square(224, 7, 2, 3)),
    "first_padded": Shape(32, 8, 64, **square(224, 7, 2, 3)),
    "128x128_28": Shape(128, 128, 128, **square(28, 3, 1, 1)),
    "matrix_128x128_28": Shape(128, 1152, 128, **square(28, 1, 1, 0)),
    "groups32_56": Shape(32, 128, 128, 32, **square(56, 3, 1, 1)),
    "groups32_28_s2": Shape(32, 256, 256, 32, **square(28, 3, 2, 1)),
    "depthwise_56": Shape(32, 96, 96, 96, **square(56, 3, 1, 1)),
    "3d_64": Shape(4, 64, 64, **cube((16, 56, 56))),
    "3d_128": Shape(1, 128, 128, **cube((32, 64, 64))),
}
GROUPED = ("groups32_56", "groups32_28_s2", "depthwise_56")
DIRECTIONS = ("forward", "backward_data", "backward_weight")
EXTRA = ("first_padded", "matrix_128x128_28")
"""Not in the means: first_7x7 behind a stage that pads its channels, and the product of 128x128_28 ungathered."""

TILINGS = [
    ((128, 128, 32), (2, 2), 4),
    ((128, 128, 64), (2, 2), 3),
    ((128, 128, 64), (2, 4), 3),
    ((128, 64, 64), (2, 2), 3),
    ((128, 64, 32), (2, 2), 4),
    ((256, 64, 32), (4, 1), 4),
    ((64, 64, 64), (2, 2), 3),
    ((64, 64, 64), (2, 2), 4),
    ((64, 128, 64), (2, 2), 3),
    ((256, 16, 32), (4, 1), 4),
    ((256, 128, 32), (4, 2), 3),
]


def matrix_configs(direction: str, shape: Shape) -> dict[str, ConvGpuConfig]:
    """Kernels worth timing on a dense shape."""
    g, found = shape.geometry(), {}
    strided = direction == "backward_data" and max(shape.stride) > 1
    pointwise = g.is_pointwise and max(shape.stride) == 1
    narrow, gathered = math.gcd(g.cg, 8), math.gcd(g.kg, 8)
    vectors = (narrow, narrow, 8) if direction == "forward" else (gathered, narrow, 8)
    for tile, wave, stages in TILINGS:
        config = ConvGpuConfig(
            tile=tile, wave=wave, stages=stages, direction=direction, ndim=shape.ndim,
            vectors=vectors, kind="pointwise" if pointwise else "implicit",
        )  # fmt: skip
        name = f"{tile[0]}x{tile[1]}x{tile[2]}_w{wave[0]}x{wave[1]}_s{stages}"
        if direction == "backward_data":
            config = config.replace(b_col=False, grouped=strided, linear_rows=not strided)
        if direction == "backward_weight":
            config = config.replace(a_col=True, b_col=False)
            found[f"{name}_split"] = config.replace(split_k=2)
            found[f"{name}_2stage"] = config.replace(split_k=2, two_stage=True)
        else:
            found[name] = config
            if tile[0] * tile[1] >= 64 * 128:
                found[f"{name}_split"] = config.replace(split_k=2)
    return found


def depthwise_configs(direction: str, shape: Shape) -> dict[str, ConvGpuConfig]:
    fixed = {"filter": shape.filter, "stride": shape.stride, "dilation": shape.dilation}
    found = {}
    for vector, channels, rows, run, waves in [
        (8, 32, 2, 4, 4), (8, 96, 2, 4, 3), (8, 32, 1, 4, 4), (4, 32, 2, 4, 4), (4, 96, 2, 4, 6), (8, 32, 2, 2, 4),
        (4, 32, 4, 4, 4), (8, 96, 4, 2, 3), (2, 32, 4, 4, 4), (2, 96, 4, 4, 6), (4, 32, 1, 8, 4), (8, 32, 1, 2, 8),
    ]:  # fmt: skip
        config = ConvGpuConfig(
            kind="depthwise", direction=direction, vectors=(vector, vector, vector), channel_tile=channels,
            pixel_tile=(1, rows, run), wave=(waves, 1), ndim=shape.ndim, **fixed,
        )  # fmt: skip
        found[f"depthwise_v{vector}_c{channels}_{rows}x{run}_w{waves}"] = config
    return found


def group_configs(direction: str, shape: Shape) -> dict[str, ConvGpuConfig]:
    phases = direction == "backward_data" and max(shape.stride) > 1
    fixed = {"filter": shape.filter, "stride": shape.stride, "dilation": shape.dilation}
    more: dict[str, Any] = {"grouped": True, "linear_rows": False} if phases else fixed
    found = {}
    for vector, channels, pixels, waves in [
        (4, 32, (1, 2, 4), 4), (4, 32, (2, 2, 4), 4), (4, 64, (2, 2, 4), 4), (4, 128, (2, 2, 4), 4),
        (4, 32, (4, 2, 4), 4), (4, 64, (1, 1, 4), 4), (8, 64, (1, 2, 2), 4), (4, 64, (2, 1, 8), 4),
        (4, 64, (2, 2, 2), 8), (8, 64, (2, 1, 4), 4),
    ]:  # fmt: skip
        if shape.geometry().cg % vector:
            continue
        config = ConvGpuConfig(
            kind="direct", direction=direction, vectors=(vector, vector, vector), channel_tile=channels,
            pixel_tile=pixels, wave=(waves, 1), ndim=shape.ndim, **more,
        )  # fmt: skip
        if direction == "backward_weight" and vector > 4:
            continue
        found[f"direct_v{vector}_c{channels}_{'x'.join(map(str, pixels))}_w{waves}"] = config
    return found


def merged_configs(direction: str, shape: Shape) -> dict[str, ConvGpuConfig]:
    g = shape.geometry()
    phases = direction == "backward_data" and max(shape.stride) > 1
    more: dict[str, Any] = {"grouped": True, "linear_rows": False} if phases else {}
    found = {}
    wide = g.output[2] > 32
    tiles = [(8, 8), (4, 8), (14, 8), (8, 16)] if wide else [(8, 8), (14, 8), (4, 16), (2, 16)]
    works = [(32, 2), (32, 4), (64, 4), (64, 8), (128, 8), (96, 6), (48, 3)]
    for (rows, run), (channels, waves), repeats in itertools.product(tiles, works, (1, 2, 4)):
        if repeats > 1 and direction == "backward_weight":
            continue
        if g.c % channels:
            continue
        config = ConvGpuConfig(
            kind="depthwise" if g.cg == 1 else "direct", direction=direction, groups_merged=64 // g.cg,
            channel_tile=channels, pixel_tile=(repeats, rows, run), wave=(waves, 1), ndim=shape.ndim,
            filter=shape.filter, stride=shape.stride, dilation=shape.dilation, **more,
        )  # fmt: skip
        if config.merged_bytes < 100_000:
            found[f"merged_c{channels}_{rows}x{run}_w{waves}_r{repeats}"] = config
    return found


def configs_for(direction: str, name: str, shape: Shape) -> dict[str, ConvGpuConfig]:
    if name == "depthwise_56":
        return {**merged_configs(direction, shape), **dict(list(depthwise_configs(direction, shape).items())[:2])}
    if name in GROUPED:
        return {**merged_configs(direction, shape), **dict(list(group_configs(direction, shape).items())[:2])}
    return matrix_configs(direction, shape)


def build(configs: dict[str, ConvGpuConfig]) -> dict[str, tuple[ConvGpuConfig, bytes]]:
    """Compiles every kernel; prints those that fail or spill."""

    def one(item: tuple[str, ConvGpuConfig]) -> tuple[str, tuple[ConvGpuConfig, bytes] | None]:
        name, config = item
        try:
            built = compile_text(config.unit("kernel"))
        except RuntimeError as failed:
            say(f"FAILS TO BUILD {name}: {str(failed)[:600]}")
            return name, None
        if built.spilled_bytes:
            say(f"spills {built.spilled_bytes} bytes: {name}")
        return name, (config, built.cubin)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {name: value for name, value in pool.map(one, configs.items()) if value}


def check_all(seed: int) -> int:
    """Every case of conv_gpu_cases.py; prints what is wrong."""
    from conv_gpu_device import ConvKernel, run_case
    from gpu_device import Arena

    arena, bad, count = Arena(), 0, 0
    kernels = {name: ConvKernel(*found) for name, found in build({n: c for n, (c, _) in CASES.items()}).items()}
    rng = np.random.default_rng(seed)
    for name, (config, settings) in CASES.items():
        if name not in kernels:
            bad += 1
            continue
        for more in settings:
            case = ConvCase(config, rng=rng, at_end=bool(rng.integers(0, 2)), **more)
            count += 1
            try:
                fault = run_case(arena, kernels[name], case)
                case.check()
                if not fault:
                    continue
                say(f"WRONG {name} {more}: {fault}")
            except (AssertionError, RuntimeError) as failed:
                say(f"WRONG {name} {more}: {str(failed)[:500]}")
            bad += 1
    say(f"{count} convolutions of {len(CASES)} kernels checked, {bad} wrong")
    return bad


def slices_for(config: ConvGpuConfig, shape: Shape) -> list[int]:
    """Numbers of slices worth a try."""
    g = shape.geometry()
    if config.direction != "backward_weight":
        if config.split_k == 1:
            return [1]
        rows = g.n * (g.out_pixels if config.direction == "forward" else g.in_pixels)
        columns = g.kg if config.direction == "forward" else g.cg
        tiles = -(-rows // config.tile[0]) * -(-columns // config.tile[1]) * g.groups
        return sorted({slices for waves in (1, 2, 3) if 1 < (slices := UNITS * waves // tiles) <= 16})
    if config.merged:
        blocks = -(-g.c // config.channel_tile)
        return sorted({max(1, UNITS * waves // blocks) for waves in (1, 2, 4)})
    if not config.is_matrix:
        units = -(-g.groups // config.vectors[0])
        if config.kind == "direct":
            units = g.filter[0] * g.filter[1] * -(-g.kg // config.vectors[0]) * (g.cg // config.vectors[1]) * g.groups
        blocks = -(-units // config.threads_across)
        return sorted({max(1, UNITS * waves // blocks) for waves in (1, 2, 4, 8)})
    m, n, _ = config.tile
    tiles = -(-g.kg // m) * -(-g.taps * g.cg // n) * g.groups
    return sorted({min(64, max(1, UNITS * waves // tiles)) for waves in (1, 2, 4)})


def time_all(words: list[str], out: Path | None) -> int:
    """Every shape and direction: all kernels and cuDNN; the table and its geometric means."""
    import torch
    from conv_gpu_device import ConvKernel, TimedCase
    from gpu_device import time_each

    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    cases = [(name, direction) for name in SHAPES for direction in DIRECTIONS]
    cases = [case for case in cases if not words or any(word in "/".join(case) for word in words)]
    wanted = {
        f"{name}/{direction}/{kernel}": config
        for name, direction in cases
        for kernel, config in configs_for(direction, name, SHAPES[name]).items()
    }
    began = time.monotonic()
    unique = {config: index for index, config in enumerate(dict.fromkeys(wanted.values()))}
    built = build({str(index): config for config, index in unique.items()})
    kernels = {config: ConvKernel(*built[str(index)]) for config, index in unique.items() if str(index) in built}
    say(f"{len(kernels)} kernels built in {time.monotonic() - began:.1f} s")
    wrong = 0
    for name, direction in cases:
        shape = SHAPES[name]
        calls: dict[str, Any] = {}
        first: TimedCase | None = None
        peer: Any = None
        for kernel, config in configs_for(direction, name, shape).items():
            if config not in kernels:
                continue
            for slices in slices_for(config, shape):
                case = TimedCase(config, shape, slices, first)
                if first is None:
                    first, peer = case, case.peer()
                    expected = peer()
                call = case.call(kernels[config])
                case._poison()
                call()
                torch.cuda.synchronize()
                off = case.difference(expected)
                if not off < 2e-3:
                    say(f"WRONG {name}/{direction}/{kernel} slices {slices}: differs by {off:.2e} from cuDNN")
                    wrong += 1
                    continue
                calls[f"{kernel}_x{slices}"] = call
        if first is None:
            continue
        try:
            times = time_each({"cudnn": peer, **calls}, target_s=0.004, rounds=3)
        except Exception as failed:
            say(f"{name}/{direction}: {failed}")
            continue
        tflops = {key: first.geometry.flops / value / 1e12 for key, value in times.items()}
        order = sorted(calls, key=lambda key: -tflops[key])
        best = order[0]
        row = {"shape": name, "direction": direction, "cudnn": tflops["cudnn"], "best": best, "own": tflops[best]}
        rows.append({**row, "all": tflops})
        rest = ", ".join(f"{key} {tflops[key]:.1f}" for key in order[1:4])
        say(f"{name:16} {direction:16} cuDNN {tflops['cudnn']:7.1f}  own {tflops[best]:7.1f}  "
            f"ratio {tflops[best] / tflops['cudnn']:.2f}  {best}; {rest}")  # fmt: skip
        if out:
            (out / "conv_speed.json").write_text(json.dumps(rows, indent=1))
    for direction in DIRECTIONS:
        for kind, members in (("dense", False), ("grouped", True)):
            ratios = [
                row["own"] / row["cudnn"]
                for row in rows
                if row["direction"] == direction and (row["shape"] in GROUPED) == members and row["shape"] not in EXTRA
            ]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                say(f"{direction:16} {kind:8} geometric mean {mean:.3f} of {len(ratios)} shapes")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="correctness")
    parser.add_argument("--speed", action="store_true", help="times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--filter", default="", help="speed: only shapes or directions with one of these words")
    parser.add_argument("--out", type=Path, help="a folder for the table as JSON")
    args = parser.parse_args()
    bad = 0
    if args.check or not args.speed:
        bad += check_all(args.seed)
    if args.speed or not args.check:
        bad += time_all([word for word in args.filter.split(",") if word], args.out)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
