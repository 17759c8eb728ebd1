"""A compiler of AMD GPUs' kernels for tests: what compiles, and what the headers say of themselves. Needs no GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tilewright_arch import ArchSpec
from tilewright_emulator.code.compiler import MISSING, compiler, have_objdump
from tilewright_gemm.codegen import render_gpu
from tilewright_gemm.config.config import GemmConfig
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain

__all__ = ["HAVE_HIP", "HIP_ARCHS", "WITHOUT_HIP", "compile_text", "statement_of", "toolchain"]

HIP_ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
WITHOUT_HIP = f"needs {MISSING}"
_NOTHING = 'extern "C" __attribute__((global)) void nothing() {}\n'


@cache
def toolchain() -> HipToolchain:
    """One for all tests of a process; its helper processes end with it. The emulator can read what it compiles."""
    listed = None if have_objdump() else compiler(Path(tempfile.mkdtemp()))
    return HipToolchain([include_dir()], compiler=listed[0] if listed else "")


def _have() -> bool:
    try:
        toolchain().identity()
    except ToolchainMissingError:
        return False
    return True


HAVE_HIP = _have()


def statement_of(config: GemmConfig, arch: ArchSpec, number: int, expected: str) -> str:
    """A piece of source that states a configuration and asserts ``expected`` of its kernel, here called ``Kernel``."""
    text = render_gpu(config, arch).text
    struct = text[text.index("struct Config") : text.index("TW_GEMM_KERNEL")]
    return f"namespace n{number} {{\n{struct}\nusing Kernel = tw::gpu::Gemm<Config>;\n{expected}\n}}"


def compile_text(parts: Sequence[str], arch: ArchSpec) -> str:
    """Compiles pieces of source beside a kernel that does nothing. The log of a failure; empty if it compiled."""
    text = '#include "tilewright/gpu/gemm/gemm.hpp"\n' + "\n".join(parts) + "\n" + _NOTHING
    unit = SourceUnit("statements", "hip", text, {"main": "nothing"})
    with tempfile.TemporaryDirectory() as folder:
        try:
            toolchain().compile(unit, Path(folder), arch)
        except BuildFailedError as error:
            return error.log_tail or str(error)
    return ""
