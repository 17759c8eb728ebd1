"""Every kernel of the default sets of attention compiles for its GPU: no spills, and the registers, shared memory,
waves and matrix instructions that its launch and its main loop are to have. See ``gated.py`` for what is compiled, and
when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gated import gate_of

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_fmha.codegen import generate
from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.defaults import ELEMENTWISE
from tilewright_fmha.gpu_shared import shared_bytes
from tilewright_fmha.rules import RULES
from tilewright_fmha.sets import KERNEL_SETS
from tilewright_fmha.stages_view import threads_of
from tilewright_kit.errors import BuildFailedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.analysis.code_object import read_code_object
from tilewright_server.analysis.disassembly import Disassembler
from tilewright_server.analysis.loops import main_loop
from tilewright_server.build.hip import HipToolchain, scratch_in_use
from tilewright_server.build.nvrtc import NvrtcToolchain, resources_of
from tilewright_server.build.toolchain import Compiled, Toolchain

CUDA = ("sm_80", "sm_90a")
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
OPEN: tuple[str, ...] = ()
"""Archs of which some kernels do not pass: they are compiled with ``make gates`` alone."""
SAMPLE = 4
"""Kernels of each set that a compiler compiles of which there is no record."""
ROW_THREADS = 128
"""Of workgroups without a product of matrices."""


@pytest.fixture(scope="module")
def toolchains() -> Iterator[Callable[[str], Toolchain]]:
    made = {"cuda": NvrtcToolchain([include_dir()]), "hip": HipToolchain([include_dir()])}

    def ready(kind: str) -> Toolchain:
        try:
            made[kind].identity()
        except ToolchainMissingError as error:
            pytest.skip(str(error))
        return made[kind]

    yield ready
    for toolchain in made.values():
        toolchain.close()


def threads(config: FmhaConfig, arch: ArchSpec) -> int:
    return ROW_THREADS if config.family in ELEMENTWISE else threads_of(config, arch)


def cuda_fault(config: FmhaConfig, arch: ArchSpec, compiled: Compiled, symbol: str) -> str:
    """What is wrong with a kernel; empty if nothing is. What spills does not build."""
    registers = max(item.registers for item in resources_of(compiled.log))
    limit = arch.registers_per_thread(threads(config, arch))
    return f"{registers} registers, not {limit}" if registers > limit else ""


def amd_fault(config: FmhaConfig, arch: ArchSpec, compiled: Compiled, symbol: str) -> str:
    image, count = compiled.binary.read_bytes(), threads(config, arch)
    facts = read_code_object(image).kernel(symbol)
    spills = facts.vgpr_spills or scratch_in_use(facts)  # scalar registers may lie in lanes of vector registers
    if spills or facts.vgprs > arch.registers_per_thread(count):
        return str(facts)
    if (facts.wave, facts.max_workgroup) != (arch.wave_size, count):
        return str(facts)
    if facts.lds_bytes + shared_bytes(config, arch) > arch.lds_bytes:
        return f"{facts.lds_bytes} bytes of LDS beside {shared_bytes(config, arch)} of the launch"
    loop = main_loop(next(item for item in Disassembler().disassemble(image) if item.name == symbol))
    matrix = loop.matrix_instructions if loop else 0
    due = config.family not in ELEMENTWISE and (config.q.bytes < 4 or arch.wave_size == 64)
    return f"{matrix} matrix instructions in the main loop" if bool(matrix) != due else ""


def faults(configs: Sequence[FmhaConfig], arch: ArchSpec, toolchain: Toolchain, folder: Path) -> list[str]:
    def judge(numbered: tuple[int, FmhaConfig]) -> str:
        number, config = numbered
        unit, room = generate(config, arch), folder / str(number)
        room.mkdir()
        try:
            compiled = toolchain.compile(unit, room, arch)
        except BuildFailedError as error:
            return f"{config.name}: {error.rule}: {error.log_tail[-500:]}"
        fault = (cuda_fault if arch.id in CUDA else amd_fault)(config, arch, compiled, unit.entries["main"])
        return f"{config.name}: {fault}" if fault else ""

    assert configs
    with ThreadPoolExecutor(2) as pool:
        return [text for text in pool.map(judge, enumerate(configs)) if text]


def chosen(configs: Sequence[FmhaConfig]) -> list[FmhaConfig]:
    """Some of them, always the same: by a hash of their names, so that no kind of them stands together."""
    return sorted(configs, key=lambda item: hashlib.sha256(item.name.encode()).digest())[:SAMPLE]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*CUDA, *AMD])
def test_every_kernel_of_the_shipped_sets_compiles(
    name: str, toolchains: Callable[[str], Toolchain], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    arch = tilewright_arch.load(name)
    toolchain = toolchains("cuda" if name in CUDA else "hip")
    sets = [sets["default"].expand(arch, RULES) for sets in KERNEL_SETS.values()]
    configs = [config for kernels in sets for config in kernels]
    units = [generate(config, arch) for config in configs]
    gate = gate_of(f"fmha/shipped/{name}", units, arch, toolchain, [Path(__file__)])
    again = pytestconfig.getoption("--gates")
    if gate.is_passed and not again:
        return
    if name in OPEN and not again:
        pytest.skip(f"some kernels for {name} do not pass yet: make gates says which")
    some = [config for kernels in sets for config in chosen(kernels)]
    found = faults(configs if again or gate.is_to_be_proved else some, arch, toolchain, tmp_path)
    assert not found, "\n".join(found)
    if again:
        gate.record()
