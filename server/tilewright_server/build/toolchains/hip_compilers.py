"""Finding a compiler for AMD GPUs' kernels: hiprtc, a clang++ with lld, or the clang inside the wheel ``ziglang``."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_server.build.toolchains.compilers import answer_of, digest, file_stamp, have_module, zig_binary
from tilewright_server.build.toolchains.installed import InstalledCompiler
from tilewright_server.build.workers.helper import HelperEndedError, HelperPool

__all__ = ["FIX", "HIPRTC", "ZIGLANG", "HipCompiler", "find_compiler"]

HIPRTC, ZIGLANG = "hiprtc", "ziglang"
"""Names that the setting understands beside those of programs."""

OLDEST = 19
"""Release of clang that first compiles our headers."""
_KNOWN_SINCE = {"gfx950": 20}
"""Releases of clang that first know an arch, where that is later."""
_TUNING = (
    ("-mllvm", "-amdgpu-disable-clustered-low-occupancy-reschedule"),
    ("-mllvm", "-amdgpu-disable-unclustered-high-rp-reschedule"),
)
"""Options that leave out second rounds of scheduling: a tenth of the time that large kernels take, for no better code.
They are a compiler's own affair, so each is given only to those that accept it."""
_ROCM = ("/opt/rocm/llvm/bin/clang++", "/opt/rocm/lib/llvm/bin/clang++")
_NAMES = ("clang++", *(f"clang++-{release}" for release in range(22, OLDEST - 1, -1)), *_ROCM)

FIX = (
    f"install clang and lld {OLDEST} or later (Debian, Ubuntu: apt-get install clang-22 lld-22, from apt.llvm.org), or"
    " the wheel that brings both (pip install ziglang); where ROCm is installed, pip install 'tilewright[hip]' will do"
)


@dataclass(frozen=True, slots=True)
class HipCompiler(InstalledCompiler):
    """One that works. hiprtc has no command, because it is a library."""

    family: Literal["hiprtc", "clang", "zig"]
    release: int = 0
    """Release of clang; 0 if it is not known."""
    tuning: tuple[str, ...] = ()
    """Options that make it faster, beside those that every compiler is given."""

    def require(self, gpu_arch: str) -> None:
        """Raises ``ToolchainMissingError`` if it is too old to know ``gpu_arch``."""
        since = _KNOWN_SINCE.get(gpu_arch, 0)
        if 0 < self.release < since:
            raise ToolchainMissingError(
                f"the compiler for AMD GPUs is clang {self.release}, and {gpu_arch} needs clang {since} or later",
                field="hip_compiler",
                value=self.identity,
                rule="toolchain",
                fix=f"install clang and lld {since} or later, or a newer wheel ziglang, and name it in the setting",
            )


def find_compiler(name: str, search_path: str | None, helpers: HelperPool) -> HipCompiler:
    """The named compiler, or the first that can be used. Raises ``ToolchainMissingError``, whose log says why each of
    those that are there cannot."""
    refusals: list[str] = []
    for candidate in (name,) if name else (HIPRTC, *_NAMES, ZIGLANG):
        found = _candidate(candidate, search_path, helpers)
        if isinstance(found, HipCompiler):
            return found
        if found:
            refusals.append(f"{candidate}: {found}")
    said = "\n".join(refusals)
    if name:
        raise ToolchainMissingError(
            "the configured compiler for AMD GPUs cannot be used",
            field="hip_compiler",
            value=name,
            rule="toolchain",
            fix=f"correct the setting, clear it to search for a compiler, or {FIX}",
            log_tail=said,
        )
    raise ToolchainMissingError(
        "no compiler for AMD GPUs was found", rule="toolchain", value="hiprtc clang++ ziglang", fix=FIX, log_tail=said
    )


def _candidate(name: str, search_path: str | None, helpers: HelperPool) -> HipCompiler | str:
    """The compiler, or why it cannot be used; nothing if there is no program of that name."""
    if name == HIPRTC:
        return _hiprtc(helpers)
    if name == ZIGLANG:
        return _ziglang()
    where = shutil.which(name, path=search_path)
    return "" if where is None else _clang(Path(where).absolute())


def _hiprtc(helpers: HelperPool) -> HipCompiler | str:
    if not have_module("hip"):
        return "hip-python is not installed"
    try:
        answer, _ = helpers.ask({"ask": "identity"})
    except (HelperEndedError, OSError) as error:
        return f"its process does not answer: {error}"
    library = Path(str(answer.get("library", "")))
    stamp = file_stamp(library)
    if answer.get("state") != "ok" or stamp is None:
        return str(answer.get("reason", "its library was not found"))
    identity = f"hiprtc {answer['version']} [{str(answer['sha256'])[:16]}]"
    return HipCompiler((), identity, library, stamp, "hiprtc")


def _clang(binary: Path) -> HipCompiler | str:
    version = (answer_of((str(binary), "--version")) or "").splitlines()
    stamp = file_stamp(binary)
    release = re.search(r"clang version (\d+)", version[0]) if version else None
    if release is None or stamp is None:
        return "it does not say which clang it is"
    if int(release[1]) < OLDEST:
        return f"it is release {release[1]}, and {OLDEST} is needed"
    if re.search(r"^\s+amdgcn\b", answer_of((str(binary), "--print-targets")) or "", re.MULTILINE) is None:
        return "it was built without the target amdgcn"
    linker = Path((answer_of((str(binary), "--print-prog-name=lld")) or "").strip())
    if not linker.is_absolute() or not linker.is_file():
        return f"it finds no lld (Debian, Ubuntu: apt-get install lld-{release[1]})"
    identity = f"{version[0].strip()} [{digest(binary, linker)}]"
    command = (str(binary),)
    return HipCompiler(command, identity, binary, stamp, "clang", int(release[1]), _tuning_of(command))


def _ziglang() -> HipCompiler | str:
    found = zig_binary()
    stamp = None if found is None else file_stamp(found[0])
    if found is None or stamp is None:
        return "the wheel is not installed"
    command = (str(found[0]), "clang")
    release = re.search(r"clang version (\d+)", answer_of((*command, "--version")) or "")
    if release is None:
        return "it does not say which clang it is"
    if int(release[1]) < OLDEST:
        return f"it is clang {release[1]}, and {OLDEST} is needed (pip install -U ziglang)"
    return HipCompiler(command, f"clang of {found[1]}", found[0], stamp, "zig", int(release[1]), _tuning_of(command))


def _tuning_of(command: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the options that the compiler accepts. They are read even where nothing is compiled."""
    nothing = ("-x", "c", "-fsyntax-only", os.devnull)
    kept = (option for option in _TUNING if answer_of((*command, *option, *nothing)) is not None)
    return tuple(word for option in kept for word in option)
