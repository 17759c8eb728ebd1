"""Where the arguments of a program's launches lie: roots, which go by value, and tables, which lie in device memory.

All stages share one host block: first every root, then every table. Tables are uploaded as one piece. Everything that a
binding changes is a 64-bit word that becomes the sum of an address and an addend, or a tensor map.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tilewright_kit.contract.plan import ARGS, COUNTERS, WORKSPACE, PackedArgs, TensorMap
from tilewright_kit.types.errors import InternalError

__all__ = ["HostBlock", "ProgramLayout"]

_LINE = 64
_WORD = 8
_MASK = 2**64 - 1


class HostBlock:
    """Memory at a fixed address, a multiple of 64, seen as 64-bit words."""

    __slots__ = ("_memory", "address", "words")

    def __init__(self, image: bytes) -> None:
        """Begins as ``image``, whose size is a multiple of 8."""
        self._memory = (ctypes.c_char * (len(image) + _LINE))()
        start = -ctypes.addressof(self._memory) % _LINE
        self.address = ctypes.addressof(self._memory) + start
        raw = memoryview(self._memory).cast("B")[start : start + len(image)]
        raw[:] = image
        self.words = raw.cast("Q")


class ProgramLayout:
    """The block of a program, and which of its words depend on a binding."""

    def __init__(self, stages: Sequence[PackedArgs], operands: Sequence[str]) -> None:
        """Raises ``KeyError`` if a stage names an operand that is not listed, ``InternalError`` for an argument block
        that points into its own root, which has no address on a device."""
        places = {name: place for place, name in enumerate((*operands, WORKSPACE, COUNTERS, ARGS))}
        self.root_sizes = tuple(_lines(args.root_bytes or len(args.template)) for args in stages)
        """Bytes of each root, up to the next multiple of 64."""
        self.roots: tuple[int, ...] = ()
        """Offset of each root."""
        end = 0
        for size in self.root_sizes:
            self.roots += (end,)
            end += size
        self.tables_at = end
        tables = []
        for args, size in zip(stages, self.root_sizes, strict=True):
            tables.append(end)
            end += _lines(max(0, len(args.template) - size))
        self.nbytes = max(end, _LINE)
        self.table_bytes = end - self.tables_at
        self.uses_counters = any(name == COUNTERS for args in stages for _, name, _ in args.relocations)
        image = bytearray(self.nbytes)
        patches: list[tuple[int, int, int]] = []
        maps: list[tuple[int, int, TensorMap]] = []
        for args, root, size, table in zip(stages, self.roots, self.root_sizes, tables, strict=True):
            image[root : root + min(size, len(args.template))] = args.template[:size]
            image[table : table + max(0, len(args.template) - size)] = args.template[size:]

            def moved(offset: int, root: int = root, size: int = size, table: int = table) -> int:
                return root + offset if offset < size else table + offset - size

            for hole, operand, addend in args.relocations:
                if operand == ARGS:
                    if addend < size:
                        raise _points_into_root()
                    addend = moved(addend) - self.tables_at
                patches.append((moved(hole) // _WORD, places[operand], addend))
            maps += [(moved(hole), places[item.operand], item) for hole, item in args.maps]
        self.image = bytes(image)
        self.maps = tuple(maps)
        """Offset in the block, place of the operand, and the map."""
        self._patches = tuple(patches)

    def addresses(self, operands: Sequence[int], workspace: int, counters: int, tables: int) -> tuple[int, ...]:
        """By place: those of the operands and of what a device brings itself."""
        return (*operands, workspace, counters, tables)

    def bound(self, addresses: Sequence[int]) -> HostBlock:
        """A block with its words in place; tensor maps are left to the device."""
        block = HostBlock(self.image)
        words = block.words
        for word, place, addend in self._patches:
            words[word] = (addresses[place] + addend) & _MASK
        return block


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def _points_into_root() -> InternalError:
    return InternalError(
        "an argument block points into its own root",
        field="plan.args",
        rule="plan_argument",
        fix="report it as a fault of the operation's plugin",
    )
