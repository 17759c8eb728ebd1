"""Rules on kernels with operands of fewer than 8 bits (``config.narrow`` has the contract)."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.block_scales import takes_exponents, takes_packed
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.narrow import narrow_a, narrow_b
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.dtypes import DType

__all__ = ["NARROW_LAYOUT", "NARROW_PIPELINE", "narrow_operands", "narrow_steps"]

NARROW_LAYOUT, NARROW_PIPELINE = "rc", "compv3"
"""Letters of A and B, whose values lie along k; and the pipeline of kernels that widen values on their way through
registers to shared memory.
"""


def narrow_operands(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """Narrow values are multiplied as fp8, and lie along k; so does what is beside them."""
    for field, form, dtype in (
        ("dtype_a", narrow_a(config.scale_a), config.a),
        ("dtype_b", narrow_b(config.scale_b), config.b),
    ):
        if form and dtype != DType.FP8.value:
            reason = f"values of {form.name} are multiplied as fp8"
            fix = DType.FP8 if field == "dtype_a" else DType.FP8.value
            yield Violation("narrow_operands", field, dtype, reason, {field: fix})
            return
    if config.narrow and config.layout[:2] != NARROW_LAYOUT:
        reason = "packed values, and the operand beside them, lie along k"
        yield Violation("narrow_operands", "layout", config.layout, reason, {"layout": f"{NARROW_LAYOUT}r"})


def narrow_steps(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Instructions that take narrow values as they are stored serve the main loops of plain products; elsewhere values
    are widened in the pipeline that does so.
    """
    if not config.narrow or arch.kind == "cpu" or config.pipeline not in arch.pipelines:
        return
    if config.pipeline == NARROW_PIPELINE or takes_packed(config, arch):
        return
    if takes_exponents(config, arch) and takes_packed(config.replace(pipeline="compv4"), arch):
        fix: dict[str, object] = {"pipeline": "compv4"}
        reason = f"tiles of 6-bit values do not go straight to LDS, as pipeline {config.pipeline} has them"
    else:
        reason = f"narrow values are not widened in pipeline {config.pipeline} of {arch.id}"
        fix = {
            "pipeline": NARROW_PIPELINE, "scheduler": arch.pipeline(NARROW_PIPELINE).schedulers[0], "stages": 0,
            "cluster": (1, 1, 1), "transpose_c": False, "num_wave_groups": 1,
        }  # fmt: skip
    yield Violation("narrow_steps", "pipeline", config.pipeline, reason, fix)
