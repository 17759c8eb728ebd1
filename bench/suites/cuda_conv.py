"""Grouped convolution on the GPU against cuDNN through PyTorch, channels-last fp16, all three directions.

Needs an NVIDIA GPU and PyTorch built for it. Kernels are the ones that the selection takes; cuDNN is allowed to measure
its algorithms first. Every result is compared with float64 on the GPU before it is timed. Ratios are ours over the
peer's in speed: above 1 we are faster.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import torch
from common.conv_peer import DIRECTIONS, kind_of, relative
from common.cuda_local import Cuda, Product, describe

from suites.base import Options, Table, main
from suites.conv import Ratios, brief, geometry
from tilewright_grouped_conv.commands.cases import ConvCase
from tilewright_grouped_conv.commands.family import CONV
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.errors import TilewrightError

SHAPES = Path(__file__).resolve().parents[1] / "shapes" / "conv.csv"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LIGHT = ("grouped", "depthwise")
"""Kinds of which each group has few channels: a mean of their own."""
TOLERANCE = 1e-2


def cases(options: Options) -> list[ConvCase]:
    with SHAPES.open() as file:
        found = [CONV.from_record(row, f"{SHAPES.name}:{line}") for line, row in enumerate(csv.DictReader(file), 2)]
    return found[:3] if options.quick else found


def operands(request: OperationRequest, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors in the layout that the request describes, without holes."""
    found = {}
    for name, desc in request.inputs.items():
        values = torch.randn(desc.shape, device="cuda", dtype=torch.float32).to(dtype)
        found[name] = torch.empty_strided(desc.shape, desc.strides, dtype=dtype, device="cuda").copy_(values)
    return found


def ours(cuda: Cuda, case: ConvCase, tensors: dict[str, torch.Tensor]) -> tuple[Product, torch.Tensor]:
    """The kernel that the server would take, bound to operands and to a poisoned output."""
    request = case.request()
    items = cuda.engine.operations[request.operation].parse(request).operands
    (out,) = (item for item in items if item.role is Role.OUTPUT)
    dtype = next(iter(tensors.values())).dtype
    result = torch.empty_strided(out.desc.shape, out.desc.strides, dtype=dtype, device="cuda").fill_(float("nan"))
    asked = dataclasses.replace(request, outputs={out.name: describe(result)})
    return Product(cuda, asked, tensors | {out.name: result}, ""), result


def truth(case: ConvCase, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64, which cuDNN would refuse or take long for: PyTorch's own kernels, image by image."""
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    with torch.backends.cudnn.flags(enabled=False):
        result: torch.Tensor = CONV.peer_call(torch, case, doubles)()
    return result


def compare(cuda: Cuda, name: str, options: Options) -> tuple[Table, Ratios]:
    dtype = DTYPES[name]
    table = Table(
        f"Convolution on the GPU, {name}, channels-last (TFLOP/s, cold caches)",
        ["N", "layer", "direction", "ours", "cuDNN", "ours / cuDNN", "error / cuDNN's", "kernel"],
    )
    ratios = Ratios()
    for case in cases(options):
        for direction, label in DIRECTIONS.items():
            asked = dataclasses.replace(case, dtype=name, direction=direction)
            try:
                row, ratio = one(cuda, asked, dtype, label)
            except (TilewrightError, ValueError) as error:
                table.notes.append(f"- {asked.label}: {error}")
                continue
            kind = kind_of(case)
            ratios.add("grouped, depthwise" if kind in LIGHT else "dense", name, direction, ratio)
            table.rows.append(row)
            print(row, flush=True)
    return table, ratios


def one(cuda: Cuda, case: ConvCase, dtype: torch.dtype, label: str) -> tuple[list[Any], float]:
    tensors = operands(case.request(), dtype)
    product, result = ours(cuda, case, tensors)
    torch.cuda.synchronize()
    product()
    cuda.stream.synchronize()
    library = CONV.peer_call(torch, case, tensors)
    library()
    torch.cuda.synchronize()
    want = truth(case, tensors)
    mine, theirs = relative(result, want), relative(library(), want)
    del want
    if not mine < TOLERANCE:
        raise ValueError(f"{product.config.name}: the result is off by {mine:.1e}")
    measured = cuda.alternate({"ours": product, "cuDNN": library})
    rate = {who: case.flops / seconds / 1e12 for who, seconds in measured.items()}
    ratio = rate["ours"] / rate["cuDNN"]
    head = [case.n, geometry(case), label]
    return [*head, *rate.values(), ratio, mine / theirs if theirs else None, brief(product.config.name)], ratio


def measure(options: Options) -> list[Table]:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    tables: list[Table] = []
    with Cuda() as cuda, torch.inference_mode():
        for name in list(DTYPES)[: 1 if options.quick else 2]:
            table, ratios = compare(cuda, name, options)
            tables += [ratios.table(f"Convolution against cuDNN, {name}: geometric means of ours / cuDNN"), table]
    return tables


if __name__ == "__main__":
    raise SystemExit(main(measure))
