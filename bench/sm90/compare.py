"""Hopper GEMMs from two sets of headers, the shipped ones and others: what is right, how fast, how long they compile.

    python bench/sm90/compare.py --headers FOLDER  # on a GPU: about 100 s; exit status 0 if the others may be shipped
    python bench/sm90/compare.py --headers FOLDER --compile-only    # without one: seconds and what ptxas says

The others are those of the folder that --headers names, a changed copy of native/include. Kernels are those that the
server's selection takes for the benchmarks' problems and for fused ones. Both sets run in turns, on the same operands,
in one process; their results must have the same bits. What fails for one problem is a fault of its row; the others go
on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sm90 import config as sm90_config
from sm90.suites import SUITES
from tilewright_gemm.codegen import generate
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_kit.contract.problem import OperationRequest
from tilewright_native import include_dir
from tilewright_server.engine.call import Call

LEAST_MEAN, LEAST, MOST_SECONDS = 0.99, 0.97, 0.5
"""Limits of the ratios of speed (others over shipped), and the most that a kernel may take to compile on its own."""
NAMES = ("shipped", "others")
SLOWEST = 10
AGAIN_SECONDS = 0.45
"""A kernel that takes longer is compiled twice more; the median counts."""
Shape = tuple[int, int, int]


@dataclass
class Case:
    """A product; ``more``: further inputs and their element type, ``scale_a`` and ``scale_b`` for rows and columns."""

    kind: str
    shape: Shape
    dtype: str
    out: str
    more: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))}"


def cases() -> Iterator[Case]:
    from suites.cuda import DECODE, FUSED, SHAPES

    for shape in SHAPES:
        for dtype, out in (("fp16", "fp16"), ("bf16", "bf16"), ("fp8", "bf16"), ("int8", "int32")):
            yield Case(dtype, shape, dtype, out)
        yield Case("fp8 fast", shape, "fp8", "bf16", {}, {"fast_accumulation": True})
    for shape in (*FUSED, (8192, 8192, 8192)):
        yield Case("gelu", shape, "bf16", "bf16", {"bias": "bf16"}, {"unary": "Gelu"})
        yield Case("d", shape, "bf16", "bf16", {"d[0]": "bf16"}, {"binary": "Add"})
    scales = {"scale_a": "fp32", "scale_b": "fp32", "bias": "bf16"}
    for shape in ((4096, 4096, 4096), (16, 4096, 4096), (128, 28672, 4096)):
        both = {"bias": "bf16", "d[0]": "bf16"}
        yield Case("bias d gelu", shape, "bf16", "bf16", both, {"unary": "Gelu", "binary": "Add"})
        yield Case("scaled gelu", shape, "fp8", "bf16", scales, {"unary": "Gelu"})
        yield Case("scaled", shape, "int8", "bf16", scales)
        yield Case("silu", shape, "bf16", "fp32", {"bias": "fp32"}, {"unary": "Silu"})
    for shape in (*DECODE[::4], (512, 512, 16384), (1024, 1024, 8192), (2304, 4096, 8192)):
        yield Case("bf16", shape, "bf16", "bf16")


def tensors_of(case: Case) -> dict[str, Any]:
    import torch
    from suites.cuda import operands

    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    kinds |= {"fp32": torch.float32, "int32": torch.int32}
    m, n, k = case.shape
    a, b = operands(m, n, k, kinds[case.dtype])
    shapes = {"bias": (n,), "d[0]": (m, n), "scale_a": (m, 1), "scale_b": (n,)}
    made = {"a": a, "b": b}
    for name, dtype in case.more.items():
        values = torch.randn(shapes[name], device="cuda")
        made[name] = (values.abs() * 0.01 if "scale" in name else values).to(kinds[dtype])
    for name in NAMES:
        made[name] = torch.full((m, n), 7 if case.out == "int32" else math.nan, dtype=kinds[case.out], device="cuda")
    return made


def build_faults(engine: Any, configs: list[Any], arch: Any) -> list[str]:
    """Build them, in parallel. Returns what is wrong with those that do not compile."""
    results = engine.build(configs, arch, lambda _: None, Call())
    return [f"does not compile: {r.config.name}: {r.error}" for r in results if r.error is not None]


def cold_seconds(engine: Any, config: Any, arch: Any) -> float:
    """Wall seconds of its first build, or the median with two compilations more if it is long."""
    begun = time.perf_counter()
    failed = build_faults(engine, [config], arch)
    seconds = [time.perf_counter() - begun]
    if failed:
        raise RuntimeError(failed[0])
    while seconds[0] > AGAIN_SECONDS and len(seconds) < 3:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            engine.toolchains["cuda"].compile(generate(config, arch), Path(folder), arch)
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def cold_builds(engine: Any, configs: list[Any], arch: Any) -> tuple[dict[str, float], list[str]]:
    """Each alone, after one that starts the compiler's process. Returns seconds by name, and faults."""
    portable = next(c for c in KERNEL_SETS["default"].expand(arch, RULES) if c.pipeline != "ws")
    faults = build_faults(engine, [portable], arch)
    found: dict[str, float] = {}
    for config in configs:
        try:
            found[config.name] = cold_seconds(engine, config, arch)
        except Exception as failed:  # noqa: PERF203  (the others go on)
            faults.append(str(failed)[:400])
    faults += [f"compiles for {s:.2f} s: {name}" for name, s in found.items() if s > MOST_SECONDS]
    slowest = sorted(found.items(), key=lambda item: -item[1])
    for name, seconds in slowest[:SLOWEST]:
        print(f"  {seconds:.2f} s {name}")
    median, most = (statistics.median(found.values()), slowest[0][1]) if found else (math.nan, math.nan)
    print(f"{len(found)} kernels compiled alone: median {median:.2f} s, most {most:.2f} s", flush=True)
    return found, faults


@contextmanager
def headers_at(folder: Path) -> Iterator[None]:
    """Engines that are made meanwhile compile with these headers."""
    with mock.patch("tilewright_server.engine.engine.include_dir", lambda: folder):
        yield


class Comparison:
    """Both sets of headers on one GPU."""

    def __init__(self, headers: dict[str, Path]) -> None:
        from common.cuda_local import Cuda

        self.cudas = {}
        for name in NAMES:
            with headers_at(headers[name]):
                self.cudas[name] = Cuda()
        self.first = self.cudas[NAMES[0]]
        for cuda in self.cudas.values():  # one stream for all: events stand around every launch
            cuda.device, cuda.stream, cuda.torch_stream = self.first.device, self.first.stream, self.first.torch_stream
        self.operation = self.first.engine.operations["gemm"]
        self.configs: dict[str, Any] = {}
        self.faults: list[str] = []
        for case in cases():
            try:
                self.configs[case.label] = self._choose(case)
            except Exception as failed:  # noqa: PERF203  (the others go on)
                self.faults.append(f"no kernel: {case.label}: {failed}")

    def _choose(self, case: Case) -> Any:
        from common.cuda_local import describe

        made = tensors_of(case)
        inputs = {name: describe(tensor) for name, tensor in made.items() if name not in NAMES}
        request = OperationRequest("gemm", inputs, {"out": describe(made[NAMES[0]])}, case.attributes)
        return self.first.choose(self.operation, self.operation.parse(request), "")

    def build(self) -> dict[str, float]:
        """Seconds of each kernel of the others, compiled cold, one at a time; the shipped ones in parallel."""
        distinct = list({config.name: config for config in self.configs.values() if config.pipeline == "ws"}.values())
        found, faults = cold_builds(self.cudas["others"].engine, distinct, self.first.info.arch)
        self.faults += faults + build_faults(self.cudas["shipped"].engine, distinct, self.first.info.arch)
        return found

    def run(self, case: Case, seconds: float) -> tuple[float, float, bool]:
        """Seconds of the shipped kernel and of the other, and whether their results have the same bits."""
        import torch

        made, calls = tensors_of(case), {}
        for name in NAMES:
            given = {key: tensor for key, tensor in made.items() if key not in NAMES} | {"out": made[name]}
            calls[name] = self.cudas[name].product(given, case.attributes, self.configs[case.label].name)
            calls[name]()
        torch.cuda.synchronize()
        views = [made[name].view(torch.uint8) for name in NAMES]
        same = bool(torch.equal(*views)) and bool(torch.isfinite(made[NAMES[1]].float()).all())
        measured = self.first.alternate(calls, seconds)
        if measured["shipped"] < measured["others"] * LEAST:  # once more, longer: small kernels are noisy
            measured = self.first.alternate(calls, 3 * seconds)
        return measured["shipped"], measured["others"], same


def run_cases(comparison: Comparison, log: Path, seconds: float, alone: dict[str, float]) -> list[str]:
    """Bits and speed of every case; what speaks against the others."""
    ratios: dict[str, float] = {}
    faults: list[str] = []
    for case in cases():
        if case.label not in comparison.configs or comparison.configs[case.label].pipeline != "ws":
            continue
        try:
            shipped, others, same = comparison.run(case, seconds)
        except Exception as failed:
            faults.append(f"failed: {case.label}: {type(failed).__name__}: {str(failed)[:300]}")
            print(f"{case.label:32} FAILED {str(failed)[:80]}", flush=True)
            continue
        ratios[case.label] = shipped / others
        faults += [] if same else [f"other bits: {case.label}"]
        faults += [f"slower: {case.label} {shipped / others:.3f}"] if shipped / others < LEAST else []
        print(f"{case.label:32} {shipped * 1e6:9.1f} us {shipped / others:.3f}{'' if same else ' DIFFERS'}", flush=True)
        log.write_text(json.dumps({"alone": alone, "ratios": ratios, "faults": faults}))
    if not ratios:
        return [*faults, "nothing was compared"]
    mean, least = math.exp(statistics.fmean(map(math.log, ratios.values()))), min(ratios, key=lambda name: ratios[name])
    print(f"speed over {len(ratios)} cases: geometric mean {mean:.4f}, least {ratios[least]:.3f} ({least})")
    return faults + ([f"slower: {mean:.4f} on the mean"] if mean < LEAST_MEAN else [])


def check(headers: Path, seconds: float) -> list[str]:
    """check.py's suite `correct` with these headers: what is wrong."""
    script = str(Path(__file__).with_name("check.py"))
    command = [sys.executable, script, "--suite", "correct", "--include", str(headers), "--budget", str(seconds)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=3 * seconds)
    except subprocess.TimeoutExpired:
        return ["check.py did not end"]
    lines = done.stdout.splitlines()
    print("check.py:", *lines[-1:], flush=True)
    bad = ("WRONG", "REPEAT", "COUNTERS", "FAILED", "SPILLS", "does not", "died", "hung", "skipped", "Error")
    faults = [f"check.py: {line}" for line in lines if any(word in line for word in bad)]
    return faults or (["check.py failed"] if done.returncode else [])


def compare(headers: dict[str, Path], log: Path, seconds: float, budget: float) -> list[str]:
    """All of it, on a GPU: what speaks against the others."""
    faults = check(headers["others"], budget)
    verdicts = {"correct": not faults}
    comparison = Comparison(headers)
    alone = comparison.build()
    faults += comparison.faults + run_cases(comparison, log, seconds, alone)
    kinds = {"same bits": "other bits", "as fast": "slower", "compile in time": "compiles for"}
    verdicts |= {name: not any(fault.startswith(start) for fault in faults) for name, start in kinds.items()}
    print("; ".join(f"{name}: {'yes' if good else 'NO'}" for name, good in verdicts.items()))
    return faults


def compile_only(headers: dict[str, Path]) -> list[str]:
    """Kernels of check.py's suite `correct` from both sets: processor seconds, spills, warnings."""
    faults = []
    for config in dict.fromkeys(experiment.config for experiment in SUITES["correct"]()):
        seconds = {}
        for name in NAMES:
            with mock.patch.object(sm90_config, "INCLUDE", headers[name]):
                begun = time.process_time()
                built = sm90_config.compile_source(sm90_config.source_of(config))
                seconds[name] = time.process_time() - begun
        label = f"{config.a}.{config.b}.{config.c} {config.label}"
        print(f"{label:72} {seconds['shipped']:.2f} {seconds['others']:.2f} s, {built.registers} registers", flush=True)
        if built.spills or built.warnings:
            faults.append(f"{label}: {built.spills} bytes spilled {built.warnings}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--headers", type=Path, required=True, help="a folder of headers to compare with the shipped ones"
    )
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.15, help="for the launches of one case")
    parser.add_argument("--check-seconds", type=float, default=60.0, help="for check.py")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "sm90_compare.json")
    args = parser.parse_args()
    headers = {"shipped": include_dir(), "others": args.headers}
    good = "the others may be shipped"
    if args.compile_only:
        faults, good = compile_only(headers), "they compile clean"
    else:
        faults = compare(headers, args.log, args.seconds, args.check_seconds)
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults" if faults else good)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
