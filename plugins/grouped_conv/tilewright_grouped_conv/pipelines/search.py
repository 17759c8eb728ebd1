"""The wide space of convolution kernels, for oracles and learned models (``contract.abilities.Searchable``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.candidates.applicability.gpu import VECTOR_BYTES, strict_vectors
from tilewright_grouped_conv.candidates.applicability.tensors import with_signature
from tilewright_grouped_conv.candidates.wide import wide_algorithms
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.config.pipelines import IM2COL
from tilewright_grouped_conv.cost.columns import FEATURES, TABLE, features, table_of, times
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, layout_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.dtypes import DType

__all__ = ["ConvSearch"]

Table = Mapping[str, npt.NDArray[Any]]
_LEAST_CHANNELS = 16
"""Channels of a group from which on products are the kernels of choice."""


class ConvSearch:
    """The abilities of the operations as a mix-in."""

    feature_names: Sequence[str] = FEATURES

    def search_class(self, problem: ConvProblem, device: DeviceInfo) -> str:
        """Name of the class whose space serves the problem: halves share one. Empty if there is none: the space holds
        products of 16 bits with channels last and whole vectors.
        """
        geometry, width = problem.geometry, VECTOR_BYTES // problem.dtype_in.bytes
        plain = (
            IM2COL.drives(device.arch)
            and problem.dtype_in.bytes == problem.dtype_out.bytes == 2
            and problem.dtype_in == problem.dtype_wei
            and problem.order is Order.LAST
            and not problem.is_empty
            and min(geometry.cg, geometry.kg) >= _LEAST_CHANNELS
            and strict_vectors(problem)[:2] == (width, width)
        )
        return f"{problem.direction.value}-half-{problem.ndim}d" if plain else ""

    def search_space(self, problem: ConvProblem, device: DeviceInfo) -> Sequence[ConvConfig]:
        """Every valid kernel of the problem's class, without fused steps."""
        return _space(problem.direction, problem.ndim, problem.dtype_in, problem.dtype_out, device.arch)

    def search_has(self, config: ConvConfig, device: DeviceInfo) -> bool:
        """True for products, whose traits the table has."""
        return device.arch.kind == "cuda" and config.is_matrix and not config.channels_first and TABLE.holds(config)

    def search_table(self, configs: Sequence[ConvConfig], device: DeviceInfo) -> Table:
        """Traits of kernels as arrays."""
        return table_of(configs, device.arch)

    def search_times(self, problem: ConvProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float64]:
        """Analytical seconds; infinite for kernels that cannot win."""
        return times(problem, table, device)

    def search_features(self, problem: ConvProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float32]:
        """Features of kernels on the problem, one row each, in the order of ``feature_names``."""
        return features(problem, table, device)

    def search_config(self, problem: ConvProblem, table: Table, row: int, device: DeviceInfo) -> ConvConfig:
        """The kernel of a row, with the problem's signature. It may break a rule: rules are asked afterwards."""
        kind = CONFIGS[problem.direction]
        config = kind(
            layout=layout_of(problem.ndim), ndim=problem.ndim, dtype_in=problem.dtype_in,
            **TABLE.fields(table, row, kind),
        )  # fmt: skip
        return with_signature(problem, config, device)


@lru_cache(maxsize=16)
def _space(direction: Direction, ndim: int, dtype: DType, out: DType, arch: ArchSpec) -> tuple[ConvConfig, ...]:
    return tuple(dict.fromkeys(wide_algorithms(direction, ndim, dtype, out, arch, RULES)))
