"""Grouped and depthwise convolution on the GPU: every candidate kernel of every such layer of the suite, built, checked
against cuDNN, and timed in turns with it.

    python bench/cuda_groups.py --output groups.jsonl                 # fp16 and bf16, all three directions
    python -m tilewright_server.tuning.ship --database groups.jsonl --arch sm_90a --operation conv --out ...

Prints the fastest kernel of each layer beside cuDNN, and the geometric means: over the layers that the goal names (the
first three), and over all. The lines of the output are measurements, as a sweep records them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from conv_peer import DIRECTIONS, kind_of, relative
from cuda_local import Cuda, Product, describe
from suite import Options
from suite_cuda_conv import DTYPES, LIGHT, TOLERANCE, cases, operands

from tilewright_kit.errors import TilewrightError
from tilewright_kit.measurements import Measurement, point_of
from tilewright_kit.problem import Role
from tilewright_server.engine.call import Call
from tilewright_server.tuning.families.conv import CONV, ConvCase

NAMED = 3
"""Layers of the list that the goal names; they come first."""
FINALISTS = 4
_FINAL_SECONDS = 0.05


def layers() -> list[ConvCase]:
    """The suite's layers of groups, those that the goal names first."""
    return [case for case in cases(Options(threads=1, quick=False)) if kind_of(case) in LIGHT]


def kernels(cuda: Cuda, case: ConvCase) -> list[Any]:
    request = case.request()
    operation = cuda.engine.operations[request.operation]
    return list(operation.candidates(operation.parse(request), cuda.info))


def build(cuda: Cuda, configs: Sequence[Any]) -> set[Any]:
    """Builds all of them at once; returns those that did not build, and says why."""
    results = cuda.engine.build(list(configs), cuda.info.arch, lambda _: None, Call())
    failed = {config: result.error for config, result in zip(configs, results, strict=True) if result.error is not None}
    for config, error in failed.items():
        print(f"not built: {config.name}: {error}")
    return set(failed)


def measure(cuda: Cuda, case: ConvCase, configs: Sequence[Any]) -> tuple[list[Measurement], float]:
    """Measurements of all kernels that are right, the fastest first, and cuDNN's seconds."""
    request, dtype = case.request(), DTYPES[case.dtype]
    operation = cuda.engine.operations[request.operation]
    problem = operation.parse(request)
    tensors = operands(request, dtype)
    library = CONV.peer_call(torch, case, tensors)
    want = library()
    (out,) = (item for item in problem.operands if item.role is Role.OUTPUT)
    result = torch.empty_strided(out.desc.shape, out.desc.strides, dtype=dtype, device="cuda")
    asked = dataclasses.replace(request, outputs={out.name: describe(result)})
    calls = {}
    for config in configs:
        try:
            product = Product(cuda, asked, tensors | {out.name: result}, config.name)
        except TilewrightError as error:
            print(f"refused: {config.name}: {error}")
            continue
        result.fill_(float("nan"))
        torch.cuda.synchronize()
        product()
        cuda.stream.synchronize()
        if (error := relative(result, want)) < TOLERANCE:
            calls[config] = product
        else:
            print(f"WRONG by {error:.1e}: {config.name}")
    heat = cuda.alternate({"cuDNN": library, **calls}, 0.0)
    ranked = sorted(calls, key=lambda config: heat[config])
    final = cuda.alternate(
        {"cuDNN": library, **{config: calls[config] for config in ranked[:FINALISTS]}}, _FINAL_SECONDS
    )
    point = point_of(problem)
    rows = [
        Measurement(
            operation=request.operation,
            signature=point.signature,
            sizes=dict(point.sizes),
            arch=cuda.info.arch.id,
            device=cuda.info.name,
            config=config.to_dict(),
            median_ns=final.get(config, heat[config]) * 1e9,
            flops=case.flops,
            bytes_moved=problem.bytes_moved,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        for config in ranked
    ]
    return sorted(rows, key=lambda row: row.median_ns), final["cuDNN"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--limit", type=int, default=32, help="kernels of each layer, the model's favourites first")
    parser.add_argument("--cache", type=Path, default=None, help="artifact cache to keep")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    with Cuda(given.cache) as cuda, torch.inference_mode(), given.output.open("w") as file:
        asked = [
            dataclasses.replace(case, dtype=dtype, direction=direction)
            for dtype in given.dtypes
            for direction in DIRECTIONS
            for case in layers()
        ]
        offered = {case: kernels(cuda, case)[: given.limit] for case in asked}
        failed = build(cuda, list(dict.fromkeys(config for configs in offered.values() for config in configs)))
        ratios: dict[tuple[str, str], list[float]] = {}
        for case, configs in offered.items():
            rows, peer = measure(cuda, case, [config for config in configs if config not in failed])
            for row in rows:
                file.write(json.dumps(row.to_dict()) + "\n")
            if not rows:
                print(f"{case.label}: no kernel is right")
                continue
            ratio = peer * 1e9 / rows[0].median_ns
            ratios.setdefault((case.dtype, case.direction), []).append(ratio)
            print(f"{case.label}: {rows[0].median_ns / 1e3:.1f} us, cuDNN {peer * 1e6:.1f} us, {ratio:.2f}", flush=True)
        for (dtype, direction), found in ratios.items():
            means = [statistics.geometric_mean(some) for some in (found[:NAMED], found)]
            print(f"{dtype} {DIRECTIONS[direction]}: {means[0]:.2f} over the first {NAMED}, {means[1]:.2f} over all")


if __name__ == "__main__":
    main()
