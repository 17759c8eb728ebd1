"""Stages that write scores to memory: as an output, and the sum of a bias and slopes, which no kernel adds both."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.candidates.auxiliary_kernels import scores_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.launch.geometry import launch_of
from tilewright_fmha.launch.kernel_args import JOINT_BIAS, OWN_LSE, args_of, joint_items, own_tensor, tensor_args
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Scores
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import I64, Stage, Struct, WorkspaceLayout

__all__ = ["bias_stage", "open_stage", "reserve_lse", "scores_stage"]

_WHAT: Mapping[Scores, int] = {
    Scores.SCALED: 0,
    Scores.CAPPED: 1,
    Scores.MASKED: 2,
    Scores.PROBABILITIES: 3,
}
_ADDED, _OPEN = 4, 5
"""``kFmhaScaled`` and those that follow, of ``tilewright/core/args/fmha_scores.h``."""


def bias_stage(
    problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout
) -> tuple[Stage, ...]:
    """A stage before all others if there are a bias and slopes: their sum, which takes the bias's place."""
    if not problem.joint_bias:
        return ()
    size = joint_items(problem) * problem.heads_q * problem.seq_q * problem.seq_k
    args = args_of(problem)
    layout.reserve(4 * size, JOINT_BIAS)
    to = own_tensor(problem, JOINT_BIAS, layout.offsets[JOINT_BIAS])
    return (_stage("bias", problem, config, device, args, to, _ADDED),)


def open_stage(
    problem: FmhaProblem, part: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout
) -> Stage:
    """A stage before all others that makes all scores of ``problem``, but for the mask, the bias of ``part``."""
    layout.reserve(4 * joint_items(part) * part.heads_q * part.seq_q * part.seq_k, JOINT_BIAS)
    to = own_tensor(part, JOINT_BIAS, layout.offsets[JOINT_BIAS])
    return _stage("open_scores", problem, config, device, args_of(problem), to, _OPEN)


def reserve_lse(problem: FmhaProblem, layout: WorkspaceLayout) -> None:
    """Room for the logarithms of sums, which probabilities are made with, where they are no output."""
    if problem.scores is Scores.PROBABILITIES and not problem.lse:
        rows = problem.total_q if problem.varlen else problem.batch * problem.seq_q
        layout.reserve(4 * problem.heads_q * rows, OWN_LSE)


def scores_stage(
    problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout
) -> tuple[Stage, ...]:
    """A stage behind all others if scores are an output."""
    if problem.scores is Scores.NONE:
        return ()
    own = {OWN_LSE: layout.offsets[OWN_LSE]} if OWN_LSE in layout.offsets else {}
    to = tensor_args(problem, "scores")
    return (_stage("scores", problem, config, device, args_of(problem, parts=own), to, _WHAT[problem.scores]),)


def _stage(
    name: str, problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, args: Struct, to: Struct, what: int
) -> Stage:
    kernel = scores_of(problem, config, device.arch)
    return Stage(name, kernel, "main", Struct((args, to, I64(what))), launch_of(problem, kernel, device, 1))
