"""Grouped and depthwise convolution on the GPU: kernels of every such layer of the suite, built, checked against cuDNN,
and timed in turns with it.

    python bench/lab/cuda_groups.py --output groups.jsonl  # fp16 and bf16, all directions, 12 kernels of each layer
    python bench/lab/ship_groups.py groups.jsonl           # what the plugin ships from then on

Which kernels come first is written in ``group_tries.py``, which lists and builds them without a GPU. Prints the fastest
kernel of each layer beside cuDNN, and the geometric means: over the layers that the goal names (the first three), and
over all. The lines of the output are measurements, as a sweep records them, written layer by layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.conv_peer import DIRECTIONS, relative
from common.cuda_local import Cuda, Product, describe
from group_tries import LIMIT, asked, offered
from suites.cuda_conv import DTYPES, TOLERANCE, operands

from tilewright_grouped_conv.commands.cases import ConvCase
from tilewright_grouped_conv.commands.family import CONV
from tilewright_kit.contract.problem import Role
from tilewright_kit.selection.measurements import Measurement, point_of
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.engine.call import Call

NAMED = 3
"""Layers of the list that the goal names; they come first."""
FINALISTS = 4
_FINAL_SECONDS = 0.05


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
            product = Product(cuda, asked, tensors | {out.name: result}, config)
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


def sweep(cuda: Cuda, cases: Sequence[ConvCase], limit: int, file: TextIO) -> list[float]:
    """Builds and measures the kernels of some layers; returns how much faster than cuDNN the fastest of each is. What
    is measured is in the file when the next layer begins.
    """
    kernels = {}
    for case in cases:
        operation = cuda.engine.operations[case.request().operation]
        kernels[case], refused = offered(case, operation, cuda.info, limit)
        for text in refused:
            print(f"{case.label}: refused: {text}")
    failed = build(cuda, list(dict.fromkeys(config for configs in kernels.values() for config in configs)))
    ratios = []
    for case, configs in kernels.items():
        rows, peer = measure(cuda, case, [config for config in configs if config not in failed])
        file.writelines(json.dumps(row.to_dict()) + "\n" for row in rows)
        file.flush()
        if not rows:
            print(f"{case.label}: no kernel is right")
            continue
        ratios.append(peer * 1e9 / rows[0].median_ns)
        kernel = cuda.engine.operations[rows[0].operation].config_type.from_dict(rows[0].config).name
        print(
            f"{case.label}: {rows[0].median_ns / 1e3:.1f} us, cuDNN {peer * 1e6:.1f} us, {ratios[-1]:.2f}: {kernel}",
            flush=True,
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=list(DIRECTIONS))
    parser.add_argument("--limit", type=int, default=LIMIT, help="kernels of each layer, the promising ones first")
    parser.add_argument("--cache", type=Path, default=None, help="artifact cache to keep")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    ratios: dict[tuple[str, str], list[float]] = {}
    with Cuda(given.cache) as cuda, torch.inference_mode(), given.output.open("w") as file:
        for dtype, direction in itertools.product(given.dtypes, given.directions):
            ratios[dtype, direction] = sweep(cuda, asked([dtype], [direction]), given.limit, file)
        for (dtype, direction), found in ratios.items():
            means = [statistics.geometric_mean(some) for some in (found[:NAMED], found)]
            print(f"{dtype} {DIRECTIONS[direction]}: {means[0]:.2f} over the first {NAMED}, {means[1]:.2f} over all")


if __name__ == "__main__":
    main()
