"""Kernels of AMD GPUs compile: no spills, no scratch, registers and LDS as the specs and the footprint say.

See ``gated.py`` for what is compiled, and when.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hip_batches
import pytest
from gated import gate_of
from hip_batches import batches, chosen, faults_of, loop_fault, resource_fault, width_fault
from hip_units import HAVE_HIP, HIP_ARCHS, WITHOUT_HIP, toolchain

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_emulator.code.compiler import WITHOUT_OBJDUMP, have_objdump
from tilewright_gemm.candidates.hip import HipShape, hip_config
from tilewright_gemm.codegen import generate
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS, PACK_B_SETS
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.tiles.choices import table_key
from tilewright_kit.tiles.footprint.workgroup import registers_of, threads_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.build.toolchains.code_object import KernelFacts, read_code_object
from tilewright_tools.analysis.disassembly import Instruction

pytestmark = [
    pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP),
    pytest.mark.skipif(not have_objdump(), reason=WITHOUT_OBJDUMP),
]

SAMPLE = 32
"""Kernels of each arch's default set that a compiler compiles of which there is no record."""
PROPOSED, OF_PROPOSED = 12, 5
"""Kernels that planners propose beyond the default set, and those that such a compiler compiles."""


def facts_of(config: GemmConfig | PackBConfig, arch: ArchSpec, folder: Path) -> KernelFacts:
    """Compiles one kernel. Raises ``BuildFailedError``, for spills too."""
    unit = generate(config, arch)
    folder.mkdir()
    compiled = toolchain().compile(unit, folder, arch)
    (symbol,) = unit.entries.values()
    return read_code_object(compiled.binary.read_bytes()).kernel(symbol)


def faults(configs: Sequence[GemmConfig], arch: ArchSpec, folder: Path) -> list[str]:
    """What is wrong with kernels: spills, registers, LDS, waves, matrix instructions of the main loop."""
    assert configs
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda item: faults_of(item[1], arch, folder / str(item[0])), enumerate(batches(configs)))
        return [text for texts in found for text in texts]


def judge(
    name: str, arch: ArchSpec, configs: Sequence[GemmConfig], some: Sequence[GemmConfig], folder: Path, again: bool
) -> None:
    """Holds kernels to their gate. ``some``: of which a compiler without a record compiles these."""
    units = [generate(config, arch) for config in configs]
    gate = gate_of(f"gemm/{name}/{arch.id}", units, arch, toolchain(), [Path(hip_batches.__file__)])
    gate.require(lambda whole: faults(configs if whole else some, arch, folder), again)


def shipped(arch: ArchSpec) -> tuple[tuple[GemmConfig, ...], tuple[GemmConfig, ...]]:
    """The essential and the default set."""
    return KERNEL_SETS["essential"].expand(arch, RULES), KERNEL_SETS["default"].expand(arch, RULES)


def proposed(arch: ArchSpec) -> list[GemmConfig]:
    """What planners would try for usual problems, plain and with an epilogue."""
    operation, device = GemmOperation(), device_of(arch)
    found: dict[GemmConfig, None] = {}
    sizes = ((1024, 1024, 1024), (4096, 4096, 4096), (16, 4096, 4096), (512, 512, 16384))
    types = [("bf16", "bf16"), ("int8", "fp32"), ("fp32", "fp32"), ("fp8", "bf16")]
    for (m, n, k), (dtype, out) in itertools.product(sizes, types):
        if arch.acc_dtype(dtype, dtype) is None:
            continue
        for strides, d in (((1, k), {}), ((n, 1), {"d[0]": TensorDesc.of("bf16", (m, n))})):
            inputs = {"a": TensorDesc.of(dtype, (m, k)), "b": TensorDesc.of(dtype, (k, n), strides), **d}
            request = OperationRequest("gemm", inputs, {}, {"out_dtype": out})
            found |= dict.fromkeys(operation.candidates(operation.parse(request), device)[:8])
    return list(found)


def spread(configs: list[GemmConfig], count: int) -> list[GemmConfig]:
    """``count`` of them, evenly: declarations of one kind stand together."""
    step = max(len(configs) / count, 1.0)
    return [configs[int(index * step)] for index in range(min(count, len(configs)))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HIP_ARCHS)
def test_every_kernel_of_the_shipped_sets_compiles(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    arch = tilewright_arch.load(name)
    essential, default = shipped(arch)
    configs = list(dict.fromkeys([*essential, *default]))
    some = list(dict.fromkeys([*essential, *chosen(default, SAMPLE), *crowded(arch)]))
    judge("shipped", arch, configs, some, tmp_path, pytestconfig.getoption("--gates"))


@pytest.mark.slow
@pytest.mark.parametrize("name", HIP_ARCHS)
def test_what_planners_propose_beyond_the_shipped_sets_compiles(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    arch = tilewright_arch.load(name)
    known = set[GemmConfig]().union(*shipped(arch))
    configs = spread([config for config in proposed(arch) if config not in known], PROPOSED)
    again = pytestconfig.getoption("--gates")
    judge("proposed", arch, configs, spread(configs, OF_PROPOSED), tmp_path, again)


def test_what_is_wrong_with_a_kernel_is_found(tmp_path: Path) -> None:
    arch = tilewright_arch.load("gfx942")
    config = next(item for item in KERNEL_SETS["essential"].expand(arch, RULES) if item.a == "fp16")
    facts = facts_of(config, arch, tmp_path / "kernel")
    assert not resource_fault(config, arch, facts)
    for wrong, said in (
        ({"vgpr_spills": 1}, "spills"), ({"sgpr_spills": 1}, "spills"), ({"scratch_bytes": 4}, "spills"),
        ({"vgprs": 513}, "513 registers"), ({"wave": 32}, "wave=32"), ({"max_workgroup": 1024}, "max_workgroup=1024"),
        ({"lds_bytes": 64}, "lds_bytes=64"),
    ):  # fmt: skip
        assert said in resource_fault(config, arch, dataclasses.replace(facts, **wrong)), wrong
    sums = math.prod(
        tile // wave // warp
        for tile, wave, warp in list(zip(config.tile, config.wave, config.warp_tile, strict=True))[:2]
    )
    assert not loop_fault(config, arch, sums)
    assert loop_fault(config, arch, 0) and loop_fault(config, arch, sums + 1)
    narrow = Instruction(0, "ds_read_b64", ("v[0:1]", "v2"), (), (0, 0))
    assert "LDS reads of 8 bytes" in width_fault(config, arch, [narrow])
    assert not width_fault(config, arch, [dataclasses.replace(narrow, mnemonic="ds_read_b128")])


def crowded(arch: ArchSpec) -> list[GemmConfig]:
    """Kernels of the default set of whose registers the most are taken, by the count of the footprint."""
    configs = [item for item in KERNEL_SETS["default"].expand(arch, RULES) if item.a != "bf16"]
    configs.sort(key=lambda item: -registers_of(item, arch) / arch.registers_per_thread(threads_of(item, arch)))
    return configs[:6]


def widest(arch: ArchSpec) -> Iterator[GemmConfig]:
    """Bytes that are transposed beside the most sums: not in the default set, but planners may propose them."""
    for dtype, pipeline, nbytes in itertools.product(
        (DType.FP8, DType.INT8), ("comp_async", "compv4", "compv3"), (64, 128)
    ):
        key = table_key(dtype.value, dtype.value)
        if pipeline not in arch.pipelines or key not in arch.warp_tiles:
            continue
        for shape in (HipShape((256, 224), (4, 1)), HipShape((256, 192), (4, 1))):
            config = hip_config(arch, dtype, key, shape, pipeline, nbytes)
            if config is not None and RULES.allows(config.replace(layout="rrr"), arch):
                yield config.replace(layout="rrr")
                break


def test_the_fullest_workgroups_are_among_the_kernels_that_need_the_most_registers() -> None:
    """16 waves, whose threads have 128 registers each, half of them for sums."""
    found = {(item.pipeline, item.a, item.tile) for item in crowded(tilewright_arch.load("gfx950"))}
    assert found > {("comp_async", "fp8", (256, 256, 128))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950"])
def test_the_widest_tiles_of_bytes_beyond_the_shipped_sets_compile(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    arch = tilewright_arch.load(name)
    found = list(widest(arch))
    assert len(found) >= 4
    judge("widest", arch, found, found, tmp_path, pytestconfig.getoption("--gates"))


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950"])
def test_kernels_that_pack_compile(name: str, tmp_path: Path) -> None:
    arch = tilewright_arch.load(name)
    configs = list(PACK_B_SETS["default"].expand(arch, RULES))  # type: ignore[arg-type]
    assert len(configs) >= 8
    for number, config in enumerate(spread(configs, 4)):
        assert facts_of(config, arch, tmp_path / str(number)).scratch_bytes == 0
