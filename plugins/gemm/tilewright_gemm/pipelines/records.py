"""The pipelines of GEMM, one record for each template.

A pipeline is added here: a record that names its template, tile shapes, cost, rules and kernel sets, the template's
header under ``native/include/tilewright``, and its tests. Archs have it by naming it in their specs.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_gemm.candidates.applicability import bulk_copy_mismatches
from tilewright_gemm.candidates.cpu import cpu_algorithms
from tilewright_gemm.candidates.cuda import cuda_algorithms
from tilewright_gemm.candidates.hip import hip_algorithms
from tilewright_gemm.candidates.warp_specialised import PIPELINE as WS
from tilewright_gemm.candidates.warp_specialised import ws_algorithms, ws_reaches
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.cpu import predict_cpu
from tilewright_gemm.cost.cuda import predict_portable
from tilewright_gemm.cost.hip import predict_hip
from tilewright_gemm.cost.warp_specialised import predict_warp_specialised
from tilewright_gemm.kernel_sets.cpu import CPU_DEFAULTS
from tilewright_gemm.kernel_sets.cuda import CUDA_DEFAULTS
from tilewright_gemm.kernel_sets.hip import HIP_DEFAULTS
from tilewright_gemm.kernel_sets.warp_specialised import SWEEP_HOPPER, TUNE_HOPPER, WS_DEFAULTS
from tilewright_gemm.pipelines.record import Pipeline, PipelineRules
from tilewright_gemm.rules import warp_specialised as ws

__all__ = ["PIPELINES", "pipeline_of"]

PIPELINES: tuple[Pipeline, ...] = (
    Pipeline(
        names=("mem", "compv1", "compv3", "preshufflev2"),
        kind="cpu",
        template="cpu_gemm.cpp.in",
        algorithms=cpu_algorithms,
        predict=predict_cpu,
        declarations=CPU_DEFAULTS,
    ),
    Pipeline(
        names=("mem", "compv3", "compv4", "comp_async", "preshufflev2"),
        kind="hip",
        template="gpu_gemm.cu.in",
        algorithms=hip_algorithms,
        predict=predict_hip,
        declarations=HIP_DEFAULTS,
    ),
    Pipeline(
        names=(WS,),
        kind="cuda",
        template="sm90_gemm.cu.in",
        instructions=frozenset({"wgmma"}),
        algorithms=ws_algorithms,
        reaches=ws_reaches,
        predict=predict_warp_specialised,
        mismatches=bulk_copy_mismatches,
        rules=PipelineRules(
            instruction=(ws.swapped_warp_tile,),
            registers=(ws.register_split,),
            copies=(ws.one_instruction_wide, ws.swizzled_rows, ws.mn_major, ws.copy_box, ws.stored_lines),
        ),
        declarations=WS_DEFAULTS,
        spaces=(TUNE_HOPPER, SWEEP_HOPPER),
    ),
    Pipeline(
        names=("compv3", "compv4"),
        kind="cuda",
        template="gpu_gemm.cu.in",
        instructions=frozenset({"simt", "mma"}),
        algorithms=cuda_algorithms,
        predict=predict_portable,
        declarations=CUDA_DEFAULTS,
    ),
)
"""In the order in which their candidates are proposed."""


def pipeline_of(config: GemmConfig, arch: ArchSpec) -> Pipeline | None:
    """The record of a configuration's pipeline on an arch; None if there is no template for it."""
    return next((record for record in PIPELINES if record.has(config.pipeline, arch)), None)
