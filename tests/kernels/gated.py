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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contents import content

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_server.build.cache.artifacts import artifact_key
from tilewright_server.build.toolchains.toolchain import Toolchain

__all__ = ["Gate", "gate_of"]

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


def _records() -> dict[str, list[str]]:
    text = RECORD.read_text() if RECORD.exists() else ""
    found: dict[str, list[str]] = json.loads(text or "{}")
    return found
