"""Convolutions of AMD GPUs whose channels fill whole steps: where planners propose them, and what plans launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conv_requests import backward_data, backward_weight, forward, last

import tilewright_arch
from tilewright_emulator import CodeObject, Memory
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import TAPS
from tilewright_grouped_conv.pipelines.candidates import conv_candidates, predict_conv
from tilewright_grouped_conv.plan.plan import plan_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.references.reference import reference_conv
from tilewright_grouped_conv.rules.taps import taps_mismatches
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, pack
from tilewright_kit.contract.problem import Role
from tilewright_server.build.toolchains.hip import HipToolchain

CDNA, OTHERS = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201", "sm_90a", "x86-64-v4")
APART = 1 << 32


def layer(n: int, c: int, k: int, size: int, taps: int = 3, groups: int = 1, dtype: str = "bf16") -> ConvProblem:
    tensors = {"x": last(dtype, n, c, size, size), "w": last(dtype, k, c // groups, taps, taps)}
    return forward(tensors, padding=taps // 2, groups=groups)


def gradient(n: int, c: int, k: int, size: int, stride: int = 1) -> ConvProblem:
    rows = (size - 1) // stride + 1
    tensors = {"dy": last("fp16", n, k, rows, rows), "w": last("fp16", k, c, 3, 3)}
    return backward_data(tensors, padding=1, stride=stride, input_size=(size, size))


def best(problem: ConvProblem, name: str) -> ConvConfig:
    device = device_of(tilewright_arch.load(name))
    return min(conv_candidates(problem, device), key=lambda config: predict_conv(problem, config, device).seconds)


def proposed(problem: ConvProblem, name: str) -> list[ConvConfig]:
    found = conv_candidates(problem, device_of(tilewright_arch.load(name)))
    return [config for config in found if TAPS.makes(config)]


@pytest.mark.parametrize(("name", "tile"), [("gfx942", (176, 128, 32)), ("gfx950", (208, 128, 32))])
def test_a_body_layer_gets_a_tile_that_divides_among_the_units(name: str, tile: tuple[int, int, int]) -> None:
    for problem in (layer(32, 256, 256, 28), gradient(32, 256, 256, 28)):
        config = best(problem, name)
        assert TAPS.makes(config) and config.tile == tile


def test_only_amd_gpus_with_waves_of_64_have_them() -> None:
    problem = layer(8, 64, 64, 14)
    assert all(proposed(problem, name) for name in CDNA)
    assert not any(proposed(problem, name) for name in OTHERS)


def test_other_problems_have_other_kernels() -> None:
    weights = backward_weight(
        {"x": last("bf16", 8, 64, 14, 14), "dy": last("bf16", 8, 64, 14, 14)}, padding=1, filter_size=(3, 3)
    )
    refused = {
        "channels of a group do not fill": (layer(8, 48, 64, 14), layer(8, 64, 64, 14, groups=4)),
        "up to 32 taps": (layer(8, 64, 64, 14, taps=7),),
        "offsets do not reach": (gradient(1, 16384, 16384, 4),),
    }
    (one, *_) = proposed(layer(8, 64, 64, 14), "gfx942")
    for reason, problems in refused.items():
        for problem in problems:
            assert not proposed(problem, "gfx942")
            found = tuple(taps_mismatches(problem, one))
            assert any(item.rule == "whole_taps" and reason in item.reason for item in found)
    assert not proposed(weights, "gfx942")
    assert all(config.split_image for config in proposed(layer(512, 512, 64, 72), "gfx942"))


def run(problem: ConvProblem, config: ConvConfig, name: str, hip_toolchain: HipToolchain, folder: Path) -> None:
    """Plan, build, run, compare."""
    arch = tilewright_arch.load(name)
    plan, rng = plan_conv(problem, config, device_of(arch)), np.random.default_rng(5)
    (stage,) = plan.stages
    memory, addresses, arrays = Memory(), {}, {}
    for number, item in enumerate(plan.operands):
        own = item.role is Role.INPUT
        kept = np.moveaxis(np.empty([item.desc.shape[i] for i in (0, 2, 3, 1)], item.desc.dtype.numpy), -1, 1)
        kept[...] = rng.standard_normal(kept.shape).astype(np.float32) if own else np.nan
        address = (0x7F00 << 32) + number * APART
        memory.map(address, np.moveaxis(kept, 1, -1).reshape(-1).view(np.uint8), item.name, writable=not own)
        addresses[item.name], arrays[item.name] = address, kept
    extra: dict[Any, Any] = {WORKSPACE: plan.workspace_bytes, COUNTERS: plan.counter_bytes}
    for number, (what, nbytes) in enumerate(extra.items(), len(addresses)):
        addresses[what] = (0x7F00 << 32) + number * APART
        memory.map(addresses[what], np.zeros(nbytes // 16 * 16 + 16, np.uint8), str(what))
    packed = pack(stage.args)
    block, table = bytearray(len(packed.template)), 0x6F00 << 32
    packed.bind(addresses, block, table)
    if len(block) > packed.root_bytes:
        whole = np.zeros(-(-len(block) // 16) * 16, np.uint8)
        whole[: len(block)] = np.frombuffer(bytes(block), np.uint8)
        memory.map(table, whole, "tables", writable=False)
    unit = generate(config, arch)
    image = hip_toolchain.compile(unit, folder, arch).binary.read_bytes()
    CodeObject.load(image).kernel(unit.entries["main"]).launch(
        memory, grid=stage.geometry.grid, block=stage.geometry.block, arguments=bytes(block[: packed.root_bytes]),
        dynamic_lds=stage.geometry.shared_bytes,
    )  # fmt: skip
    inputs = {item.name: arrays[item.name] for item in plan.operands if item.role is Role.INPUT}
    for output, truth in reference_conv(problem, inputs).items():
        np.testing.assert_allclose(arrays[output].astype(np.float64), truth.astype(np.float64), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kind", ["forward", "slices", "gradient", "phases"])
@pytest.mark.some(1)
def test_a_plan_launches_what_its_template_expects(
    kind: str, name: str, hip_toolchain: HipToolchain, tmp_path: Path
) -> None:
    problem = {
        "forward": layer(1, 64, 72, 13),
        "slices": layer(1, 64, 72, 13),
        "gradient": gradient(1, 72, 64, 11),
        "phases": gradient(1, 72, 64, 15, stride=2),
    }[kind]
    found = [item for item in proposed(problem, name) if (item.split_k > 1) == (kind == "slices")]
    run(problem, found[0], name, hip_toolchain, tmp_path)
