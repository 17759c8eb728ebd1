"""Kernels of any operation for an AMD GPU, several in one unit: their headers are read once, and each is judged by what
the code object says of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError
from tilewright_server.build.toolchains.code_object import KernelFacts, read_code_object
from tilewright_server.build.toolchains.compilers import ALLOW_SPILLS
from tilewright_server.build.toolchains.hip import scratch_in_use
from tilewright_server.build.toolchains.toolchain import Toolchain

__all__ = ["SIZE", "faults_of_units", "joined"]

SIZE = 16
"""Kernels of one unit: more are not cheaper, and two compilers no longer share the work evenly."""
_INCLUDE = re.compile(r'^#include "[^"]+"\n', re.MULTILINE)


def faults_of_units(units: Mapping[str, SourceUnit], arch: ArchSpec, toolchain: Toolchain, folder: Path) -> list[str]:
    """Faults of units of one kernel each, by name: those that do not build, or not within their registers."""

    def judge(numbered: tuple[int, list[str]]) -> list[str]:
        number, names = numbered
        return _faults({name: units[name] for name in names}, arch, toolchain, folder / str(number))

    with ThreadPoolExecutor(2) as pool:
        return [text for texts in pool.map(judge, enumerate(_groups(units))) for text in texts]


def joined(units: Sequence[SourceUnit]) -> SourceUnit:
    """One unit of several with the same headers, flags and definitions. Spills are let through, to be found kernel by
    kernel.
    """
    parts, entries = [_head(units[0])], {}
    for number, unit in enumerate(units):
        assert _alike(unit) == _alike(units[0])
        body = _INCLUDE.sub("", unit.text)
        parts.append(re.sub(r"\bConfig\b", f"Config{number}", body))
        entries |= {f"{role}{number}": symbol for role, symbol in unit.entries.items()}
    defines = units[0].defines | {ALLOW_SPILLS: "1"}
    return SourceUnit("batch", units[0].language, "\n".join(parts), entries, flags=units[0].flags, defines=defines)


def _head(unit: SourceUnit) -> str:
    return "".join(_INCLUDE.findall(unit.text))


def _alike(unit: SourceUnit) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Traits that units share which may be joined."""
    return _head(unit), tuple(unit.flags), tuple(sorted(unit.defines.items()))


def _groups(units: Mapping[str, SourceUnit]) -> Iterator[list[str]]:
    kinds = defaultdict(list)
    for name, unit in units.items():
        kinds[_alike(unit)].append(name)
    for names in kinds.values():
        for start in range(0, len(names), SIZE):
            yield names[start : start + SIZE]


def _faults(units: Mapping[str, SourceUnit], arch: ArchSpec, toolchain: Toolchain, folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    alone = len(units) == 1
    unit = next(iter(units.values())) if alone else joined(list(units.values()))
    try:
        image = toolchain.compile(unit, folder, arch).binary.read_bytes()
    except BuildFailedError as error:
        if alone:
            return [f"{next(iter(units))}: {error.rule}: {error.log_tail[-300:]}"]
        halves = [dict(list(units.items())[part::2]) for part in range(2)]
        return [text for part, half in enumerate(halves) for text in _faults(half, arch, toolchain, folder / str(part))]
    code = read_code_object(image)
    found = []
    for name, own in units.items():
        for symbol in own.entries.values():
            why = _fault(code.kernel(symbol), arch, spills=not alone)
            if why and not alone:  # alone, as the toolchain judges it
                found += _faults({name: own}, arch, toolchain, folder / f"alone{len(found)}-{symbol[-12:]}")
            elif why:
                found.append(f"{name}: {why}")
    return found


def _fault(facts: KernelFacts, arch: ArchSpec, *, spills: bool) -> str:
    """Faults of what a kernel takes; empty if there are none. ``spills``: were let through, so look for them."""
    if spills and (facts.vgpr_spills or scratch_in_use(facts)):
        return f"{facts.vgpr_spills} registers are spilled, {scratch_in_use(facts)} bytes of memory"
    limit = arch.registers_per_thread(facts.max_workgroup)
    if facts.vgprs > limit:
        return f"{facts.vgprs} registers, of which {facts.max_workgroup} threads have {limit} each"
    return f"{facts.lds_bytes} bytes of LDS, of {arch.lds_bytes}" if facts.lds_bytes > arch.lds_bytes else ""
