"""A small part of many configurations that still shows everything which the whole shows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import sampling

from tilewright_gemm.config.config import GemmConfig

__all__ = ["covering"]


def features(config: GemmConfig) -> set[Hashable]:
    """What a configuration shows: the value of every field, alone and in its schedule, and each type in each place."""
    values = sampling.fields_of(config, "pipeline", "scheduler")
    schedule = (config.pipeline, config.scheduler)
    dtypes = (config.a, config.b)
    shown: set[Hashable] = {(schedule, name, value) for name, value in values.items()}
    return shown | {(dtypes, value) for value in (schedule, config.layout, config.c, config.epilogue)}


def covering(configs: Iterable[GemmConfig], shown: Sequence[GemmConfig] = ()) -> list[GemmConfig]:
    """Configurations of which every feature of all is shown, beyond those that ``shown`` has. The same in every run.

    Of configurations that show as much, the one with the most accumulators in a thread is taken: it is the likeliest to
    lack registers.
    """
    known = set[Hashable]().union(*map(features, shown))
    ordered = sorted(set(configs), key=lambda config: (pressure(config), config.name), reverse=True)
    return [ordered[place] for place in sampling.covering(ordered, lambda config: features(config) - known)]


def pressure(config: GemmConfig) -> float:
    """Accumulators for each warp."""
    waves = config.wave[0] * config.wave[1] * config.wave[2]
    return config.tile[0] * config.tile[1] / waves
