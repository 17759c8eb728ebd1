"""Runs a sample of every GEMM template on the GPU, in one process, for NVIDIA's compute-sanitizer.

    python tests/gpu/sanitized.py --cache FOLDER   # builds the kernels, and runs them as they are
    compute-sanitizer --tool memcheck --report-api-errors no --kernel-name kns=gemm_ \
        python tests/gpu/sanitized.py --cache FOLDER --seconds 150
    compute-sanitizer --tool racecheck --kernel-name kns=gemm_ python tests/gpu/sanitized.py --cache FOLDER

Of the kernels that would be considered for a number of small and odd problems, one of each kind is run: by element
types, layout, pipeline, scheduler, epilogue, swapped or not, large tiles or small, cluster, slices, Stream-K, operands
D, groups. Kernels that differ most from those before them come first, so that a run that ends early has seen every
template. Results are compared as well, with products that the host computes: the tool watches no kernels but ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tilewright_gemm.vocabulary import Reduction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

PROBLEMS = [
    # m, n, k, A, B, C, layout, attributes, further operands
    (192, 320, 256, "bf16", "bf16", "bf16", "rcr", {}, ()),
    (136, 264, 200, "bf16", "bf16", "bf16", "rcr", {"binary": "Add"}, ("d[0]",)),
    (100, 77, 192, "fp16", "fp16", "fp16", "rcr", {}, ()),
    (136, 264, 72, "bf16", "bf16", "fp32", "crr", {"unary": "Gelu"}, ("bias",)),
    (160, 256, 512, "fp8", "fp8", "bf16", "rcr", {}, ()),
    (8, 320, 1024, "bf16", "bf16", "bf16", "rcr", {}, ()),
    (160, 256, 512, "int8", "int8", "int32", "rcr", {}, ()),
    (64, 96, 2048, "bf16", "bf16", "bf16", "rcr", {"split_k": 3}, ()),
    (130, 200, 136, "fp16", "fp16", "fp16", "rrr", {}, ()),
    (33, 77, 111, "bf16", "bf16", "bf16", "rcr", {}, ()),
    (100, 130, 70, "fp32", "fp32", "fp32", "rcr", {}, ()),
    (136, 264, 200, "fp16", "fp16", "fp16", "ccr", {}, ()),
    (33, 77, 111, "int8", "int8", "int32", "rrr", {}, ()),
]
STREAMED = 3
"""The first problems are given to Stream-K kernels too."""
LIMIT = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 8e-3, "int32": 0.0}
GROUPS = 2
LARGE = 128 * 128
"""Elements of a tile beyond which it is large."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and a kernel for it."""

    problem: tuple[Any, ...]
    grouped: bool
    config: Any

    def traits(self) -> tuple[Any, ...]:
        """Kernels with equal traits differ in sizes alone."""
        c = self.config
        return (
            c.pipeline, c.scheduler, c.epilogue, c.transpose_c, c.persistent, c.tile[0] * c.tile[1] > LARGE,
            c.cluster[:2] != (1, 1), c.cluster[2] > 1, c.split_k > 1, c.reduction, c.promote > 0, self.grouped,
            *self.problem[3:7], tuple(self.problem[7]), self.problem[8],
        )  # fmt: skip


def request_of(problem: tuple[Any, ...], grouped: bool) -> OperationRequest:
    m, n, k, a, b, c, layout, attributes, more = problem

    def matrix(dtype: str, rows: int, cols: int, letter: str) -> TensorDesc:
        return TensorDesc.of(dtype, (rows, cols), (1, rows) if letter == "c" else (cols, 1))

    one = {"a": matrix(a, m, k, layout[0]), "b": matrix(b, k, n, layout[1]), "out": matrix(c, m, n, "r")}
    one |= {name: TensorDesc.of(a, (n,) if name == "bias" else (m, n)) for name in more}
    if grouped:
        one = {f"{name}[{group}]": desc for group in range(GROUPS) for name, desc in one.items()}
    inputs = {name: desc for name, desc in one.items() if not name.startswith("out")}
    outputs = {name: desc for name, desc in one.items() if name.startswith("out")}
    return OperationRequest("gemm", inputs, outputs, dict(attributes))


def considered(operation: Any, device: Any) -> Iterator[Case]:
    for number, problem in enumerate(PROBLEMS):
        for grouped in (False, True) if number == 0 else (False,):
            parsed = operation.parse(request_of(problem, grouped))
            for config in operation.candidates(parsed, device):
                yield Case(problem, grouped, config)
                # Nobody would take Stream-K for so little; where the rules allow it, it is right all the same.
                stream = config.replace(reduction=Reduction.LINEAR, persistent=True)
                if number < STREAMED and not grouped and not operation.rules.check(stream, device.arch):
                    yield Case(problem, grouped, stream)


def sample(operation: Any, device: Any) -> list[Case]:
    """One of each kind; in turn the one with the most values of traits that none before it has."""
    left = list({case.traits(): case for case in considered(operation, device)}.items())
    ordered, seen = [], set[Any]()
    while left:
        best = max(left, key=lambda item: len(set(enumerate(item[0])) - seen))
        left.remove(best)
        seen |= set(enumerate(best[0]))
        ordered.append(best[1])
    return ordered


def build(engine: Any, cases: list[Case], device: Any) -> dict[str, str]:
    """All kernels, in parallel; those in the cache are left as they are. Returns why which of them did not compile."""
    from tilewright_server.engine.call import Call

    operation = engine.operations["gemm"]
    plans = [operation.plan(operation.parse(request_of(c.problem, c.grouped)), c.config, device) for c in cases]
    kernels = list({kernel.name: kernel for plan in plans for kernel in plan.kernels}.values())
    results = engine.build(kernels, device.arch, lambda _: None, Call())
    return {result.config.name: str(result.error) for result in results if result.error is not None}


def run(torch: Any, cuda: Any, case: Case) -> float:
    """The relative error of the worst output."""
    from common.cuda_local import Product
    from gpu_cases import matrix, poisoned, relative

    request = request_of(case.problem, case.grouped)
    m, n, k, a, b, c, layout, attributes, _ = case.problem
    tensors: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    for group in [f"[{i}]" for i in range(GROUPS)] if case.grouped else [""]:
        x, y = matrix(torch, m, k, a, transposed=layout[0] == "c"), matrix(torch, k, n, b, transposed=layout[1] == "c")
        want = x.cpu().double() @ y.cpu().double()
        tensors |= {f"a{group}": x, f"b{group}": y, f"out{group}": poisoned(torch, m, n, c)}
        for name in case.problem[8]:
            tensors[name] = torch.randn((n,) if name == "bias" else (m, n), device="cuda").to(x.dtype)
            want = want + tensors[name].cpu().double()
        wanted[f"out{group}"] = torch.nn.functional.gelu(want) if "unary" in attributes else want
    torch.cuda.synchronize()
    Product(cuda, request, tensors, case.config)()
    cuda.stream.synchronize()
    errors: list[float] = [relative(torch, tensors[name].cpu(), want) for name, want in wanted.items()]
    return max(errors)


def say(line: str) -> None:
    """At once: what the tool reports next belongs to the kernel after this line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder of built kernels; made if it is not there")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel later than this")
    args = parser.parse_args()

    import torch
    from common.cuda_local import Cuda

    begun, failures, count = time.monotonic(), 0, 0
    with Cuda(args.cache) as cuda:
        cases = sample(cuda.engine.operations["gemm"], cuda.info)
        broken = build(cuda.engine, cases, cuda.info)
        for name, fault in broken.items():
            failures += 1
            say(f"does not compile: {name}: {fault}")
        for case in [case for case in cases if case.config.name not in broken]:
            if time.monotonic() - begun > args.seconds:
                break
            error = run(torch, cuda, case)
            count += 1
            good = error <= LIMIT[case.problem[5]]
            failures += not good
            spent = f"{time.monotonic() - begun:.0f} s"
            say(f"{count} {spent} {case.config.name} {error:.1e}{'' if good else ' WRONG'}")
    say(f"{count} of {len(cases)} kernels ran, {failures} faults, {time.monotonic() - begun:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
