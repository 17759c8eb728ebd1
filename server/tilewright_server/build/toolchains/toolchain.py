"""Compilers: how to find one, what it is exactly, and how to run it on a source unit."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ResourceExhaustedError, ToolchainMissingError
from tilewright_server.build.toolchains.compilers import (
    answer_of,
    digest,
    environment,
    file_stamp,
    without_folders,
    zig_binary,
    zig_environment,
)
from tilewright_server.build.toolchains.headers import HeaderIndex
from tilewright_server.build.toolchains.installed import InstalledCompiler, InstalledToolchain
from tilewright_server.build.toolchains.trial import Trial
from tilewright_server.build.workers.process import Finished, Limits, run_limited

__all__ = ["Compiled", "CpuToolchain", "Toolchain", "failure_of", "log_tail"]

_NAMES = ("c++", "g++", "clang++")
_LOG_TAIL = 4000
_FIX = "install a C++ compiler (Debian, Ubuntu: apt-get install g++) or the wheel that brings one (pip install ziglang)"

_COMMON_FLAGS = (
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",  # a tenth of the time to compile, for code that nothing unwinds
    "-pipe",
)
# Passes of GCC that take a quarter of the time to compile and gain nothing (measured on x86-64-v3 and v4): loops that
# count are written as they are to run, with vectors in variables and with what loops share computed ahead of them.
_GCC_FLAGS = (
    "-fno-tree-pre",
    "-fno-tree-slp-vectorize",
    "-fno-tree-tail-merge",
    "-fno-code-hoisting",
    "-fno-gcse",
    "-fno-crossjumping",
    "-fno-cse-follow-jumps",
    "-fno-rerun-cse-after-loop",
    "-fno-thread-jumps",
    "-fno-schedule-insns2",
)
# Kernels use no C++ library. Without it the link is faster, and the result depends on the C library only. libgcc has
# conversions that the hardware lacks; -z defs makes a missing symbol fail the build instead of the load.
_LINK_FLAGS = ("-nodefaultlibs", "-Wl,--as-needed", "-Wl,-z,defs")
_LIBRARIES = ("-lgcc", "-lm", "-lpthread", "-lc")
_ZIG_LINK_FLAGS = ("-nostdlib++",)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A finished build: the binary's path in the work folder, and what the compiler said."""

    binary: Path
    log: str
    seconds: float


class Toolchain(Protocol):
    """Compiles source units of one language. Thread-safe."""

    language: str
    source_suffix: str
    binary_suffix: str
    job_bytes: int
    """Memory that one build usually needs."""
    headers: HeaderIndex

    def identity(self) -> str:
        """Stable text of compiler, version and fingerprint of its binary. Raises ``ToolchainMissingError``."""
        ...

    def flags(self, unit: SourceUnit, arch: ArchSpec) -> tuple[str, ...]:
        """Everything that the compiler is told besides the names of files."""
        ...

    def compile(
        self, unit: SourceUnit, workdir: Path, arch: ArchSpec, abort: threading.Event | None = None
    ) -> Compiled:
        """Compile ``unit`` inside ``workdir``, which exists and is empty.

        Raises ``BuildFailedError`` (rule ``compiler_failed``, ``compiler_hung`` or ``compiler_killed``, and of some
        ``binary_unloadable``, ``compiler_warning`` or ``kernel_spills``), ``ToolchainMissingError`` or
        ``ResourceExhaustedError`` (full disk).
        """
        ...

    def close(self) -> None:
        """Give back what is kept for the next build. Idempotent; another build may follow."""
        ...


@dataclass(frozen=True, slots=True)
class _Found(InstalledCompiler):
    family: Literal["gcc", "other", "zig"]


class CpuToolchain(InstalledToolchain[_Found]):
    """The system's C++ compiler, or the one in the ``ziglang`` wheel.

    ``compiler`` names one (a name on the search path, a path, or ``ziglang``); empty takes the first of c++, g++,
    clang++ that answers.
    """

    language = "c++"
    source_suffix = ".cpp"
    binary_suffix = ".so"
    job_bytes = 384 << 20

    def describe(self) -> str:
        """Command and version for people (``doctor``). Raises ``ToolchainMissingError``."""
        found = self._find()
        return f"{' '.join(found.command)}: {found.identity}"

    def flags(self, unit: SourceUnit, arch: ArchSpec) -> tuple[str, ...]:
        found = self._find()
        defines = tuple(f"-D{name}={value}" for name, value in sorted(unit.defines.items()))
        if found.family == "zig":
            return (*_COMMON_FLAGS, *_ZIG_LINK_FLAGS, *arch.toolchain.zig_flags, *unit.flags, *defines)
        passes = _GCC_FLAGS if found.family == "gcc" else ()
        return (*_COMMON_FLAGS, *passes, *_LINK_FLAGS, *arch.toolchain.flags, *unit.flags, *defines)

    def compile(
        self, unit: SourceUnit, workdir: Path, arch: ArchSpec, abort: threading.Event | None = None
    ) -> Compiled:
        found = self._find()
        source, binary = workdir / f"kernel{self.source_suffix}", workdir / f"kernel{self.binary_suffix}"
        source.write_text(unit.text, "utf-8")
        includes = [f"-I{folder}" for folder in self.headers.include_dirs]
        libraries = () if found.family == "zig" else _LIBRARIES
        # Relative names keep the work folder's path out of the binary, so that equal inputs give equal bytes.
        argv = [*found.command, *self.flags(unit, arch), *includes, source.name, *libraries, "-o", binary.name]
        try:
            result = run_limited(argv, folder=workdir, env=self._env(found, workdir), limits=self._limits, abort=abort)
        except OSError as error:
            self._forget()
            raise ToolchainMissingError(
                "the C++ compiler cannot be started", rule="toolchain", value=error.strerror or "", fix=_FIX
            ) from error
        log = without_folders(result.log, self.headers.include_dirs)
        if result.outcome != "ok":
            raise failure_of(unit.name, result, log, self._limits)
        if not binary.is_file():
            raise BuildFailedError(
                f"the compiler ended well but wrote no binary for {unit.name}",
                rule="compiler_failed",
                fix="check the server's compiler with `tilewright doctor`",
                log_tail=log_tail(log),
            )
        self._trial.load(unit.name, binary, tuple(unit.entries.values()), abort)
        return Compiled(binary, log, result.seconds)

    def close(self) -> None:
        """End the processes that load for trial and wait."""
        self._trial.close()

    def _ready(self) -> None:
        self._trial = Trial()

    def _env(self, found: _Found, workdir: Path) -> dict[str, str]:
        if found.family == "zig":
            return zig_environment(found.binary, workdir, self._scratch)
        return environment(found.binary, workdir)

    def _detect(self) -> _Found:
        for name in (self._compiler,) if self._compiler else (*_NAMES, "ziglang"):
            found = _ziglang() if name == "ziglang" else self._probe(name)
            if found is not None:
                return found
        if self._compiler:
            raise ToolchainMissingError(
                "the configured C++ compiler was not found, or does not answer --version",
                field="compiler",
                value=self._compiler,
                rule="toolchain",
                fix=f"correct the setting, clear it to search for a compiler, or {_FIX}",
            )
        raise ToolchainMissingError("no C++ compiler was found", rule="toolchain", value=" ".join(_NAMES), fix=_FIX)

    def _probe(self, name: str) -> _Found | None:
        where = shutil.which(name, path=self._search_path)
        return None if where is None else _identify(Path(where).absolute())


def failure_of(name: str, result: Finished, log: str, limits: Limits) -> BuildFailedError | ResourceExhaustedError:
    """The error that says how a compiler ended."""
    tail = log_tail(log)
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return ResourceExhaustedError(
            f"the disk is full: the compiler could not write {name}",
            rule="cache_full",
            fix="free space on the cache's disk",
            log_tail=tail,
            retry_after_s=30.0,
        )
    if result.outcome == "hung":
        return BuildFailedError(
            f"the compiler did not finish {name} within {limits.timeout_s:g} s and was killed",
            rule="compiler_hung",
            value=f"{limits.timeout_s:g} s",
            fix="look at the machine's load, or allow more time",
            log_tail=tail,
        )
    if result.outcome in ("killed", "aborted"):
        return BuildFailedError(
            f"the compiler was killed while it built {name}",
            rule="compiler_aborted" if result.outcome == "aborted" else "compiler_killed",
            value=f"signal {result.code}",
            fix="give the machine more memory, or build with fewer workers",
            log_tail=tail,
        )
    return BuildFailedError(
        f"the compiler refused {name}",
        rule="compiler_failed",
        value=f"exit code {result.code}",
        fix="choose another kernel; what the compiler said is in the log, and is a fault of the kernel's template or of"
        " the compiler",
        log_tail=tail,
    )


def log_tail(log: str) -> str:
    """The end of a compiler's output, which is where it says why it failed."""
    return log if len(log) <= _LOG_TAIL else "..." + log[-_LOG_TAIL:]


def _identify(binary: Path) -> _Found | None:
    """A compiler that calls itself by name: GCC, Clang or another with their options."""
    answer, stamp = answer_of((str(binary), "--version")), file_stamp(binary)
    if not answer or stamp is None:
        return None
    family: Literal["gcc", "other"] = "gcc" if "Free Software Foundation" in answer else "other"
    version = answer.splitlines()[0].strip()  # it names the packaging revision too
    return _Found((str(binary),), f"{version} [{digest(binary)}]", binary, stamp, family)


def _ziglang() -> _Found | None:
    found = zig_binary()
    stamp = None if found is None else file_stamp(found[0])
    if found is None or stamp is None:
        return None
    return _Found((str(found[0]), "c++"), found[1], found[0], stamp, "zig")
