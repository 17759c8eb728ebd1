"""Random bytes that every implementation must draw: on CPUs, on GPUs, and in NumPy.

The first vectors are those that Random123 is tested with (kat_vectors, philox4x32 with ten rounds).
"""

from __future__ import annotations

VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""Counter, key, words."""

ANSWERS = (
    (0, 0, 0, 0, 1, 0, 0, 213),
    (0, 0, 0, 0, 1, 0, 1, 232),
    (0, 0, 0, 0, 1, 0, 63, 109),
    (0, 0, 0, 0, 1, 0, 64, 84),
    (1, 0, 0, 0, 4, 0, 0, 112),
    (1, 0, 0, 1, 4, 0, 0, 18),
    (1, 0, 1, 0, 4, 0, 0, 96),
    (1, 7, 0, 0, 4, 5, 9, 198),
    (4294967296, 0, 0, 0, 8, 17, 200, 74),
    (9223372036854775807, 4294967295, 3, 5, 8, 127, 1000, 127),
    (12345678901234567, 42, 2, 7, 8, 1023, 4095, 121),
    (77, 1, 0, 2, 4, 64, 8, 172),
    (77, 1, 0, 2, 4, 64, 16, 95),
    (77, 1, 0, 2, 4, 65, 7, 146),
    (77, 1, 0, 2, 4, 65, 6, 254),
)
"""Seed, offset, batch item, query head, query heads, row, column, byte."""
