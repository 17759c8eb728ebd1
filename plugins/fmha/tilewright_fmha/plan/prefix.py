"""Attention over prefixes that sequences share: candidates, times and plans.

Kernels are chosen for the keys that are each sequence's own, as for any problem. A plan has the stages of the best
kernel over the prefixes, which reads each once for all rows of queries of its group, then those of the chosen one, then
one that puts both results together.
"""

from __future__ import annotations

from functools import lru_cache

from tilewright_fmha.candidates.auxiliary_kernels import merge_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes, splits_tiles
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.launch.geometry import launch_of
from tilewright_fmha.launch.kernel_args import args_of
from tilewright_fmha.pipelines.algorithms import completed
from tilewright_fmha.pipelines.candidates import fmha_candidates, fmha_mismatches, fmha_refusal, predict_fmha
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.prefix import PREFIX_OPERANDS
from tilewright_fmha.problem.problem import FmhaProblem, SharedPrefix
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.arguments import Pointer
from tilewright_kit.contract.composition import Composition
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Prediction
from tilewright_kit.contract.plan import I64, ExecutionPlan, Stage, Struct
from tilewright_kit.selection.candidates import fastest
from tilewright_kit.types.errors import UnsupportedError

__all__ = ["attention_candidates", "attention_mismatches", "attention_refusal", "plan_attention", "predict_attention"]

_ANY = "*"
"""Alignment of all operands together, in a plan's details."""
_NEARLY = 1.1
"""Specialised kernels that are predicted to take so much longer than portable ones do not: these reach the rates that
they are predicted with on full devices only.
"""


def attention_candidates(problem: FmhaProblem, device: DeviceInfo) -> Candidates[FmhaConfig]:
    """Kernels for the problem, or for the keys that are each sequence's own."""
    shared = problem.shared
    if shared is None:
        return fmha_candidates(problem, device)
    if fmha_refusal(shared.prefix, device) is not None and not fmha_candidates(shared.prefix, device):
        return Candidates(())
    return fmha_candidates(shared.rest, device)


def attention_mismatches(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> tuple[Violation, ...]:
    """Reasons why this kernel cannot compute this problem on this device; empty if it can."""
    return fmha_mismatches(problem if problem.shared is None else problem.shared.rest, config, device)


def attention_refusal(problem: FmhaProblem, device: DeviceInfo) -> Violation | None:
    """Why there is no kernel for the problem, or for one of its parts."""
    shared = problem.shared
    if shared is None:
        return fmha_refusal(problem, device)
    return fmha_refusal(shared.rest, device) or fmha_refusal(shared.prefix, device)


def predict_attention(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the whole plan, and its parts."""
    shared = problem.shared
    if shared is None:
        return predict_fmha(problem, config, device)
    rest = predict_fmha(shared.rest, config, device)
    prefix = predict_fmha(shared.prefix, _kernel(shared.prefix, device), device)
    return Prediction(rest.seconds + prefix.seconds, {**rest.parts, "prefix": prefix.seconds})


@lru_cache(maxsize=256)
def _kernel(problem: FmhaProblem, device: DeviceInfo) -> FmhaConfig:
    """The fastest kernel over prefixes by prediction. Raises ``UnsupportedError`` if there is none."""
    candidates = fmha_candidates(problem, device)
    if not candidates:
        raise UnsupportedError(
            f"no kernel of attention reads these prefixes on {device.arch.id}",
            field="prefix_table",
            value=problem.describe(),
            rule="no_candidates",
            fix="give each sequence all of its pages in block_table, or use another device",
        )

    def predict(config: FmhaConfig) -> Prediction:
        return predict_fmha(problem, config, device)

    # Tiles of many rows read keys at the rate of memory, where kernels of 32 have no more than 0.4 of it (H200).
    many = any(splits_tiles(config) for config in candidates)
    usable = [config for config in candidates if not many or (is_specialised(config) and not decodes(config))]
    best, own = fastest(usable, predict), [config for config in usable if is_specialised(config)]
    if own and predict(nearly := fastest(own, predict)).seconds <= _NEARLY * predict(best).seconds:
        return nearly
    return best


def plan_attention(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> ExecutionPlan:
    """The stages of a plan; of prefixes first, if sequences share some."""
    shared = problem.shared
    if shared is None:
        return plan_fmha(problem, config, device)
    whole = Composition()
    places: dict[str, str | Pointer] = {name: name for name in (_ANY, *(item.name for item in problem.operands))}
    own = {name: whole.intermediate(shared.prefix.operand(name).desc) for name in _outputs(shared.prefix)}
    if not problem.lse:
        places["lse"] = whole.intermediate(shared.rest.operand("lse").desc)
    if not problem.is_empty:
        of_prefix = {**places, **{its: name for name, its in PREFIX_OPERANDS.items()}, **own}
        kernel = completed(_kernel(shared.prefix, device), device.arch)
        whole.add("prefix", plan_fmha(shared.prefix, kernel, device), of_prefix)
        whole.add("rest", plan_fmha(shared.rest, config, device), places)
        whole.add("merge", _merge(shared, config, device), {**places, **{f"prefix.{name}": own[name] for name in own}})
    moved = problem.bytes_moved
    return whole.plan(problem.operation, device.arch.id, problem.operands, flops=problem.flops, bytes_moved=moved)


def _outputs(problem: FmhaProblem) -> tuple[str, ...]:
    return ("o", "lse", "status") if problem.status else ("o", "lse")


def _merge(shared: SharedPrefix, config: FmhaConfig, device: DeviceInfo) -> ExecutionPlan:
    """The last stage, ``tw_fmha_merge_args`` of ``tilewright/core/args/fmha_merge.h``: what the part over prefixes gave
    are operands of names that begin with ``prefix``.
    """
    rest, prefix = shared.rest, shared.prefix
    kernel = merge_of(config, device.arch)
    starts = Pointer("prefix_starts") if prefix.varlen else Pointer()
    status = Pointer("prefix.status") if prefix.status else Pointer()
    numbers = (prefix.batch, prefix.total_q, prefix.seq_q)
    args = Struct((
        args_of(rest), _rows_of(prefix, "o"), _rows_of(prefix, "lse"), starts, status, *(I64(item) for item in numbers)
    ))  # fmt: skip
    stage = Stage("results", kernel, "main", args, launch_of(rest, kernel, device, 1))
    return ExecutionPlan(rest.operation, device.arch.id, rest.operands, (stage,))


def _rows_of(prefix: FmhaProblem, name: str) -> Struct:
    """``tw_fmha_tensor`` of a result of the part over prefixes, by the rows of all queries: groups lie end to end."""
    head, row = (prefix.total_q, 1) if name == "lse" else (prefix.hdim_v, prefix.heads_q * prefix.hdim_v)
    return Struct((Pointer(f"prefix.{name}"), *(I64(step) for step in (0, head, row, 1, 0))))
