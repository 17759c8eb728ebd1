"""Many kernels of AMD GPUs in one unit: the headers are read once, and each is judged by what the code object says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hip_units import toolchain

from tilewright_arch import ArchSpec
from tilewright_gemm.codegen import generate
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.hip import resident_of
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.tiles.footprint.workgroup import threads_of
from tilewright_kit.types.errors import BuildFailedError
from tilewright_server.build.toolchains.code_object import KernelFacts, read_code_object
from tilewright_server.build.toolchains.compilers import ALLOW_SPILLS
from tilewright_tools.analysis.disassembly import Disassembler, Instruction
from tilewright_tools.analysis.instructions import Kind, work_of
from tilewright_tools.analysis.loops import main_loop

__all__ = ["batches", "chosen", "faults_of", "loop_fault", "resource_fault", "width_fault"]

SIZE = 12
"""Kernels of one unit: with more, a compiler's run is no cheaper, and two of them no longer share the work evenly."""
GRAIN = 8
"""Registers are handed out in blocks of so many."""
EXPECTED = 2
"""Workgroups that share a unit, where the cost model counts on more than one."""
HEADER = '#include "tilewright/gpu/gemm/gemm.hpp"\n'


def chosen(configs: Sequence[GemmConfig], count: int) -> list[GemmConfig]:
    """``count`` of them, always the same: by a hash of their names, so that no kind of them stands together."""
    return sorted(configs, key=lambda item: hashlib.sha256(item.name.encode()).digest())[:count]


def batches(configs: Sequence[GemmConfig]) -> Iterator[list[GemmConfig]]:
    """The configs in groups for ``faults_of``."""
    for start in range(0, len(configs), SIZE):
        yield list(configs[start : start + SIZE])


def faults_of(configs: Sequence[GemmConfig], arch: ArchSpec, folder: Path) -> list[str]:
    """What is wrong with each of them that is not right. ``folder`` is new."""
    folder.mkdir()
    unit, symbols = _joined([generate(config, arch) for config in configs])
    try:
        image = toolchain().compile(unit, folder, arch).binary.read_bytes()
    except BuildFailedError as error:
        return [f"{configs[0].name} and those behind it: {error.rule}: {error.log_tail[-800:]}"]
    code = read_code_object(image)
    functions = {function.name: function for function in Disassembler().disassemble(image)}
    found = []
    for config, symbol in zip(configs, symbols, strict=True):
        why = resource_fault(config, arch, code.kernel(symbol))
        loop = main_loop(functions[symbol])
        why = why or loop_fault(config, arch, loop.matrix_instructions if loop else 0)
        why = why or width_fault(config, arch, loop.body if loop else ())
        if why:
            found.append(f"{config.name}: {why}")
    return found


def resource_fault(config: GemmConfig, arch: ArchSpec, facts: KernelFacts) -> str:
    """What is wrong with what a kernel takes; empty if nothing is."""
    if facts.vgpr_spills or facts.sgpr_spills or facts.scratch_bytes:
        return f"spills: {facts}"
    threads = threads_of(config, arch)
    limit = arch.registers_per_thread(threads)
    if facts.vgprs > limit:
        return f"{facts.vgprs} registers, of which {threads} threads have {limit} each"
    room = arch.register_file // (threads * (-(-facts.vgprs // GRAIN) * GRAIN))
    if room < min(resident_of(config, arch), EXPECTED):
        return f"{facts.vgprs} registers leave room for {room} workgroups, not {resident_of(config, arch)}"
    if (facts.wave, facts.max_workgroup) != (arch.wave_size, threads) or facts.lds_bytes:
        return str(facts)
    return ""


def loop_fault(config: GemmConfig, arch: ArchSpec, matrix: int) -> str:
    """What is wrong with how many matrix instructions the main loop has; empty if nothing is."""
    if not _has_matrix(config, arch):
        return f"{matrix} matrix instructions, of which there are none for these types" if matrix else ""
    sums = 1
    for tile, waves, warp in zip(config.tile[:2], config.wave[:2], config.warp_tile[:2], strict=True):
        sums *= tile // waves // warp
    if not matrix or matrix % sums:
        return f"{matrix} matrix instructions in the main loop, for {sums} warp tiles of sums"
    return ""


def width_fault(config: GemmConfig, arch: ArchSpec, body: Sequence[Instruction]) -> str:
    """What is wrong with how much the main loop's accesses move at once; empty if nothing is.

    Without matrix instructions the loops for aligned and for other operands are one, so that nothing can be told apart.
    """
    if not _has_matrix(config, arch):
        return ""
    along_k = config.layout.startswith("rc")  # what does not lie along k is turned on its way into LDS
    least = {"loads": 16 if along_k else 8, "LDS reads": 16, "LDS writes": 16 if along_k else 4}
    for work in map(work_of, body):
        what = {Kind.GLOBAL: "loads", Kind.LDS: "LDS writes" if work.store else "LDS reads"}.get(work.kind, "")
        if what and work.lane_bytes < (4 if work.also_lds else least[what]):  # gfx942 moves 4 to LDS at once
            return f"{what} of {work.lane_bytes} bytes in the main loop, where {least[what]} are due"
    return ""


def _has_matrix(config: GemmConfig, arch: ArchSpec) -> bool:
    """Whether the arch multiplies these types by other than each thread's own arithmetic."""
    return config.a != "fp32" or arch.wave_size == 64


def _joined(units: Sequence[SourceUnit]) -> tuple[SourceUnit, list[str]]:
    """One unit of them all, and each one's symbol. Spills are let through, to be found kernel by kernel."""
    parts, symbols = [HEADER], []
    for number, unit in enumerate(units):
        _, found, body = unit.text.partition(HEADER)
        assert found, f"{unit.name} begins otherwise"
        (symbol,) = unit.entries.values()
        parts.append(
            body.replace("struct Config {", f"struct Config{number} {{").replace(", Config)", f", Config{number})")
        )
        symbols.append(symbol)
    defines = units[0].defines | {ALLOW_SPILLS: "1"}
    names = {f"kernel{number}": symbol for number, symbol in enumerate(symbols)}
    return SourceUnit("batch", "hip", "\n".join(parts), names, flags=units[0].flags, defines=defines), symbols
