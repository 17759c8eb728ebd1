"""A process that compiles HIP sources with hiprtc. See ``worker_loop`` for what it answers."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright_server.build.workers.worker_loop import found, serve

__all__ = ["Hiprtc"]

_NAMES = ("libhiprtc", "libamd_comgr", "libLLVM")
_PARTS = re.compile(rf"/({'|'.join(_NAMES)})[^/]*$")
"""Libraries that decide what comes out: the interface first, then what compiles."""


class Hiprtc:
    """``worker_loop.Compiler`` for the hiprtc of hip-python, which loads ``libhiprtc`` at the first call."""

    def identity(self) -> dict[str, Any]:
        hiprtc = _interface()
        major, minor = _checked(hiprtc.hiprtcVersion())
        # With a program there, whatever compiles has been loaded too.
        _destroy(hiprtc, _checked(hiprtc.hiprtcCreateProgram(b"", b"none", 0, None, None))[0])
        return found(f"{major}.{minor}", *_loaded())

    def compile_source(self, text: bytes, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        hiprtc = _interface()
        program = _checked(hiprtc.hiprtcCreateProgram(text, name.encode(), 0, None, None))[0]
        try:
            arguments = [option.encode() for option in options]
            status = hiprtc.hiprtcCompileProgram(program, len(arguments), arguments)[0]
            log = bytearray(_checked(hiprtc.hiprtcGetProgramLogSize(program))[0] or 1)
            _checked(hiprtc.hiprtcGetProgramLog(program, log))
            said = log.rstrip(b"\0 \n").decode("utf-8", "replace")
            if int(status) != 0:
                return None, said or f"hiprtc refused the source: {status.name}"
            binary = bytearray(_checked(hiprtc.hiprtcGetCodeSize(program))[0])
            _checked(hiprtc.hiprtcGetCode(program, binary))
            return bytes(binary), said
        finally:
            _destroy(hiprtc, program)


def _interface() -> Any:
    """The module, whose functions have no types."""
    from hip import hiprtc

    return hiprtc


def _destroy(hiprtc: Any, program: Any) -> None:
    hiprtc.hiprtcDestroyProgram(program.createRef())  # it takes a pointer to the handle


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"hiprtc: {getattr(status, 'name', status)}")
    return tuple(values)


def _loaded() -> list[str]:
    """The compiler's libraries in this process, the interface first. Raises ``RuntimeError`` if that is no file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {f"/{line.partition('/')[2]}" for line in lines if "/" in line}
    order = sorted((path for path in paths if _PARTS.search(path)), key=lambda path: (_rank(path), path))
    if not order or _rank(order[0]) != 0:
        raise RuntimeError("libhiprtc is loaded, but is no file")
    return order


def _rank(path: str) -> int:
    match = _PARTS.search(path)
    return _NAMES.index(match[1]) if match else len(_NAMES)


if __name__ == "__main__":
    sys.exit(serve(Hiprtc(), sys.argv[1:]))
