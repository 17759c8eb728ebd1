"""Products for static analysis: which one a text means for a kernel, and what of it there is to compute."""

from __future__ import annotations

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.narrow import widths
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.problem.resize import block_operands
from tilewright_kit.contract.abilities import Product, WorkShare
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.tiles.work_share import tile_share
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["DEFAULT_SHAPE", "gemm_analysis_request", "gemm_product", "gemm_share"]

DEFAULT_SHAPE = "4096,4096,4096"


def gemm_analysis_request(config: GemmConfig, shape: str) -> OperationRequest:
    """The plain product of ``M,N,K`` for a kernel, of its blocks if it has any: what it fuses changes nothing of its
    launch.

    Raises ``InvalidArgumentError``.
    """
    try:
        m, n, k = (int(part) for part in shape.lower().replace("x", ",").split(","))
    except ValueError:
        m = n = k = 0
    if min(m, n, k) < 1:
        raise refuse("a shape is three positive sizes", "shape", shape, "analysis_shape", "write it as M,N,K")
    inputs = {
        "a": TensorDesc.of(config.dtype_a, (m, k), (1, m) if config.layout[0] == "c" else (k, 1)),
        "b": TensorDesc.of(config.dtype_b or config.dtype_a, (k, n), (1, k) if config.layout[1] == "c" else (n, 1)),
    }
    attributes = {"out_dtype": str(config.dtype_c)} if config.dtype_c else {}
    if config.block_scaled:
        own, words = block_operands(config.scale_a, config.scale_b, (), (m, n, k))
        inputs |= own
        attributes |= words
    return OperationRequest("gemm", inputs, {}, attributes)


def gemm_product(problem: GemmProblem) -> Product:
    """One plain product."""
    m, n, k = problem.m, problem.n, problem.k
    bits_a, bits_b = widths(problem.scale_a, problem.scale_b)
    nbytes = (m * k * problem.dtype_a.bytes * bits_a + k * n * problem.dtype_b.bytes * bits_b) // 8
    return Product(
        m=m,
        n=n,
        k=k,
        batch=len(problem.products),
        dtype=problem.dtype_a,
        dtype_out=problem.dtype_c,
        bytes_in=len(problem.products) * nbytes,
        bytes_out=len(problem.products) * m * n * problem.dtype_c.bytes,
    )


def gemm_share(problem: GemmProblem, config: GemmConfig, workgroups: int) -> WorkShare:  # noqa: ARG001
    """One output tile, or a slice of its K, after the other."""
    return tile_share(gemm_product(problem), config.tile, config.split_k)
