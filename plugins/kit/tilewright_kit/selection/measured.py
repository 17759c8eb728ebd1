"""Choosing by measurements: the fastest kernel where the very problem was measured, else what was fast on problems
near it; where there is a learned model of the very kind of device, its proposals stand in for the latter.

Near means near in the logarithms of the sizes. Not a kernel's time carries over from one problem to another but
its efficiency (the time of the fastest kernel there over its own), and of that what the operation's own model did not
expect: a kernel that was faster than the model said on the problems near it is taken to be so here. How much of the
model is believed is what explains the measurements best (the slope of a regression), so that a poor model leaves the
choice to the neighbours themselves, and where nothing is near the model decides.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.abilities import Resizes
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation, Prediction
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.candidates import Verdicts
from tilewright_kit.selection.learned import LearnedModels
from tilewright_kit.selection.measurements import Measurement, MeasurementSource, class_of, point_of
from tilewright_kit.selection.neighbours import Near, Shape, index_of, nearest
from tilewright_kit.selection.strategies import MEASURED, NEIGHBOURS, Heuristic, Ranked, ordered

__all__ = ["Auto", "Measured", "tile_use"]

PRIOR = 0.1
"""Weight of a neighbour that found the model right, where a measurement of the same problem has one."""
BELIEF = (0.8, 0.5)
"""Part of the model that is believed without evidence, and the weight of that: squared logarithms of efficiencies."""
ABSENT = 0.95
"""Efficiency of a kernel that was not measured on a neighbour, in parts of the third fastest there: of a shipped
selection the rest was slower."""
_KEPT = 3
_PLANNED = frozenset({"split_k"})
"""Fields of a signature that planners choose, and that measurements therefore have an opinion on."""


class Measured:
    """Ranks by measurements, and by the operation's model where there are none.

    ``sources`` are layers: what a later one has of a problem on a device replaces what earlier ones have of it.
    Kernels that measurements name and the operation did not propose take part if rules and problem allow them.
    """

    name = "measured"

    def __init__(self, sources: Sequence[MeasurementSource] = (), models: LearnedModels | None = None) -> None:
        self._sources = tuple(sources)
        self._models = models or LearnedModels()
        self._heuristic = Heuristic()
        self._known: dict[tuple[str, str], tuple[object, dict[str, list[Shape]]]] = {}
        self._verdicts: dict[str, Verdicts[KernelConfig]] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read learned models now, so that the first problem does not wait for it."""
        self._models.read()

    @property
    def generation(self) -> object:
        """Changes with the measurements of any source."""
        return tuple(source.generation() for source in self._sources)

    def has(self, operation: Operation[Any, Any], device: DeviceInfo) -> bool:
        """True if anything of the operation was measured on the device's arch, or a model learned."""
        return self._models.has(operation, device) or bool(self._shapes(operation, device))

    def propose(self, operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> list[Ranked]:
        """The kernels of the very problem's measurements, then those of the learned model; empty without one, where
        candidates have to be ranked.
        """
        modelled = self._models.propose(operation, problem, device)
        if not modelled:
            return []
        point = point_of(problem)
        shapes = self._shapes(operation, device).get(class_of(point.signature), ())
        rows = next((item for item in shapes if item.point == point and item.device == device.name), None)
        known = {} if rows is None else self._pool(operation, problem, (), device).carry(rows)
        if not _is_evidence(known, modelled):
            return modelled
        placed = [_as_measured(config, row) for config, row in ordered(known.items(), _median, _name)]
        return [*placed, *(item for item in modelled if item.config not in known)]

    def _pool(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> _Pool:
        verdicts = self._verdicts.get(operation.name) or self._verdicts.setdefault(
            operation.name, Verdicts(operation.rules)
        )
        return _Pool(operation, problem, candidates, device, verdicts)

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]:
        modelled = self._heuristic.rank(operation, problem, candidates, device)
        proposed = self.propose(operation, problem, device)
        if proposed:
            taken = {item.config for item in proposed}
            return [*proposed, *(item for item in modelled if item.config not in taken)]
        point = point_of(problem)
        near = nearest(self._shapes(operation, device).get(class_of(point.signature), ()), point, device)
        if not near:
            return modelled
        pool = self._pool(operation, problem, candidates, device)
        carried = [(item, pool.carry(item.shape)) for item in near]
        # Kernels that measurements added were not predicted yet.
        modelled = [*modelled, *self._heuristic.rank(operation, problem, pool.added, device)]
        known = next((rows for item, rows in carried if item.distance == 0.0), {})
        if not _is_evidence(known, modelled):
            known = {}
        placed = [_as_measured(config, row) for config, row in ordered(known.items(), _median, _name)]
        rest = [item for item in modelled if item.config not in known]
        return [*placed, *_Blend(operation, problem, carried, device).rank(rest)]

    def _shapes(self, operation: Operation[Any, Any], device: DeviceInfo) -> dict[str, list[Shape]]:
        """Measurements by class of signature, read anew when a source has changed."""
        place = (operation.name, device.arch.id)
        generation = self.generation
        known = self._known.get(place)
        if known is None or known[0] != generation:
            with self._lock:
                known = self._known.get(place)
                if known is None or known[0] != generation:
                    layers = [source.rows(*place) for source in self._sources]
                    known = self._known[place] = (generation, index_of(layers, operation.config_type))
        return known[1]


class Auto:
    """By measurements if there are any of the operation on the device's arch, else by the model."""

    name = "auto"

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._heuristic = Heuristic()

    def propose(self, operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> list[Ranked]:
        """As ``Measured.propose``."""
        return self._measured.propose(operation, problem, device)

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]:
        chosen = self._measured if self._measured.has(operation, device) else self._heuristic
        return chosen.rank(operation, problem, candidates, device)


def _is_evidence(known: Mapping[KernelConfig, Measurement], modelled: Sequence[Ranked]) -> bool:
    """True if measurements of the very problem decide: one or two kernels that somebody tried say little of others."""
    return len(known) >= _KEPT or (len(known) > 1 and modelled[0].config in known)


# ---- kernels that can run ----


class _Pool:
    """The candidates, and kernels of measurements that can compute the problem."""

    def __init__(
        self,
        operation: Operation[Any, Any],
        problem: Problem,
        candidates: Sequence[KernelConfig],
        device: DeviceInfo,
        verdicts: Verdicts[KernelConfig],
    ) -> None:
        self._operation, self._problem, self._device = operation, problem, device
        self._verdicts = verdicts
        self._usable = dict.fromkeys(candidates, True)
        self._signature = point_of(problem).signature
        self._demanded = _demanded(candidates)
        self.added: list[KernelConfig] = []

    def carry(self, shape: Shape) -> dict[KernelConfig, Measurement]:
        """The shape's rows by the kernels that would run here."""
        found: dict[KernelConfig, Measurement] = {}
        for config, row in shape.ordered():
            here = config
            if shape.point.signature != self._signature:
                here = config.replace(**self._demanded)  # the same algorithm with this problem's epilogue
            if here not in found and self._can_run(here):
                found[here] = row
        return found

    def _can_run(self, config: KernelConfig) -> bool:
        usable = self._usable.get(config)
        if usable is None:
            usable = self._verdicts.allows(config, self._device) and not self._operation.mismatches(
                self._problem, config, self._device
            )
            self._usable[config] = usable
            if usable:
                self.added.append(config)
        return usable


def _demanded(candidates: Sequence[KernelConfig]) -> dict[str, Any]:
    """The signature that the problem demands of its kernels: what all candidates agree on."""
    if not candidates:
        return {}
    first = candidates[0]
    names = (name for name in first.signature_fields if name not in _PLANNED)
    return {
        name: getattr(first, name)
        for name in names
        if all(getattr(config, name) == getattr(first, name) for config in candidates[1:])
    }


# ---- opinions, weighed ----


def _median(item: tuple[KernelConfig, Measurement]) -> float:
    return item[1].median_ns


def _name(item: tuple[KernelConfig, Measurement]) -> str:
    return item[0].name


def _as_measured(config: KernelConfig, row: Measurement) -> Ranked:
    seconds = row.median_ns / 1e9
    when = f", {row.date[:10]}" if row.date else ""
    reason = f"measured {seconds * 1e6:.4g} us for this problem ({row.samples} samples{when})"
    spread = (row.p10_ns / 1e9, row.p90_ns / 1e9) if row.p90_ns else None
    return Ranked(config, reason, Prediction(seconds, {"measured": seconds}), MEASURED, spread)


@dataclass(frozen=True, slots=True)
class _Opinion:
    """The opinion of one neighbour: logarithms of efficiencies, by kernel."""

    near: Near
    measured: Mapping[KernelConfig, float]
    absent: float
    """Upper bound for kernels that were not measured."""
    modelled: Mapping[KernelConfig, float]
    """The model's expectation there."""

    @property
    def means(self) -> tuple[float, float]:
        """Means of the model's expectations of the measured kernels, and of their measurements."""
        count = len(self.measured)
        return math.fsum(self.modelled[config] for config in self.measured) / count, math.fsum(
            self.measured.values()
        ) / count

    def surprises(self, configs: Iterable[KernelConfig], belief: float) -> dict[KernelConfig, float]:
        """Measurements beyond the expectations of the model, as far as it is believed.

        Of kernels that were not measured the usual surprise is assumed, but no more than leaves them behind the
        fastest.
        """
        expected_mean, measured_mean = self.means
        usual = measured_mean - belief * expected_mean
        found = {}
        for config in configs:
            expected = belief * self.modelled[config]
            measured = self.measured.get(config)
            found[config] = min(usual, self.absent - expected) if measured is None else measured - expected
        return found


class _Blend:
    """The model's opinion of this problem and the neighbours' of the model, weighed by distance."""

    def __init__(
        self,
        operation: Operation[Any, Any],
        problem: Problem,
        carried: Sequence[tuple[Near, Mapping[KernelConfig, Measurement]]],
        device: DeviceInfo,
    ) -> None:
        self._operation, self._problem, self._device = operation, problem, device
        self._sizes = dict(point_of(problem).sizes)
        self._carried = [(item, rows) for item, rows in carried if rows]

    def rank(self, modelled: Sequence[Ranked]) -> list[Ranked]:
        """``modelled`` in the order of all opinions together."""
        here = _efficiencies({item.config: _seconds(item) for item in modelled})
        opinions = [self._opinion(item, rows, here) for item, rows in self._carried]
        belief = _belief(opinions)
        surprises = [opinion.surprises(here, belief) for opinion in opinions]
        scored = [(self._score(item, belief * here[item.config], opinions, surprises), item) for item in modelled]
        scored = ordered(scored, lambda entry: -entry[0][0], lambda entry: entry[1].config.name)
        return [Ranked(item.config, reason, item.prediction, NEIGHBOURS) for (_, reason), item in scored]

    def _opinion(
        self, near: Near, rows: Mapping[KernelConfig, Measurement], here: Mapping[KernelConfig, float]
    ) -> _Opinion:
        times = sorted(row.median_ns for row in rows.values())
        measured = {config: math.log(times[0] / row.median_ns) for config, row in rows.items()}
        absent = math.log(ABSENT * times[0] / times[min(_KEPT, len(times)) - 1])
        return _Opinion(near, measured, absent, self._modelled(near, {*here, *rows}, here))

    def _modelled(
        self, near: Near, configs: set[KernelConfig], here: Mapping[KernelConfig, float]
    ) -> Mapping[KernelConfig, float]:
        """The model's opinion there. If it cannot be asked, it is taken to differ only in how tiles divide sizes."""
        there = dict(near.shape.point.sizes)
        operation = self._operation
        problem = operation.resized(self._problem, there) if isinstance(operation, Resizes) else None
        if problem is not None:
            known = near.shape.remembered(point_of(problem).signature)
            for config in [item for item in configs if item not in known]:
                known[config] = self._operation.predict(problem, config, self._device).seconds
            return _efficiencies({config: known[config] for config in configs})
        return {
            config: here.get(config, 0.0) + math.log(
                tile_use(config, there, self._device) / tile_use(config, self._sizes, self._device)
            )
            for config in configs
        }  # fmt: skip

    def _score(
        self,
        item: Ranked,
        expected: float,
        opinions: Sequence[_Opinion],
        surprises: Sequence[Mapping[KernelConfig, float]],
    ) -> tuple[float, str]:
        if not opinions:
            return math.exp(expected), item.reason
        weights = PRIOR + sum(opinion.near.weight for opinion in opinions)
        surprise = sum(
            opinion.near.weight * found[item.config] for opinion, found in zip(opinions, surprises, strict=True)
        )
        score = math.exp(expected + surprise / weights)
        seen = sum(item.config in opinion.measured for opinion in opinions)
        closest = opinions[0].near.shape
        told = f"efficiency {score:.3g} by {seen} of {len(opinions)} measured problems near it and the model"
        return score, f"{told} (nearest: {closest.point.text} on {closest.device}); {item.reason}"


def _belief(opinions: Sequence[_Opinion]) -> float:
    """The slope from what the model expected to what was measured, each as it differs from the neighbour's mean."""
    at, weight = BELIEF
    xx, xy = weight, weight * at
    for opinion in opinions:
        pairs = [(opinion.modelled[config], measured) for config, measured in opinion.measured.items()]
        mean_x, mean_y = opinion.means
        xx += opinion.near.weight * sum((x - mean_x) ** 2 for x, _ in pairs)
        xy += opinion.near.weight * sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return min(1.0, max(0.05, xy / xx))


def _efficiencies(seconds: Mapping[KernelConfig, float]) -> dict[KernelConfig, float]:
    """Logarithms of the fastest time over each; of kernels without a usable time that of a millionth."""
    usable = [value for value in seconds.values() if math.isfinite(value) and value > 0]
    fastest = min(usable, default=1.0)
    worst = math.log(1e-6)
    return {
        config: max(worst, math.log(fastest / value)) if math.isfinite(value) and value > 0 else worst
        for config, value in seconds.items()
    }


def _seconds(item: Ranked) -> float:
    """The model's expectation in seconds; infinite if it has no usable one."""
    seconds = math.inf if item.prediction is None else item.prediction.seconds
    return seconds if math.isfinite(seconds) else math.inf


def tile_use(config: KernelConfig, sizes: Mapping[str, int], device: DeviceInfo) -> float:
    """The part of the device's work that is not padding: of tiles that reach past the problem, and of units that have
    no tile in the last round. 1 where nothing is known of tiles, and on CPUs, whose kernels cut tiles to size.
    """
    tile = getattr(config, "tile", None)
    if device.kind == "cpu" or not isinstance(tile, tuple) or len(tile) != 3 or not {"m", "n"} <= set(sizes):
        return 1.0
    m, n, batch = max(sizes["m"], 1), max(sizes["n"], 1), max(sizes.get("batch", 1), 1)
    along_m, along_n = -(-m // max(tile[0], 1)), -(-n // max(tile[1], 1))
    filled = (m * n) / (along_m * tile[0] * along_n * tile[1])
    units = max(device.units, 1)
    work = along_m * along_n * batch * max(getattr(config, "split_k", 1), 1)
    reduction = getattr(config, "reduction", None)
    shared = reduction is not None and str(getattr(reduction, "value", reduction)) != "none"
    rounds = work / units
    return float(filled) if shared else float(filled * rounds / math.ceil(rounds))
