"""A check that code for RDNA reaches no memory of a lane's own (scratch): metadata say only how much was set aside.

Where scalar registers nearly did not suffice, clang 22 sets places aside that no instruction uses, and tells no spill.
Every word of the code is looked at, operands and constants included: a word that merely looks like such an instruction
counts as one. Encodings: "RDNA3 Instruction Set Architecture", FLAT (bits 31 to 26 are 0x37, bits 17 and 16 are 0 for
flat and 1 for scratch), and "RDNA4 Instruction Set Architecture", VFLAT (0xec) and VSCRATCH (0xed).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["reaches_private_memory"]

_LOADED, _EXECUTABLE = 1, 1
"""``PT_LOAD`` and ``PF_X`` of ELF."""


def reaches_private_memory(image: bytes, target: str) -> bool:
    """False if no instruction of an ELF image does. True for GPUs other than gfx11 and gfx12, whose code is not read.

    ``target``: as in the code object's metadata.
    """
    if target.startswith("gfx11"):
        return any(word >> 26 == 0x37 and word >> 16 & 3 < 2 for word in _code(image))
    if target.startswith("gfx12"):
        return any(word >> 24 in (0xEC, 0xED) for word in _code(image))
    return True


def _code(image: bytes) -> Iterator[int]:
    """The 32-bit words of all executable segments."""
    (table,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for index in range(count):
        kind, flags, offset, _, _, length = struct.unpack_from("<IIQQQQ", image, table + index * size)
        if kind == _LOADED and flags & _EXECUTABLE:
            for (word,) in struct.iter_unpack("<I", image[offset : offset + length // 4 * 4]):
                yield word
