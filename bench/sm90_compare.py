"""Hopper GEMMs from two sets of headers, the shipped ones and others: what is right, how fast, how long they compile.

    python bench/sm90_compare.py                   # on a GPU: about 100 s; exit status 0 if the others may be shipped
    python bench/sm90_compare.py --compile-only    # without one: seconds of the compiler and what ptxas says

The others are those of tilewright/sm90/named, unless --headers names a folder in which they take the place of the
shipped ones. Kernels are those that the server's selection takes for the benchmarks' problems and for fused ones. Both
sets run in turns, on the same operands, in one process; their results must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import sm90_config
from sm90_suites import SUITES

from tilewright_kit.problem import OperationRequest
from tilewright_native import include_dir
from tilewright_server.engine.call import Call

LEAST_MEAN, LEAST, MOST_SECONDS = 0.99, 0.97, 0.5
"""Of the ratios of speed (others over shipped), and the most that a kernel may take to compile on its own."""
NAMES = ("shipped", "others")
Shape = tuple[int, int, int]


def replaced(folder: Path) -> Path:
    """A copy of the headers in which the GEMM is the one of sm90/named."""
    target = folder / "include"
    shutil.copytree(include_dir(), target)
    (target / "tilewright/sm90/gemm.hpp").write_text('#include "tilewright/sm90/named/gemm.hpp"\n')
    return target


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
    from suite_cuda import DECODE, FUSED, SHAPES

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
    from suite_cuda import operands

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


class Comparison:
    """Both sets of headers on one GPU."""

    def __init__(self, headers: dict[str, Path]) -> None:
        from cuda_local import Cuda

        self.headers = headers
        self.cudas = {name: self._cuda(Cuda, name) for name in NAMES}
        self.first = self.cudas[NAMES[0]]
        for cuda in self.cudas.values():  # one stream for all: events stand around every launch
            cuda.device, cuda.stream, cuda.torch_stream = self.first.device, self.first.stream, self.first.torch_stream
        self.operation = self.first.engine.operations["gemm"]
        self.configs: dict[str, Any] = {}
        for case in cases():
            self.configs[case.label] = self._choose(case)

    def _cuda(self, kind: Any, name: str) -> Any:
        with mock.patch("tilewright_server.engine.engine.include_dir", lambda: self.headers[name]):
            return kind()

    def _choose(self, case: Case) -> Any:
        from cuda_local import describe

        made = tensors_of(case)
        inputs = {name: describe(tensor) for name, tensor in made.items() if name not in NAMES}
        request = OperationRequest("gemm", inputs, {"out": describe(made[NAMES[0]])}, case.attributes)
        return self.first.choose(self.operation, self.operation.parse(request), "")

    def seconds_alone(self) -> dict[str, float]:
        """Each kernel of the others, compiled cold, one at a time."""
        found: dict[str, float] = {}
        distinct = {config.name: config for config in self.configs.values()}
        self._build("others", [next(iter(distinct.values()))])  # starts the compiler's process
        for name, config in list(distinct.items())[1:]:
            begun = time.perf_counter()
            self._build("others", [config])
            found[name] = time.perf_counter() - begun
        self._build("shipped", list(distinct.values()))
        return found

    def _build(self, which: str, configs: list[Any]) -> None:
        engine = self.cudas[which].engine
        for result in engine.build(configs, self.first.info.arch, lambda _: None, Call()):
            if result.error is not None:
                print(f"FAILED {which} {result.config.name}: {result.error}", flush=True)

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
        return measured["shipped"], measured["others"], same


def compare(headers: dict[str, Path], log: Path, seconds: float) -> list[str]:
    """What speaks against the others."""
    comparison = Comparison(headers)
    alone = comparison.seconds_alone()
    slowest = max(alone, key=lambda name: alone[name])
    print(f"compiled alone: median {statistics.median(alone.values()):.2f} s, most {alone[slowest]:.2f} s ({slowest})")
    ratios: dict[str, float] = {}
    different = []
    for case in cases():
        shipped, others, same = comparison.run(case, seconds)
        ratios[case.label] = shipped / others
        different += [] if same else [case.label]
        print(f"{case.label:32} {shipped * 1e6:9.1f} us {shipped / others:.3f}{'' if same else ' DIFFERS'}", flush=True)
    log.write_text(json.dumps({"alone": alone, "ratios": ratios, "different": different}))
    mean, least = math.exp(statistics.fmean(map(math.log, ratios.values()))), min(ratios, key=lambda name: ratios[name])
    print(f"speed over {len(ratios)} cases: geometric mean {mean:.4f}, least {ratios[least]:.3f} ({least})")
    faults = [f"other bits: {label}" for label in different]
    faults += [f"slower: {mean:.4f} on the mean"] if mean < LEAST_MEAN else []
    faults += [f"slower: {label} {ratio:.3f}" for label, ratio in ratios.items() if ratio < LEAST]
    return faults + [
        f"compiles for {s:.2f} s: {name}" for name, s in alone.items() if s > MOST_SECONDS and "_ws_" in name
    ]


def compile_only(headers: dict[str, Path]) -> list[str]:
    """Kernels of sm90_check.py's suite `correct` from both sets: processor seconds, spills, warnings."""
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
    parser.add_argument("--headers", type=Path, help="a folder of headers to compare with the shipped ones")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.2, help="for the launches of one case")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "sm90_compare.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        headers = {"shipped": include_dir(), "others": args.headers or replaced(Path(folder))}
        if args.compile_only:
            faults = compile_only(headers)
        else:
            script = str(Path(__file__).with_name("sm90_check.py"))
            command = [sys.executable, script, "--suite", "correct", "--include", str(headers["others"])]
            checked = subprocess.run([*command, "--budget", "60"], stdout=subprocess.PIPE, text=True, check=False)
            print(*checked.stdout.splitlines()[-1:])
            faults = [f"wrong: {line}" for line in checked.stdout.splitlines() if "WRONG" in line or "REPEAT" in line]
            faults += ["sm90_check.py failed"] if checked.returncode else []
            faults += compare(headers, args.log, args.seconds)
    for fault in faults:
        print(fault)
    good = "they compile clean" if args.compile_only else "the others may be shipped"
    print(f"{len(faults)} faults" if faults else good)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
