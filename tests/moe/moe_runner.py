"""Problems of experts with counts of any kind, run on the CPU, on GPUs' kernels in fibers, and in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cpu_kernels import CpuKernels, draw
from gemm_runner import Array, Runner

from tilewright_arch import ArchSpec
from tilewright_gemm.fusion import ScaleBlock
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare, poison
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_moe.codegen import generate
from tilewright_moe.config import MoeConfig
from tilewright_moe.plugin import MoeGemm
from tilewright_moe.problem import MoeProblem

__all__ = ["COLUMNS", "MOE", "SQUARES", "MoeRunner", "check", "problem_of"]

MOE = MoeGemm()
SQUARES, COLUMNS = ScaleBlock.ROWS_AND_SQUARES.value, ScaleBlock.ROWS_AND_COLUMNS.value
of = TensorDesc.of


class MoeRunner(Runner):
    """Builds each kernel once and runs plans."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path) -> None:
        self._kernels = CpuKernels(arch, command, folder, generate)
        self.prepare = self._kernels.build
        self.kernel = self._kernels.kernel


def problem_of(
    dtype: str, experts: int, rows: int, n: int, k: int, *, room: bool = False, gap: int = 0, **attributes: Any
) -> MoeProblem:
    """A problem with factors of both operands, whose rows lie ``gap`` elements apart. Factors of blocks (attribute
    ``scale_block``) lie as awkwardly as they may: those of x by blocks of k first, those of w with gaps.
    """
    x = (experts, rows, k) if room else (rows, k)
    out = (*x[:-1], n)
    apart = (rows * (k + gap), k + gap, 1)[-len(x) :]
    out_apart = (rows * (n + gap), n + gap, 1)[-len(x) :]
    quantised, gated = "out_scale_block" in attributes, "activation" in attributes
    wanted = attributes.get("out_dtype") or ("fp8" if quantised else {"fp8": "fp16"}.get(dtype, dtype))
    lines = 2 * n if gated else n
    inputs = {
        "x": of(dtype, x, apart),
        "w": of(dtype, (experts, lines, k)),
        "counts": of("int32", (experts,)),
        "scale_x": of("fp32", ()),
        "scale_w": of("fp32", (experts,)),
    }
    if block := attributes.get("scale_block"):
        blocks, lines = -(-k // 128), lines if block == COLUMNS else -(-lines // 128)
        inputs["scale_x"] = of("fp32", (*x[:-1], blocks), (blocks * rows, 1, rows)[-len(x) :])
        inputs["scale_w"] = of("fp32", (experts, lines, blocks), (lines * (blocks + 2), blocks + 2, 1))
    outputs = {"out": of(wanted, out, out_apart)}
    if quantised:
        blocks = -(-n // 128)
        outputs["out_scale"] = of("fp32", (*x[:-1], blocks), (blocks * rows, 1, rows)[-len(x) :])
    return MOE.parse(OperationRequest("moe_gemm", inputs, outputs, {"return_status": True, **attributes}))


def check(
    problem: MoeProblem,
    config: MoeConfig,
    device: DeviceInfo,
    counts: Sequence[int],
    run: Callable[[ExecutionPlan, Mapping[str, Array]], Mapping[str, Any]],
) -> ExecutionPlan:
    """Plan, run, and compare: rows of experts with float64, all others with what they held before."""
    assert not MOE.rules.check(config, device.arch), MOE.rules.check(config, device.arch)
    assert not MOE.mismatches(problem, config, device), MOE.mismatches(problem, config, device)
    plan = MOE.plan(problem, config, device)
    rng = np.random.default_rng(7)
    inputs = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    inputs["counts"] = np.array(counts, np.int32)
    if problem.block_scaled:  # of orders of magnitude, so that a factor of the wrong block shows
        for name in ("scale_x", "scale_w"):
            inputs[name] = np.exp2(rng.uniform(-6, 7, inputs[name].shape)).astype(np.float32)
    memory = run(plan, inputs)
    truth = MOE.reference(problem, inputs)
    desc = problem.desc("out")
    assert desc is not None
    have, written = memory["out"].view, ~np.isnan(truth["out"])
    before = poison(desc.dtype, desc.shape)
    words = f"u{desc.dtype.bytes}"
    kept = np.ascontiguousarray(have).view(words)[~written] == np.ascontiguousarray(before).view(words)[~written]
    assert kept.all(), "rows of no expert were written"
    if problem.quantised:
        _check_quantised(problem, have, memory["out_scale"].view, truth, config.name)
        assert memory["status"].view.tolist() == truth["status"].tolist(), counts
        return plan
    if problem.block_scaled:
        error = np.linalg.norm(have[written].astype(np.float64) - truth["out"][written])
        bound = {DType.FP32: 1e-6, DType.FP16: 4e-4, DType.BF16: 3e-3}[desc.dtype]
        assert error <= bound * np.linalg.norm(truth["out"][written]), (config.name, counts, error)
        assert memory["status"].view.tolist() == truth["status"].tolist(), counts
        return plan
    result = compare(have[written], truth["out"][written], desc.dtype, max(problem.k, 1), DType.FP32, before[written])
    assert result.passed, f"{config.name}, {counts}: {result}"
    assert memory["status"].view.tolist() == truth["status"].tolist(), counts
    return plan


def _check_quantised(problem: MoeProblem, have: Array, scales: Array, truth: Mapping[str, Array], name: str) -> None:
    """Factors are right but for rounding, those of no row as they were; results are within half a step of fp8."""
    own = ~np.isnan(truth["out_scale"])
    assert np.all(np.isnan(scales[~own])), f"{name}: factors of no row were written"
    # Sums of 8-bit floats and of rows of bf16 are right to some 2^-16 of their magnitude.
    assert np.allclose(scales[own], truth["out_scale"][own], rtol=1e-4, atol=0), name
    wide = np.repeat(scales.astype(np.float64), 128, -1)[..., : problem.n]
    wanted = truth["out"] * np.repeat(truth["out_scale"], 128, -1)[..., : problem.n]
    written = ~np.isnan(wanted)
    error = np.abs(have.astype(np.float64)[written] * wide[written] - wanted[written])
    allowed = np.abs(wanted[written]) * (2.0**-4 + 1e-3) + wide[written] * (2.0**-10 + 448 * 1e-4)
    assert np.all(error <= allowed), (name, float(np.max(error / allowed)))
    norm = np.linalg.norm(error) / max(np.linalg.norm(wanted[written]), 1e-30)
    assert norm <= 0.04, (name, norm)
