"""Kernel sets: the default set, from which candidates come in spirit, and the seeds' preselected and sweep sets."""

from __future__ import annotations

from tilewright_gemm.choices import offered
from tilewright_gemm.config import GemmConfig
from tilewright_gemm.pack_b import PackBConfig
from tilewright_gemm.words import Epilogue
from tilewright_kit.declare import ANY, KernelSet, declare

__all__ = ["KERNEL_SETS", "PACK_B_SETS"]

DEFAULT = KernelSet(
    "default",
    "Plain kernels of every type and layout with the preferred algorithms of the arch",
    (
        declare(
            GemmConfig,
            dtype_a=ANY,
            layout=ANY,
            pipeline="compv3",
            epilogue=Epilogue.DEFAULT,
            scheduler=ANY,
            tile=ANY,
            wave=ANY,
            warp_tile=ANY,
        ),
    ),
    offered,
)
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
        ),
    ),
    offered,
)

KERNEL_SETS = {item.name: item for item in (DEFAULT,)}
PACK_B_SETS = {item.name: item for item in (PACK,)}
