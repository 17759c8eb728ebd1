"""Every kernel of an operation's default sets compiles for its GPU: no spills, and the registers, shared memory, waves
and matrix instructions that its launch and its main loop are to have. See ``gated.py`` for what is compiled, and when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gated import gate_of

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.code_object import KernelFacts, read_code_object
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain, resources_of
from tilewright_server.build.toolchains.toolchain import Compiled, Toolchain
from tilewright_tools.analysis.disassembly import Disassembler
from tilewright_tools.analysis.loops import main_loop

__all__ = ["ARCHS", "Shipped"]

CUDA = ("sm_80", "sm_90a")
ARCHS = (*CUDA, "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@dataclass(frozen=True)
class Shipped:
    """The default sets of an operation, and what its kernels are to be like. A config stands with its arch."""

    name: str
    judge: Path
    """The module that says so: when it changes, what it passed counts no longer."""
    sets: Mapping[str, Mapping[str, Any]]
    rules: RuleBook[Any]
    generate: Callable[[Any, ArchSpec], SourceUnit]
    threads: Callable[[Any, ArchSpec], int]
    """Threads of a workgroup."""
    has_matrix: Callable[[Any, ArchSpec], bool]
    """True if the main loop is to have matrix instructions, on AMD GPUs."""
    spills: Callable[[KernelFacts], object]
    """True if a kernel keeps values in memory, on AMD GPUs; on the others such a kernel does not build."""
    shared: Callable[[Any, ArchSpec], int] = lambda _config, _arch: 0
    """Bytes of shared memory that a launch asks for."""
    sample: int = 4
    """Kernels of each set that a compiler compiles of which there is no record."""

    def check(self, name: str, folder: Path, again: bool) -> None:
        """Fails with what is wrong with the kernels for one arch. ``again``: compile all of them, and record that they
        passed.
        """
        arch = tilewright_arch.load(name)
        sets = [sets["default"].expand(arch, self.rules) for sets in self.sets.values()]
        configs = [config for kernels in sets for config in kernels]
        units = [self.generate(config, arch) for config in configs]
        with _toolchain(arch) as toolchain:
            gate = gate_of(f"{self.name}/shipped/{name}", units, arch, toolchain, [self.judge, Path(__file__)])
            if gate.is_passed and not again:
                return
            some = [config for kernels in sets for config in self._chosen(kernels)]
            found = self._faults(configs if again or gate.is_to_be_proved else some, arch, toolchain, folder)
        assert not found, "\n".join(found)
        if again:
            gate.record()

    def _chosen(self, configs: Sequence[Any]) -> list[Any]:
        """Some of them, always the same: by a hash of their names, so that no kind of them stands together."""
        return sorted(configs, key=lambda item: hashlib.sha256(item.name.encode()).digest())[: self.sample]

    def _faults(self, configs: Sequence[Any], arch: ArchSpec, toolchain: Toolchain, folder: Path) -> list[str]:
        def judge(numbered: tuple[int, Any]) -> str:
            number, config = numbered
            unit, room = self.generate(config, arch), folder / str(number)
            room.mkdir()
            try:
                compiled = toolchain.compile(unit, room, arch)
            except BuildFailedError as error:
                return f"{config.name}: {error.rule}: {error.log_tail[-500:]}"
            fault = (self._cuda_fault if arch.id in CUDA else self._amd_fault)(config, arch, compiled, unit)
            return f"{config.name}: {fault}" if fault else ""

        assert configs
        with ThreadPoolExecutor(2) as pool:
            return [text for text in pool.map(judge, enumerate(configs)) if text]

    def _cuda_fault(self, config: Any, arch: ArchSpec, compiled: Compiled, unit: SourceUnit) -> str:
        """Faults of a kernel; empty if there are none."""
        registers = max(item.registers for item in resources_of(compiled.log))  # of all entries of the unit
        limit = arch.registers_per_thread(self.threads(config, arch))
        return f"{registers} registers, not {limit}" if registers > limit else ""

    def _amd_fault(self, config: Any, arch: ArchSpec, compiled: Compiled, unit: SourceUnit) -> str:
        image, symbol = compiled.binary.read_bytes(), unit.entries["main"]
        facts, threads = read_code_object(image).kernel(symbol), self.threads(config, arch)
        if self.spills(facts) or facts.vgprs > arch.registers_per_thread(threads):
            return str(facts)
        if (facts.wave, facts.max_workgroup) != (arch.wave_size, threads):
            return str(facts)
        shared = self.shared(config, arch)
        if facts.lds_bytes + shared > arch.lds_bytes:
            return f"{facts.lds_bytes} bytes of LDS beside {shared} of the launch"
        loop = main_loop(next(item for item in Disassembler().disassemble(image) if item.name == symbol))
        matrix = loop.matrix_instructions if loop else 0
        wrong = bool(matrix) != self.has_matrix(config, arch)
        return f"{matrix} matrix instructions in the main loop" if wrong else ""


@contextmanager
def _toolchain(arch: ArchSpec) -> Iterator[Toolchain]:
    """The compiler for an arch; the test is skipped where there is none."""
    made: Toolchain = (NvrtcToolchain if arch.id in CUDA else HipToolchain)([include_dir()])
    try:
        made.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()
