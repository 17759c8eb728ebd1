"""Launch arguments: described by plans, laid out in one block, bound to addresses by devices.

On a CPU the block is handed over by address. On a GPU its root goes by value, as the kernel's only parameter, and its
tables lie in device memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright_kit.types.errors import InvalidArgumentError

__all__ = [
    "ARGS",
    "COUNTERS",
    "F64",
    "I64",
    "MAP_BYTES",
    "WORKSPACE",
    "Arg",
    "PackedArgs",
    "PixelWalk",
    "Pointer",
    "Struct",
    "Table",
    "TensorMap",
    "pack",
]

WORKSPACE = "workspace"
"""Reserved operand name: the scratch memory of the plan."""
COUNTERS = "counters"
"""Reserved operand name: memory of the plan that is zero when a launch begins and that the launch leaves zero."""
ARGS = "@args"
"""Reserved operand name: the packed argument block itself (pointers from the root into its tables)."""

MAP_BYTES = 128
MAP_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Pointer:
    """Address of an operand plus ``offset`` bytes; the empty operand is a null pointer."""

    operand: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class I64:
    value: int


@dataclass(frozen=True, slots=True)
class F64:
    value: float


@dataclass(frozen=True, slots=True)
class PixelWalk:
    """How copies through a tensor map gather the pixels of images at which a filter may begin (im2col).

    The map's tensor has the channels first, then one to three spatial dimensions, then images; its box is channels and
    pixels of one copy. By spatial dimension, the fastest first: pixels from ``lower`` to the dimension's size plus
    ``upper``, less one, ``step`` apart. CUDA driver API, ``cuTensorMapEncodeIm2col``.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A descriptor for the bulk tensor copy engine of NVIDIA's sm_90 and later: 128 bytes, at a multiple of 64.

    Describes the tensor at ``operand`` plus ``offset`` bytes, which must lie at a multiple of 16. ``sizes`` are
    elements, fastest dimension first; ``strides`` are bytes of all dimensions but the fastest, multiples of 16;
    ``box`` is what one copy moves. Elements outside the tensor read as zero and are not written. The empty operand
    gives a descriptor of zeros, which no copy may use. CUDA driver API, ``cuTensorMapEncodeTiled``.

    A map whose dimensions 1 and 2 have the same stride shows rows twice, so that copies can end at any row: dimension 1
    ends where they stop, dimension 2 says where they are. It begins, with a negative ``offset``, as many rows before
    the operand as dimension 1 has; the kernel sees to it that no copy begins there.
    """

    operand: str
    offset: int
    dtype: str
    """Element type by its kit name; 8-bit types are moved as bytes."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    """Bytes over which the shared-memory side is swizzled: 0, 32, 64 or 128."""
    fetch: int = 256
    """Bytes of a line's neighbourhood that the second-level cache gets from memory at a time: 0, 64, 128 or 256."""
    walk: PixelWalk | None = None
    """None: a copy moves a box of the tensor."""


@dataclass(frozen=True, slots=True)
class Struct:
    """Fields laid out in order, each 8 bytes wide, a tensor map or a nested struct.

    A struct that holds a tensor map lies at a multiple of 64 bytes and is padded to one, as C++ does.
    """

    fields: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A pointer to ``rows`` laid out one after the other (null if there are none)."""

    rows: tuple[Struct, ...]


Arg = Pointer | I64 | F64 | TensorMap | Struct | Table


@dataclass(frozen=True, slots=True)
class PackedArgs:
    """An argument block with holes: ``relocations`` are (offset in block, operand name, addend)."""

    template: bytes
    relocations: tuple[tuple[int, str, int], ...]
    maps: tuple[tuple[int, TensorMap], ...] = ()
    """Tensor maps by their offset in the block; the device encodes them."""
    root_bytes: int = 0
    """Bytes of the root; the tables follow from the next multiple of 64."""

    def bind(self, addresses: Mapping[str, int], block: bytearray | memoryview, base: int) -> None:
        """Write the block into ``block``, which will lie at address ``base``, with operands at ``addresses``.

        Tensor maps stay zero. Raises ``ValueError`` if ``block`` is too small, ``KeyError`` for an operand without an
        address.
        """
        if len(block) < len(self.template):
            raise ValueError(f"the argument block needs {len(self.template)} bytes, not {len(block)}")
        block[: len(self.template)] = self.template
        for offset, operand, addend in self.relocations:
            address = base if operand == ARGS else addresses[operand]
            struct.pack_into("<Q", block, offset, address + addend)


class _Packer:
    def __init__(self) -> None:
        self.block = bytearray()
        self.relocations: list[tuple[int, str, int]] = []
        self.maps: list[tuple[int, TensorMap]] = []
        self.pending: list[tuple[int, Table]] = []

    def put(self, arg: Arg) -> None:
        block = self.block
        if isinstance(arg, Struct):
            self.put_struct(arg)
        elif isinstance(arg, I64):
            block.extend(_int64(arg.value))
        elif isinstance(arg, F64):
            block.extend(struct.pack("<d", arg.value))
        elif isinstance(arg, Pointer):
            if arg.operand:
                self.relocations.append((len(block), arg.operand, arg.offset))
            block.extend(bytes(8))
        elif isinstance(arg, TensorMap):
            self.align()
            if arg.operand:
                self.maps.append((len(block), arg))
            block.extend(bytes(MAP_BYTES))
        else:
            if arg.rows:
                self.pending.append((len(block), arg))
            block.extend(bytes(8))

    def put_struct(self, arg: Struct) -> None:
        aligned = _holds_map(arg)
        if aligned:
            self.align()
        for item in arg.fields:
            self.put(item)
        if aligned:
            self.align()

    def align(self) -> None:
        self.block.extend(bytes(-len(self.block) % MAP_ALIGNMENT))


def pack(root: Struct) -> PackedArgs:
    """Lay out ``root``, then its tables breadth-first, with pointers between them as relocations.

    Raises ``InvalidArgumentError`` for an integer that does not fit in 64 bits.
    """
    packer = _Packer()
    packer.put(root)
    root_bytes = len(packer.block)
    # Rows may hold tables of their own, which join the end of the queue.
    if packer.pending:
        packer.align()
    while packer.pending:
        hole, table = packer.pending.pop(0)
        if _holds_map(table.rows[0]):
            packer.align()
        packer.relocations.append((hole, ARGS, len(packer.block)))
        for row in table.rows:
            packer.put(row)
    return PackedArgs(bytes(packer.block), tuple(packer.relocations), tuple(packer.maps), root_bytes)


def _holds_map(arg: Arg) -> bool:
    if isinstance(arg, Struct):
        return any(_holds_map(item) for item in arg.fields)
    return isinstance(arg, TensorMap)


def _int64(value: int) -> bytes:
    try:
        return struct.pack("<q", value)
    except struct.error:
        raise InvalidArgumentError(
            "an argument of the plan is not a 64-bit integer", field="plan.args", value=value, rule="plan_argument"
        ) from None
