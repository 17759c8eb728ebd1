"""Parts of a code object's file that are executed or checked: segments, kernel descriptors and the metadata note."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from tilewright_emulator.errors import BadCodeObject

LOAD, NOTE, METADATA, AMDGPU = 1, 4, 32, 224
PROGRAM_BITS, ALLOCATED, EXECUTABLE = 1, 2, 4  # type and flags of sections


@dataclass(frozen=True)
class Segment:
    """Bytes that are loaded at ``address`` (relative); ``size`` counts the zeros after ``data`` too."""

    address: int
    size: int
    data: bytes


@dataclass(frozen=True)
class Descriptor:
    """The 64 bytes that tell the command processor how a kernel starts."""

    address: int
    lds: int
    private: int
    kernarg: int
    entry: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int

    @classmethod
    def read(cls, address: int, data: bytes) -> Descriptor:
        lds, private, kernarg = struct.unpack_from("<III", data, 0)
        (entry,) = struct.unpack_from("<q", data, 16)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", data, 44)
        return cls(address, lds, private, kernarg, address + entry, rsrc1, rsrc2, rsrc3, properties, preload)


class Elf:
    """A code object. Raises ``BadCodeObject`` for anything else."""

    def __init__(self, image: bytes) -> None:
        if image[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", image, 18)[0] != AMDGPU:
            raise BadCodeObject("not a little-endian 64-bit ELF file for AMD GPUs (bundles are not read)")
        self.image = image
        (self.flags,) = struct.unpack_from("<I", image, 48)
        try:
            self.segments, notes = self._program_headers()
            self._heads = self._section_headers()
            self.symbols = self._symbols()
            self.sections = self._named_sections()
            self.metadata = _metadata(notes)
        except (struct.error, IndexError, ValueError, KeyError) as error:
            raise BadCodeObject(f"the file cannot be read: {error}") from error

    def _program_headers(self) -> tuple[list[Segment], list[bytes]]:
        (table,) = struct.unpack_from("<Q", self.image, 32)
        size, count = struct.unpack_from("<HH", self.image, 54)
        segments, notes = [], []
        for i in range(count):
            kind, _, offset, address, _, stored, loaded, _ = struct.unpack_from(
                "<IIQQQQQQ", self.image, table + i * size
            )
            data = self.image[offset : offset + stored]
            if kind == LOAD:
                segments.append(Segment(address, loaded, data))
            elif kind == NOTE:
                notes.append(data)
        return segments, notes

    def _section_headers(self) -> list[tuple[int, ...]]:
        (table,) = struct.unpack_from("<Q", self.image, 40)
        size, count = struct.unpack_from("<HH", self.image, 58)
        return [struct.unpack_from("<IIQQQQIIQQ", self.image, table + i * size) for i in range(count)]

    def _named_sections(self) -> dict[str, bytes]:
        """Contents of sections that are not loaded, by name."""
        if not self._heads:
            return {}
        (index,) = struct.unpack_from("<H", self.image, 62)
        names = self._heads[index][4]
        found = {}
        for name, kind, flags, _, offset, length, *_ in self._heads:
            if kind == PROGRAM_BITS and not flags & ALLOCATED:
                end = self.image.index(b"\0", names + name)
                found[self.image[names + name : end].decode()] = self.image[offset : offset + length]
        return found

    def is_code(self, address: int) -> bool:
        """True if the address lies in a section of instructions."""
        return any(
            flags & EXECUTABLE and start <= address < start + size for _, _, flags, start, _, size, *_ in self._heads
        )

    def _symbols(self) -> dict[str, tuple[int, int]]:
        """Address and size of each symbol in the section headers' tables."""
        heads = self._heads
        found: dict[str, tuple[int, int]] = {}
        for _, kind, _, _, offset, length, link, _, _, entry in heads:
            if kind not in (2, 11):  # the symbol tables
                continue
            names = self.image[heads[link][4] : heads[link][4] + heads[link][5]]
            for at in range(offset, offset + length, entry):
                name, _, _, _, value, extent = struct.unpack_from("<IBBHQQ", self.image, at)
                text = names[name : names.index(b"\0", name)].decode()
                if text:
                    found[text] = (value, extent)
        return found

    def read(self, address: int, size: int) -> bytes:
        """Bytes at a relative address."""
        for segment in self.segments:
            if segment.address <= address and address + size <= segment.address + len(segment.data):
                start = address - segment.address
                return segment.data[start : start + size]
        raise BadCodeObject(f"no loaded segment holds {address:#x}")

    def descriptor(self, kernel: str) -> Descriptor:
        if f"{kernel}.kd" not in self.symbols:
            known = ", ".join(sorted(name[:-3] for name in self.symbols if name.endswith(".kd")))
            raise BadCodeObject(f"no kernel {kernel}; there are: {known or 'none'}")
        address, _ = self.symbols[f"{kernel}.kd"]
        return Descriptor.read(address, self.read(address, 64))


def _metadata(notes: list[bytes]) -> dict[str, Any]:
    for data in notes:
        at = 0
        while at + 12 <= len(data):
            name_size, size, kind = struct.unpack_from("<III", data, at)
            begin = at + 12 + (name_size + 3 & ~3)
            if kind == METADATA:
                return dict(unpack(data[begin : begin + size], 0)[0])
            at = begin + (size + 3 & ~3)
    raise BadCodeObject("no metadata note")


NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
LENGTHS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
COUNTS = {0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value at ``at``, and where the next begins."""
    tag, at = data[at], at + 1
    if tag < 0x80 or tag >= 0xE0:
        return tag - (0x100 if tag >= 0xE0 else 0), at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in NUMBERS:
        return struct.unpack_from(NUMBERS[tag], data, at)[0], at + struct.calcsize(NUMBERS[tag])
    if tag in LENGTHS or 0xA0 <= tag < 0xC0:
        if tag in LENGTHS:
            (length,) = struct.unpack_from(LENGTHS[tag], data, at)
            at += struct.calcsize(LENGTHS[tag])
        else:
            length = tag & 31
        raw = data[at : at + length]
        return (raw if 0xC4 <= tag <= 0xC6 else raw.decode()), at + length
    if tag in COUNTS:
        (count,) = struct.unpack_from(COUNTS[tag], data, at)
        at += struct.calcsize(COUNTS[tag])
        mapping = tag >= 0xDE
    else:
        count, mapping = tag & 15, tag < 0x90
    values = []
    for _ in range(count * (2 if mapping else 1)):
        value, at = unpack(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if mapping else values), at
