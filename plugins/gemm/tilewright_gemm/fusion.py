"""The public part of GEMM, for plugins that fuse something around products.

A product is asked for by a request (``parse_gemm``), a kernel for it is chosen (``gemm_candidates``, ``best_kernel``,
``predict_gemm``), and its plan (``plan_gemm``) becomes a part of a larger one by ``Composition`` of the kit. A plugin
may derive its configuration from ``GemmConfig``: ``RULES`` and ``generate`` take it, ``kernel_for`` gives its algorithm
to another product. A plugin with kernels of its own over GEMM's blocks states a configuration to them with
``config_struct``, ``kernel_type`` and ``kernel_header``, and a product with ``problem_row``; ``workspace_bytes`` is
what such a kernel needs on a CPU, and ``Shape`` a cut of the warp-specialised ``PIPELINE``. ``SCALES`` are the blocks
that have factors, which ``check_block_scales`` and ``scale_shapes`` judge by; ``spread_factors`` gives each element
its own.
"""

from __future__ import annotations

from functools import lru_cache

from tilewright_gemm.candidates.warp_specialised import PIPELINE, Shape
from tilewright_gemm.codegen import config_struct, generate, kernel_header, kernel_type
from tilewright_gemm.config.block_scales import SCALES, scale_shapes, spread_factors
from tilewright_gemm.config.choices import offered
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.footprint.cpu import workspace_bytes
from tilewright_gemm.launch.kernel_args import problem_row
from tilewright_gemm.pipelines.candidates import gemm_candidates, gemm_mismatches, predict_gemm, with_signature
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.plan.plan import plan_gemm
from tilewright_gemm.problem.block_scales import check_block_scales
from tilewright_gemm.problem.parse import parse_gemm
from tilewright_gemm.problem.problem import GemmProblem, Product, View
from tilewright_gemm.references.reference import reference_gemm
from tilewright_gemm.vocabulary import ScaleA, ScaleB, ScaleBlock, default_output, output_dtypes
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.candidates import fastest
from tilewright_kit.types.errors import UnsupportedError

__all__ = [
    "PIPELINE",
    "RULES",
    "SCALES",
    "GemmConfig",
    "GemmProblem",
    "Product",
    "ScaleA",
    "ScaleB",
    "ScaleBlock",
    "Shape",
    "View",
    "best_kernel",
    "check_block_scales",
    "config_struct",
    "default_output",
    "gemm_candidates",
    "gemm_mismatches",
    "generate",
    "kernel_for",
    "kernel_header",
    "kernel_type",
    "offered",
    "output_dtypes",
    "parse_gemm",
    "plan_gemm",
    "predict_gemm",
    "problem_row",
    "reference_gemm",
    "scale_shapes",
    "spread_factors",
    "workspace_bytes",
]


def kernel_for(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> GemmConfig:
    """A kernel of GEMM with the algorithm of ``config`` for ``problem``, or, where that cannot be, the best one."""
    plain = GemmConfig(**{name: getattr(config, name) for name in GemmConfig.field_names()})
    found = with_signature(problem, plain)
    if RULES.allows(found, device.arch) and not gemm_mismatches(problem, found, device):
        return found
    return best_kernel(problem, device)


@lru_cache(maxsize=256)
def best_kernel(problem: GemmProblem, device: DeviceInfo) -> GemmConfig:
    """The fastest candidate by prediction. Raises ``UnsupportedError`` if there is none."""
    candidates = gemm_candidates(problem, device)
    if not candidates:
        raise UnsupportedError(
            f"no kernel of gemm computes a product of this request on {device.arch.id}",
            field="problem",
            value=problem.describe(),
            rule="no_candidates",
            fix="use other element types or layouts, or another device",
        )
    return fastest(candidates, lambda config: predict_gemm(problem, config, device))
