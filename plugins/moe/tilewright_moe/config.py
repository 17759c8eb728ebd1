"""Configurations: a kernel of GEMM, run over the experts of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright_arch import ArchSpec
from tilewright_gemm.fusion import RULES as GEMM_RULES
from tilewright_gemm.fusion import SCALES, GemmConfig, ScaleA, ScaleB, ScaleBlock
from tilewright_kit.config.rules import RuleBook, Violation, rule_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Reduction, Unary

__all__ = ["RULES", "MoeConfig", "algorithm"]

_PLAIN: dict[str, Any] = {
    "binary": Binary.NONE, "num_d_tensors": 0, "dtype_d": (), "unary": Unary.NONE, "bias": "", "grouped": False,
    "batched": False, "preshuffle": False, "split_k": 1, "reduction": Reduction.NONE, "cluster": (1, 1, 1),
}  # fmt: skip
_UNSCALED: dict[str, Any] = {"scale_a": ScaleA.NONE, "scale_b": ScaleB.NONE}
_BLOCKS = tuple(pair for block, pair in SCALES.items() if block is not ScaleBlock.EXPONENTS)


@dataclass(frozen=True)
class MoeConfig(GemmConfig):
    """A kernel of GEMM whose products are those of experts. Factors of tensors and experts are no part of it."""

    operation: ClassVar[str] = "moe_gemm"


def algorithm(config: GemmConfig) -> MoeConfig:
    """The same algorithm and types, for experts."""
    fields = {name: getattr(config, name) for name in GemmConfig.field_names()}
    return MoeConfig(**{**fields, "batched": False})


def plain_products(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """Whole products of plain weights without fused steps: what varies is which expert a workgroup finds in counts."""
    for name, value in _PLAIN.items():
        if getattr(config, name) != value:
            shown = getattr(config, name)
            reason = "products of experts are whole, and nothing is fused with them"
            yield Violation("plain_products", name, str(shown), reason, {name: value})
            return
    scales = (config.scale_a, config.scale_b)
    if scales not in (tuple(_UNSCALED.values()), *_BLOCKS):
        reason = "factors of tensors and experts are operands of every kernel; those of blocks are 1x128 and 128x128"
        yield Violation("plain_products", "scale_b", config.scale_b.value, reason, _UNSCALED)


def float_types(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """Rows and weights are floats."""
    if config.a == "int8":
        reason = "rows and weights are fp32, fp16, bf16, fp8 or bf8"
        yield Violation(
            "float_types", "dtype_a", config.a, reason, {"dtype_a": DType.BF16, "dtype_b": "", "dtype_c": ""}
        )


@rule_of("cuda", "hip")
def stays(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """GPU: workgroups stay, for how many tiles there are is known on the device alone."""
    if not config.persistent:
        reason = "workgroups go from tile to tile, whose number is data"
        yield Violation("stays", "persistent", False, reason, {"persistent": True})


@rule_of("cuda")
def clipped_rows(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: the copy engine stores results, and leaves out rows that belong to the next expert."""
    specialised = config.pipeline in arch.pipelines and arch.pipeline(config.pipeline).register_splits
    if specialised and config.epilogue is not Epilogue.CSHUFFLE:
        reason = "the copy engine stores results up to an expert's last row"
        fix = {"epilogue": Epilogue.CSHUFFLE}
        yield Violation("clipped_rows", "epilogue", config.epilogue.value, reason, fix)


RULES: RuleBook[MoeConfig] = RuleBook((float_types, plain_products, stays, *GEMM_RULES.rules, clipped_rows))
