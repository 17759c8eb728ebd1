"""The compiler of CUDA kernels: NVRTC from PyPI, in processes of its own. Needs neither a GPU nor a host compiler.

``cuda.bindings.nvrtc`` is used as it is: it gives the library's own log, in which ptxas tells registers and spills, and
the options untouched. Binaries are cubins, never PTX: a driver does not load PTX of a newer compiler.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ToolchainMissingError
from tilewright_server.build.toolchains.compilers import ALLOW_SPILLS, file_stamp, have_module, without_folders
from tilewright_server.build.toolchains.installed import InstalledCompiler, InstalledToolchain
from tilewright_server.build.toolchains.toolchain import Compiled, failure_of, log_tail
from tilewright_server.build.workers.helper import HelperEndedError, HelperPool
from tilewright_server.build.workers.process import Finished, Limits

__all__ = ["NvrtcToolchain", "Resources", "performance_warnings", "resources_of"]

_WORKER = "tilewright_server.build.workers.nvrtc_worker"
_FIX = "pip install 'tilewright[cuda]'"
_FLAGS = ("-default-device", "--std=c++17", "-DNDEBUG", "--ptxas-options=-v")
_PERFORMANCE = re.compile(r"^.*\(C75\d\d\).*$", re.MULTILINE)
_FUNCTION = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one function of a binary, as ptxas says: registers of a thread, and bytes."""

    function: str
    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    """Stored and loaded again, per thread."""
    shared_bytes: int = 0
    """Static shared memory of a workgroup."""


def resources_of(log: str) -> tuple[Resources, ...]:
    """Resources that ``ptxas -v`` reports in a compiler's log, by function."""
    found: list[Resources] = []
    name, stack, spills = "", 0, 0
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            name, stack, spills = match[1], 0, 0
        elif match := _STACK.search(line):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif (match := _USED.search(line)) and name:
            shared = _SHARED.search(match[2])
            found.append(Resources(name, int(match[1]), stack, spills, int(shared[1]) if shared else 0))
            name = ""
    return tuple(found)


def performance_warnings(log: str) -> tuple[str, ...]:
    """Lines in which ptxas says that it made something slower than it was written (C7510: wgmma serialised, C7508:
    setmaxnreg ignored, and their like)."""
    return tuple(line.strip() for line in _PERFORMANCE.findall(log))


class NvrtcToolchain(InstalledToolchain[InstalledCompiler]):
    """Compiles ``cuda`` units to cubins.

    Beyond what the compiler refuses, a build fails with rule ``compiler_warning`` if ptxas reports a lost optimisation
    (C75xx), and with rule ``kernel_spills`` if registers are spilled and the unit does not define ``ALLOW_SPILLS``.
    """

    language = "cuda"
    source_suffix = ".cu"
    binary_suffix = ".cubin"
    job_bytes = 256 << 20

    def __init__(self, include_dirs: Sequence[Path], *, limits: Limits | None = None) -> None:
        super().__init__(include_dirs, limits=limits)

    def _ready(self) -> None:
        self._helpers = HelperPool(_WORKER, self._limits)

    def describe(self) -> str:
        """Version for people (``doctor``). Raises ``ToolchainMissingError``."""
        return self.identity()

    def flags(self, unit: SourceUnit, arch: ArchSpec) -> tuple[str, ...]:
        defines = tuple(f"-D{name}={value}" for name, value in sorted(unit.defines.items()))
        return (*_FLAGS, *arch.toolchain.flags, *unit.flags, *defines)

    def compile(
        self, unit: SourceUnit, workdir: Path, arch: ArchSpec, abort: threading.Event | None = None
    ) -> Compiled:
        self.identity()
        begin = time.monotonic()
        (workdir / f"kernel{self.source_suffix}").write_text(unit.text, "utf-8")
        includes = [f"--include-path={folder}" for folder in self.headers.include_dirs]
        request = {"ask": "compile", "name": "kernel.cu", "options": [*self.flags(unit, arch), *includes]}
        try:
            answer, cubin = self._helpers.ask(request, unit.text.encode(), abort)
        except HelperEndedError as error:
            # Of what an interpreter prints before it dies, the end says why, and the rest names files.
            log = error.log.strip().rpartition("\n")[2]
            result = Finished(error.outcome, error.code, log, time.monotonic() - begin)
            raise failure_of(unit.name, result, log, self._limits) from error
        except OSError as error:
            raise self._not_started(error) from error
        log = without_folders(str(answer.get("log", "")), self.headers.include_dirs)
        if answer.get("state") != "ok":
            raise failure_of(unit.name, Finished("failed", 1, log, 0.0), log, self._limits)
        self._require_fast(unit, log)
        binary = workdir / f"kernel{self.binary_suffix}"
        binary.write_bytes(cubin)
        return Compiled(binary, log, time.monotonic() - begin)

    def close(self) -> None:
        """End the helper processes that wait. Compiling starts new ones."""
        self._helpers.close()

    def _require_fast(self, unit: SourceUnit, log: str) -> None:
        warnings = performance_warnings(log)
        if warnings:
            raise BuildFailedError(
                f"ptxas made {unit.name} slower than it was written",
                rule="compiler_warning",
                value=warnings[0],
                fix="choose another kernel: this one's shape does not fit the machine",
                log_tail=log_tail(log),
            )
        spilled = [item for item in resources_of(log) if item.spill_bytes]
        if spilled and ALLOW_SPILLS not in unit.defines:
            worst = max(spilled, key=lambda item: item.spill_bytes)
            raise BuildFailedError(
                f"{unit.name} needs more registers than there are and would spill {worst.spill_bytes} bytes a thread",
                rule="kernel_spills",
                value=worst.spill_bytes,
                fix="choose another kernel, with a smaller tile or more threads",
                log_tail=log_tail(log),
            )

    def _detect(self) -> InstalledCompiler:
        if not have_module("cuda.bindings") or not have_module("cuda.pathfinder"):
            raise ToolchainMissingError("the CUDA compiler's packages are not installed", rule="toolchain", fix=_FIX)
        try:
            answer, _ = self._helpers.ask({"ask": "identity"})
        except HelperEndedError as error:
            raise ToolchainMissingError(
                "the CUDA compiler does not answer", rule="toolchain", fix=_FIX, log_tail=log_tail(error.log)
            ) from error
        except OSError as error:
            raise self._not_started(error) from error
        library = Path(str(answer.get("library", "")))
        stamp = file_stamp(library)
        if answer.get("state") != "ok" or stamp is None:
            raise ToolchainMissingError(
                "the CUDA compiler (libnvrtc) was not found",
                rule="toolchain",
                fix=_FIX,
                log_tail=str(answer.get("reason", "")),
            )
        digest = str(answer["sha256"])[:16]
        return InstalledCompiler((), f"NVRTC {answer['version']} [{digest}]", library, stamp)

    @staticmethod
    def _not_started(error: OSError) -> ToolchainMissingError:
        return ToolchainMissingError(
            "the CUDA compiler's process cannot be started",
            rule="toolchain",
            value=error.strerror or "",
            fix="raise the limit of processes (ulimit -u), or give the machine more memory",
        )
