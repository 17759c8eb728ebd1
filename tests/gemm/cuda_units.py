"""NVRTC for tests: what compiles, and what the headers say of themselves. Needs no GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.codegen import render_gpu
from tilewright_gemm.config.config import GemmConfig
from tilewright_kit.tiles.footprint.workgroup import is_specialised
from tilewright_native import include_dir

__all__ = ["HAVE_NVRTC", "WITHOUT_NVRTC", "compile_text", "statement_of"]


def _have() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


HAVE_NVRTC = _have()
WITHOUT_NVRTC = "NVRTC is not installed: pip install 'tilewright[cuda]'"


def statement_of(config: GemmConfig, arch: ArchSpec, number: int, expected: str) -> str:
    """A piece of source that states a configuration and asserts ``expected`` of its kernel, here called ``Kernel``."""
    text = render_gpu(config, arch).text
    struct = text[text.index("struct Config") : text.index("TW_GEMM_KERNEL")]
    name = "sm90::GemmPlan" if is_specialised(config, arch) else "gpu::Gemm"
    return f"namespace n{number} {{\n{struct}\nusing Kernel = tw::{name}<Config>;\n{expected}\n}}"


def compile_text(text: str, arch: ArchSpec, headers: Sequence[str] = ()) -> str:
    """Compiles a source without generating code for kernels that it does not export.

    Returns the log of a failure; empty if it compiled.
    """
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    source = "".join(f'#include "{header}"\n' for header in headers) + text
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, None, None)
    assert int(error) == 0
    options = [*(flag.encode() for flag in arch.toolchain.flags), b"-default-device", b"--std=c++17", b"-DNDEBUG"]
    options.append(f"-I{include_dir()}".encode())
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = ""
    if int(error) != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = b" " * size
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = buffer.decode(errors="replace")
    nvrtc.nvrtcDestroyProgram(program)
    return log
