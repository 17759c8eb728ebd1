"""Kernel sets of the three directions.

``default``: examples of everything that candidates come from, at most some dozens for an arch. ``essential``: what is
built and checked for every GPU. ``tiny``: one kernel. ``tests``: a few of each kind. ``full``: every shape with every
type and dimension; ``full_tests``: the same with every access, epilogue and variant. ``profiler``: the default
tile table of AMD GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from tilewright_grouped_conv.config.config import CONFIGS, DIRECT_PIPELINE, ConvConfig
from tilewright_grouped_conv.kernel_sets.choices import first_offered, offered
from tilewright_grouped_conv.kernel_sets.cuda import cuda_defaults, cuda_essential, cuda_full
from tilewright_grouped_conv.kernel_sets.hip import hip_defaults, hip_essential, hip_full
from tilewright_grouped_conv.kernel_sets.tile_table import table_tiles
from tilewright_grouped_conv.vocabulary import Direction, Scale, Specialization, layout_of
from tilewright_kit.kernel_sets.declare import ANY, Declaration, DeferredDeclarations, KernelSet, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Unary

__all__ = ["KERNEL_SETS", "RULE_SETS"]

Declarations = Iterator[Declaration[ConvConfig]]

_FLOATS = [DType.FP32, DType.FP16, DType.BF16]

RULE_SETS = ("default", "full", "full-tests", "profiler", "tests", "tiny")
"""Names that the generator takes; those of sets have underscores."""


def _cpu(config: type[ConvConfig], **fields: Any) -> Declaration[ConvConfig]:
    base: dict[str, Any] = {"pipeline": "compv3", "epilogue": Epilogue.DEFAULT, "tile": ANY, "warp_tile": ANY}
    return declare(config, **{**base, "wave": (1, 1, 1), **fields}).for_kinds("cpu")


def _cpu_direct(config: type[ConvConfig], kind: Specialization, **fields: Any) -> Declaration[ConvConfig]:
    base: dict[str, Any] = {"pipeline": DIRECT_PIPELINE, "epilogue": Epilogue.DEFAULT, "scheduler": "default"}
    base |= {"tile": (1, 1, 1), "warp_tile": (1, 1, 1), "wave": (1, 1, 1), "specialization": kind}
    return declare(config, **{**base, **fields}).for_kinds("cpu")


def _cpu_tests(config: type[ConvConfig]) -> Declarations:
    yield _cpu(config, dtype_in=_FLOATS)
    yield _cpu_direct(config, Specialization.DEPTHWISE, dtype_in=DType.FP32)
    yield _cpu_direct(config, Specialization.DIRECT, dtype_in=DType.FP32)


def _cpu_defaults(config: type[ConvConfig]) -> Declarations:
    forward = config.direction is Direction.FORWARD
    yield _cpu(config, dtype_in=ANY if forward else _FLOATS)
    yield _cpu(config, dtype_in=[DType.FP32, DType.BF16], wave=(1, 2, 1))
    for ndim in (1, 3):
        yield _cpu(config, dtype_in=DType.FP32, layout=layout_of(ndim), ndim=ndim)
    for ndim in (1, 2, 3):
        yield _cpu(config, dtype_in=DType.FP32, layout=layout_of(ndim, True), ndim=ndim)
    pointwise = {"explicit_gemm": True, "specialization": Specialization.FILTER1X1_STRIDE1_PAD0}
    yield _cpu(config, dtype_in=[DType.FP32, DType.BF16], **pointwise)
    for kind in (Specialization.DEPTHWISE, Specialization.DIRECT):
        yield _cpu_direct(config, kind, dtype_in=_FLOATS)
        yield _cpu_direct(config, kind, dtype_in=DType.FP32, layout=layout_of(2, True))
        for ndim in (1, 3):
            yield _cpu_direct(config, kind, dtype_in=DType.FP32, layout=layout_of(ndim), ndim=ndim)
    if forward:
        yield _cpu(config, dtype_in=DType.FP8, dtype_wei="bf8")
        steps = {"bias": "fp32", "unary": [Unary.NONE, Unary.RELU]}
        yield _cpu(config, dtype_in=[DType.FP32, DType.BF16], **steps)
        yield _cpu(config, dtype_in=DType.FP32, binary=Binary.MULTI_D_ADD, num_d_tensors=1, unary=Unary.RELU)
        yield _cpu(config, dtype_in=DType.INT8, dtype_out=["fp32", "int8"], scale=[Scale.TENSOR, Scale.CHANNEL])
    else:
        yield _cpu(config, dtype_in=[DType.FP32, DType.BF16], accumulate=True)
    if config.direction is Direction.BACKWARD_DATA:
        yield _cpu(config, dtype_in=[DType.FP32, DType.BF16], mapped_rows=True)
        yield _cpu(config, dtype_in=DType.FP32, bias="fp32", unary=Unary.RELU)
    if config.direction is Direction.BACKWARD_WEIGHT:
        yield _cpu(config, dtype_in=[DType.FP32, DType.BF16], split_k=4)
        yield _cpu_direct(config, Specialization.DEPTHWISE, dtype_in=DType.FP32, split_k=4)


def _cpu_full(config: type[ConvConfig]) -> Declarations:
    for ndim in (1, 2, 3):
        for first in (False, True):
            yield _cpu(config, dtype_in=ANY, layout=layout_of(ndim, first), ndim=ndim, scheduler=ANY)


def _sets(config: type[ConvConfig]) -> dict[str, KernelSet[ConvConfig]]:
    essential = DeferredDeclarations(lambda: chain(cuda_essential(config), hip_essential(config)))
    default = DeferredDeclarations(lambda: chain(_cpu_defaults(config), cuda_defaults(config), hip_defaults(config)))
    full = DeferredDeclarations(lambda: chain(_cpu_full(config), cuda_full(config), hip_full(config)))
    every: dict[str, tuple[str, DeferredDeclarations[ConvConfig]]] = {
        "default": ("Sources of candidates, in every type, layout and variant", default),
        "essential": ("GPUs: every type, pipeline, epilogue and variant in the usual tiles", essential),
        "tiny": ("One kernel", DeferredDeclarations(lambda: _tiny(config))),
        "tests": ("A few kernels of each kind", DeferredDeclarations(lambda: chain(_cpu_tests(config), essential))),
        "full": ("Every shape, with every type and dimension", full),
        "full_tests": ("The same, and the default set", DeferredDeclarations(lambda: chain(full, default))),
        "profiler": ("The default tile table, where valid", DeferredDeclarations(lambda: _profiler(config))),
    }
    return {
        name: KernelSet(name, text, declarations, first_offered if name == "tiny" else offered)
        for name, (text, declarations) in every.items()
    }


def _tiny(config: type[ConvConfig]) -> Declarations:
    yield from cuda_essential(config, tiny=True)
    yield from hip_essential(config, tiny=True)
    yield _cpu(config, dtype_in=DType.FP32)


def _profiler(config: type[ConvConfig]) -> Declarations:
    yield from table_tiles(config)
    yield _cpu(config, dtype_in=_FLOATS)


KERNEL_SETS: Mapping[Direction, Mapping[str, KernelSet[ConvConfig]]] = {
    direction: _sets(config) for direction, config in CONFIGS.items()
}
