"""Default kernels of CPUs."""

from __future__ import annotations

from typing import Any

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.vocabulary import Binary, Epilogue, ScaleA, ScaleB, Unary
from tilewright_kit.kernel_sets.declare import ANY, Declaration, declare
from tilewright_kit.types.dtypes import DType

__all__ = ["CPU_DEFAULTS", "CPU_PACKING"]


def _cpu(**fields: Any) -> Declaration[GemmConfig]:
    base = {"dtype_a": ANY, "layout": ANY, "epilogue": Epilogue.DEFAULT, "tile": ANY, "wave": ANY, "warp_tile": ANY}
    return declare(GemmConfig, **(base | fields)).for_kinds("cpu")


CPU_DEFAULTS: tuple[Declaration[GemmConfig], ...] = (
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
)

CPU_PACKING: Declaration[PackBConfig] = declare(
    PackBConfig,
    dtype_a=ANY,
    layout=["rcr", "rrr"],
    pipeline=ANY,
    epilogue=Epilogue.DEFAULT,
    tile=ANY,
    wave=ANY,
    warp_tile=ANY,
    preshuffle=True,
).for_kinds("cpu")
