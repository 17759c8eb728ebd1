"""The problems that were measured, and which of them are near another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.measurements import Measurement, Point, class_of
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["Near", "Shape", "index_of", "nearest"]

NEIGHBOURS = 6
REACH = 2.5
"""Farthest neighbour, in doublings: sizes that differ by more say nothing of each other."""
SIGNATURES = 32
"""Kinds of problem for which the model's opinion is cached, for each that was measured."""
STRANGER = 0.5
"""Distance that another device of the arch, or another epilogue, adds."""


@dataclass(slots=True)
class Shape:
    """One problem that was measured on one device: the newest time of each kernel."""

    point: Point
    device: str
    logs: Mapping[str, float]
    rows: dict[KernelConfig, Measurement] = field(default_factory=dict)
    predicted: dict[str, dict[KernelConfig, float]] = field(default_factory=dict)
    """Seconds by the model, by the signature of the problem that asked; cached, since the model takes its time."""

    def remembered(self, signature: str) -> dict[KernelConfig, float]:
        """``predicted`` for a signature, to be added to. Callers make signatures at will: few are kept."""
        known = self.predicted.get(signature)
        if known is None:
            if len(self.predicted) >= SIGNATURES:
                self.predicted.clear()
            known = self.predicted[signature] = {}
        return known

    def ordered(self) -> list[tuple[KernelConfig, Measurement]]:
        """The fastest first."""
        return sorted(self.rows.items(), key=lambda item: (item[1].median_ns, item[0].name))


@dataclass(frozen=True, slots=True)
class Near:
    """A measured problem, and how far it is from the one that is asked for, in doublings."""

    shape: Shape
    distance: float

    @property
    def weight(self) -> float:
        return math.exp(-(self.distance**2))


def index_of(layers: Iterable[Sequence[Measurement]], config_type: type[KernelConfig]) -> dict[str, list[Shape]]:
    """Measurements by class of signature. A later layer's rows of a problem on a device replace earlier ones."""
    shapes: dict[tuple[Point, str], Shape] = {}
    parsed: dict[str, KernelConfig | None] = {}
    for layer in layers:
        own: dict[tuple[Point, str], Shape] = {}
        for row in layer:
            config = _config(row, config_type, parsed)
            if config is None:
                continue
            place = (row.point, row.device)
            shape = own.get(place)
            if shape is None:
                shape = own[place] = Shape(row.point, row.device, _logs(row.point))
            known = shape.rows.get(config)
            if known is None or known.date <= row.date:
                shape.rows[config] = row
        shapes.update(own)
    found: dict[str, list[Shape]] = {}
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


def nearest(shapes: Sequence[Shape], point: Point, device: DeviceInfo) -> list[Near]:
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
            found.append(Near(shape, distance))
    found.sort(key=lambda item: (item.distance, item.shape.point.sizes, item.shape.device))
    return found[:NEIGHBOURS]
