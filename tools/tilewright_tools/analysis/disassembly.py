"""The instructions of an AMD code object, as ``llvm-objdump`` prints them, read into a structure.

A plain reader of text: it knows how instructions are written, and nothing of what they do.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright_kit.types.errors import InternalError, ToolchainMissingError

__all__ = ["Disassembler", "Function", "Instruction", "parse"]

OLDEST = 19
"""LLVM release that first knows every arch of ours."""
_NAMES = ("llvm-objdump", *(f"llvm-objdump-{release}" for release in range(22, OLDEST - 1, -1)))
_ROCM = ("/opt/rocm/llvm/bin/llvm-objdump", "/opt/rocm/lib/llvm/bin/llvm-objdump")
_TIMEOUT_S = 60.0
_FIX = "install LLVM 19 or later (Debian, Ubuntu: apt-get install llvm-22, from apt.llvm.org), or ROCm"

_HEADER = re.compile(r"^([0-9a-f]+) <(.+)>:$")
_COMMENT = "// "
_ENCODING = re.compile(r"([0-9A-F]+): ((?:[0-9A-F]{8} ?)+)")
_WORD_LISTS = ("s_waitcnt", "s_delay_alu", "s_sendmsg")
"""Begin the names of instructions whose words are one operand each, with no commas between them."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``v_dual_*`` carries its second half in ``dual``, at the same address and of size 0."""

    address: int
    mnemonic: str
    operands: tuple[str, ...]
    """As written: ``v[2:17]``, ``-v3``, ``|s4|``, ``0x3f800000``, ``off``, ``vmcnt(0)``."""
    modifiers: tuple[str, ...]
    """Text after the last operand: ``offset:16``, ``op_sel:[0,1]``, ``glc``."""
    words: tuple[int, ...]
    """The encoding, 32 bits each."""
    target: int | None = None
    """Address that a branch with a fixed target leads to."""
    dual: Instruction | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * len(self.words)

    @property
    def text(self) -> str:
        """The instruction as it was written, one space between parts."""
        separator = " " if self.mnemonic.startswith(_WORD_LISTS) else ", "
        own = " ".join(filter(None, (self.mnemonic, separator.join(self.operands), *self.modifiers)))
        return own if self.dual is None else f"{own} :: {self.dual.text}"

    def modifier(self, name: str) -> str | None:
        """The value of ``name:value``, ``""`` for a bare ``name``, ``None`` if it is not there."""
        for modifier in self.modifiers:
            key, _, value = modifier.partition(":")
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class Function:
    """A symbol and the instructions up to the next, padding included."""

    name: str
    address: int
    instructions: tuple[Instruction, ...]


def parse(listing: str) -> tuple[Function, ...]:
    """The functions in the output of ``llvm-objdump -d``, in its order. Lines of another form are passed over."""
    found: list[Function] = []
    name, address, body = "", 0, list[Instruction]()
    for line in listing.splitlines():
        written, _, comment = line.partition(_COMMENT)
        if line[:1].isspace() and (text := written.strip()) and (match := _ENCODING.match(comment)):
            words = tuple([int(word, 16) for word in match[2].split()])
            body.append(_instruction(text, int(match[1], 16), words))
        elif match := _HEADER.match(line):
            if body:
                found.append(Function(name, address, tuple(body)))
            name, address, body = match[2], int(match[1], 16), []
    if body:
        found.append(Function(name, address, tuple(body)))
    return tuple(found)


def _instruction(text: str, address: int, words: tuple[int, ...]) -> Instruction:
    first, _, second = text.partition(" :: ")
    dual = _instruction(second.strip(), address, ()) if second else None
    mnemonic, operands, modifiers = _parts(first.strip())
    return Instruction(address, mnemonic, operands, modifiers, words, _target(mnemonic, address, words), dual)


@functools.lru_cache(maxsize=1 << 15)
def _parts(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Mnemonic, operands and modifiers. Kept, since much of a kernel is the same few instructions."""
    mnemonic, _, rest = text.partition(" ")
    if mnemonic.startswith(_WORD_LISTS):
        return mnemonic, tuple(rest.split()), ()
    operands = [part.strip() for part in _split(rest, ",")]
    modifiers: list[str] = []
    if operands:
        operands[-1], *modifiers = [part for part in _split(operands[-1], " ") if part] or [""]
    return mnemonic, tuple(operand for operand in operands if operand), tuple(modifiers)


def _split(text: str, separator: str) -> Iterator[str]:
    """The parts between separators that stand outside all brackets."""
    if "[" not in text and "(" not in text:
        parts = text.split(separator)
        yield from parts if parts[-1] else parts[:-1]
        return
    depth = begin = 0
    for at, letter in enumerate(text):
        if letter in "[(":
            depth += 1
        elif letter in "])":
            depth -= 1
        elif letter == separator and not depth:
            yield text[begin:at]
            begin = at + 1
    if begin < len(text):
        yield text[begin:]


def _target(mnemonic: str, address: int, words: tuple[int, ...]) -> int | None:
    """Where a branch leads, from its encoding: the next instruction and as many words as the signed low half says.

    The text names the target by the nearest symbol, which need not be one that is printed.
    """
    if not words or not mnemonic.startswith(("s_branch", "s_cbranch", "s_call")):
        return None
    low = words[0] & 0xFFFF
    return address + 4 + 4 * (low - 0x10000 if low & 0x8000 else low)


class Disassembler:
    """Finds and runs ``llvm-objdump``. Thread-safe.

    ``tool`` names one (a name on the search path, or a path); empty takes the first of release 19 or later that knows
    amdgcn. ``search_path`` replaces the process's own.
    """

    def __init__(self, tool: str = "", *, search_path: str | None = None) -> None:
        self._tool = tool
        self._search_path = search_path
        self._found: Path | None = None
        self._lock = threading.Lock()

    def find(self) -> Path:
        """The program. Raises ``ToolchainMissingError``."""
        with self._lock:
            if self._found is None or not self._found.is_file():
                self._found = self._search()
            return self._found

    def disassemble(self, image: bytes) -> tuple[Function, ...]:
        """The functions of an ELF image. Raises ``ToolchainMissingError``, or ``InternalError`` if the program fails.

        The image decides the arch, so one for another machine than ``amdgcn`` gives nothing.
        """
        program = self.find()
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            path = Path(folder) / "kernel.co"
            path.write_bytes(image)
            answer = _run([str(program), "-d", str(path)])
        if answer is None or answer.returncode != 0:
            said = "" if answer is None else answer.stderr.decode("utf-8", "replace").replace(folder + "/", "")
            raise InternalError(
                f"llvm-objdump could not read the code object: {said.strip()[-300:] or 'no answer'}",
                rule="disassembly",
                fix="give an ELF image of an arch that this llvm-objdump knows",
            )
        return parse(answer.stdout.decode("utf-8", "replace"))

    def _search(self) -> Path:
        if self._tool:
            found = self._probe(self._tool)
            if found is None:
                raise ToolchainMissingError(
                    f"the configured llvm-objdump was not found, is older than {OLDEST} or does not know amdgcn",
                    field="llvm_objdump",
                    value=self._tool,
                    rule="toolchain",
                    fix=f"correct the setting, clear it to search for one, or {_FIX}",
                )
            return found
        for name in (*_NAMES, *_ROCM):
            found = self._probe(name)
            if found is not None:
                return found
        raise ToolchainMissingError(
            f"no llvm-objdump of release {OLDEST} or later that knows amdgcn was found",
            rule="toolchain",
            value="llvm-objdump",
            fix=_FIX,
        )

    def _probe(self, name: str) -> Path | None:
        where = shutil.which(name, path=self._search_path)
        answer = None if where is None else _run([where, "--version"])
        if where is None or answer is None or answer.returncode != 0:
            return None
        text = answer.stdout.decode("utf-8", "replace")
        release = re.search(r"LLVM version (\d+)", text)
        known = release is not None and int(release[1]) >= OLDEST and re.search(r"^\s+amdgcn\b", text, re.MULTILINE)
        return Path(where).absolute() if known else None


def _run(argv: list[str]) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
