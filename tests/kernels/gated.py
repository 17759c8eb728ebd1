"""Which whole sets of kernels have passed their gates: what has not changed since is not compiled again.

``gated.json`` has, for each set, the compiler and a digest of all that it and the gates read: sources, headers, flags,
the arch, and the modules that judge. Where both are as recorded, the set passes as it stands. Where the same compiler
would read something else, the whole set is compiled. Another compiler judges a sample; its own record can be made with
``make gates``, which compiles everything and writes what passed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contents import content

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_server.build.cache.artifacts import artifact_key
from tilewright_server.build.toolchains.toolchain import Toolchain

__all__ = ["Gate", "Kept", "gate_of"]

RECORD = Path(__file__).with_name("gated.json")


@dataclass(frozen=True, slots=True)
class Gate:
    """A set of kernels, as it stands now."""

    name: str
    compiler: str
    digest: str

    @property
    def is_passed(self) -> bool:
        """These very kernels have passed these very gates."""
        return _records().get(self.name) == [self.compiler, self.digest]

    @property
    def is_to_be_proved(self) -> bool:
        """The compiler of the record would read something else now."""
        return _records().get(self.name, [""])[0] == self.compiler

    def require(self, faults: Callable[[bool], Collection[str]], again: bool) -> None:
        """Fails with what is wrong with the kernels, unless these very kernels have passed. ``faults``: what is wrong
        with all of them, or, asked with False, with those that a compiler judges of which there is no record.
        ``again``: judge all of them in any case, and record that they passed.
        """
        if self.is_passed and not again:
            return
        found = faults(again or self.is_to_be_proved)
        assert not found, found
        if again:
            self.record()

    def record(self) -> None:
        """Say that it passed. Other processes may record others at the same time."""
        with RECORD.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            records = _records() | {self.name: [self.compiler, self.digest]}
            RECORD.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


def gate_of(
    name: str, units: Iterable[SourceUnit], arch: ArchSpec, toolchain: Toolchain, judges: Sequence[Path]
) -> Gate:
    """The gate of a set. ``judges``: the modules that hold the gates. Raises ``ToolchainMissingError``."""
    digest = hashlib.sha256()
    for judge in judges:
        digest.update(content(judge))
    for key in sorted(artifact_key(unit, arch, toolchain) for unit in units):
        digest.update(key.encode())
    return Gate(name, toolchain.identity(), digest.hexdigest())


class Kept:
    """Kernels that passed on this machine, by what they and the judges were then: a run that was stopped goes on where
    it was, and after a change only what it touches is compiled. They are forgotten with the folder ``build``.
    """

    FILE = RECORD.parents[2] / "build" / "passed-kernels.txt"
    TOGETHER = 64
    """Kernels between two looks: four units of 16, so that two compilers share them evenly."""

    def __init__(self, judges: Sequence[Path], arch: ArchSpec, toolchain: Toolchain) -> None:
        self._judges = hashlib.sha256(b"".join(content(judge) for judge in judges)).hexdigest()
        self._arch, self._toolchain = arch, toolchain

    def faults(
        self, units: Mapping[str, SourceUnit], judge: Callable[[Mapping[str, SourceUnit], int], Collection[str]]
    ) -> list[str]:
        """Faults of all units, by what ``judge`` says of some of them (and of how many before); those that passed
        before are left out.
        """
        passed = set(self.FILE.read_text().split()) if self.FILE.exists() else set()
        left = {key: name for name in units if (key := self._key(units[name])) not in passed}
        order = sorted(left, key=lambda key: _headers(units[left[key]]))  # of the same ones, they share a unit
        found: list[str] = []
        for start in range(0, len(order), self.TOGETHER):
            keys = order[start : start + self.TOGETHER]
            faults = judge({left[key]: units[left[key]] for key in keys}, start)
            found += faults
            if not faults:
                self.FILE.parent.mkdir(exist_ok=True)
                with self.FILE.open("a") as file:
                    file.write("".join(f"{key}\n" for key in keys))
        return found

    def _key(self, unit: SourceUnit) -> str:
        text = self._judges + self._toolchain.identity() + artifact_key(unit, self._arch, self._toolchain)
        return hashlib.sha256(text.encode()).hexdigest()


def _headers(unit: SourceUnit) -> list[str]:
    return [line for line in unit.text.splitlines() if line.startswith("#include")]


def _records() -> dict[str, list[str]]:
    text = RECORD.read_text() if RECORD.exists() else ""
    found: dict[str, list[str]] = json.loads(text or "{}")
    return found
