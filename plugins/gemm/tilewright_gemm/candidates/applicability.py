"""Reasons why a valid kernel cannot compute a problem."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec, BulkCopy
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.packing import VectorFormat, packing_of
from tilewright_gemm.launch.geometry import Matrix, alignments, matrices, tiles_of
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.applicability import (
    canonical,
    other_signature,
    slices_asked,
    team_too_large,
    unpadded_sizes,
)

__all__ = ["bulk_copy_mismatches", "copy_fault", "gpu_mismatches", "signature_mismatches"]

_LARGEST = 2**31 - 1
"""Kernels count rows, columns, steps and tiles in 32 bits."""
_LARGEST_STRIDE = 2**40
"""Bytes; ``cuTensorMapEncodeTiled``."""


def signature_mismatches(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Iterator[Violation]:
    """Differences between what the problem asks and the kernel computes, on any kind of device."""
    wanted: dict[str, tuple[object, object]] = {
        "dtype_a": (config.a, problem.dtype_a.value),
        "dtype_b": (config.b, problem.dtype_b.value),
        "dtype_c": (config.c, problem.dtype_c.value),
        "layout": (config.layout, problem.layout),
        "binary": (canonical(config.binary), canonical(problem.binary)),
        "dtype_d": (config.d, tuple(dtype.value for dtype in problem.dtype_d)),
        "unary": (config.unary, problem.unary),
        "bias": (config.bias, problem.dtype_bias.value if problem.dtype_bias else ""),
        "scale_a": (config.scale_a, problem.scale_a),
        "scale_b": (config.scale_b, problem.scale_b),
    }
    if device.arch.kind != "cuda":  # which rejects a packed B with a reason of its own
        wanted["preshuffle"] = (config.preshuffle, problem.packing is not None)
    yield from other_signature(wanted, unmendable=("dtype_d",))
    if problem.grouped and not config.grouped:
        yield Violation("variant", "grouped", False, "the problem has several products", {"grouped": True})
    elif problem.is_batched and not (config.batched or config.grouped):
        yield Violation("variant", "batched", False, "the problem is batched", {"batched": True})
    if not problem.grouped:
        yield from slices_asked(problem.split_k, config.split_k, "K")
    if config.reduction is not Reduction.NONE and problem.grouped:
        yield Violation("variant", "reduction", config.reduction.value, "Stream-K takes one product")
    reads = packing_of(config, device.arch)
    if problem.packing and device.arch.kind != "cuda" and reads != problem.packing:
        reason = f"B is packed as {problem.packing}, the kernel reads {reads}"
        yield Violation("packing", "warp_tile", config.warp_tile, reason)
    yield from unpadded_sizes(config, problem.products)
    yield from team_too_large(config, device)


def gpu_mismatches(problem: GemmProblem, config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Reasons of the device, and of the places of the operands, on any GPU."""
    if problem.packing and not arch.preshuffle_pipelines:
        reason = f"B is packed for another device; kernels of {arch.id} read a plain B"
        yield Violation("packing", "preshuffle", config.preshuffle, reason)
        return
    if isinstance(problem.packing, VectorFormat) and (beyond := problem.packing.beyond(problem.k, problem.n)):
        yield Violation("packed_range", "b", str(problem.packing), f"{beyond}: pack ranges of its columns")
        return
    if problem.split_k == 1 and (config.split_k > 1 or config.reduction is not Reduction.NONE):
        reason = "the caller asked for one slice of K"
        yield Violation("variant", "split_k", config.split_k, reason, {"split_k": 1, "reduction": Reduction.NONE})
    yield from _range(problem, config)
    yield from _alignment(problem, config, arch)


def bulk_copy_mismatches(problem: GemmProblem, config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Operands that the copy engine does not reach, and sums that warpgroup instructions keep too few bits of."""
    if arch.bulk_copy:
        yield from _copies(problem, config, arch.bulk_copy)
    promoted = config.promote > 0 or config.block_scaled
    if problem.dtype_a in ("fp8", "bf8") and not promoted and not problem.fast_accumulation:
        reason = "the matrix unit keeps fewer bits of sums of 8-bit floats than fp32 has"
        fix = {"promote": config.tile[2] // config.warp_tile[2]}
        yield Violation("accumulation", "promote", 0, reason, fix)


def _range(problem: GemmProblem, config: GemmConfig) -> Iterator[Violation]:
    sizes = max(max(item.m, item.n, item.k) for item in problem.products)
    tiles = sum(tiles_of(item, config) for item in problem.products)
    steps = -(-problem.k // config.tile[2])
    if sizes > _LARGEST or tiles * max(steps, config.split_k) > _LARGEST:
        reason = f"{tiles} tiles of {steps} steps are more than 32 bits count"
        yield Violation("index_range", "tile", config.tile, reason)


def _alignment(problem: GemmProblem, config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    needed = max(alignments(problem, config, arch).values(), default=1)
    if needed > problem.alignment:
        reason = f"operands lie at multiples of {problem.alignment} bytes; the kernel needs {needed}"
        yield Violation("alignment", "pipeline", config.pipeline, reason)


def _copies(problem: GemmProblem, config: GemmConfig, copies: BulkCopy) -> Iterator[Violation]:
    for product in problem.products:
        if product.is_empty:
            continue
        if product.k == 0:
            yield Violation("empty_k", "pipeline", config.pipeline, "there is nothing to copy for a K of zero")
            return
        a, b, c = matrices(problem, product)
        for name, matrix in (("A", a), ("B", b)):
            fault = copy_fault(matrix, product.batch, copies)
            if fault:
                yield Violation("copy_strides", "pipeline", config.pipeline, f"{name}: {fault}")
                return
        fault = copy_fault(c, product.batch, copies)
        if fault and config.epilogue is Epilogue.CSHUFFLE:
            fix = {"epilogue": Epilogue.DEFAULT}
            yield Violation("copy_strides", "epilogue", config.epilogue.value, f"C: {fault}", fix)
            return


def copy_fault(matrix: Matrix, batch: int, copies: BulkCopy) -> str:
    """Reason why the copy engine cannot reach an operand; empty if it can."""
    unit, size, view = copies.alignment, matrix.dtype.bytes, matrix.view
    if view.offset * size % unit:
        return f"it begins at byte {view.offset * size}, not at a multiple of {unit}"
    row = matrix.stride_bytes
    if row % unit or row >= _LARGEST_STRIDE:
        return f"its rows are {row} bytes apart, not a multiple of {unit}"
    if row < matrix.cols * size:
        return "its rows overlap"
    if batch > 1 and (view.batch_stride * size % unit or view.batch_stride * size >= _LARGEST_STRIDE):
        return f"its matrices are {view.batch_stride * size} bytes apart, not a multiple of {unit}"
    return ""
