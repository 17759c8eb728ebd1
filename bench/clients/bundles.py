"""Time to open a bundle of many kernels, and what its first plans and launches cost.

    python bench/clients/bundles.py [--arch sm_90a] [--kernels 200] [--bundle FILE]

Builds a bundle of products of small sizes whose types, layouts, biases and activations all differ, so that each has a
kernel of its own, unless FILE is one already. Then, in processes that have not seen it: the client library's modules
for bundles, ``tilewright.load_bundle``, the first plan that is asked for (read, digests checked), its first launch (on
a GPU: its code loaded by the driver), and all other plans. Milliseconds, the middle of processes that follow each
other, files in the system's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tilewright_kit.contract.bundle import read_bundle_index

TYPES = ("bf16", "fp16", "fp32", "fp8")
LAYOUTS = ("rcr", "rrr", "crr", "ccr")
ACTIVATIONS = ("", "Relu", "Gelu", "FastGelu", "Silu", "Sigmoid", "Tanh", "HardSwish")
OPEN = """
import json, sys, time
import numpy as np
import tilewright as tw
from tilewright.launch.library import load_library
from tilewright.types.spec import fresh

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

path, on_gpu = sys.argv[1], sys.argv[2] == "gpu"
if on_gpu:
    import torch
    torch.zeros(1, device="cuda")
load_library()
clock = time.perf_counter
asked = clock()
import tilewright.sync.bundle
began, before = clock(), resident()
bundle = tw.load_bundle(path)
opened, after = clock(), resident()
plan = bundle[bundle.problems[0].name]
first = clock()

def tensor(spec):
    if on_gpu:
        steps = spec.strides or torch.empty(spec.shape).stride()
        return torch.empty_strided(spec.shape, steps, device="cuda", dtype=getattr(torch, spec.dtype.name))
    return np.empty(spec.shape, spec.dtype) if spec.strides is None else fresh(np.empty, spec)

bound = plan.bind(*map(tensor, plan.inputs.values()), out=tensor(*plan.outputs.values()))
bound()
if on_gpu:
    torch.cuda.synchronize()
launched = clock()
for item in bundle.problems:
    bundle[item.name]
ended = clock()
taken = {"imports": began - asked, "open": opened - began, "first plan": first - opened}
taken |= {"first launch": launched - first, "other plans": ended - launched, "MiB": (after - before) / 2**20}
print(json.dumps(taken))
"""


def build(target: Path, arch: str, kernels: int) -> None:
    rows = itertools.product(ACTIVATIONS, ("", "yes"), TYPES, LAYOUTS)
    lines = [f"96,80,64,{dtype},{layout},{bias},{kind}" for kind, bias, dtype, layout in rows][:kernels]
    with tempfile.TemporaryDirectory() as folder:
        shapes = Path(folder) / "shapes.csv"
        shapes.write_text("\n".join(["m,n,k,dtype,layout,bias,activation", *lines]) + "\n")
        flags = ["--arch", arch] if arch else []
        command = [sys.executable, "-m", "tilewright_tools.cli", "bundle", "build", "--gemm", str(shapes), *flags]
        subprocess.run([*command, "-o", str(target)], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="", help="default: this machine's CPU")
    parser.add_argument("--kernels", type=int, default=200)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--bundle", type=Path, help="made unless it is there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.bundle or Path(folder) / "model.twb"
        if not path.exists():
            build(path, given.arch, given.kernels)
        index = read_bundle_index(path)
        print(f"{len(index.entries)} plans, {len(index.objects)} code objects, {index.nbytes / 2**20:.1f} MiB")
        kind = "gpu" if index.entries[0].arch.startswith(("sm_", "gfx")) else "cpu"
        taken = [
            json.loads(subprocess.run([sys.executable, "-c", OPEN, str(path), kind], check=True, stdout=-1).stdout)
            for _ in range(given.processes)
        ]
    for name in taken[0]:
        scale = 1 if name == "MiB" else 1e3
        found = sorted(item[name] * scale for item in taken)
        unit = "MiB more in memory after open" if name == "MiB" else f"ms  {name}"
        print(f"{statistics.median(found):8.2f} ({found[0]:.2f} to {found[-1]:.2f}) {unit}")


if __name__ == "__main__":
    main()
