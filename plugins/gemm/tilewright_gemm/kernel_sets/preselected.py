"""Preselected sets for AMD GPUs, under the names that they have in other libraries.

``ORIGINALS`` states every kernel as it was selected there, without regard to the arch filter. Most were never valid:
``REFUSED`` says which, and by which rule (computed by a test, for ``REFERENCE_ARCH``). The sets hold the valid
originals and, in place of each rejected one, its corrected equivalent: what auto-correction makes of it.
"""

from __future__ import annotations

from typing import Any

from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.vocabulary import Binary, Epilogue, Unary
from tilewright_kit.types.dtypes import DType

__all__ = ["DEFAULT_KERNEL", "ORIGINALS", "REFERENCE_ARCH", "REFUSED", "mended", "preselected_kernels"]

REFERENCE_ARCH = "gfx942"
"""The arch that the sets were selected for."""

DEFAULT_KERNEL = GemmConfig()
"""128x128x32, 2x2x1 waves, 32x32x16, compv4, cshuffle, intrawave, padded."""


def _compute(tile: Triple, wave: Triple, **more: Any) -> GemmConfig:
    return GemmConfig(tile=tile, wave=wave, warp_tile=(32, 32, 16), block_size=256, **more)


def _memory(tile: Triple, wave: Triple, warp: int, **more: Any) -> GemmConfig:
    fields: dict[str, Any] = {"pipeline": "mem", "epilogue": Epilogue.CSHUFFLE, "scheduler": "interwave"} | more
    return GemmConfig(tile=tile, wave=wave, warp_tile=(warp, warp, 16), block_size=128, **fields)


def _multi_d(count: int, **step: Any) -> GemmConfig:
    return _compute((128, 128, 32), (2, 2, 1), num_d_tensors=count, **step)


_COMPUTE = (
    _compute((256, 256, 32), (4, 4, 1)),
    _compute((256, 256, 64), (4, 4, 1)),
    _compute((256, 128, 32), (4, 2, 1)),
    _compute((128, 256, 32), (2, 4, 1)),
    _compute((128, 128, 32), (2, 2, 1)),
    _compute((128, 128, 64), (2, 2, 1)),
    _compute((256, 256, 32), (4, 4, 1), persistent=True, pad_m=False, pad_n=False, pad_k=False),
)
_MEMORY = (
    _memory((16, 32, 32), (1, 1, 1), 16),
    _memory((32, 16, 32), (1, 1, 1), 16),
    _memory((16, 64, 32), (1, 2, 1), 16),
    _memory((64, 16, 32), (2, 1, 1), 16),
    _memory((32, 64, 32), (1, 1, 1), 32),
    _memory((64, 32, 32), (1, 1, 1), 32),
    _memory((32, 128, 32), (1, 2, 1), 32),
    _memory((128, 32, 32), (2, 1, 1), 32),
)
_LATENCY = tuple(
    _memory(tile, (1, 1, 1), 16, epilogue=Epilogue.DEFAULT, scheduler="intrawave")
    for tile in ((16, 32, 32), (32, 16, 32))
)
_STEPS: tuple[dict[str, Any], ...] = (
    {"binary": Binary.MULTI_D_ADD},
    {"unary": Unary.RELU},
    {"unary": Unary.GELU},
    {"unary": Unary.FAST_GELU},
)
_MULTI_D = tuple(_multi_d(count, **step) for step in _STEPS for count in (1, 2))
_PRESHUFFLE = (
    _compute((256, 256, 32), (4, 4, 1), preshuffle=True),
    _compute((128, 128, 32), (2, 2, 1), preshuffle=True),
)


def _eight_bit(dtype: DType, **more: Any) -> tuple[GemmConfig, ...]:
    return (
        _compute((256, 256, 64), (4, 4, 1), dtype_a=dtype, **more),
        _compute((128, 128, 64), (2, 2, 1), dtype_a=dtype, **more),
    )


ORIGINALS: dict[str, tuple[GemmConfig, ...]] = {
    "fp16_rcr_compute": _COMPUTE,
    "fp16_rcr_memory": _MEMORY,
    "fp16_rcr_latency": _LATENCY,
    "fp16_rcr_multi_d": _MULTI_D,
    "fp16_rcr_preshuffle": _PRESHUFFLE,
    "fp16_rcr_all": (*_COMPUTE, *_MEMORY, *_LATENCY, *_MULTI_D, *_PRESHUFFLE),
    "fp16_rcr_essential": (
        _COMPUTE[0],
        _COMPUTE[4],
        _MEMORY[4],
        _MEMORY[5],
        _multi_d(1, unary=Unary.RELU),
        _multi_d(1, unary=Unary.GELU),
    ),
    "bf16_rcr_essential": tuple(config.replace(dtype_a=DType.BF16) for config in (_COMPUTE[0], _COMPUTE[4])),
    "int8_rcr_essential": _eight_bit(DType.INT8),
    "fp8_rcr_essential": _eight_bit(DType.FP8),
    # The contents of this set are not recorded, only its size; these two are ours.
    "mixed_precision": (
        _compute((128, 128, 64), (2, 2, 1), dtype_a=DType.FP8, dtype_b="bf8"),
        _compute((128, 128, 64), (2, 2, 1), dtype_a=DType.BF8, dtype_b="fp8"),
    ),
    "default_kernel": (DEFAULT_KERNEL,),
}

# 8 or 16 waves, for which the block of 256 threads has no room, nor has the LDS for the results of each.
_CROWDED = ("wave_table", "workgroup_threads", "shared_memory")
_OVERFULL = ("wave_table", "workgroup_threads", "accumulators_fit_registers", "shared_memory")

REFUSED: dict[str, dict[int, tuple[str, ...]]] = {
    "fp16_rcr_compute": {
        0: _CROWDED,
        1: ("wave_table", "workgroup_threads", "accumulators_fit_registers", "staging_budget", "shared_memory"),
        2: _CROWDED,
        3: _CROWDED,
        6: _CROWDED,
    },
    # A block of 128 threads with one wave of 64.
    "fp16_rcr_memory": dict.fromkeys((0, 1, 4, 5), ("workgroup_threads",)),
    "fp16_rcr_latency": dict.fromkeys((0, 1), ("workgroup_threads",)),
    # Unary steps that leave the D operands unused.
    "fp16_rcr_multi_d": dict.fromkeys(range(2, 8), ("elementwise_operands",)),
    "fp16_rcr_preshuffle": {0: ("pipeline", *_OVERFULL), 1: ("pipeline",)},
    "bf16_rcr_essential": {0: _CROWDED},
    "int8_rcr_essential": {0: _OVERFULL},
    "fp8_rcr_essential": {0: _CROWDED},
}
"""Set, place in it, rules broken. ``fp16_rcr_all`` and ``fp16_rcr_essential`` repeat kernels of the others."""

_WAVES = {(4, 4, 1): (2, 2, 1), (4, 2, 1): (2, 2, 1), (2, 4, 1): (2, 2, 1)}


def mended(config: GemmConfig) -> GemmConfig:
    """The valid equivalent of an original: itself, or what auto-correction on ``REFERENCE_ARCH`` makes of it.

    The block size, which follows from the waves, is left to the arch, so that the sets serve other wave sizes too.
    """
    changes: dict[str, Any] = {"block_size": 0, "wave": _WAVES.get(config.wave, config.wave)}
    if config.tile == (128, 256, 32):
        changes["wave"] = (1, 4, 1)
    if config.tile == (256, 256, 64) and config.dtype_a.bytes == 2:
        changes["tile"] = (256, 256, 32)
    if config.num_d_tensors and config.binary is Binary.NONE:
        changes["binary"] = Binary.MULTI_D_ADD
    if config.preshuffle:
        changes["pipeline"] = "preshufflev2"
    return config.replace(**changes)


def preselected_kernels(name: str) -> tuple[GemmConfig, ...]:
    """The kernels of a set, corrected, none twice."""
    return tuple(dict.fromkeys(mended(config) for config in ORIGINALS[name]))
