"""The wide space of GEMM kernels, for oracles and learned models (``contract.abilities.Searchable``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_gemm.candidates.applicability import copy_fault
from tilewright_gemm.candidates.warp_specialised import PIPELINE, ws_reaches
from tilewright_gemm.candidates.wide import SpaceClass, wide_configs
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.columns import FEATURES, features, table_of, times
from tilewright_gemm.launch.geometry import matrices
from tilewright_gemm.pipelines.candidates import signature_of
from tilewright_gemm.pipelines.records import PIPELINES
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.contract.device import DeviceInfo

__all__ = ["GemmSearch"]

Table = Mapping[str, npt.NDArray[Any]]


def _kind(problem: GemmProblem, device: DeviceInfo) -> SpaceClass | None:
    """The class of a problem; None where the warp-specialised pipeline cannot compute it, or its kernels are others."""
    arch = device.arch
    drives = any(PIPELINE in record.names and record.drives(arch) for record in PIPELINES)
    if (
        not drives
        or problem.packing
        or problem.is_empty
        or problem.block_scaled
        or problem.int4
        or not ws_reaches(problem, arch)
    ):
        return None
    copies = arch.bulk_copy
    stored = copies is not None and not any(
        copy_fault(matrices(problem, product)[2], product.batch, copies)
        for product in problem.products
        if not product.is_empty
    )
    other = "" if problem.dtype_b == problem.dtype_a else problem.dtype_b.value
    promoted = problem.dtype_a in ("fp8", "bf8") and not problem.fast_accumulation
    return SpaceClass(problem.dtype_a, other, problem.dtype_c.value, problem.layout, promoted, stored)


class GemmSearch:
    """The abilities of the operation as a mix-in."""

    feature_names: Sequence[str] = FEATURES

    def search_class(self, problem: GemmProblem, device: DeviceInfo) -> str:
        """Name of the class whose space serves the problem: halves share one. Empty if there is none."""
        kind = _kind(problem, device)
        if kind is None or problem.grouped:
            return ""
        types = "half" if kind.dtype_a in ("fp16", "bf16") and not kind.dtype_b else kind.dtype_a.value + kind.dtype_b
        out = "half" if kind.dtype_c in ("fp16", "bf16") else kind.dtype_c
        ends = ("promoted",) if kind.promoted else ()
        return "-".join((types, out, kind.layout, *ends, "stored" if kind.stored else "unstored"))

    def search_space(self, problem: GemmProblem, device: DeviceInfo) -> Sequence[GemmConfig]:
        """Every valid kernel of the problem's class, without steps of an epilogue."""
        kind = _kind(problem, device)
        return () if kind is None else wide_configs(kind, device.arch, RULES)

    def search_has(self, config: GemmConfig, device: DeviceInfo) -> bool:
        """True for kernels of the warp-specialised pipeline."""
        return config.pipeline == PIPELINE and PIPELINE in device.arch.pipelines

    def search_table(self, configs: Sequence[GemmConfig], device: DeviceInfo) -> Table:
        """Traits of kernels as arrays."""
        return table_of(configs, device.arch)

    def search_times(self, problem: GemmProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float64]:
        """Analytical seconds; infinite for kernels that cannot win."""
        return times(problem, table, device)

    def search_features(self, problem: GemmProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float32]:
        """Features of kernels on the problem, one row each, in the order of ``feature_names``."""
        return features(problem, table, device)

    def search_config(self, problem: GemmProblem, table: Table, row: int, device: DeviceInfo) -> GemmConfig:  # noqa: ARG002
        """The kernel of a row, with the problem's signature. It may break a rule: rules are asked afterwards."""
        value = {name: int(column[row]) for name, column in table.items() if name not in ("step", "ending", "join")}
        swapped, waves = bool(value["swapped"]), (value["wave_m"], value["wave_n"], 1)
        depth = 32 // problem.dtype_a.bytes
        warp = (
            (value["tile_m"] // waves[0], 64, depth) if swapped else (64, value["tile_n"] // waves[1], depth)
        )  # one instruction along the flexible side
        return GemmConfig(
            **signature_of(problem),
            pipeline=PIPELINE,
            epilogue=Epilogue.CSHUFFLE if value["staged"] else Epilogue.DEFAULT,
            scheduler="pingpong" if value["pingpong"] else "cooperative",
            num_wave_groups=2 if value["pingpong"] else 1,
            tile=(value["tile_m"], value["tile_n"], value["tile_k"]),
            wave=waves,
            warp_tile=warp,
            cluster=(value["cluster_m"], value["cluster_n"], value["cluster_k"]),
            transpose_c=swapped,
            stages=value["stages"],
            persistent=bool(value["persistent"]),
            reduction=Reduction.LINEAR if value["stream"] else Reduction.NONE,
            split_k=value["split"],
            promote=value["promote"],
        )
