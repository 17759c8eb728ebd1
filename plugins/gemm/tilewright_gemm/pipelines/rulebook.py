"""All rules of GEMM, in the order in which they are checked and corrected.

No rule knows an arch's numbers: they come from ``ArchSpec``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.record import PipelineRules
from tilewright_gemm.pipelines.records import PIPELINES, pipeline_of
from tilewright_gemm.rules import cuda, tiles, variants
from tilewright_gemm.rules.block_scales import block_registers, block_scales, block_steps
from tilewright_gemm.rules.int4 import int4_operands, int4_registers, int4_steps
from tilewright_gemm.rules.narrow import narrow_operands, narrow_steps
from tilewright_gemm.rules.signature import SIGNATURE_RULES
from tilewright_kit.config.rules import KindRule, Rule, RuleBook, Violation
from tilewright_kit.tiles.rules.resources import shared_memory
from tilewright_kit.tiles.rules.tiling import always_padded, cpu_waves, gpu_waves, paired_columns, stage_count

__all__ = ["RULES"]


def template(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """There is a template that issues the instruction of the arch's pipeline."""
    if config.pipeline not in arch.pipelines or pipeline_of(config, arch):
        return
    known = next((name for name in arch.pipelines if pipeline_of(config.replace(pipeline=name), arch)), "")
    fix = {"pipeline": known, "scheduler": arch.pipeline(known).schedulers[0]} if known else {}
    reason = f"no template of GEMM has pipeline {config.pipeline} of {arch.id} with its instructions"
    yield Violation("template", "pipeline", config.pipeline, reason, fix)


def _of_pipelines(place: Callable[[PipelineRules], tuple[Rule[GemmConfig], ...]]) -> Iterator[Rule[GemmConfig]]:
    for record in PIPELINES:
        for rule in place(record.rules):
            yield KindRule(rule, (record.kind,))


RULES: RuleBook[GemmConfig] = RuleBook(
    (
        *SIGNATURE_RULES,
        block_scales,
        narrow_operands,
        int4_operands,
        *tiles.SHAPE_RULES,
        template,
        *_of_pipelines(lambda rules: rules.instruction),
        *tiles.WORKGROUP_RULES,
        *_of_pipelines(lambda rules: rules.registers),
        narrow_steps,
        block_steps,
        int4_steps,
        *tiles.RESOURCE_RULES,
        block_registers,
        int4_registers,
        *variants.VARIANT_RULES,
        *cuda.CLUSTER_RULES,
        stage_count,
        cuda.promotion,
        *_of_pipelines(lambda rules: rules.copies),
        cuda.always_persistent,
        always_padded,
        paired_columns,
        shared_memory,
        cuda.transposed_fragments,
        cpu_waves,
        gpu_waves,
    )
)
