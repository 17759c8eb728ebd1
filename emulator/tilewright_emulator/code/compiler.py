"""Finding a compiler of code objects that the emulator can read."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from tilewright_emulator.code import listed_clang
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_tools.analysis.disassembly import Disassembler

RELEASES = range(22, 18, -1)
MISSING = "a compiler for AMD GPUs: clang 19 or later with lld, or the wheel ziglang (pip install ziglang)"
WITHOUT_OBJDUMP = "needs llvm-objdump 19 or later (apt-get install llvm-22), which reads code without a listing"


def tool(name: str) -> str | None:
    """A program of LLVM, under its plain name or with a release; the newest first."""
    names = [*(f"{name}-{release}" for release in RELEASES), name]
    return next((path for each in names if (path := shutil.which(each))), None)


@functools.cache
def have_objdump() -> bool:
    try:
        Disassembler().find()
    except ToolchainMissingError:
        return False
    return True


def compiler(folder: Path, *, listed: bool | None = None) -> list[str] | None:
    """A command that compiles HIP units for AMD GPUs as clang does; None if there is none.

    clang of release 19 or later with lld, else the wheel ``ziglang``. ``listed``: code objects carry the assembler's
    listing; by default they do where llvm-objdump is missing. ``folder`` keeps scripts that the command needs.
    """
    folder = folder.resolve()
    command = _clang() or _zig(folder)
    if command is None or not (not have_objdump() if listed is None else listed):
        return command
    plain = [sys.executable, "-I", "-S", listed_clang.__file__, *command, "--"]
    return [str(_script(folder / "listed-clang++", f'exec {shlex.join(plain)} "$@"'))]


def _clang() -> list[str] | None:
    clang = tool("clang++") or tool("clang")
    if clang is None or tool("ld.lld") is None:
        return None
    said = subprocess.run([clang, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"clang version (\d+)", said)
    return [clang] if release and int(release[1]) >= RELEASES[-1] else None


def _zig(folder: Path) -> list[str] | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    zig = Path(spec.origin).with_name("zig")
    linker = f'exec {shlex.quote(str(zig))} ld.lld "$@"'
    _script(folder / "lld", f"shift 2\n{linker}")  # for HIP units, clang calls `lld -flavor gnu ...`
    _script(folder / "ld.lld", linker)
    return [str(zig), "clang", f"-B{folder}"]


def _script(path: Path, text: str) -> Path:
    """Writes an executable script, unless it is there. Other processes may write the same one."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.{id(path)}.partial")
        partial.write_text(f"#!/bin/sh\n{text}\n")
        partial.chmod(partial.stat().st_mode | stat.S_IXUSR)
        partial.rename(path)
    return path
