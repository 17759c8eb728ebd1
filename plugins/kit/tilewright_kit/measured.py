"""Choosing by measurements: the fastest kernel where the very problem was measured, else what was fast on problems
near it.

Near means near in the logarithms of the sizes. What carries over from one problem to another is not a kernel's time but
its efficiency: the time of the fastest kernel there over its own, corrected for how well its tiles divide either
problem. The prediction of the operation's own model takes part with a small weight, which decides where nothing near
was measured.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright_kit.config import KernelConfig
from tilewright_kit.device import DeviceInfo
from tilewright_kit.errors import InvalidArgumentError
from tilewright_kit.measurements import Measurement, MeasurementSource, Point, class_of, point_of
from tilewright_kit.operation import Operation, Prediction
from tilewright_kit.problem import Problem
from tilewright_kit.select import Heuristic, Ranked

__all__ = ["Auto", "Measured", "tile_use"]

NEIGHBOURS = 6
REACH = 2.5
"""Farthest neighbour, in doublings: sizes that differ by more say nothing of each other."""
STRANGER = 0.5
"""Distance that another device of the arch, or another epilogue, adds."""
PRIOR = 0.1
"""Weight of the model's opinion, where a measurement of the same problem has one."""
ABSENT = 0.95
"""Efficiency of a kernel that was not measured on a neighbour, in parts of the third fastest there: of a shipped
selection the rest was slower."""
_KEPT = 3
_PLANNED = frozenset({"split_k"})
"""Fields of a signature that planners choose, and that measurements therefore have an opinion on."""


@dataclass(slots=True)
class _Shape:
    """One problem that was measured on one device: the newest time of each kernel."""

    point: Point
    device: str
    logs: Mapping[str, float]
    rows: dict[KernelConfig, Measurement] = field(default_factory=dict)

    def ordered(self) -> list[tuple[KernelConfig, Measurement]]:
        """The fastest first."""
        return sorted(self.rows.items(), key=lambda item: (item[1].median_ns, item[0].name))


@dataclass(frozen=True, slots=True)
class _Near:
    shape: _Shape
    distance: float

    @property
    def weight(self) -> float:
        return math.exp(-(self.distance**2))


class Measured:
    """Ranks by measurements, and by the operation's model where there are none.

    ``sources`` are layers: what a later one has of a problem on a device replaces what earlier ones have of it.
    Kernels that measurements name and the operation did not propose take part if rules and problem allow them.
    """

    name = "measured"

    def __init__(self, sources: Sequence[MeasurementSource] = ()) -> None:
        self._sources = tuple(sources)
        self._heuristic = Heuristic()
        self._known: dict[tuple[str, str], tuple[object, dict[str, list[_Shape]]]] = {}
        self._lock = threading.Lock()

    def has(self, operation: Operation[Any, Any], device: DeviceInfo) -> bool:
        """Whether anything of the operation was measured on the device's arch."""
        return bool(self._shapes(operation, device))

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]:
        modelled = self._heuristic.rank(operation, problem, candidates, device)
        point = point_of(problem)
        near = _nearest(self._shapes(operation, device).get(class_of(point.signature), ()), point, device)
        if not near:
            return modelled
        pool = _Pool(operation, problem, candidates, device)
        carried = [(item, pool.carry(item.shape)) for item in near]
        # What measurements added was not among what the model saw.
        modelled = [*modelled, *self._heuristic.rank(operation, problem, pool.added, device)]
        exact = [rows for item, rows in carried if item.distance == 0.0]
        known = exact[0] if exact else {}
        placed = [_as_measured(config, row) for config, row in sorted(known.items(), key=_by_time)]
        rest = [item for item in modelled if item.config not in known]
        return [*placed, *_Blend(carried, point, device).rank(rest)]

    def _shapes(self, operation: Operation[Any, Any], device: DeviceInfo) -> dict[str, list[_Shape]]:
        """What was measured, by class of signature. Read anew when a source has changed."""
        place = (operation.name, device.arch.id)
        generation = tuple(source.generation() for source in self._sources)
        known = self._known.get(place)
        if known is None or known[0] != generation:
            with self._lock:
                known = self._known.get(place)
                if known is None or known[0] != generation:
                    layers = [source.rows(*place) for source in self._sources]
                    known = self._known[place] = (generation, _index(layers, operation.config_type))
        return known[1]


class Auto:
    """By measurements if there are any of the operation on the device's arch, else by the model."""

    name = "auto"

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._heuristic = Heuristic()

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]:
        chosen = self._measured if self._measured.has(operation, device) else self._heuristic
        return chosen.rank(operation, problem, candidates, device)


# ---- what was measured, in order ----


def _index(layers: Iterable[Sequence[Measurement]], config_type: type[KernelConfig]) -> dict[str, list[_Shape]]:
    shapes: dict[tuple[Point, str], _Shape] = {}
    parsed: dict[str, KernelConfig | None] = {}
    for layer in layers:
        own: dict[tuple[Point, str], _Shape] = {}
        for row in layer:
            config = _config(row, config_type, parsed)
            if config is None:
                continue
            place = (row.point, row.device)
            shape = own.get(place)
            if shape is None:
                shape = own[place] = _Shape(row.point, row.device, _logs(row.point))
            known = shape.rows.get(config)
            if known is None or known.date <= row.date:
                shape.rows[config] = row
        shapes.update(own)
    found: dict[str, list[_Shape]] = {}
    for shape in shapes.values():
        found.setdefault(class_of(shape.point.signature), []).append(shape)
    return found


def _config(
    row: Measurement, config_type: type[KernelConfig], parsed: dict[str, KernelConfig | None]
) -> KernelConfig | None:
    """The row's configuration; None if this version of the operation has no such kernel."""
    text = repr(sorted(row.config.items()))
    if text not in parsed:
        try:
            parsed[text] = config_type.from_dict(row.config)
        except InvalidArgumentError:
            parsed[text] = None
    return parsed[text]


def _logs(point: Point) -> dict[str, float]:
    return {name: math.log2(max(size, 1)) for name, size in point.sizes}


def _nearest(shapes: Sequence[_Shape], point: Point, device: DeviceInfo) -> list[_Near]:
    """The nearest shapes within reach, in a fixed order. The problem itself, on this device, has distance zero."""
    logs = _logs(point)
    found = []
    for shape in shapes:
        names = {*logs, *shape.logs}
        distance = math.sqrt(sum((logs.get(name, 0.0) - shape.logs.get(name, 0.0)) ** 2 for name in names))
        distance += STRANGER * (shape.device != device.name) + STRANGER * (shape.point.signature != point.signature)
        if distance == 0.0 and shape.point.sizes != point.sizes:
            distance = 0.1  # a count of zero and one have one logarithm
        if distance <= REACH:
            found.append(_Near(shape, distance))
    found.sort(key=lambda item: (item.distance, item.shape.point.sizes, item.shape.device))
    return found[:NEIGHBOURS]


# ---- kernels that can run ----


class _Pool:
    """The candidates, and kernels of measurements that can compute the problem."""

    def __init__(
        self,
        operation: Operation[Any, Any],
        problem: Problem,
        candidates: Sequence[KernelConfig],
        device: DeviceInfo,
    ) -> None:
        self._operation, self._problem, self._device = operation, problem, device
        self._usable = dict.fromkeys(candidates, True)
        self._signature = point_of(problem).signature
        self._demanded = _demanded(candidates)
        self.added: list[KernelConfig] = []

    def carry(self, shape: _Shape) -> dict[KernelConfig, Measurement]:
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
            usable = self._operation.rules.allows(config, self._device.arch) and not self._operation.mismatches(
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


def _by_time(item: tuple[KernelConfig, Measurement]) -> tuple[float, str]:
    return item[1].median_ns, item[0].name


def _as_measured(config: KernelConfig, row: Measurement) -> Ranked:
    seconds = row.median_ns / 1e9
    when = f", {row.date[:10]}" if row.date else ""
    reason = f"measured {seconds * 1e6:.4g} us for this problem ({row.samples} samples{when})"
    return Ranked(config, reason, Prediction(seconds, {"measured": seconds}))


class _Blend:
    """Efficiency by neighbours and by the model: a geometric mean, weighed by distance."""

    def __init__(
        self,
        carried: Sequence[tuple[_Near, Mapping[KernelConfig, Measurement]]],
        point: Point,
        device: DeviceInfo,
    ) -> None:
        self._point, self._device = point, device
        self._near: list[tuple[_Near, dict[KernelConfig, float], float]] = []
        for item, rows in carried:
            if not rows:
                continue
            times = sorted(row.median_ns for row in rows.values())
            known = {config: times[0] / row.median_ns for config, row in rows.items()}
            absent = ABSENT * times[0] / times[min(_KEPT, len(times)) - 1]
            self._near.append((item, known, absent))

    def rank(self, modelled: Sequence[Ranked]) -> list[Ranked]:
        """``modelled`` in the order of all opinions together."""
        fastest = min((_seconds(item) for item in modelled), default=1.0)
        scored = [(self._score(item, fastest), item) for item in modelled]
        scored.sort(key=lambda entry: (-entry[0][0], entry[1].config.name))
        return [Ranked(item.config, reason, item.prediction) for (_, reason), item in scored]

    def _score(self, item: Ranked, fastest: float) -> tuple[float, str]:
        config, seconds = item.config, _seconds(item)
        model = max(fastest, 1e-12) / max(seconds, 1e-12) if math.isfinite(seconds) else 0.0
        total, weights = PRIOR * math.log(max(model, 1e-6)), PRIOR
        here = tile_use(config, dict(self._point.sizes), self._device)
        seen = 0
        for near, known, absent in self._near:
            there = tile_use(config, dict(near.shape.point.sizes), self._device)
            seen += config in known
            total += near.weight * math.log(known.get(config, absent) * here / there)
            weights += near.weight
        score = math.exp(total / weights)
        if not self._near:
            return score, item.reason
        nearest = self._near[0][0].shape
        told = f"efficiency {score:.3g} by {seen} of {len(self._near)} measured problems near it"
        return score, f"{told} (nearest: {nearest.point.text} on {nearest.device}); {item.reason}"


def _seconds(item: Ranked) -> float:
    """What the model expects; infinite if it has no usable opinion."""
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
