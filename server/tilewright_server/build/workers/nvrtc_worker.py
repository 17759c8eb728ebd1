"""A process that compiles CUDA sources with NVRTC. See ``worker_loop`` for what it answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from tilewright_server.build.workers.worker_loop import found, serve

__all__ = ["Nvrtc"]


class Nvrtc:
    """``worker_loop.Compiler`` for ``cuda.bindings.nvrtc``."""

    def identity(self) -> dict[str, Any]:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        major, minor = _checked(nvrtc.nvrtcVersion())
        return found(f"{major}.{minor}", str(path))

    def compile_source(self, text: bytes, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        from cuda.bindings import nvrtc

        program = _checked(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))[0]
        try:
            arguments = [option.encode() for option in options]
            status = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)[0]
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program))[0])
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            said = log.rstrip(b"\0 \n").decode("utf-8", "replace")
            if int(status) != 0:
                return None, said or f"NVRTC refused the source: {status.name}"
            binary = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program))[0])
            _checked(nvrtc.nvrtcGetCUBIN(program, binary))
            return bytes(binary), said
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(answer[0]) != 0:
        raise RuntimeError(f"NVRTC: {answer[0].name}")
    return answer[1:]


if __name__ == "__main__":
    # NVRTC initialises the driver where there is one, though it needs no device. Without devices that costs nothing.
    os.putenv("CUDA_VISIBLE_DEVICES", "")
    sys.exit(serve(Nvrtc(), sys.argv[1:]))
