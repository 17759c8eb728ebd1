"""Sweeps over whole tile spaces of GPUs, one for each variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.config.choices import offered
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import Binary, Epilogue
from tilewright_kit.kernel_sets.declare import ANY, KernelSet, declare

__all__ = ["SWEEPS"]


def _may_be_valid(partial: Mapping[str, Any], arch: ArchSpec) -> bool:
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
        declare(GemmConfig, **(_SWEEP | fields)).for_kinds("hip"),
        declare(GemmConfig, **(_SWEEP | fields | padded)).for_kinds("cuda"),
    )
    return KernelSet(f"sweep_{variant}", description, declarations, offered, _may_be_valid)


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
"""The sweep of each variant, in fp16 and rcr; ``select_set`` changes types and layout. Too large for ``kernel_sets``,
in which kernels are looked up by name.
"""
