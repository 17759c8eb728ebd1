"""Metadata of an AMD code object: its target and the resources of each kernel. Reads ELF; needs no tool."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["CodeObject", "KernelFacts", "read_code_object"]

_MACHINE_AMDGPU = 224
_NOTE_SEGMENT = 4
_ABI_VERSION, _FIRST_VERSION = 8, 2
"""Place of ``EI_ABIVERSION``, which is 2 for version 4: user guide of LLVM's AMDGPU backend, "Header"."""
_NOTE_METADATA = 32
"""NT_AMDGPU_METADATA of the LLVM AMDGPU ABI: a MessagePack document."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel's entry in the metadata. Bytes, and registers per lane (VGPR, AGPR) or per wave (SGPR)."""

    name: str
    descriptor: str
    """Symbol of the kernel descriptor: the name and ``.kd``."""
    kernarg_bytes: int
    lds_bytes: int
    """Static LDS of a workgroup."""
    scratch_bytes: int
    """Private memory of a lane."""
    sgprs: int
    vgprs: int
    """All vector registers; where the file is unified this includes ``agprs``."""
    agprs: int
    sgpr_spills: int
    vgpr_spills: int
    wave: int
    """Lanes of a wave: 32 or 64."""
    max_workgroup: int
    """Work-items that a workgroup may have."""
    arguments: tuple[int, ...] = ()
    """Bytes of each argument that the source names, in order."""


@dataclass(frozen=True, slots=True)
class CodeObject:
    """The head and the metadata of a code object."""

    target: str
    """For example ``gfx942``; without feature suffixes."""
    features: tuple[str, ...]
    """For example ``sramecc+``; empty where the code runs with either."""
    elf_flags: int
    kernels: tuple[KernelFacts, ...]
    version: int = 0
    """4, 5 or 6: that of the code object, which ELF's ABI version stands for (two less)."""

    def kernel(self, name: str) -> KernelFacts:
        """Raises ``InvalidArgumentError`` with the names that there are."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise InvalidArgumentError(
            "the code object has no such kernel",
            field="name",
            value=name,
            rule="kernel_name",
            fix=f"use one of {', '.join(kernel.name for kernel in self.kernels) or 'none'}",
        )


def read_code_object(image: bytes) -> CodeObject:
    """The facts of an ELF image for ``amdgcn-amd-amdhsa``, not bundled. Raises ``InvalidArgumentError``."""
    try:
        flags, metadata = _metadata(image)
        kernels = tuple(_kernel(entry) for entry in metadata.get("amdhsa.kernels", ()))
        target, *features = str(metadata.get("amdhsa.target", "")).rpartition("--")[2].split(":")
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, ValueError, TypeError, AttributeError) as error:
        raise _refusal(f"it cannot be read: {error}") from error
    return CodeObject(target, tuple(features), flags, kernels, image[_ABI_VERSION] + _FIRST_VERSION)


def _refusal(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"this is no AMD code object: {why}",
        field="code_object",
        rule="code_object",
        fix="give the ELF image that the toolchain wrote, not a bundle",
    )


def _metadata(image: bytes) -> tuple[int, dict[str, Any]]:
    """The ELF header's flags and the decoded metadata note."""
    if image[:4] != b"\x7fELF" or image[4:6] != b"\x02\x01":
        raise _refusal("it does not begin like a little-endian 64-bit ELF file")
    (machine,) = struct.unpack_from("<H", image, 18)
    if machine != _MACHINE_AMDGPU:
        raise _refusal(f"it is for ELF machine {machine}")
    (table,) = struct.unpack_from("<Q", image, 32)
    (flags,) = struct.unpack_from("<I", image, 48)
    size, count = struct.unpack_from("<HH", image, 54)
    for index in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", image, table + index * size)
        if kind == _NOTE_SEGMENT:
            for name, note, text in _notes(image[offset : offset + length]):
                if name == b"AMDGPU" and note == _NOTE_METADATA:
                    return flags, _Reader(text).value()
    raise _refusal("it has no metadata note")


def _notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Owner, type and content of each note of a segment."""
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, at)
        begin = at + 12 + (name_size + 3 & ~3)
        yield data[at + 12 : at + 12 + name_size].rstrip(b"\0"), kind, data[begin : begin + size]
        at = begin + (size + 3 & ~3)


def _kernel(entry: dict[str, Any]) -> KernelFacts:
    return KernelFacts(
        name=entry[".name"],
        descriptor=entry[".symbol"],
        kernarg_bytes=entry[".kernarg_segment_size"],
        lds_bytes=entry[".group_segment_fixed_size"],
        scratch_bytes=entry[".private_segment_fixed_size"],
        sgprs=entry[".sgpr_count"],
        vgprs=entry[".vgpr_count"],
        agprs=entry.get(".agpr_count", 0),
        sgpr_spills=entry.get(".sgpr_spill_count", 0),
        vgpr_spills=entry.get(".vgpr_spill_count", 0),
        wave=entry[".wavefront_size"],
        max_workgroup=entry.get(".max_flat_workgroup_size", 0),
        arguments=tuple(
            item[".size"] for item in entry.get(".args", ()) if not item[".value_kind"].startswith("hidden_")
        ),
    )


class _Reader:
    """Decodes one MessagePack document: as much of the format as the metadata's producers use."""

    _FIXED: ClassVar = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"} | {
        0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
    }  # fmt: skip
    _SIZED: ClassVar = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
    _COUNTED: ClassVar = {0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _raw(self, length: int) -> bytes:
        self._at += length
        return self._data[self._at - length : self._at]

    def value(self) -> Any:
        tag = self._take(">B")
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0xA0:
            return self._many(tag & 0x0F, mapping=tag < 0x90)
        if tag < 0xC0:
            return self._raw(tag & 0x1F).decode("utf-8")
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if tag in self._FIXED:
            return self._take(self._FIXED[tag])
        if tag in self._SIZED:
            raw = self._raw(self._take(self._SIZED[tag]))
            return raw if tag < 0xD9 else raw.decode("utf-8")
        if tag in self._COUNTED:
            return self._many(self._take(self._COUNTED[tag]), mapping=tag >= 0xDE)
        raise ValueError(f"unknown MessagePack tag {tag:#x}")

    def _many(self, count: int, *, mapping: bool) -> Any:
        if mapping:
            return {self.value(): self.value() for _ in range(count)}
        return [self.value() for _ in range(count)]
