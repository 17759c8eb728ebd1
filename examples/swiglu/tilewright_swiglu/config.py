"""Kernels: that of the second product, whose epilogue multiplies with the gate; the first has the same algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright_arch import ArchSpec
from tilewright_gemm.fusion import RULES as GEMM_RULES
from tilewright_gemm.fusion import GemmConfig, offered
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.kernel_sets.declare import ANY, KernelSet, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue

__all__ = ["KERNEL_SETS", "RULES", "SwigluConfig"]

STEP: dict[str, Any] = {"binary": Binary.MULTIPLY, "num_d_tensors": 1, "dtype_d": ("fp32",)}


@dataclass(frozen=True)
class SwigluConfig(GemmConfig):
    """A kernel of GEMM that multiplies with one D, the gate."""

    operation: ClassVar[str] = "swiglu"


def multiplies_with_the_gate(config: SwigluConfig, arch: ArchSpec) -> Iterable[Violation]:
    """The epilogue multiplies with one operand, in fp32."""
    if (config.binary, config.num_d_tensors, config.d) != (STEP["binary"], 1, ("fp32",)):
        reason = "the second product is multiplied with the gate, one fp32 operand"
        yield Violation("multiplies_with_the_gate", "binary", config.binary.value, reason, STEP)


def computes_one_type(config: SwigluConfig, arch: ArchSpec) -> Iterable[Violation]:
    """All matrices but the gate have one float type."""
    if config.dtype_a not in (DType.FP32, DType.FP16, DType.BF16):
        yield Violation("computes_one_type", "dtype_a", config.a, "fp32, fp16 or bf16", {"dtype_a": DType.FP32})
    elif config.c != config.a:
        yield Violation("computes_one_type", "dtype_c", config.c, f"the same type as x: {config.a}", {"dtype_c": ""})


RULES: RuleBook[SwigluConfig] = RuleBook((multiplies_with_the_gate, computes_one_type, *GEMM_RULES.rules))

_FLOATS = [DType.FP32, DType.FP16, DType.BF16]
_ALL: dict[str, Any] = {"layout": ["rrr", "rcr"], "tile": ANY, "wave": ANY, "warp_tile": ANY, **STEP}
KERNEL_SETS = {
    "default": KernelSet(
        "default",
        "The blocked kernels of CPUs, and the usual tile of NVIDIA GPUs",
        (
            declare(SwigluConfig, dtype_a=_FLOATS, pipeline="compv3", epilogue=Epilogue.DEFAULT, **_ALL).for_kinds(
                "cpu"
            ),
            declare(
                SwigluConfig,
                dtype_a=[DType.FP16, DType.BF16],
                layout=["rrr", "rcr"],
                tile=(128, 64, 32),
                wave=(2, 2, 1),
                warp_tile=ANY,
                **STEP,
            ).for_kinds("cuda"),
        ),
        offered,
    )
}
