"""Kernel sets: the default set of every arch, the seeds' preselected sets, and the seeds' sweeps over whole tile
spaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.config.choices import offered
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.kernel_sets.cuda import CUDA_DEFAULTS, SWEEP_HOPPER, TUNE_HOPPER
from tilewright_gemm.kernel_sets.hip import ESSENTIAL, HIP_DEFAULTS, packing_kernels, preferred
from tilewright_gemm.kernel_sets.preselected import seed_kernels
from tilewright_gemm.vocabulary import Binary, Epilogue, ScaleA, ScaleB, Unary
from tilewright_kit.kernel_sets.declare import ANY, Declaration, KernelSet, declare
from tilewright_kit.types.dtypes import DType

__all__ = ["KERNEL_SETS", "PACK_B_SETS", "SPACES", "SWEEPS", "fixed"]

_CPUS = ("x86*", "aarch64*")
_HIP = ("gfx*",)


def fixed(config: GemmConfig) -> Declaration[GemmConfig]:
    """A declaration of exactly this configuration."""
    changed = {
        item.name: getattr(config, item.name)
        for item in dataclasses.fields(config)
        if getattr(config, item.name) != item.default
    }
    return declare(GemmConfig, **changed)


def _cpu(**fields: Any) -> Declaration[GemmConfig]:
    base = {"dtype_a": ANY, "layout": ANY, "epilogue": Epilogue.DEFAULT, "tile": ANY, "wave": ANY, "warp_tile": ANY}
    return declare(GemmConfig, **(base | fields)).on(*_CPUS)


def may_be_valid(partial: Mapping[str, Any], arch: ArchSpec) -> bool:
    """A quick look for sweeps: pipeline and scheduler fit, and the tile is a whole number of warp tiles."""
    pipeline, scheduler = partial.get("pipeline"), partial.get("scheduler")
    if pipeline is not None and pipeline not in arch.pipelines:
        return False
    if pipeline is not None and scheduler is not None and scheduler not in arch.pipelines[pipeline].schedulers:
        return False
    tile, wave, warp = partial.get("tile"), partial.get("wave"), partial.get("warp_tile")
    if tile is None or wave is None or warp is None:
        return True
    return not any(size % max(waves * unit, 1) for size, waves, unit in zip(tile, wave, warp, strict=True))


DEFAULT = KernelSet(
    "default",
    "The preferred algorithms of the arch for every element type and layout, and an example of each variant",
    (
        _cpu(pipeline="compv3", scheduler=ANY),
        _cpu(pipeline=["mem", "compv1"]),
        _cpu(pipeline="preshufflev2", preshuffle=True, layout=["rcr", "ccr"]),
        _cpu(pipeline="compv3", wave=(1, 1, 1), layout="rcr", batched=True),
        _cpu(pipeline="compv3", wave=(1, 1, 1), layout="rcr", grouped=True),
        _cpu(pipeline="compv3", wave=(1, 1, 1), layout="rcr", split_k=4),
        _cpu(
            pipeline="compv3",
            dtype_a=[DType.FP32, DType.BF16],
            wave=(1, 1, 1),
            layout="rcr",
            binary=Binary.MULTI_D_ADD,
            num_d_tensors=[1, 2],
            unary=[Unary.NONE, Unary.GELU],
        ),
        _cpu(
            pipeline="compv3",
            dtype_a=DType.INT8,
            dtype_c="fp32",
            wave=(1, 1, 1),
            layout="rcr",
            bias=["", "fp32"],
            scale_a=[ScaleA.TENSOR, ScaleA.ROW],
            scale_b=[ScaleB.TENSOR, ScaleB.COLUMN],
        ),
        _cpu(pipeline="compv3", dtype_a=DType.FP8, dtype_b="bf8", wave=(1, 1, 1), layout="rcr"),
        *HIP_DEFAULTS,
        *CUDA_DEFAULTS,
    ),
    preferred,
)

_SWEEP = {"pipeline": ["compv3", "compv4", "mem"], "epilogue": [Epilogue.CSHUFFLE, Epilogue.DEFAULT]} | {
    "scheduler": ["intrawave", "interwave"],
    "pad_m": False,
    "pad_n": False,
    "pad_k": False,
    "persistent": [False, True],
    "tile": ANY,
    "wave": (ANY, ANY, 1),
    "warp_tile": ANY,
}


def _sweep(variant: str, description: str, **fields: Any) -> KernelSet[GemmConfig]:
    padded = {"pad_m": True, "pad_n": True, "pad_k": True}  # CUDA has no kernels without
    declarations = (
        declare(GemmConfig, **(_SWEEP | fields)).on(*_HIP),
        declare(GemmConfig, **(_SWEEP | fields | padded)).on("sm_*"),
    )
    return KernelSet(f"sweep_{variant}", description, declarations, offered, may_be_valid)


SWEEPS: dict[str, KernelSet[GemmConfig]] = {
    "standard": _sweep("standard", "Every tile of 64 to 256, waves, warp tiles and traits of the arch"),
    "preshuffle": _sweep(
        "preshuffle",
        "The same for pre-shuffled B",
        pipeline=ANY,
        scheduler="default",
        epilogue=Epilogue.CSHUFFLE,
        preshuffle=True,
    ),
    "multi_d": _sweep(
        "multi_d",
        "The same with one and two D operands",
        binary=[Binary.MULTI_D_ADD, Binary.MULTI_D_MULTIPLY],
        num_d_tensors=[1, 2],
    ),
    "batched": _sweep("batched", "The same for strided batches", batched=True),
    "grouped": _sweep("grouped", "The same for groups of products", grouped=True),
    "stream_k": _sweep(
        "stream_k",
        "Stream-K in its three ways to add up",
        epilogue=Epilogue.CSHUFFLE,
        persistent=False,
        reduction=["atomic", "linear", "tree"],
    ),
}
"""The seeds' default sweep for each variant of its generator, in fp16 and rcr; ``generate_set`` changes types and
layout. Not among the operation's
``kernel_sets``: nobody should have to walk them to find a kernel by name."""

SPACES: dict[str, KernelSet[GemmConfig]] = {
    kernels.name: kernels for kernels in (TUNE_HOPPER, SWEEP_HOPPER, *SWEEPS.values())
}
"""Sets for tuning, by name: too large to be looked through for anything else."""

PACK = KernelSet(
    "default",
    "Packing of B into every preferred format of the arch",
    (
        declare(
            PackBConfig,
            dtype_a=ANY,
            layout=["rcr", "rrr"],
            pipeline=ANY,
            epilogue=Epilogue.DEFAULT,
            tile=ANY,
            wave=ANY,
            warp_tile=ANY,
            preshuffle=True,
        ).on(*_CPUS),
        *packing_kernels(),
    ),
    preferred,
)

KERNEL_SETS: dict[str, KernelSet[GemmConfig]] = {"default": DEFAULT, "essential": ESSENTIAL} | {
    name: KernelSet(name, f"Preselected: {name}, mended", tuple(map(fixed, configs)), offered)
    for name, configs in seed_kernels()
}
PACK_B_SETS: dict[str, KernelSet[PackBConfig]] = {"default": PACK}
