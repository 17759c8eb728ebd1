"""The launch that packs B on a GPU."""

from __future__ import annotations

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.packing import VectorFormat
from tilewright_gemm.launch.kernel_args import bare_row
from tilewright_gemm.problem.problem import PackBProblem, Product, View
from tilewright_kit.contract.plan import I64, Geometry, Pointer, Stage, Struct
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["hip_pack_stage"]

PACK_THREADS = 256
"""``PackB::threads`` of ``tilewright/gpu/gemm/pack_b.hpp``."""
_MAXIMUM_GRID = 1 << 16


def hip_pack_stage(problem: PackBProblem, config: GemmConfig, packing: VectorFormat, out: str) -> Stage:
    """The launch: ``GemmParams`` with B, and the packed matrix in the place of C."""
    product = Product(0, problem.n, problem.k, 1, View("", 0, 0), problem.b, View(out, 0, 0))
    row = bare_row(problem.layout, product, (1, problem.dtype_b.bytes, 1))
    vectors = ceil_div(problem.n, packing.columns) * packing.stride(problem.k) // packing.values
    groups = min(max(ceil_div(vectors, PACK_THREADS), 1), _MAXIMUM_GRID)
    head = (Pointer(), I64(1), I64(groups), Pointer(), Pointer(), I64(1), I64(0), I64(0))
    geometry = Geometry(grid=(groups, 1, 1), block=(PACK_THREADS, 1, 1))
    return Stage("pack_b", config, "pack_b", Struct((*head, Struct((row, I64(0))))), geometry)
