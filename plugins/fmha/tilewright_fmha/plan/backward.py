"""The three stages of gradients: sums of rows and zeros, then the products, then slices added and rounded."""

from __future__ import annotations

import math

from tilewright_fmha.candidates.auxiliary_kernels import convert_of, dot_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.gradients import turns_of
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.footprint.cpu import backward_bytes, lanes_of
from tilewright_fmha.footprint.gpu import resident
from tilewright_fmha.launch.geometry import launch_of
from tilewright_fmha.launch.kernel_args import args_of
from tilewright_fmha.launch.tensor_maps import with_maps
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.signature import bias_type
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import Stage, WorkspaceLayout
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["backward_parts", "choose_slices", "dbias_copies"]

MOST_SLICES = 32
_MOST_BYTES = 2 << 30
"""Bytes of slices of dq on a GPU: a server has a few GiB for the workspaces of all plans."""
_EVEN = 4
"""Pieces of work for each thread above which it does not matter that the last ones are left over."""
_SLICE = 0.4
"""Cost of zeros of a slice of dq and of its way to the sum, in blocks of keys: eight bytes an element at the rate of
memory, against the products of a block of 128 keys.
"""


def choose_slices(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> int:
    """Parts that the keys are dealt out to. Each has gradients of all queries of its own, which are added in their
    order; a bias that broadcasts over items or heads leaves them as the only thing to share out. On a GPU as many as
    let workgroups fill whole rounds of what the device holds at once, if there is memory: each is as large as dq in
    fp32.
    """
    blocks = max(ceil_div(problem.seq_k, max(config.n0, 1)), 1)
    items = max(math.prod(_owners(problem, device)), 1)
    if device.arch.kind == "cpu":
        team = config.team
        if items % team == 0 or items >= _EVEN * team:
            return 1
        return min(blocks, ceil_div(_EVEN * team, items), MOST_SLICES)
    if not config.deterministic or is_specialised(config):
        return 1
    slots = max(device.units, 1) * resident(config, device.arch)

    def cost(slices: int) -> float:
        return ceil_div(items * slices, slots) * ceil_div(blocks, slices) + _SLICE * slices * items / slots

    room = _MOST_BYTES // max(4 * _query_rows(problem) * config.hdim[0], 1)
    return min(range(1, max(min(blocks, MOST_SLICES, room), 1) + 1), key=cost)


def _in_type_of_bias(problem: FmhaProblem, kernel: FmhaConfig) -> FmhaConfig:
    """The kernel that writes the gradient of a bias in the type of the bias, not of its sum with slopes."""
    return kernel.replace(dtype_bias=bias_type(problem)) if kernel.dbias else kernel


def _query_rows(problem: FmhaProblem) -> int:
    """Rows of all heads and items."""
    return problem.heads_q * (problem.total_q if problem.varlen else problem.batch * problem.seq_q)


def _owners(problem: FmhaProblem, device: DeviceInfo) -> tuple[int, int]:
    """Batch items and key heads that are computed independently of each other. On a CPU these are not those that share
    a gradient of the bias; a GPU adds that in any order.
    """
    if not problem.dbias or device.arch.kind != "cpu":
        return problem.batch, problem.heads_k
    place = problem.place("dbias")
    return (problem.batch if place.batch else 1), (problem.heads_k if place.head else 1)


def dbias_copies(problem: FmhaProblem, slices: int) -> int:
    """One for each slice where a bias broadcasts along keys: only then do slices, which share out keys, meet."""
    return slices if problem.place("dbias").col == 0 else 1


def backward_parts(
    problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout
) -> tuple[Stage, ...]:
    """``dot_do_o``, ``dq_dk_dv``, ``convert_dq``; what they hand on is reserved in ``layout``."""
    cpu = device.arch.kind == "cpu"
    slices = choose_slices(problem, config, device)
    rows = _query_rows(problem)
    layout.reserve(4 * rows, "delta")
    layout.reserve(4 * slices * rows * config.hdim[0], "dq_acc")
    if problem.dbias:
        size = problem.operand("dbias").desc.size
        layout.reserve(4 * size * dbias_copies(problem, slices), "dbias_acc")
    nbytes = backward_bytes(config, lanes_of(device.arch)) if cpu else 0
    if nbytes:
        layout.reserve(nbytes, "workspace")
    tiles = {
        "splits": slices,
        "q_tiles": ceil_div(problem.seq_q, config.m0),
        "k_tiles": max(ceil_div(problem.seq_k, config.n0), 1),
        "workspace_bytes": nbytes,
    }
    tiles["tiles"] = math.prod(_owners(problem, device)) * slices
    turns = bool(turns_of(config, 1, 1))
    args = args_of(problem, parts=layout.offsets, counters=turns, **tiles)
    own = with_maps(problem, config, args) if is_specialised(config) else args
    return tuple(
        Stage(name, kernel, "main", own if kernel is config else args, launch_of(problem, kernel, device, slices))
        for name, kernel in (
            ("dot_do_o", dot_of(config, device.arch)),
            ("dq_dk_dv", config),
            ("convert_dq", _in_type_of_bias(problem, convert_of(config, device.arch))),
        )
    )
