"""Registries of convolution kernels: exported, read back, told to people, and matched with problems in full."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conv_requests import backward_data, forward, last

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS
from tilewright_grouped_conv.pipelines.candidates import conv_mismatches
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.kernel_sets.registry import Registry

TYPES: dict[str, Any] = {config.operation: config for config in CONFIGS.values()}
HOPPER = tilewright_arch.load("sm_90a")
PLAIN = RULES.correct(ConvConfig(vector_sizes=(8, 8, 8)), HOPPER).config


def filled(arch: ArchSpec) -> Registry:
    registry = Registry("convolutions")
    for sets in KERNEL_SETS.values():
        registry.register_set(sets["default"].expand(arch, RULES), arch)
    return registry


def test_kernels_of_all_directions_live_in_one_registry_and_come_back(arch: ArchSpec) -> None:
    registry = filled(arch)
    document = json.loads(json.dumps(registry.to_dict()))
    exported = [TYPES[kernel["operation"]].from_dict(kernel["config"]) for kernel in document["kernels"]]
    assert exported == [entry.config for entry in registry]
    assert len(registry) == sum(len(sets["default"].expand(arch, RULES)) for sets in KERNEL_SETS.values())
    counts = document["statistics"]["by_variant"]
    assert set(counts) == {direction.value for direction in Direction}
    assert sum(counts.values()) == len(registry)
    assert set(document["statistics"]["by_ndim"]) == {"1d", "2d", "3d"}


def test_directions_with_equal_fields_are_kernels_of_their_own() -> None:
    registry = Registry()
    for config in CONFIGS.values():
        registry.register(config(), "gfx942")
    assert len(registry) == len(CONFIGS)
    assert len({entry.name for entry in registry}) == len(CONFIGS)


def problem(dtype: str = "fp16", **attributes: Any) -> Any:
    tensors = {"x": last(dtype, 2, 64, 9, 9), "w": last(dtype, 64, 64 // attributes.get("groups", 1), 3, 3)}
    return forward(tensors, **{"padding": 1, **attributes})


def test_a_kernel_matches_its_problem() -> None:
    assert conv_mismatches(problem(), PLAIN, device_of(HOPPER)) == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype_in": "bf16"}, "dtype_in"),
        ({"dtype_out": "fp32"}, "dtype_out"),
        ({"ndim": 3, "layout": "ndhwgc"}, "ndim"),
        ({"unary": "Relu"}, "unary"),
        ({"bias": "fp32"}, "bias"),
        ({"specialization": "filter1x1_pad0"}, "filter"),
        ({"specialization": "depthwise"}, "specialization"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], field: str) -> None:
    # The original matched the direction alone.
    values = {name: ConvConfig.coerce(name, value) for name, value in changes.items()}
    found = conv_mismatches(problem(), PLAIN.replace(**values), device_of(HOPPER))
    assert field in {item.field for item in found}
    assert all(item.reason for item in found)


def test_the_kernel_of_another_direction_is_none_of_the_candidates() -> None:
    backward = backward_data(
        {"dy": last("fp16", 2, 64, 9, 9), "w": last("fp16", 64, 64, 3, 3)}, padding=1, input_size=[9, 9]
    )
    for direction, asked in ((Direction.FORWARD, problem()), (Direction.BACKWARD_DATA, backward)):
        candidates = ConvOperation(direction).candidates(asked, device_of(HOPPER))
        assert candidates
        assert {config.direction for config in candidates} == {direction}
