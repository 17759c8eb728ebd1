"""Packing of B for the pre-shuffle pipeline of AMD GPUs: which formats there are, which to choose, the launch."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.candidates.hip import HIP_SHAPES, hip_config
from tilewright_gemm.config.choices import table_key
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.config.packing import VectorFormat
from tilewright_gemm.launch.kernel_args import bare_row
from tilewright_gemm.problem.problem import PackBProblem, Product, View
from tilewright_gemm.rules.rulebook import RULES
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.plan import I64, Geometry, Pointer, Stage, Struct
from tilewright_kit.types.arithmetic import ceil_div, padded

__all__ = ["hip_pack_candidates", "hip_pack_stage", "predict_hip_pack"]

PACK_THREADS = 256
"""``PackB::threads`` of ``tilewright/gpu/gemm/pack_b.hpp``."""
_LEAST_COLUMNS = 16
"""Panels of fewer columns serve instructions of few columns, which only those who ask for them want."""
_LINE_BYTES = 128
_MAXIMUM_GRID = 1 << 16


def hip_pack_candidates(problem: PackBProblem, arch: ArchSpec) -> Iterator[PackBConfig]:
    """A kernel for every format that the arch reads, or for the one that is asked for."""
    key = table_key(problem.dtype_a.value, problem.dtype_b.value)
    for pipeline in arch.preshuffle_pipelines:
        tiles = arch.warp_tiles_for(key, pipeline)
        for columns in sorted({tile[1] for tile in tiles}, reverse=True):
            wanted = problem.packing
            if wanted is None and columns < _LEAST_COLUMNS:
                continue
            if wanted is not None and wanted != VectorFormat(problem.dtype_b.value, columns):
                continue
            found = _kernel(problem, arch, pipeline, [tile for tile in tiles if tile[1] == columns])
            if found:
                yield found


def _kernel(problem: PackBProblem, arch: ArchSpec, pipeline: str, tiles: list[Triple]) -> PackBConfig | None:
    """A pre-shuffle kernel of one of these warp tiles: which one does not matter to the packing."""
    key = table_key(problem.dtype_a.value, problem.dtype_b.value)
    for shape in HIP_SHAPES:
        config = hip_config(arch, problem.dtype_a, key, shape, pipeline, _LINE_BYTES, tiles)
        if config is None:
            continue
        fields = {name: getattr(config, name) for name in ("tile", "wave", "warp_tile", "epilogue", "scheduler")}
        packs = PackBConfig(
            dtype_a=problem.dtype_a,
            dtype_b=problem.dtype_b.value,
            layout=problem.layout,
            pipeline=pipeline,
            preshuffle=True,
            **fields,
        )
        if RULES.allows(packs, arch):
            return packs
    return None


def predict_hip_pack(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """The time of the products to come, for it is they that a format is chosen for: rows that a warp tile computes for
    nothing count, and so does what narrow ones read more often from the LDS.
    """
    rates = device.arch.throughput
    peak = rates.peak_flops(config.a, units=device.units) or 1e14
    m, n, _ = config.warp_tile
    work = 2.0 * padded(max(problem.m, 1), m) * padded(max(problem.n, 1), n) * problem.k
    compute = work / peak * (1.0 + 4.0 / n)
    read = problem.k * problem.n * problem.dtype_b.bytes / float(rates.memory_bytes_per_second or 10**12)
    return Prediction(max(compute + read, 1e-9), {"compute": compute, "memory": read})


def hip_pack_stage(problem: PackBProblem, config: GemmConfig, packing: VectorFormat, out: str) -> Stage:
    """The launch: ``GemmParams`` with B, and the packed matrix in the place of C."""
    product = Product(0, problem.n, problem.k, 1, View("", 0, 0), problem.b, View(out, 0, 0))
    row = bare_row(problem.layout, product, (1, problem.dtype_b.bytes, 1))
    vectors = ceil_div(problem.n, packing.columns) * packing.stride(problem.k) // packing.values
    groups = min(max(ceil_div(vectors, PACK_THREADS), 1), _MAXIMUM_GRID)
    head = (Pointer(), I64(1), I64(groups), Pointer(), Pointer(), I64(1), I64(0), I64(0))
    geometry = Geometry(grid=(groups, 1, 1), block=(PACK_THREADS, 1, 1))
    return Stage("pack_b", config, "pack_b", Struct((*head, Struct((row, I64(0))))), geometry)
