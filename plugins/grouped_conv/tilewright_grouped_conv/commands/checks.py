"""How a large convolution, or gradient of one, is checked: parts of it as smaller convolutions, and all of it by sums
over output channels, which a convolution with that many fewer channels must give too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_grouped_conv.commands.cases import ConvCase
from tilewright_kit.commands.cases import Part, Projection

__all__ = ["parts_of", "projection_of"]

Array = npt.NDArray[Any]

CHANNELS = 4
"""Output channels of a convolution without groups that are compared element by element."""
_ALL = slice(None)
_AXIS = {"fwd": 1, "bwd_data": 1, "bwd_weight": 0}
"""Axis of the output that runs over its channels of all groups (bwd_weight: over those of dy)."""


def parts_of(case: ConvCase, inputs: Mapping[str, Array], rng: np.random.Generator, budget: int) -> list[Part]:
    """A few output channels, or the first and the last group; and one image whole, if that is not too much."""
    found = [_group(case, inputs, group) for group in _ends(case.groups)] if case.groups > 1 else []
    if not found:
        size = case.c if case.direction == "bwd_data" else case.k
        picked = np.unique([0, size - 1, *rng.choice(size, min(CHANNELS - 2, size), replace=False)])
        found = [_channels(case, inputs, picked)]
    if case.direction != "bwd_weight":
        cost = case.flops // 2
        if cost * CHANNELS > budget * max(case.k, case.groups):
            found = [_images(part, smaller, _ends(case.n)) for part, smaller in found]
        if cost // case.n <= budget:
            whole = (Part(lambda out: out, case.request(), inputs), case)
            found.append(_images(*whole, [int(rng.integers(case.n))]))
    return [part for part, _ in found]


def _ends(count: int) -> list[int]:
    return [0, count - 1] if count > 1 else [0]


def _group(case: ConvCase, inputs: Mapping[str, Array], group: int) -> tuple[Part, ConvCase]:
    """One group, which is a convolution of its own."""
    cg, kg = case.c // case.groups, case.k // case.groups
    image, pixels = slice(group * cg, (group + 1) * cg), slice(group * kg, (group + 1) * kg)
    out = {"fwd": (_ALL, pixels), "bwd_data": (_ALL, image), "bwd_weight": (pixels,)}[case.direction]
    places: dict[str, Any] = {"x": (_ALL, image), "dy": (_ALL, pixels), "w": pixels, "acc": out}
    smaller = replace(case, c=cg, k=kg, groups=1)
    return _part(smaller, inputs, places, out, out[-1]), smaller


def _channels(case: ConvCase, inputs: Mapping[str, Array], picked: Array) -> tuple[Part, ConvCase]:
    """Some output channels of a convolution without groups."""
    if case.direction == "bwd_data":
        return _part(smaller := replace(case, c=len(picked)), inputs, {"w": (_ALL, picked), "acc": (_ALL, picked)},
                     (_ALL, picked), picked), smaller  # fmt: skip
    smaller = replace(case, k=len(picked))
    if case.direction == "fwd":
        return _part(smaller, inputs, {"w": picked}, (_ALL, picked), picked), smaller
    return _part(smaller, inputs, {"dy": (_ALL, picked), "acc": picked}, (picked,), picked), smaller


def _part(case: ConvCase, inputs: Mapping[str, Array], places: Mapping[str, Any], out: Any, channels: Any) -> Part:
    picked = {}
    for name, array in inputs.items():
        if name.startswith("d["):
            picked[name] = array[out]
        elif name in ("bias", "scale"):
            picked[name] = array[channels] if array.ndim else array
        else:
            picked[name] = array[places[name]] if name in places else array
    return Part(lambda result: result[out], case.request(), picked)


def _images(part: Part, case: ConvCase, images: list[int]) -> tuple[Part, ConvCase]:
    """A part of a part: some images of it."""
    picked = {name: array[images] if name in ("x", "dy", "acc") or name.startswith("d[") else array
              for name, array in part.inputs.items()}  # fmt: skip
    smaller = replace(case, n=len(images))
    return Part(lambda out: part.take(out)[images], smaller.request(), picked), smaller


def projection_of(
    case: ConvCase, inputs: Mapping[str, Array], rng: np.random.Generator, reference: Callable[..., Array]
) -> Projection:
    """Sums of every group's output channels with random signs: convolutions are linear in each operand, so they are
    the outputs of operands that were summed likewise.
    """
    groups = case.groups
    width = (case.c if case.direction == "bwd_data" else case.k) // groups
    signs = rng.choice(np.array([-1.0, 1.0]), (width, 1))
    summed = dict(inputs)
    if case.direction == "fwd":
        summed["w"] = _summed(inputs["w"], 0, groups, signs)
        smaller = replace(case, k=groups)
    elif case.direction == "bwd_data":
        summed["w"] = np.einsum("kc...,cv->kv...", inputs["w"].astype(np.float64), signs)
        smaller = replace(case, c=groups)
    else:
        summed["dy"] = _summed(inputs["dy"], 1, groups, signs)
        smaller = replace(case, k=groups)
    axis = _AXIS[case.direction]
    sums = _lines(reference(smaller.request(), summed), axis, groups)
    return Projection(lambda out: _lines(out, axis, groups), signs, sums, "sums over channels are off")


def _lines(array: Array, axis: int, groups: int) -> Array:
    """The channels of every group as the last axis: a view."""
    return np.moveaxis(_split(array, axis, groups), axis + 1, -1)


def _split(array: Array, axis: int, groups: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def _summed(array: Array, axis: int, groups: int, signs: Array) -> Array:
    """One channel of each group, the sum of all with signs."""
    total: Array = _lines(array, axis, groups).astype(np.float64) @ signs
    return total[..., 0]
