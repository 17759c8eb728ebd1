"""The compiler of AMD GPUs' kernels. Needs neither a GPU nor ROCm: the sources include our own headers only.

Binaries are raw ELF code objects. What a kernel takes is read from their metadata, which is the same whichever compiler
made it, and not from the compiler's remarks, which are not.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from pathlib import Path

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, InvalidArgumentError, ToolchainMissingError
from tilewright_server.build.toolchains.code_object import CodeObject, KernelFacts, read_code_object
from tilewright_server.build.toolchains.compilers import ALLOW_SPILLS, environment, without_folders, zig_environment
from tilewright_server.build.toolchains.hip_compilers import FIX, HipCompiler, find_compiler
from tilewright_server.build.toolchains.installed import InstalledToolchain
from tilewright_server.build.toolchains.private_memory import reaches_private_memory
from tilewright_server.build.toolchains.toolchain import Compiled, failure_of, log_tail
from tilewright_server.build.workers.helper import HelperEndedError, HelperPool
from tilewright_server.build.workers.process import Finished, run_limited

__all__ = ["HipToolchain", "resource_line", "scratch_in_use", "unbundled"]

_WORKER = "tilewright_server.build.workers.hiprtc_worker"
_LANGUAGE_FLAGS = ("-O3", "-std=c++17", "-DNDEBUG")
# Without a CUID the bytes do not depend on the names of files.
_CLANG_FLAGS = (
    "-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "-nostdinc", "--no-gpu-bundle-output",
    "-fuse-cuid=none",
)  # fmt: skip
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"


class HipToolchain(InstalledToolchain[HipCompiler]):
    """Compiles ``hip`` units to code objects, with what ``hip_compilers.find_compiler`` finds.

    ``compiler`` names one (``hiprtc``, ``ziglang``, or a clang++ by name or path); empty takes the first of these that
    can be used. Beyond what the compiler refuses, a build fails with rule ``kernel_spills`` if a kernel spills vector
    registers to memory or keeps variables there (scratch), and the unit does not define ``ALLOW_SPILLS``.
    """

    language = "hip"
    source_suffix = ".hip"
    binary_suffix = ".co"
    job_bytes = 384 << 20

    def _ready(self) -> None:
        self._helpers = HelperPool(_WORKER, self._limits)

    def describe(self) -> str:
        """Command and version for people (``doctor``). Raises ``ToolchainMissingError``."""
        found = self._find()
        return f"{' '.join(found.command) or found.binary}: {found.identity}"

    def flags(self, unit: SourceUnit, arch: ArchSpec) -> tuple[str, ...]:
        found = self._find()
        own = () if found.family == "hiprtc" else (*_CLANG_FLAGS, *found.tuning)
        defines = tuple(f"-D{name}={value}" for name, value in sorted(unit.defines.items()))
        return (*own, *_LANGUAGE_FLAGS, *arch.toolchain.flags, *unit.flags, *defines)

    def compile(
        self, unit: SourceUnit, workdir: Path, arch: ArchSpec, abort: threading.Event | None = None
    ) -> Compiled:
        begin = time.monotonic()
        found = self._find()
        found.require(arch.toolchain.gpu_arch)
        (workdir / f"kernel{self.source_suffix}").write_text(unit.text, "utf-8")
        if found.family == "hiprtc":
            image, log = self._by_library(unit, arch, abort)
        else:
            image, log = self._by_program(found, unit, workdir, arch, abort)
        image = unbundled(image, arch.toolchain.gpu_arch)
        code = _checked(unit, arch, image, log)
        log = "\n".join(filter(None, (log.strip(), *(resource_line(kernel) for kernel in code.kernels)))) + "\n"
        _require_no_spills(unit, code, image, log)
        binary = workdir / f"kernel{self.binary_suffix}"
        binary.write_bytes(image)
        return Compiled(binary, log, time.monotonic() - begin)

    def close(self) -> None:
        """End the helper processes that wait. Compiling starts new ones."""
        self._helpers.close()

    def _by_program(
        self, found: HipCompiler, unit: SourceUnit, workdir: Path, arch: ArchSpec, abort: threading.Event | None
    ) -> tuple[bytes, str]:
        """The image and the log of a compiler that is a program."""
        includes = [f"-I{folder}" for folder in self.headers.include_dirs]
        extra: list[str] = []
        env = environment(found.binary, workdir)
        if found.family == "zig":
            extra, env = ["-B."], zig_environment(found.binary, workdir, self._scratch)
            _write_linker(workdir / "lld", found.binary)
        # Relative names keep the work folder's path out of the binary, so that equal inputs give equal bytes.
        argv = [*found.command, *self.flags(unit, arch), *includes, *extra, "kernel.hip", "-o", "kernel.out"]
        try:
            result = run_limited(argv, folder=workdir, env=env, limits=self._limits, abort=abort)
        except OSError as error:
            self._forget()
            raise _not_started(error) from error
        log = without_folders(result.log, self.headers.include_dirs)
        if result.outcome != "ok":
            raise failure_of(unit.name, result, log, self._limits)
        try:
            return (workdir / "kernel.out").read_bytes(), log
        except OSError as error:
            raise _no_code(unit, "the compiler ended well but wrote nothing", log) from error

    def _by_library(self, unit: SourceUnit, arch: ArchSpec, abort: threading.Event | None) -> tuple[bytes, str]:
        """The image and the log of hiprtc."""
        begin = time.monotonic()
        includes = [f"-I{folder}" for folder in self.headers.include_dirs]
        request = {"ask": "compile", "name": "kernel.hip", "options": [*self.flags(unit, arch), *includes]}
        try:
            answer, image = self._helpers.ask(request, unit.text.encode(), abort)
        except HelperEndedError as error:
            # Of what an interpreter prints before it dies, the end says why, and the rest names files.
            log = error.log.strip().rpartition("\n")[2]
            result = Finished(error.outcome, error.code, log, time.monotonic() - begin)
            raise failure_of(unit.name, result, log, self._limits) from error
        except OSError as error:
            raise _not_started(error) from error
        log = without_folders(str(answer.get("log", "")), self.headers.include_dirs)
        if answer.get("state") != "ok":
            raise failure_of(unit.name, Finished("failed", 1, log, 0.0), log, self._limits)
        return image, log

    def _detect(self) -> HipCompiler:
        return find_compiler(self._compiler, self._search_path, self._helpers)


def unbundled(image: bytes, gpu_arch: str) -> bytes:
    """The ELF image for ``gpu_arch`` in a bundle of clang's; an image that is no bundle, or has none, as it is."""
    if not image.startswith(_BUNDLE):
        return image
    at = len(_BUNDLE)
    (count,) = struct.unpack_from("<Q", image, at)
    at += 8
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", image, at)
        name = image[at + 24 : at + 24 + length].decode("ascii", "replace")
        at += 24 + length
        if size and re.search(rf"-{re.escape(gpu_arch)}(:|$)", name):
            return image[offset : offset + size]
    return image


def resource_line(kernel: KernelFacts) -> str:
    """Resources of a kernel, in the form in which the log has it for every compiler."""
    return (
        f"resources of {kernel.name}: {kernel.vgprs} VGPRs ({kernel.agprs} of them AGPRs), {kernel.sgprs} SGPRs,"
        f" {kernel.lds_bytes} bytes of static LDS, {kernel.scratch_bytes} bytes of scratch,"
        f" {kernel.vgpr_spills} VGPRs and {kernel.sgpr_spills} SGPRs spilled"
    )


def _checked(unit: SourceUnit, arch: ArchSpec, image: bytes, log: str) -> CodeObject:
    """Metadata of the image, if it is for ``arch``."""
    try:
        code = read_code_object(image)
    except InvalidArgumentError as error:
        raise _no_code(unit, error.reason, log) from error
    if code.target != arch.toolchain.gpu_arch:
        raise _no_code(unit, f"the code is for {code.target}, and was asked for {arch.toolchain.gpu_arch}", log)
    return code


def scratch_in_use(kernel: KernelFacts) -> int:
    """Bytes of memory that a lane has of its own. Where scalar registers went to lanes of vector registers, the
    compiler leaves places in its frame that it had first set aside for them, and a word beside: nothing uses these.
    """
    groups = -(-kernel.sgpr_spills // 8)  # places are for up to eight registers that belong together
    left = 4 + 32 * groups if groups and not kernel.vgpr_spills else 0
    return kernel.scratch_bytes if kernel.scratch_bytes > left else 0


def _require_no_spills(unit: SourceUnit, code: CodeObject, image: bytes, log: str) -> None:
    """Scalar registers that are kept in lanes of vector registers take no memory: they are no fault."""
    if ALLOW_SPILLS in unit.defines:
        return
    for kernel in code.kernels:
        scratch = scratch_in_use(kernel)
        # Without memory, vector registers went to accumulation registers, which are of the same file.
        spilled = kernel.vgpr_spills > 0 and kernel.scratch_bytes > 0
        if spilled or (scratch and reaches_private_memory(image, code.target)):
            raise BuildFailedError(
                f"{unit.name} needs more registers than there are: {kernel.vgpr_spills} would be spilled, with"
                f" {scratch} bytes of memory a lane",
                rule="kernel_spills",
                value=scratch or kernel.vgpr_spills,
                fix="choose another kernel, with a smaller tile or more waves",
                log_tail=log_tail(log),
            )


def _write_linker(path: Path, zig: Path) -> None:
    """The ``lld`` that clang calls, which in zig's binary is a command of another name."""
    import shlex

    path.write_text(f'#!/bin/sh\n[ "$1" = -flavor ] && shift 2\nexec {shlex.quote(str(zig))} ld.lld "$@"\n')
    path.chmod(0o700)


def _no_code(unit: SourceUnit, why: str, log: str) -> BuildFailedError:
    return BuildFailedError(
        f"no code object came of {unit.name}: {why}",
        rule="compiler_failed",
        fix="check the server's compiler for AMD GPUs with `tilewright doctor`",
        log_tail=log_tail(log),
    )


def _not_started(error: OSError) -> ToolchainMissingError:
    return ToolchainMissingError(
        "the compiler for AMD GPUs cannot be started", rule="toolchain", value=error.strerror or "", fix=FIX
    )
