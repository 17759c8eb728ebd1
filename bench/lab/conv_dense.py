"""Dense convolutions on the GPU against cuDNN through PyTorch, bf16, channels-last, all three directions: the layers of
files such as ``shapes/conv_unseen.csv``, each with the kernel that the selection takes, as
suites/cuda_conv.py measures.

cuDNN may try all of its algorithms. Needs an NVIDIA GPU and PyTorch built for it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.cuda_local import Cuda
from suites import cuda_conv
from suites.base import Options

WARM_PRODUCTS = 50


def summary(rows: list[list[Any]], label: str) -> str:
    """Geometric mean and least of ours / cuDNN in one direction."""
    ratios = [row[5] for row in rows if row[2] == label]
    mean = math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))
    return f"{label}: geometric mean {mean:.3f}, least {min(ratios, default=0.0):.3f} of {len(ratios)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0
    found: dict[str, list[list[Any]]] = {}
    with Cuda() as cuda, torch.inference_mode():
        warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(WARM_PRODUCTS):
            warm @ warm
        for shapes in args.shapes:
            cuda_conv.SHAPES = shapes
            table, _ = cuda_conv.compare(cuda, "bf16", Options(threads=1, quick=False))
            found[shapes.name] = table.rows
            print("\n".join(table.notes))
    for name, rows in found.items():
        for label in cuda_conv.DIRECTIONS.values():
            print(f"{name} {summary(rows, label)}")
    if args.output:
        args.output.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
