"""Every kernel that a planner may propose for an AMD GPU builds: see ``proposals.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from proposals import REQUESTS, chosen, convolutions, faults, proposed

import tilewright_arch
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.workers.process import Limits
from tilewright_tools.cli.problems.loading import load_operation

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@pytest.fixture(scope="module")
def toolchain() -> Iterator[HipToolchain]:
    toolchain = HipToolchain([include_dir()], limits=Limits(timeout_s=600))
    try:
        toolchain.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    yield toolchain
    toolchain.close()


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_one_of_the_proposals_of_each_arch_builds(
    arch: str, name: str, toolchain: HipToolchain, tmp_path: Path
) -> None:
    operation, spec = load_operation(name), tilewright_arch.load(arch)
    # Every seventh problem: their kinds take turns.
    configs = proposed(operation, spec, list(REQUESTS[name]())[::7])
    assert configs
    assert not faults(operation, chosen(configs, 1), spec, toolchain, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_proposals_build(arch: str, name: str, toolchain: HipToolchain, tmp_path: Path) -> None:
    operation, spec = load_operation(name), tilewright_arch.load(arch)
    assert not faults(operation, proposed(operation, spec, REQUESTS[name]()), spec, toolchain, tmp_path)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("direction", ["conv", "conv_backward_data"])
def test_small_groups_keep_the_weights_that_registers_hold(arch: str, direction: str) -> None:
    """Measured with clang 22: 16 weights of 9 taps for two rows of pixels take 352 registers, for one 169; 64 of them
    about 1100. RDNA has 256 a lane, CDNA 512.
    """
    spec = tilewright_arch.load(arch)
    room = spec.registers_per_thread(4 * spec.wave_size)
    requests = [item for item in convolutions(direction) if item.attributes["groups"] == 16]
    kernels = [item.to_dict() for item in proposed(load_operation(direction), spec, requests[::2])]
    small = [item for item in kernels if item["specialization"] == "direct" and item["filter"][2]]
    assert small
    for item in small:
        weights = item["vector_sizes"][0] ** 2 * item["filter"][1] * item["filter"][2]
        assert weights * item["pixel_tile"][1] + 72 <= room, item


def test_gradients_of_one_wave_and_many_keys_are_not_proposed_where_they_spill() -> None:
    """Measured with clang 22: 128 keys and heads of 64 on one wave take more than 512 registers, on two 311."""
    spec = tilewright_arch.load("gfx950")
    requests = [item for item in REQUESTS["attention_backward"]() if item.inputs["q"].shape[3] == 64]
    found = proposed(load_operation("attention_backward"), spec, requests)
    cuts = {(item.to_dict()["wave"][1], tuple(item.to_dict()["tile"][:2])) for item in found if "h64x64" in item.name}
    assert (2, (32, 128)) in cuts and (1, (32, 128)) not in cuts


def test_tall_tiles_with_both_operands_in_columns_are_proposed_where_they_fit() -> None:
    """Measured with clang 22 for gfx1201: tiles of 256x128 take 256 registers and spill one in ``compv4``, but neither
    tiles of 128x256, nor ``compv3``, nor slices of K.
    """
    requests = [item for item in REQUESTS["gemm"]() if item.inputs["a"].dtype.value == "fp16"]
    found = proposed(load_operation("gemm"), tilewright_arch.load("gfx1201"), requests)
    names = [item.name for item in found if item.name.startswith("gemm_fp16_ccr_")]

    def has(*words: str, split: bool = False) -> bool:
        return any(all(word in name for word in words) and ("splitk" in name) == split for name in names)

    assert not has("compv4", "_256x128x32_")
    assert has("compv3", "_256x128x32_") and has("compv4", "_128x256x32_") and has("compv4", "_256x128x32_", split=True)
