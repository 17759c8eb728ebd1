"""Runs a sample of every GEMM template on the GPU, in one process, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no --kernel-name kns=gemm_ python tests/gpu/sanitized.py
    compute-sanitizer --tool racecheck --kernel-name kns=gemm_ python tests/gpu/sanitized.py

Of the kernels that would be considered for a number of small and odd problems, one of each kind is run: by element
types, layout, pipeline, scheduler, epilogue, swapped or not, cluster, slices. Results are compared as well.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from cuda_local import Cuda, Product, describe
from gpu_cases import matrix, poisoned, relative, truth

from tilewright_kit.problem import OperationRequest

PROBLEMS = [
    # m, n, k, A, B, C, layout, attributes, bias
    (192, 320, 256, "bf16", "bf16", "bf16", "rcr", {}, False),
    (130, 200, 136, "fp16", "fp16", "fp16", "rrr", {}, False),
    (136, 264, 72, "bf16", "bf16", "fp32", "crr", {"unary": "Gelu"}, True),
    (136, 264, 200, "fp16", "fp16", "fp16", "ccr", {}, False),
    (8, 320, 1024, "bf16", "bf16", "bf16", "rcr", {}, False),
    (33, 77, 111, "bf16", "bf16", "bf16", "rcr", {}, False),
    (33, 77, 111, "int8", "int8", "int32", "rrr", {}, False),
    (160, 256, 512, "fp8", "fp8", "bf16", "rcr", {}, False),
    (160, 256, 512, "int8", "int8", "int32", "rcr", {}, False),
    (100, 130, 70, "fp32", "fp32", "fp32", "rcr", {}, False),
    (64, 96, 2048, "bf16", "bf16", "bf16", "rcr", {"split_k": 3}, False),
]
LIMIT = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 8e-3, "int32": 0.0}


def kind(config: Any) -> tuple[Any, ...]:
    """Kernels of one kind differ in sizes alone."""
    return (
        config.pipeline, config.scheduler, config.epilogue, config.transpose_c, config.persistent,
        config.cluster != (1, 1, 1), config.split_k > 1, config.reduction, config.promote > 0,
    )  # fmt: skip


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1e9
    begun, failures, count = time.monotonic(), 0, 0
    with Cuda() as cuda:
        operation = cuda.engine.operations["gemm"]
        for m, n, k, a_type, b_type, c_type, layout, attributes, bias in PROBLEMS:
            tensors = {
                "a": matrix(torch, m, k, a_type, transposed=layout[0] == "c"),
                "b": matrix(torch, k, n, b_type, transposed=layout[1] == "c"),
                "out": poisoned(torch, m, n, c_type),
            }
            if bias:
                tensors["bias"] = torch.randn(n, device="cuda").to(torch.bfloat16)
            inputs = {name: describe(tensor) for name, tensor in tensors.items() if name != "out"}
            request = OperationRequest("gemm", inputs, {"out": describe(tensors["out"])}, dict(attributes))
            want = truth(torch, tensors["a"], tensors["b"])
            if bias:
                want = torch.nn.functional.gelu(want + tensors["bias"].double())
            chosen = {kind(config): config for config in operation.candidates(operation.parse(request), cuda.info)}
            for config in chosen.values():
                if time.monotonic() - begun > seconds:
                    break
                tensors["out"].fill_(7 if c_type == "int32" else float("nan"))
                torch.cuda.synchronize()
                Product(cuda, request, tensors, config.name)()
                cuda.stream.synchronize()
                error = relative(torch, tensors["out"], want)
                count += 1
                if not error <= LIMIT[c_type]:
                    failures += 1
                    sys.stdout.write(f"{config.name}: {error:.1e}\n")
    sys.stdout.write(f"{count} kernels ran, {failures} with wrong results, {time.monotonic() - begun:.0f} s\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
