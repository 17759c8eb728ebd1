"""The launch: one stage, whose kernel finds in ``counts`` which rows are whose.

Arguments are ``tw_moe_args`` of ``tilewright/core/args/moe.h``, field for field; a test compares the two.
"""

from __future__ import annotations

import math
from typing import Any

from tilewright_arch import BulkCopy
from tilewright_gemm.fusion import problem_row, workspace_bytes
from tilewright_kit.contract.arguments import WORKSPACE, Arg, Pointer, Struct, TensorMap
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import I64, ExecutionPlan, Geometry, Stage
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.tiles.footprint.workgroup import is_specialised, shared_bytes, size_of, threads_of
from tilewright_kit.types.arithmetic import ceil_div, padded
from tilewright_kit.types.dtypes import DType
from tilewright_moe.config import MoeConfig
from tilewright_moe.problem import MoeProblem

__all__ = ["TABLE_BYTES", "beside_bytes", "most_tiles", "plan_moe"]

_PROBLEM_BYTES = 232
"""``sizeof(tw_gemm_problem)``: CPU kernels list the products of all experts in the workspace."""
_ALIGNMENT = 64
_STORE_ROWS = 64
"""Rows of the result that one copy stores where they lie along the instruction's fixed side."""
_WARPS = 4
"""Warps of a consumer."""
TABLE_BYTES = 8
"""Bytes of the table in shared memory for each expert: its first tile and its first row."""


def plan_moe(problem: MoeProblem, config: MoeConfig, device: DeviceInfo) -> ExecutionPlan:
    """One stage; none if there is nothing to write."""
    details: dict[str, Any] = {"partial": ["out", *(["out_scale"] if problem.quantised else [])]}
    stages: tuple[Stage, ...] = ()
    nbytes = 0
    if device.arch.kind == "cpu":
        (product,) = problem.product(problem.rows, problem.experts).products
        scratch = workspace_bytes(config, (product,), 1)
        sums = problem.all_rows * problem.columns * DType.FP32.bytes if problem.fused else 0
        nbytes = padded(problem.experts * _PROBLEM_BYTES, _ALIGNMENT) + padded(sums, _ALIGNMENT) + scratch
        stages = (Stage("main", config, "main", Struct(_arguments(problem, nbytes)), Geometry(team=config.waves)),)
    else:
        details["alignment"] = _alignments(problem, config, device)
        stages = (_gpu_stage(problem, config, device),)
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=problem.operands,
        stages=() if problem.is_empty else stages,
        workspace_bytes=0 if problem.is_empty else nbytes,
        flops=problem.flops,
        bytes_moved=problem.bytes_moved,
        details=details,
    )


def _arguments(problem: MoeProblem, nbytes: int = 0) -> tuple[Arg, ...]:
    """``tw_moe_args``."""
    gemm = problem.product(problem.rows, problem.experts)
    # Those of blocks are the product's own.
    scales = () if problem.block_scaled else ("scale_x", "scale_w")
    scale_w = None if problem.block_scaled else problem.desc("scale_w")
    each = scale_w is not None and scale_w.size > 1
    return (
        problem_row(gemm, gemm.products[0], Pointer()),
        Pointer("counts"),
        *(
            Pointer(name if name in scales and problem.desc(name) is not None else "")
            for name in ("scale_x", "scale_w")
        ),
        I64(scale_w.strides[0] if scale_w is not None and each else 0),
        Pointer("status" if problem.desc("status") is not None else ""),
        I64(int(problem.masked)),
        Pointer(WORKSPACE) if nbytes else Pointer(),
        I64(nbytes),
        _result_scales(problem),
    )


def _result_scales(problem: MoeProblem) -> Struct:
    """Factors of blocks of the result: ``tw_gemm_operand``."""
    desc = problem.desc("out_scale")
    if desc is None:
        return Struct((Pointer(), I64(0), I64(0), I64(0)))
    rows, blocks = desc.strides[-2:]
    return Struct((Pointer("out_scale"), I64(rows), I64(blocks), I64(desc.strides[0] if problem.masked else 0)))


# ---- GPUs ----


def most_tiles(problem: MoeProblem, config: MoeConfig) -> int:
    """Tiles of results that there are at most, however rows are shared out."""
    m, n, _ = config.tile
    rows = problem.rows // m + min(problem.experts, problem.rows)
    if problem.masked:
        rows = problem.experts * ceil_div(problem.rows, m)
    return max(rows, 1) * ceil_div(problem.columns, n * config.cluster[1]) * config.cluster[1]


def beside_bytes(problem: MoeProblem, config: MoeConfig) -> int:
    """Bytes of ``ws`` behind all that GEMM has in shared memory: the table of experts, and what consumers find the
    ranges of blocks of results through.
    """
    table = padded((problem.experts + 1) * TABLE_BYTES, 16)
    exchange = 2 * config.waves * _WARPS * config.tile[0] * DType.FP32.bytes if config.quantised else 0
    return table + exchange


def _gpu_stage(problem: MoeProblem, config: MoeConfig, device: DeviceInfo) -> Stage:
    arch = device.arch
    special = is_specialised(config, arch)
    shared = shared_bytes(config, arch)
    resident = 1 if special else max(min(arch.lds_bytes // max(shared, 1), 2), 1)
    together = math.prod(config.cluster)
    tiles = padded(max(most_tiles(problem, config), 1), together)
    geometry = Geometry(
        grid=(min(units_of(device) * resident // together * together, tiles), 1, 1),
        block=(threads_of(config, arch), 1, 1),
        cluster=(together, 1, 1),
        shared_bytes=shared + (beside_bytes(problem, config) if special else 0),
        dependent=special,
    )
    maps = _maps(problem, config, arch.bulk_copy) if special and arch.bulk_copy else ()
    return Stage("main", config, "main", Struct((*maps, *_arguments(problem))), geometry)


def _maps(problem: MoeProblem, config: MoeConfig, copies: BulkCopy) -> tuple[TensorMap, ...]:
    """Descriptors of x, w and the result.

    That of the result shows its rows twice: dimension 1 are the ``tile_m`` rows that end where the copy engine stops,
    dimension 2 says where they are. A copy that begins r rows before the end of dimension 1 stores r rows, however
    high its box: so the last tile of an expert leaves the rows of the next one alone.
    """
    gemm = problem.product(problem.rows, problem.experts)
    (product,) = gemm.products
    row = copies.swizzle_bytes // gemm.dtype_a.bytes
    m, n, k = config.tile
    x, w, out = product.a, product.b, product.out
    size, size_w, size_c = gemm.dtype_a.bytes, gemm.dtype_b.bytes, size_of(config.c)
    x_row = max(x.row_stride, problem.k) * size if problem.rows <= 1 else x.row_stride * size
    x_row = padded(x_row, copies.alignment) if problem.rows <= 1 else x_row
    experts = problem.experts
    along_n = problem.layout[1] == "r"
    cols, lines = (problem.columns, problem.k) if along_n else (problem.k, problem.columns)
    step = w.row_stride if along_n else w.col_stride
    w_row = step * size_w if lines > 1 else padded(cols * size_w, copies.alignment)
    out_row = out.row_stride * size_c if problem.rows > 1 else padded(problem.n * size_c, copies.alignment)
    each = out.batch_stride * size_c // out_row if problem.masked else 0
    last = (experts - 1) * each + problem.rows
    stored = m if config.transpose_c else _STORE_ROWS
    of_x = TensorMap(
            "x", 0, gemm.dtype_a.value, (problem.k, problem.rows, experts if problem.masked else 1),
            (x_row, x.batch_stride * size if problem.masked and experts > 1 else x_row),
            (row, m // config.cluster[1], 1),
    )  # fmt: skip
    of_w = TensorMap(
            "w", 0, gemm.dtype_b.value, (cols, lines, experts),
            (w_row, w.batch_stride * size_w if experts > 1 else w_row), (row, k if along_n else n, 1),
    )  # fmt: skip
    if problem.fused:  # which threads store: the third map is not read
        return (of_x, of_w, of_x)
    return (of_x, of_w, TensorMap(
            "out", -m * out_row, config.c, (problem.n, m, last + m), (out_row, out_row),
            (copies.swizzle_bytes // size_c, stored, 1),
    ))  # fmt: skip


def _alignments(problem: MoeProblem, config: MoeConfig, device: DeviceInfo) -> dict[str, int]:
    wanted = {item.name: item.desc.dtype.bytes for item in problem.operands}
    copies = device.arch.bulk_copy if is_specialised(config, device.arch) else None
    if copies:
        wanted |= dict.fromkeys(("x", "w", "out"), copies.alignment)
    return wanted
