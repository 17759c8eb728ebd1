"""Checks and times the portable GPU kernels on an NVIDIA GPU: ``python tests/native/gpu_harness.py --all``.

The cases are those of test_gpu_gemm.py, which runs them on the CPU; the harness compiles them with NVRTC, launches them
on the GPU and compares with float64. Every batch of kernels runs in a process of its own, under a watchdog: a kernel
that hangs or faults costs its batch's process, is named, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from gpu_config import GpuConfig, compile_text, say
from native_case import Call, Sizes

TIMEOUT_S = 30.0


def correctness_configs() -> dict[str, GpuConfig]:
    """The CPU tests' kernels."""
    import test_gpu_gemm as tests

    configs = {f"product {name}": config for name, config in tests.PRODUCTS.items()}
    configs |= {f"grouped {name}": config for name, config in tests.GROUPED.items()}
    return configs | {f"epilogue {name}": config for name, config in tests.EPILOGUES.items()}


def calls_of(name: str, config: GpuConfig, rng: np.random.Generator) -> list[Call]:
    """What a kernel is asked to compute."""
    from test_gpu_gemm import D_LAYOUTS, sizes

    m, n, k = config.tile
    if config.grouped:
        split = int(rng.integers(1, config.split_k + 1))
        table = [sizes(rng) for _ in range(5)]
        many = [Sizes(int(rng.integers(1, 90)), int(rng.integers(1, 90)), 40) for _ in range(70)]
        return [
            Call(config, [*table, sizes(rng, m=0), sizes(rng, k=0)], rng, split_k=split),
            Call(config, many, rng, split_k=split),
        ]
    alpha = 0.25 if name.startswith("epilogue") else 1.0
    layouts = D_LAYOUTS if config.d else ("full",)
    calls = [Call(config, [sizes(rng)], rng, alpha=alpha, d_layout=layout) for layout in (*layouts, *layouts)]
    calls += [Call(config, [Sizes(2 * m, 3 * n, 5 * k)], rng, alpha=alpha), Call(config, [sizes(rng, k=0)], rng)]
    calls += [Call(config, [Sizes(333, 777, 111)], rng), Call(config, [Sizes(257, 264, 520, 2, 8, 8, 8)], rng)]
    if config.split_k > 1:
        calls += [Call(config, [Sizes(100, 200, 1111)], rng, split_k=s) for s in (2, config.split_k)]
        calls += [Call(config, [Sizes(2 * m, n, 16 * k)], rng, split_k=config.split_k)]
    return calls


def diagnose(call: Call) -> str:
    """Where the results differ from the truth, and in which pattern."""
    for index, view in enumerate(call.views):
        want, magnitude = call.truth(index)
        got = view["c"].astype(np.float64)
        wrong = ~(np.abs(got - want) <= 0.02 * (magnitude + np.abs(want) + 1))
        if wrong.any():
            first = tuple(int(x) for x in np.argwhere(wrong)[0])
            rows, columns = np.flatnonzero(wrong.any((0, 2))), np.flatnonzero(wrong.any((0, 1)))
            return (
                f"task {index} {call.sizes[index]} split {call.split_k}: {wrong.mean():.1%} wrong, first at {first}: "
                f"{got[first]} for {want[first]}; rows {rows[:10].tolist()}.. ({rows.size}), columns "
                f"{columns[:10].tolist()}.. ({columns.size})"
            )
    return "rounding only"


def work(batch: list[dict[str, Any]]) -> None:
    """The worker: checks kernels one after the other, a line of JSON each."""
    import torch
    from gpu_device import Arena, Kernel, run_call

    torch.zeros(1, device="cuda")
    arena = Arena()
    for item in batch:
        say(json.dumps({"begin": item["name"]}))
        config, seed = configs_by_name()[item["name"]], int(item["seed"])
        rng = np.random.default_rng(seed)
        kernel, problems = Kernel(config, Path(item["cubin"]).read_bytes()), []
        calls = calls_of(item["name"], config, rng)
        for call in calls:
            results = []
            for grid in (int(rng.integers(1, 9)), 132):
                fault = run_call(arena, kernel, call, grid)
                results.append(b"".join(view["c"].tobytes() for view in call.views))
                try:
                    call.check()
                except AssertionError as wrong:
                    fault = f"{fault} {diagnose(call)} ({str(wrong).splitlines()[0][:80]})"
                if fault:
                    problems.append(fault)
            if results[0] != results[1]:
                problems.append(f"{call.sizes}: two launches differ")
        say(json.dumps({"end": item["name"], "problems": problems, "calls": len(calls)}))


def configs_by_name() -> dict[str, GpuConfig]:
    return correctness_configs()


def run_batches(batch: list[dict[str, Any]]) -> int:
    """Runs the worker until all is done; returns the number of kernels with problems."""
    bad = 0
    while batch:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            out, _ = process.communicate(json.dumps(batch), timeout=TIMEOUT_S + 1.0 * len(batch))
            reason = f"the process died ({process.returncode})"
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            reason = "hangs"
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        done = {line["end"]: line for line in lines if "end" in line}
        for name, line in done.items():
            if line["problems"]:
                bad += 1
                say(f"WRONG {name}: {len(line['problems'])} faults in {line['calls']} calls")
                for problem in line["problems"][:3]:
                    say(f"      {problem}")
        begun = [line["begin"] for line in lines if "begin" in line and line["begin"] not in done]
        if not begun and len(done) < len(batch):
            say(f"the worker did not start: {reason}")
            return bad + 1
        for name in begun:
            bad += 1
            say(f"FAULT {name}: {reason}")
        batch = [item for item in batch if item["name"] not in done and item["name"] not in begun]
    return bad


def check_all(folder: Path, seed: int) -> int:
    configs = configs_by_name()
    began = time.monotonic()
    cubins = build(configs, folder)
    say(f"{len(configs)} kernels in {time.monotonic() - began:.1f} s; seed {seed}")
    batch = [{"name": name, "cubin": str(path), "seed": seed} for name, path in cubins.items()]
    bad = run_batches(batch) + len(configs) - len(cubins)
    say(f"correctness: {len(configs)} kernels, {bad} with problems, {time.monotonic() - began:.1f} s")
    return bad


def build(
    configs: dict[str, GpuConfig], folder: Path, options: tuple[str, ...] = (), arch: str = "sm_90a"
) -> dict[str, Path]:
    """Compiles every kernel; prints those that fail or spill."""

    def one(item: tuple[int, tuple[str, GpuConfig]]) -> tuple[str, Path | None]:
        index, (name, config) = item
        path = folder / f"{index}.cubin"
        try:
            built = compile_text(config.unit("kernel"), arch, options)
        except RuntimeError as failed:
            say(f"FAILS TO BUILD {name}: {str(failed)[:600]}")
            return name, None
        if built.spilled_bytes:
            say(f"spills {built.spilled_bytes} bytes: {name}")
        path.write_bytes(built.cubin)
        return name, path

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {name: path for name, path in pool.map(one, enumerate(configs.items())) if path}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="correctness, then speed")
    parser.add_argument("--check", action="store_true", help="correctness")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--filter", default="", help="speed: only lines that contain one of these words, separated by commas"
    )
    parser.add_argument("--variant", action="append", help="speed: macros for the compiler, separated by commas")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.load(sys.stdin))
        return 0
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        if args.all or args.check:
            bad += check_all(Path(temporary), args.seed)
        if args.all or args.speed:
            import gpu_speed

            bad += gpu_speed.main(Path(temporary), args.filter, args.variant or [""])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
