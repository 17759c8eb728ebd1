"""Configurations: a kernel of GEMM, run over the experts of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright_arch import ArchSpec
from tilewright_gemm.fusion import RULES as GEMM_RULES
from tilewright_gemm.fusion import SCALES, GemmConfig, ScaleA, ScaleB, ScaleBlock, output_dtypes
from tilewright_kit.config.naming import suffix
from tilewright_kit.config.rules import RuleBook, Violation, rule_of
from tilewright_kit.tiles.footprint.workgroup import is_specialised
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Reduction, Unary
from tilewright_moe.problem import RESULT_BLOCK, TURN, MoeProblem

__all__ = ["RULES", "MoeConfig", "algorithm", "fused_with"]

_PLAIN: dict[str, Any] = {
    "binary": Binary.NONE, "num_d_tensors": 0, "dtype_d": (), "unary": Unary.NONE, "bias": "", "grouped": False,
    "batched": False, "preshuffle": False, "split_k": 1, "reduction": Reduction.NONE,
}  # fmt: skip
_UNSCALED: dict[str, Any] = {"scale_a": ScaleA.NONE, "scale_b": ScaleB.NONE}
_BLOCKS = tuple(pair for block, pair in SCALES.items() if block is not ScaleBlock.EXPONENTS)


@dataclass(frozen=True)
class MoeConfig(GemmConfig):
    """A kernel of GEMM whose products are those of experts. Factors of tensors and experts are no part of it."""

    operation: ClassVar[str] = "moe_gemm"

    gated: bool = suffix("swiglu", False)
    """The result is silu(gate) * up."""
    result: str = suffix("to", "")
    """Type of results that are made of the sums, which are of ``dtype_c``; fp8: with factors of blocks. Empty: the sums
    are the results.
    """

    @property
    def fused(self) -> bool:
        return self.result != ""

    @property
    def quantised(self) -> bool:
        return self.result == DType.FP8.value

    @property
    def block_columns(self) -> int:
        """Columns of the product that share a factor."""
        return RESULT_BLOCK * (2 if self.gated else 1)


def algorithm(config: GemmConfig) -> MoeConfig:
    """The same algorithm and types, for experts."""
    fields = {name: getattr(config, name) for name in GemmConfig.field_names()}
    return MoeConfig(**{**fields, "batched": False})


def fused_with(problem: MoeProblem, config: MoeConfig, arch: ArchSpec) -> MoeConfig:
    """The kernel with the steps that a problem asks for behind its sums."""
    if not problem.fused:
        return config
    out = problem.desc("out")
    assert out is not None, "parse checks that it is there"
    made = config.replace(gated=problem.gated, result=out.dtype.value)
    if arch.kind == "cpu":
        return made
    if is_specialised(made, arch):
        return made.replace(epilogue=Epilogue.DEFAULT)
    made = made.replace(epilogue=Epilogue.CSHUFFLE)
    if made.quantised:
        made = made.replace(**_block_tile(made))
    return made


def _block_tile(config: MoeConfig) -> dict[str, Any]:
    """A tile of about the same size with the columns of a block."""
    (m, n, k), (across, along, _), rows = config.tile, config.wave, max(config.warp_tile[0], 1)
    height = max(m * n // config.block_columns // rows, 1)
    fewer = next((count for count in range(min(across, height), 0, -1) if height % count == 0), 1)
    wave = (fewer, across * along // fewer, 1)
    return {"tile": (height * rows, config.block_columns, k), "wave": wave}


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


def fused_results(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Steps behind the sums take them in fp32; those of a block that shares a factor belong to one wave of a GPU."""
    plain = {"gated": False, "result": ""}
    if config.gated and not config.fused:
        yield Violation("fused_results", "result", "", "a gate's products have a type of result", {"result": "bf16"})
    if not config.fused:
        return
    if config.result not in (*output_dtypes(config.dtype_a), DType.FP8):
        yield Violation("fused_results", "result", config.result, f"products of {config.a} have no such results", plain)
    elif config.c != "fp32":
        reason = "steps behind the sums take them in fp32"
        yield Violation("fused_results", "dtype_c", config.c, reason, {"dtype_c": "fp32"})
    elif arch.kind != "cpu":
        yield from _fused_on_gpu(config, arch)


def _fused_on_gpu(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:
    if is_specialised(config, arch):
        yield from _fused_specialised(config)
    elif config.epilogue is not Epilogue.CSHUFFLE:
        reason = "sums pass through shared memory on their way to the steps behind them"
        yield Violation("fused_results", "epilogue", config.epilogue.value, reason, {"epilogue": Epilogue.CSHUFFLE})
    elif config.quantised and config.tile[1] != config.block_columns:
        reason = f"a block that shares a factor has {config.block_columns} columns, those of a tile"
        yield Violation("fused_results", "tile", config.tile, reason, _block_tile(config))
    elif config.gated and config.wave[1] > 0 and config.tile[1] // config.wave[1] % (2 * TURN):
        reason = f"a wave has whole turns of {2 * TURN} columns"
        tile = (config.tile[0], 2 * TURN * config.wave[1], config.tile[2])
        yield Violation("fused_results", "tile", config.tile, reason, {"tile": tile})


def _has_block(config: MoeConfig) -> bool:
    """True if the consumers of ``ws`` work at the same time on the columns of a block: those of a tile."""
    return config.tile[1] == config.block_columns and config.scheduler != "pingpong"


def _fused_specialised(config: MoeConfig) -> Iterator[Violation]:
    """``ws``: threads store results; of a gate they hold both sums, and ranges of blocks they exchange."""
    if config.quantised and not _has_block(config):
        reason = f"consumers of a tile of {config.block_columns} columns find the range of a block"
        yield Violation("fused_results", "result", config.result, reason, {"gated": False, "result": ""})
    elif config.epilogue is not Epilogue.DEFAULT:
        reason = "threads store the results of steps behind the sums"
        yield Violation("fused_results", "epilogue", config.epilogue.value, reason, {"epilogue": Epilogue.DEFAULT})
    elif not config.transpose_c and config.warp_tile[1] % (2 * TURN):
        reason = f"a consumer has whole turns of {2 * TURN} columns"
        m, _, k = config.warp_tile
        fix = {"warp_tile": (m, 2 * TURN, k), "tile": (config.tile[0], 2 * TURN * config.wave[1], config.tile[2])}
        yield Violation("fused_results", "warp_tile", config.warp_tile, reason, fix)


def float_types(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """Rows and weights are floats."""
    if config.a == "int8":
        reason = "rows and weights are fp32, fp16, bf16, fp8 or bf8"
        yield Violation(
            "float_types", "dtype_a", config.a, reason, {"dtype_a": DType.BF16, "dtype_b": "", "dtype_c": ""}
        )


_PAIR = (1, 2, 1)


@rule_of("cuda", "hip")
def pairs(config: MoeConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: workgroups work alone, or in ``ws`` two of neighbouring columns load rows of x for each other."""
    single = {"cluster": (1, 1, 1)}
    if config.cluster == (1, 1, 1):
        return
    if config.cluster != _PAIR or not is_specialised(config, arch) or config.scheduler == "pingpong":
        reason = "only pairs (1, 2) of a specialised pipeline share rows, whose consumers work on one tile"
        yield Violation("pairs", "cluster", config.cluster, reason, single)


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
    if specialised and not config.fused and config.epilogue is not Epilogue.CSHUFFLE:
        reason = "the copy engine stores results up to an expert's last row"
        fix = {"epilogue": Epilogue.CSHUFFLE}
        yield Violation("clipped_rows", "epilogue", config.epilogue.value, reason, fix)


RULES: RuleBook[MoeConfig] = RuleBook(
    (float_types, plain_products, pairs, stays, fused_results, *GEMM_RULES.rules, clipped_rows)
)
