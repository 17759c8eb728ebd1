"""Units compiled by NVRTC in the process of the tests, for what the log and the PTX say."""

from __future__ import annotations

import importlib
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_native import include_dir


def compiled(arch: ArchSpec, text: str) -> tuple[str, str]:
    """Log of NVRTC and ptxas, and the PTX, of the unit ``text`` for ``arch``; an assertion if it does not compile."""
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"test.cu", 0, None, None)
    flags = [*arch.toolchain.flags, "-default-device", "--std=c++17", "-DNDEBUG", f"-I{include_dir()}"]
    flags.append("--ptxas-options=-v")
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(error) == 0, log.decode()
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return log.decode(), ptx.decode()
