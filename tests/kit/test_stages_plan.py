"""Launch plans without code: where arguments lie, and what a binding changes of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tilewright_kit.contract.arguments import ARGS, COUNTERS, WORKSPACE, PackedArgs
from tilewright_kit.contract.launch_plan import root_bytes, stages_plan
from tilewright_kit.contract.plan import I64, Geometry, Pointer, Struct, Table, TensorMap, pack
from tilewright_kit.types.errors import InternalError


@dataclass(frozen=True)
class Read:
    """A plan's arguments as libtilewright reads them. docs/protocol.md has the format."""

    roots: tuple[int, ...]
    tables_at: int
    maps: tuple[int, ...]
    """Offsets of the tensor maps in the image."""
    relocations: tuple[tuple[int, int, int], ...]
    """Offset in the image, addend and place of each."""
    image: bytes

    @classmethod
    def of(cls, blocks: Sequence[PackedArgs], operands: Sequence[str], kind: str = "cuda") -> Read:
        data = stages_plan(kind, [(args, Geometry(), 8) for args in blocks], operands)
        fields = struct.unpack_from("<10I5Q4I", data, 56)
        (count, stages, objects, relocations, maps, pairs, dims, strings), image_bytes = fields[2:10], fields[13]
        assert (count, stages, objects, pairs, dims) == (len(operands), len(blocks), 0, 0, 0)
        at = 152 + 32 * count
        roots = tuple(struct.unpack_from("<2Q", data, at + 72 * i + 56)[0] for i in range(stages))
        at += 72 * stages
        found = tuple(struct.unpack_from("<QqI", data, at + 24 * i) for i in range(relocations))
        at += 24 * relocations
        offsets = tuple(struct.unpack_from("<Q", data, at + 168 * i)[0] for i in range(maps))
        at = -(-(at + 168 * maps + strings) // 64) * 64
        assert at + image_bytes == len(data)
        return cls(roots, fields[14], offsets, found, data[at:])

    def bound(self, *places: int) -> list[int]:
        """Words of the image with addresses in place."""
        words = list(struct.unpack(f"<{len(self.image) // 8}Q", self.image))
        for offset, addend, place in self.relocations:
            words[offset // 8] = places[place] + addend
        return words


def test_roots_come_first_and_tables_are_one_piece() -> None:
    first = pack(Struct((Pointer("x", 8), Table((Struct((Pointer("y"), I64(7))), Struct((Pointer(""), I64(9))))))))
    second = pack(Struct((I64(5), Pointer(WORKSPACE, 16), Table((Struct((Pointer(COUNTERS), Pointer("x"))),)))))
    plan = Read.of([first, second], ["x", "y"])
    assert (plan.roots, plan.tables_at, len(plan.image)) == ((0, 64), 128, 256)
    data = plan.bound(1000, 2000, 3000, 4000, 50_000)
    assert data[:2] == [1008, 50_000]
    assert data[8:11] == [5, 3016, 50_064]
    assert data[16:20] == [2000, 7, 0, 9]
    assert data[24:26] == [4000, 1000]


def test_table_in_a_table_is_found_on_the_device() -> None:
    inner = Table((Struct((I64(42),)),))
    plan = Read.of([pack(Struct((Table((Struct((inner, I64(1))),)),)))], [])
    data = plan.bound(0, 0, 1 << 40)
    outer = (data[0] - (1 << 40) + plan.tables_at) // 8
    nested = (data[outer] - (1 << 40) + plan.tables_at) // 8
    assert (data[outer + 1], data[nested]) == (1, 42)


def test_tensor_maps_in_roots_and_tables_keep_their_alignment() -> None:
    tensor = TensorMap("x", 0, "fp16", (64, 64), (128,), (64, 64))
    task = Struct((tensor, I64(3)))
    args = pack(Struct((I64(1), task, Table((task, task)))))
    plan = Read.of([args], ["x"])
    assert all(offset % 64 == 0 for offset in plan.maps)
    assert [offset >= plan.tables_at for offset in plan.maps] == [False, True, True]
    assert root_bytes(args) % 64 == 0


def test_arguments_that_no_device_can_take_are_refused() -> None:
    with pytest.raises(KeyError, match="nobody"):
        Read.of([pack(Struct((Pointer("nobody"),)))], ["x"])
    with pytest.raises(InternalError):
        Read.of([PackedArgs(bytes(128), ((0, ARGS, 8),), (), 64)], [])
    tensor = Struct((TensorMap("x", 0, "fp16", (64, 64), (128,), (64, 64)),))
    with pytest.raises(InternalError, match="no tensor maps"):
        Read.of([pack(tensor)], ["x"], "hip")
