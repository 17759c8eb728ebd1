"""Rules on what GPUs add: clusters, stages in shared memory, and the warp-specialised pipeline of Hopper.

A workgroup of the ``ws`` pipeline copies boxes of A and B with the bulk copy engine and multiplies them with
instructions of 64 rows and a flexible number of columns; ``transpose_c`` swaps the two.
"""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import Reduction
from tilewright_kit.config.rules import Violation, rule_of
from tilewright_kit.tiles.footprint.workgroup import is_specialised
from tilewright_kit.tiles.tables import nearest

__all__ = ["CLUSTER_RULES", "always_persistent", "promotion", "transposed_fragments", "wave_groups"]

PINGPONG_GROUPS = 2


def cluster(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The pipeline can be launched in such clusters of workgroups."""
    if config.pipeline not in arch.pipelines:
        return
    table = arch.pipeline(config.pipeline).clusters
    if config.cluster not in table:
        listed = ", ".join("x".join(map(str, entry)) for entry in table)
        reason = f"pipeline {config.pipeline} of {arch.id} has clusters {listed}"
        # Slices of K are not what was asked for.
        along = [entry for entry in table if entry[2] == 1]
        yield Violation("cluster", "cluster", config.cluster, reason, {"cluster": nearest(config.cluster, along)})


def slices_in_cluster(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A cluster along k holds all slices of a tile, and its workgroups end with that tile."""
    if config.cluster[2] == 1 or config.pipeline not in arch.pipelines:
        return
    if config.scheduler == "pingpong" or config.reduction is not Reduction.NONE or config.grouped:
        reason = "workgroups that stay, and groups of products, do not share K within a cluster"
        yield Violation("slices_in_cluster", "cluster", config.cluster, reason, {"cluster": (*config.cluster[:2], 1)})
    elif config.split_k != config.cluster[2]:
        reason = f"the {config.cluster[2]} workgroups of a cluster along k are the slices of a tile"
        fix = {"split_k": config.cluster[2]}
        yield Violation("slices_in_cluster", "split_k", config.split_k, reason, fix)
    elif config.persistent:
        reason = "a cluster along k ends with its tile"
        yield Violation("slices_in_cluster", "persistent", True, reason, {"persistent": False})


def promotion(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Only sums of 8-bit floats in the warp-specialised pipeline are promoted; all others are full fp32 anyway. Those
    of blocks that have scales always are.
    """
    if config.promote == 0:
        return
    if config.block_scaled:
        reason = "sums of blocks that have scales are promoted anyway"
        yield Violation("promotion", "promote", config.promote, reason, {"promote": 0})
        return
    if config.a not in ("fp8", "bf8") or not is_specialised(config, arch):
        reason = f"sums of {config.a} in pipeline {config.pipeline} have all bits already"
        yield Violation("promotion", "promote", config.promote, reason, {"promote": 0})
        return
    # Instructions per stage: sums are promoted between stages.
    unit = max(config.tile[2] // max(config.warp_tile[2], 1), 1)
    if config.promote < 1 or config.promote % unit:
        reason = f"sums are promoted after whole stages of {unit} instructions"
        mended = max(-(-config.promote // unit), 1) * unit
        yield Violation("promotion", "promote", config.promote, reason, {"promote": mended})


def wave_groups(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Only pipelines whose wave groups alternate have more than one: exactly two in the pingpong schedule."""
    groups = config.num_wave_groups
    if config.scheduler == "pingpong":
        if groups != PINGPONG_GROUPS:
            reason = f"{PINGPONG_GROUPS} wave groups alternate in the pingpong schedule"
            yield Violation("wave_groups", "num_wave_groups", groups, reason, {"num_wave_groups": PINGPONG_GROUPS})
    elif groups != 1:
        reason = "only the wave groups of the pingpong schedule alternate"
        yield Violation("wave_groups", "num_wave_groups", groups, reason, {"num_wave_groups": 1})


@rule_of("cuda")
def always_persistent(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """CUDA: consumers that alternate tiles, and Stream-K, are for workgroups that stay."""
    stays = config.scheduler == "pingpong" or config.reduction is not Reduction.NONE
    if stays and not config.persistent:
        reason = "workgroups stay in the pingpong schedule and with Stream-K"
        yield Violation("always_persistent", "persistent", False, reason, {"persistent": True})


def transposed_fragments(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Unless something is gained by it, the warp tile is not transposed."""
    if not config.transpose_c:
        return
    if arch.kind == "cpu":
        reason = "a CPU's register tile already lies as C does"
        yield Violation("transposed_fragments", "transpose_c", True, reason, {"transpose_c": False})
    elif config.pipeline in arch.pipelines and not is_specialised(config, arch):
        reason = f"pipeline {config.pipeline} holds neighbours along n anyway"
        yield Violation("transposed_fragments", "transpose_c", True, reason, {"transpose_c": False})


CLUSTER_RULES = (cluster, slices_in_cluster)
