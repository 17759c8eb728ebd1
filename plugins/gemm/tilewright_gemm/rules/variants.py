"""Rules on variants: how work is distributed among workgroups."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import Reduction
from tilewright_kit.config.rules import Violation
from tilewright_kit.requests.products import MAX_SPLIT_K
from tilewright_kit.tiles.footprint.workgroup import is_specialised

__all__ = ["VARIANT_RULES"]


def split_k(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """K is cut into 1 to 255 slices, and not in grouped kernels, whose products differ in K."""
    if not 1 <= config.split_k <= MAX_SPLIT_K:
        fix = {"split_k": min(max(config.split_k, 1), MAX_SPLIT_K)}
        yield Violation("split_k", "split_k", config.split_k, f"split_k is from 1 to {MAX_SPLIT_K}", fix)
    elif config.split_k > 1 and config.grouped:
        reason = "the products of a grouped kernel differ in K: no one split fits all"
        yield Violation("split_k", "split_k", config.split_k, reason, {"split_k": 1})


def batched_or_grouped(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A grouped kernel takes batches too, so it is not marked batched as well."""
    if config.batched and config.grouped:
        reason = "a grouped kernel takes batches too"
        yield Violation("batched_or_grouped", "batched", True, reason, {"batched": False})


def one_work_distribution(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Stream-K, split-K and (on HIP devices) persistence each decide which workgroup does what: at most one of them.
    On CUDA devices persistent workgroups claim slices as they claim tiles, and Stream-K is how they may share them.
    """
    stream, cuda = config.reduction is not Reduction.NONE, arch.kind == "cuda"
    if stream and (config.split_k > 1 or (config.persistent and not cuda)):
        other = "split_k" if config.split_k > 1 else "persistent"
        reason = f"Stream-K distributes the work itself and excludes {other}"
        fix: dict[str, object] = {"split_k": 1, "persistent": cuda}
        yield Violation("one_work_distribution", other, str(getattr(config, other)), reason, fix)
    elif config.persistent and config.split_k > 1 and arch.kind == "hip":
        reason = "persistent workgroups and split-K exclude each other"
        yield Violation("one_work_distribution", "persistent", True, reason, {"persistent": False})


def stream_k(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Stream-K is for single products on CUDA devices with producers, partial tiles added in their order, so that
    results do not depend on timing.
    """
    if config.reduction is Reduction.NONE:
        return
    reasons = [
        text
        for text, holds in (
            ("a CPU's threads share K by split_k", arch.kind == "cpu"),
            ("workgroups of AMD GPUs share K by split_k", arch.kind == "hip"),
            ("it takes one product", config.batched or config.grouped),
            ("B is not pre-shuffled", config.preshuffle),
            ("workgroups need producers of their own", arch.kind == "cuda" and not is_specialised(config, arch)),
            ("consumers that alternate have tiles of their own", config.scheduler == "pingpong"),
        )
        if holds
    ]
    if reasons:
        reason = f"no Stream-K here: {'; '.join(reasons)}"
        yield Violation("stream_k", "reduction", config.reduction.value, reason, {"reduction": Reduction.NONE})
    elif config.reduction is not Reduction.LINEAR:
        reason = "partial tiles are added in their order: linear"
        yield Violation("stream_k", "reduction", config.reduction.value, reason, {"reduction": Reduction.LINEAR})


VARIANT_RULES = (split_k, batched_or_grouped, one_work_distribution, stream_k)
