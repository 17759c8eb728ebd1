"""Kernels of the default sets compile for their device: no spills, no warning that the hardware's speed is lost.

See ``gated.py`` for when all of a default set is compiled, and when what covers it. Of what planners and tuning propose
beyond it, every run compiles a covering part; the marker ``exhaustive`` has all of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from covering import covering
from cuda_units import HAVE_NVRTC, WITHOUT_NVRTC
from gated import gate_of

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.codegen import generate
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS, SPACES
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.tiles.footprint.workgroup import threads_of
from tilewright_kit.types.errors import BuildFailedError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain, resources_of

pytestmark = pytest.mark.skipif(not HAVE_NVRTC, reason=WITHOUT_NVRTC)


@pytest.fixture(scope="module")
def toolchain() -> Iterator[NvrtcToolchain]:
    toolchain = NvrtcToolchain([include_dir()])
    yield toolchain
    toolchain.close()


def faults(configs: Sequence[GemmConfig], arch: ArchSpec, toolchain: NvrtcToolchain, folder: Path) -> dict[str, str]:
    """What is wrong with kernels, by name: what the toolchain refuses, and registers that the launch would not have."""
    found: dict[str, str] = {}
    for config in configs:
        try:
            compiled = toolchain.compile(generate(config, arch), folder, arch)
        except BuildFailedError as error:
            found[config.name] = f"{error.rule}: {error.value}\n{error.log_tail[-500:]}"
            continue
        (resources,) = resources_of(compiled.log)
        if resources.registers > arch.registers_per_thread(threads_of(config, arch)):
            found[config.name] = f"{resources.registers} registers for {threads_of(config, arch)} threads"
    return found


def default_set(arch: ArchSpec) -> tuple[GemmConfig, ...]:
    return KERNEL_SETS["default"].expand(arch, RULES)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_every_kernel_of_the_shipped_sets_compiles(
    name: str, toolchain: NvrtcToolchain, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    arch = tilewright_arch.load(name)
    configs = default_set(arch)
    units = [generate(config, arch) for config in configs]
    gate = gate_of(f"gemm/shipped/{name}", units, arch, toolchain, [Path(__file__)])
    again = pytestconfig.getoption("--gates")
    if gate.is_passed and not again:
        return
    assert not faults(configs if again or gate.is_to_be_proved else covering(configs), arch, toolchain, tmp_path)
    if again:
        gate.record()


def test_what_covers_a_set_has_every_type() -> None:
    configs = default_set(tilewright_arch.load("sm_90a"))
    assert {config.a for config in covering(configs)} == {config.a for config in configs}


def proposed(arch: ArchSpec) -> list[GemmConfig]:
    """What planners would try for usual problems, plain and with an epilogue."""
    operation, device = GemmOperation(), device_of(arch)
    found: dict[GemmConfig, None] = {}
    sizes = ((1024, 1024, 1024), (4096, 4096, 4096), (16, 4096, 4096), (512, 512, 16384), (2304, 4096, 8192))
    for (m, n, k), (dtype, out) in itertools.product(sizes, (("bf16", "bf16"), ("fp8", "bf16"), ("int8", "fp32"))):
        inputs = {"a": TensorDesc.of(dtype, (m, k)), "b": TensorDesc.of(dtype, (k, n), (1, k))}
        bias, d = {"bias": TensorDesc.of("fp32", (n,))}, {"d[0]": TensorDesc.of("bf16", (m, n))}
        for more, unary in (({}, "PassThrough"), (bias, "Gelu"), (d, "PassThrough")):
            request = OperationRequest("gemm", {**inputs, **more}, {}, {"out_dtype": out, "unary": unary})
            found |= dict.fromkeys(operation.candidates(operation.parse(request), device))
    return list(found)


@pytest.mark.extended
def test_what_planners_propose_beyond_the_default_set_compiles(toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    arch = tilewright_arch.load("sm_90a")
    configs = covering(proposed(arch), default_set(arch))
    assert configs
    assert not faults(configs, arch, toolchain, tmp_path)


@pytest.mark.extended
def test_what_tuning_tries_beyond_the_default_set_compiles(toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    arch = tilewright_arch.load("sm_90a")
    configs = covering(SPACES["tune_hopper"].iterate(arch, RULES), default_set(arch))
    assert configs
    assert not faults(configs, arch, toolchain, tmp_path)


# ---- all of it, and much of what has no end ----


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_planners_propose_compiles(toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    arch = tilewright_arch.load("sm_90a")
    assert not faults(proposed(arch), arch, toolchain, tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("space", ["tune_hopper", "sweep_hopper"])
def test_a_sample_of_hoppers_whole_space_compiles(space: str, toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    arch = tilewright_arch.load("sm_90a")
    configs = list(SPACES[space].iterate(arch, RULES))
    assert not faults(configs[:: len(configs) // 60], arch, toolchain, tmp_path)
