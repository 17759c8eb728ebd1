"""The assembler's listing in a code object, in the form in which llvm-objdump prints instructions.

``clang -cc1as -show-encoding`` prints instructions as a disassembler does, each with its encoding. The listing gives
the text; addresses and encodings are those of the linked code. Every byte that the linker does not fill in is compared,
so that a listing of other code is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tilewright_emulator.code.elf import Elf
from tilewright_emulator.code.listed_clang import SECTION
from tilewright_emulator.errors import BadCodeObject

_OCTET = re.compile(r"0x[0-9a-f]{2}")
_LABEL = re.compile(r"^([A-Za-z_$][\w$.]*):")
_ENCODED = re.compile(r"^(?P<text>[^;]+?)\s*;.*?\bencoding: \[(?P<octets>[^\]]*)\]")
_SYMBOL = re.compile(r"[A-Za-z_$.][\w$.]*@(?:rel32|abs32|gotpcrel32)@(?:lo|hi)(?:[+-]\d+)?")
_TARGET = re.compile(r"\.L\w+$")
_NOP, _NOP_MASK = 0xBF800000, 0xFFFF0000
"""s_nop, which aligns loops: the listing has a directive in its place."""


def has_listing(elf: Elf) -> bool:
    return SECTION in elf.sections


def disassembly(elf: Elf) -> str:
    """The text that llvm-objdump would print. Raises ``BadCodeObject`` if the listing is of other code."""
    return "\n".join(_lines(elf, elf.sections[SECTION].decode("utf-8", "replace")))


def _lines(elf: Elf, listing: str) -> Iterator[str]:
    at = end = 0
    for line in listing.splitlines():
        if match := _LABEL.match(line):
            if (place := elf.symbols.get(match[1])) and place[1] and elf.is_code(place[0]):
                at, end = place[0], place[0] + place[1]
                yield f"{at:016x} <{match[1]}>:"
        elif at < end and (match := _ENCODED.match(line.strip())):
            octets = match["octets"].split(",")
            while not _agrees(octets, elf.read(at, len(octets))):
                (word,) = _words(elf.read(at, 4))
                if word & _NOP_MASK != _NOP:
                    raise BadCodeObject(f"the listing is of other code: {match['text']} is not at {at:#x}")
                yield _printed(f"s_nop {word & 0xFFFF}", at, [word])
                at += 4
            words = _words(elf.read(at, len(octets)))
            text = _TARGET.sub(str(words[0] & 0xFFFF), _SYMBOL.sub(f"{words[-1]:#x}", match["text"]))
            yield _printed(text, at, words)
            at += len(octets)


def _printed(text: str, address: int, words: list[int]) -> str:
    return f"\t{text}  // {address:012X}: {' '.join(f'{word:08X}' for word in words)}"


def _words(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


def _agrees(octets: list[str], data: bytes) -> bool:
    """True if the code has the encoding of the listing, but for octets that the linker fills in (``A``)."""
    return all(
        not re.fullmatch(r"0x[0-9a-f]{2}", o) or int(o, 16) == byte for o, byte in zip(octets, data, strict=True)
    )
