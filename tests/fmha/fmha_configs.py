"""Configurations for tests: valid ones of every family, and a table of templates as if all were there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.config.defaults import cpu_algorithm
from tilewright_fmha.config.features import SWITCHES
from tilewright_fmha.pipelines import templates as template_table
from tilewright_fmha.pipelines.algorithms import valid_algorithms
from tilewright_fmha.vocabulary import Family, FmhaDType, Mode

CPU, AMD, NEW_AMD, RDNA, NVIDIA = (
    tilewright_arch.load(name) for name in ("x86-64-v3", "gfx942", "gfx950", "gfx1100", "sm_90a")
)
ARCHS = {arch.name: arch for arch in (CPU, AMD, NEW_AMD, RDNA, NVIDIA)}

_PIPELINES = {
    Family.FWD: ("qr", "qr_async", "qs", "qr_async_trload", "v3", "ws"),
    Family.SPLITKV: ("qr_nwarp_sshuffle", "qr"),
    Family.PAGEDKV: ("qr_pagedkv",),
    Family.BATCH_PREFILL: ("qr_async", "qr"),
    Family.COMBINE: ("splitkv_combine",),
    Family.APPENDKV: ("appendkv",),
    Family.DQ_DK_DV: ("bwd",),
    Family.DOT_DO_O: ("bwd",),
    Family.CONVERT_DQ: ("bwd",),
}
_EVERYTHING = frozenset(SWITCHES) | {  # the words are the table's own
    "group", "paged_vllm", "paged_sglang", *(item.value for item in FmhaDType),
}  # fmt: skip


@contextmanager
def all_templates() -> Iterator[None]:
    """Rules on shapes do not depend on which templates are ready: here all of them are."""
    table = {
        (kind, pipeline, family): _EVERYTHING
        for kind in ("cuda", "hip")
        for family, pipelines in _PIPELINES.items()
        for pipeline in pipelines
    }
    with patch.dict(template_table.TEMPLATES, table):
        yield


_NEEDED: dict[Family, dict[str, Any]] = {
    Family.SPLITKV: {"max_splits_log2": 5},
    Family.PAGEDKV: {"paged": True},
    Family.BATCH_PREFILL: {"paged": True, "mode": Mode.GROUP},
    Family.DQ_DK_DV: {"deterministic": True},
}


def valid(arch: ArchSpec, family: Family = Family.FWD, pipeline: str = "", **fields: Any) -> FmhaConfig:
    """A valid kernel with those fields, cut as the arch prefers it; with ``pipeline``, as it prefers it there."""
    given = {"dtype": FmhaDType.BF16, "hdim": (64, 64), **_NEEDED.get(family, {}), **fields}
    config = config_of(family)(family=family, **given)
    if arch.kind == "cpu":
        return config.replace(**cpu_algorithm(config, arch))
    cuts = [cut for cut in valid_algorithms(config, arch) if pipeline in ("", cut["pipeline"])]
    return config.replace(**cuts[0])
