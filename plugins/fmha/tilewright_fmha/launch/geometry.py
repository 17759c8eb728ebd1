"""How the kernels of a plan are launched: a team of threads, or a one-dimensional grid of workgroups."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.config.warp_specialised import specialised_bytes
from tilewright_fmha.footprint.gpu import resident, shared_bytes
from tilewright_fmha.footprint.tile_products import threads_of
from tilewright_fmha.launch.splits import share_workgroups, shares_keys
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import Geometry
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["launch_of"]

_THREADS = 128
"""Threads of workgroups without a product of matrices."""
_ROWS = {
    Family.COMBINE: 1, Family.SCORES: 16, Family.MERGE: 8, Family.DOT_DO_O: 64, Family.CONVERT_DQ: 64,
    Family.APPENDKV: 16,
}  # fmt: skip
"""Rows of such a workgroup: of queries, or new rows of a cache."""
_SCORE_COLUMNS = 64
"""Keys of a workgroup that writes scores."""


def launch_of(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, splits: int) -> Geometry:
    """``splits``: parts of the keys, or slices of the gradients of queries."""
    if device.arch.kind == "cpu":
        return Geometry(team=config.team)
    if config.family in _ROWS:
        # What adds up the parts of split keys, or of prefixes and what follows them, waits for them by itself.
        dependent = config.family in (Family.COMBINE, Family.MERGE) and device.arch.bulk_copy is not None
        rows, shared = (_row_blocks(problem, config), 1, 1), _shared(config, device.arch)
        return Geometry(grid=rows, block=(_THREADS, 1, 1), shared_bytes=shared, dependent=dependent)
    grid = _tiles(problem, config, splits)
    if config.persistent:
        each = resident(config, device.arch) if decodes(config) else max(config.block_per_cu, 1)
        grid = min(grid, max(device.units, 1) * each)
    if shares_keys(problem, config):
        grid = share_workgroups(problem, config, device)
    block = (threads_of(config, device.arch), 1, 1)
    return Geometry(
        grid=(max(grid, 1), 1, 1),
        block=block,
        shared_bytes=_shared(config, device.arch),
        dependent=is_specialised(config),
    )


def _shared(config: FmhaConfig, arch: ArchSpec) -> int:
    whole = is_specialised(config) and config.is_forward and not decodes(config)
    return specialised_bytes(config, arch) if whole else shared_bytes(config, arch)


def _row_blocks(problem: FmhaProblem, config: FmhaConfig) -> int:
    if config.family is Family.APPENDKV:
        return max(problem.batch * (problem.heads_k + problem.heads_q) * ceil_div(problem.new_rows, 16), 1)
    if config.family is Family.MERGE:  # of whatever heads
        return max(problem.batch * ceil_div(problem.heads_q * problem.seq_q, _ROWS[Family.MERGE]), 1)
    blocks = ceil_div(problem.seq_q, _ROWS[config.family])
    if config.family is Family.SCORES:
        blocks = max(blocks, 1) * max(ceil_div(problem.seq_k, _SCORE_COLUMNS), 1)
    return max(problem.batch * problem.heads_q * blocks, 1)


def _tiles(problem: FmhaProblem, config: FmhaConfig, splits: int) -> int:
    if config.family is Family.DQ_DK_DV:
        sliced = config.deterministic and not is_specialised(config)
        pieces = splits if sliced else ceil_div(problem.seq_k, config.n0)
        return problem.batch * problem.heads_k * pieces
    rows, heads = problem.seq_q, problem.heads_q
    if config.pack_gqa:
        rows, heads = rows * problem.group, problem.heads_k
    return problem.batch * heads * ceil_div(rows, config.m0) * splits
