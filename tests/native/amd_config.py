"""Configurations of the portable GPU kernels for AMD GPUs, compiled for the emulator."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import struct
import subprocess
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gpu_config import GpuConfig
from grouping import Units
from native_harness import INCLUDE

from tilewright_emulator.code.compiler import MISSING, compiler
from tilewright_emulator.code.image import disassembled
from tilewright_server.build.toolchains.code_object import KernelFacts, read_code_object
from tilewright_tools.analysis.disassembly import Function

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
WAVE = {arch: 64 if arch.startswith("gfx9") else 32 for arch in ARCHS}
FLAGS = (
    "-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "-nostdinc", "--no-gpu-bundle-output", "-O3",
    "-std=c++17", "-DNDEBUG", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}",
)  # fmt: skip
GEMM = '#include "tilewright/gpu/gemm/gemm.hpp"\n'
PER_UNIT = 6  # kernels that are compiled together
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class AmdConfig(GpuConfig):
    """One kernel. ``arch`` decides which instructions it has, and the number of lanes of a wave."""

    arch: str = "gfx942"
    warp_tile: tuple[int, int, int] = (16, 16, 16)
    pipeline: str = "compv3"
    stages: int = 2

    def text(self, name: str) -> str:
        """The definition, and what its launch needs as a constant of the code object."""
        body = super().text(name)
        gemm = f"tw::gpu::Gemm<Config_{name}>"
        return (
            f'{body}extern "C" __attribute__((device, used, visibility("protected"))) const uint32_t {name}_facts[2] = '
            f"{{{gemm}::threads, {gemm}::shared_bytes}};\n"
        )


@dataclass(frozen=True)
class Built:
    """A code object with some kernels."""

    path: Path

    def facts(self, name: str) -> tuple[int, int]:
        """Threads of a workgroup and bytes of dynamic LDS."""
        threads, shared = struct.unpack("<II", symbol_bytes(self.path.read_bytes(), f"{name}_facts", 8))
        return int(threads), int(shared)

    def resources(self, name: str) -> KernelFacts:
        """Registers, scratch and spills."""
        return read_code_object(self.path.read_bytes()).kernel(name)

    def function(self, name: str) -> Function:
        """One kernel's instructions."""
        return next(function for function in _functions(self.path) if function.name == name)


@functools.cache
def _functions(path: Path) -> tuple[Function, ...]:
    return disassembled(path.read_bytes())


def missing_tools(folder: Path) -> str:
    """What these tests need and this machine lacks; empty if nothing."""
    return MISSING if compiler(folder) is None else ""


def compile_kernels(folder: Path, kernels: dict[str, AmdConfig], options: Sequence[str] = ()) -> Built:
    """One code object with all kernels (of one arch), built unless it is there. Raises ``RuntimeError`` with the
    compiler's words."""
    (arch,) = {config.arch for config in kernels.values()}
    text = GEMM + "".join(config.text(name) for name, config in kernels.items())
    return compile_text(folder, text, arch, options)


def compile_text(folder: Path, text: str, arch: str, options: Sequence[str] = ()) -> Built:
    """See ``compile_kernels``."""
    command = [*_command(folder), f"--offload-arch={arch}", *options]
    headers = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(INCLUDE.rglob("*.hpp")))).hexdigest()
    key = hashlib.sha256("\0".join([headers, *command, text]).encode()).hexdigest()[:24]
    source, output = folder / f"{key}.hip", folder / f"{key}.co"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            source.write_text(text)
            unfinished = output.with_suffix(f".{os.getpid()}")
            _compile(command, source, unfinished)
            unfinished.rename(output)
    return Built(output)


def _command(folder: Path) -> list[str]:
    command = compiler(folder)
    if command is None:
        raise FileNotFoundError(MISSING)
    return [*command, *FLAGS]


def _compile(command: Sequence[str], source: Path, output: Path) -> None:
    done = subprocess.run([*command, str(source), "-o", str(output)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[:6000])


def units_of(
    folder: Path,
    arch: str,
    kernels: Iterable[K],
    first: Collection[K] | None,
    head: Callable[[K], str],
    text: Callable[[K, str], str],
    size: int,
) -> Units[K]:
    """Kernels of one arch. ``first``: those that this run wants, which are compiled together; others then are compiled
    alone."""
    command = [*_command(folder), f"--offload-arch={arch}"]
    build = partial(_compile, command)
    return Units(folder, kernels, first, build, head=head, text=text, options=repr(command), size=size)


class OnArch(Protocol):
    """A kernel's configuration."""

    @property
    def arch(self) -> str: ...


A = TypeVar("A", bound=OnArch)


class AmdUnits(Generic[A]):
    """Kernels of several archs, compiled when they are first wanted, with a few others of their arch."""

    def __init__(
        self,
        folder: Path,
        kernels: Sequence[A],
        first: Collection[A] | None,
        head: Callable[[A], str],
        text: Callable[[A, str], str],
        size: int = PER_UNIT,
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        own = {arch: [kernel for kernel in kernels if kernel.arch == arch] for arch in {each.arch for each in kernels}}
        self._units = {arch: units_of(folder, arch, each, first, head, text, size) for arch, each in own.items()}

    def built(self, kernel: A) -> tuple[Built, str]:
        """The code object that holds the configuration's kernel, and the kernel's name."""
        units = self._units[kernel.arch]
        return Built(units.file(kernel)), units.names[kernel]


class KernelSet(AmdUnits[AmdConfig]):
    """Kernels of products."""

    def __init__(self, folder: Path, configs: Sequence[AmdConfig], first: Collection[AmdConfig] | None = None) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        super().__init__(folder, configs, first, lambda _: GEMM, lambda config, name: config.text(name))


def symbol_bytes(elf: bytes, name: str, size: int) -> bytes:
    """The first bytes of a symbol of a code object (ELF64, little endian)."""
    segments_at, sections_at = struct.unpack_from("<QQ", elf, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<HHHH", elf, 54)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + i * section_size) for i in range(section_count)]
    for _, kind, _, _, at, length, link, _, _, entry in sections:
        if kind not in (2, 11):  # SYMTAB, DYNSYM
            continue
        strings = sections[link][4]
        for symbol in range(at, at + length, entry):
            label, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", elf, symbol)
            if elf[strings + label : elf.index(b"\0", strings + label)] != name.encode():
                continue
            for i in range(segment_count):
                fields = struct.unpack_from("<IIQQQQQQ", elf, segments_at + i * segment_size)
                kind, _, offset, address, _, held, _, _ = fields
                if kind == 1 and address <= value < address + held:
                    return elf[offset + value - address :][:size]
    raise LookupError(f"no symbol {name}")
