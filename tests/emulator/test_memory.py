"""Memory instructions against what plain indexing gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator_text import ALL, CDNA, RDNA, Bench, Words

from tilewright_emulator.errors import Misaligned, OutOfBounds, UnknownInstruction
from tilewright_emulator.memory.allocations import Memory

BASE = 0x7000_0000_0000


def aligned(array: Any) -> Any:
    """A copy that begins at a multiple of 64."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    result = room[begin : begin + array.nbytes].view(array.dtype)
    result[:] = array.reshape(-1)
    return result


def random_bytes(rng: np.random.Generator, size: int) -> Any:
    return aligned(rng.integers(0, 256, size).astype(np.uint8))


def addresses(offsets: Any) -> dict[str, Words]:
    """v2 and v3: BASE and the offsets."""
    wide = np.uint64(BASE) + offsets.astype(np.uint64)
    return {"v2": wide.astype(np.uint32), "v3": (wide >> np.uint64(32)).astype(np.uint32)}


def lanes(arch: str) -> int:
    return 64 if arch in CDNA else 32


def wait(arch: str) -> str:
    """Until everything has arrived."""
    return {"gfx1201": "s_wait_loadcnt_dscnt 0x0\ns_wait_kmcnt 0x0"}.get(arch, "s_waitcnt vmcnt(0) lgkmcnt(0)")


# Names on CDNA and on RDNA, bytes, and whether the sign is extended.
LOADS = [
    ("ubyte", "u8", 1, False), ("sbyte", "i8", 1, True), ("ushort", "u16", 2, False), ("sshort", "i16", 2, True),
    ("dword", "b32", 4, False), ("dwordx2", "b64", 8, False), ("dwordx3", "b96", 12, False),
    ("dwordx4", "b128", 16, False),
]  # fmt: skip


def expected(data: Any, offsets: Any, size: int, signed: bool) -> list[list[int]]:
    """The registers of each lane after a load."""
    rows = []
    for offset in offsets.tolist():
        raw = bytes(data[offset : offset + size])
        value = int.from_bytes(raw, "little", signed=signed) % (1 << max(8 * size, 32))
        rows.append([value >> 32 * i & 0xFFFFFFFF for i in range(-(-size // 4))])
    return rows


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: str(load[0]))
@pytest.mark.parametrize("form", ["pair", "scalar", "buffer"])
def test_loads(arch: str, load: tuple[str, str, int, bool], form: str) -> None:
    old, new, size, signed = load
    name, rng, width = old if arch in CDNA else new, np.random.default_rng(size), lanes(arch)
    data, memory = random_bytes(rng, 4096), Memory()
    memory.map(BASE, data, "data")
    unit = min(size & -size, 4)
    offsets = rng.integers(0, (4096 - 80) // unit, width) * unit
    vectors, scalars = addresses(offsets), {"s4": 16, "s5": 0}
    text = f"global_load_{name} v[8:11], v[2:3], off offset:16"
    if form == "scalar":
        vectors = {"v2": offsets.astype(np.uint32)}
        scalars = {"s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32}
        text = f"global_load_{name} v[8:11], v2, s[4:5] offset:16"
    if form == "buffer":
        vectors = {"v2": offsets.astype(np.uint32)}
        scalars = {"s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32, "s6": 4096, "s7": 3 << 28, "s8": 8}
        text = f"buffer_load_{name} v[8:11], v2, s[4:7], s8 offen offset:8"
    w = Bench(arch, vectors=vectors, scalars=scalars, memory=memory).run(f"{text}\n{wait(arch)}")
    got = [[int(w.u32[8 + i][0, lane]) for i in range(-(-size // 4))] for lane in range(width)]
    assert got == expected(data, offsets + 16, size, signed)


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("form", ["pair", "scalar", "buffer"])
def test_stores_of_some_lanes(arch: str, size: int, form: str) -> None:
    names = {1: ("byte", "b8"), 2: ("short", "b16"), 4: ("dword", "b32"), 8: ("dwordx2", "b64"), 12: ("dwordx3", "b96")}
    name = names.get(size, ("dwordx4", "b128"))[arch in RDNA]
    rng, width = np.random.default_rng(size), lanes(arch)
    data, memory = aligned(np.full(4096, 0xEE, np.uint8)), Memory()
    memory.map(BASE, data, "data")
    places = rng.permutation(4096 // 16)[:width] * 16
    values = {f"v{8 + i}": rng.integers(0, 1 << 32, width).astype(np.uint32) for i in range(4)}
    vectors, scalars = addresses(places), {"s4": 0}
    text = f"global_store_{name} v[2:3], v[8:11], off"
    if form == "scalar":
        vectors, scalars = {"v2": places.astype(np.uint32)}, {"s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32}
        text = f"global_store_{name} v2, v[8:11], s[4:5]"
    if form == "buffer":
        vectors = {"v2": places.astype(np.uint32)}
        scalars = {"s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32, "s6": 4096, "s7": 3 << 28}
        text = f"buffer_store_{name} v[8:11], v2, s[4:7], 0 offen"
    mask = int(rng.integers(1, 1 << 31))
    exec_half = "exec_lo"
    setup = f"s_mov_b32 {exec_half}, {mask:#x}" + ("\ns_mov_b32 exec_hi, 0" if arch in CDNA else "")
    Bench(arch, vectors={**vectors, **values}, scalars=scalars, memory=memory).run(f"{setup}\n{text}")
    want = np.full(4096, 0xEE, np.uint8)
    for lane in range(32):
        if mask >> lane & 1:
            raw = b"".join(int(values[f"v{8 + i}"][lane]).to_bytes(4, "little") for i in range(4))[:size]
            want[places[lane] : places[lane] + size] = np.frombuffer(raw, np.uint8)
    assert np.array_equal(data, want)


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("kind", ["byte", "signed byte", "short"])
def test_half_register_loads_keep_the_other_half(arch: str, high: bool, kind: str) -> None:
    old = {"byte": "ubyte_d16", "signed byte": "sbyte_d16", "short": "short_d16"}[kind] + ("_hi" if high else "")
    new = ("d16_hi_" if high else "d16_") + {"byte": "u8", "signed byte": "i8", "short": "b16"}[kind]
    data, memory, width = random_bytes(np.random.default_rng(3), 256), Memory(), lanes(arch)
    memory.map(BASE, data, "data")
    offsets = np.arange(width) * 2
    before = np.arange(width, dtype=np.uint32) * 0x01010101
    vectors = {**addresses(offsets), "v8": before}
    text = f"global_load_{old if arch in CDNA else new} v8, v[2:3], off\n{wait(arch)}"
    w = Bench(arch, vectors=vectors, memory=memory).run(text)
    for lane in range(width):
        raw = bytes(data[2 * lane : 2 * lane + (2 if kind == "short" else 1)])
        half = int.from_bytes(raw, "little", signed=kind == "signed byte") & 0xFFFF
        old_value = int(before[lane])
        want = (old_value & 0xFFFF) | half << 16 if high else (old_value & 0xFFFF0000) | half
        assert int(w.u32[8][0, lane]) == want


@pytest.mark.parametrize("arch", ALL)
def test_buffers_end_where_their_resource_says(arch: str) -> None:
    """Dword by dword: what is outside reads as zero, and is not written."""
    memory, data, width = Memory(), aligned(np.full(1024, 0x11, np.uint8)), lanes(arch)
    memory.map(BASE, data, "data")
    end = 16 * 20 + 8
    scalars = {"s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32, "s6": end, "s7": 3 << 28}
    vectors = {"v2": (np.arange(width) * 16).astype(np.uint32)}
    name = "dwordx4" if arch in CDNA else "b128"
    text = f"buffer_load_{name} v[8:11], v2, s[4:7], 0 offen\n{wait(arch)}\n"
    text += f"buffer_store_{name} v[12:15], v2, s[4:7], 0 offen"
    filled = {f"v{i}": np.full(width, 0x22222222, np.uint32) for i in range(12, 16)}
    w = Bench(arch, vectors={**vectors, **filled}, scalars=scalars, memory=memory).run(text)
    for lane in range(width):
        inside = [16 * lane + 4 * i + 4 <= end for i in range(4)]
        assert [int(w.u32[8 + i][0, lane]) for i in range(4)] == [0x11111111 if yes else 0 for yes in inside]
    assert (data[:end] == 0x22).all()
    assert (data[end:] == 0x11).all()


@pytest.mark.parametrize("arch", ALL)
def test_scalar_loads(arch: str) -> None:
    data, memory = aligned(np.arange(64, dtype=np.uint32)), Memory()
    memory.map(BASE, data, "data")
    scalars = {"s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32, "s6": 8}
    names = ("dword", "dwordx2", "dwordx4", "dwordx8") if arch in CDNA else ("b32", "b64", "b128", "b256")
    text = "\n".join(
        f"s_load_{name} s[{16 + 8 * i}:{23 + 8 * i}], s[4:5], {hex(16 * i)}" for i, name in enumerate(names)
    )
    offset = "s6" if arch in CDNA else "s6 offset:0x0"
    text += f"\ns_load_{names[0]} s7, s[4:5], {offset}\n{wait(arch)}"
    w = Bench(arch, waves=2, scalars=scalars, memory=memory).run(text)
    for i, count in enumerate((1, 2, 4, 8)):
        assert w.scalars[1, 16 + 8 * i : 16 + 8 * i + count].tolist() == list(range(4 * i, 4 * i + count))
    assert w.scalars[:, 7].tolist() == [2, 2]


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16])
def test_lds_stores_and_loads(arch: str, size: int) -> None:
    verbs = ("write", "read") if arch in CDNA else ("store", "load")
    kind, back = {1: ("b8", "u8"), 2: ("b16", "u16")}.get(size, (f"b{8 * size}",) * 2)
    rng, width = np.random.default_rng(size), lanes(arch)
    places = rng.permutation(width) * 16
    values = {f"v{8 + i}": rng.integers(0, 1 << 32, width).astype(np.uint32) for i in range(4)}
    text = f"ds_{verbs[0]}_{kind} v2, v[8:11] offset:32\n{wait(arch)}\n"
    text += f"ds_{verbs[1]}_{back} v[12:15], v3 offset:32\n{wait(arch)}"
    vectors = {"v2": places.astype(np.uint32), "v3": np.sort(places).astype(np.uint32), **values}
    w = Bench(arch, lds=2048, groups=2, vectors=vectors).run(text)
    order = np.argsort(places)
    for i in range(-(-size // 4)):
        mask = np.uint32((1 << min(8 * size, 32)) - 1)
        assert np.array_equal(w.u32[12 + i][1], values[f"v{8 + i}"][order] & mask)


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("far", [False, True])
def test_two_address_lds_forms(arch: str, far: bool) -> None:
    unit = "st64" if far else ""
    names = (f"ds_write2{unit}_b32", f"ds_read2{unit}_b64")
    if arch in RDNA:
        stride = "_stride64" if far else ""
        names = (f"ds_store_2addr{stride}_b32", f"ds_load_2addr{stride}_b64")
    width = lanes(arch)
    rows = np.arange(width, dtype=np.uint32)
    text = f"{names[0]} v2, v8, v9 offset1:1\n"
    reach = 256 if far else 4
    vectors = {"v2": rows * np.uint32(8), "v8": rows + 100, "v9": rows + 500}
    bench = Bench(arch, lds=16384, vectors=vectors)
    if far:  # 256 bytes apart: the second halves overlap other lanes' first ones, so that only one lane writes
        text = f"s_mov_b32 exec_lo, 1\n{'s_mov_b32 exec_hi, 0' if arch in CDNA else ''}\n{text}"
    text += f"{wait(arch)}\nds_{'read' if arch in CDNA else 'load'}_b32 v10, v2\n"
    text += f"ds_{'read' if arch in CDNA else 'load'}_b32 v11, v2 offset:{reach}\n{wait(arch)}"
    w = bench.run(text)
    active = 1 if far else width
    assert w.u32[10][0, :active].tolist() == [100 + i for i in range(active)]
    assert w.u32[11][0, :active].tolist() == [500 + i for i in range(active)]


@pytest.mark.parametrize("arch", ALL)
def test_lanes_exchange_values(arch: str) -> None:
    width, rng = lanes(arch), np.random.default_rng(5)
    index, values = rng.integers(0, width, width), rng.integers(0, 1 << 32, width).astype(np.uint32)
    target = rng.permutation(width)
    vectors = {"v2": (index * 4).astype(np.uint32), "v3": values, "v5": (target * 4).astype(np.uint32)}
    text = f"ds_bpermute_b32 v4, v2, v3\nds_permute_b32 v6, v5, v3\n{wait(arch)}"
    w = Bench(arch, vectors=vectors).run(text)
    assert np.array_equal(w.u32[4][0], values[index])
    assert np.array_equal(w.u32[6][0][target], values)


def test_transposing_reads_exchange_elements_among_sixteen_lanes() -> None:
    """Each lane names four elements of its own; together they are blocks of 4 lines and 16 columns, if lanes say so."""
    matrix = np.arange(16 * 16, dtype=np.uint16).reshape(16, 16)  # 16 of k, and columns
    lane = np.arange(64)
    group, line = lane // 16, lane % 16
    places = (group * 4 + line // 4) * 32 + line % 4 * 8
    stored = {f"v{8 + i}": matrix.reshape(64, 4).view(np.uint32)[:, i].copy() for i in range(2)}
    vectors = {"v2": (lane * 8).astype(np.uint32), "v3": places.astype(np.uint32), **stored}
    text = f"ds_write_b64 v2, v[8:9]\n{wait('gfx950')}\nds_read_b64_tr_b16 v[12:13], v3\n{wait('gfx950')}"
    w = Bench("gfx950", lds=2048, vectors=vectors).run(text)
    found = np.stack([w.u32[12][0], w.u32[13][0]], axis=1).copy().view(np.uint16)
    assert np.array_equal(found, np.stack([matrix[group * 4 + k, line] for k in range(4)], axis=1))
    with pytest.raises(UnknownInstruction, match="some lanes"):
        Bench("gfx950", lds=2048, vectors=vectors).run(f"s_mov_b64 exec, 0xff\n{text}")


@pytest.mark.parametrize(
    ("pattern", "index"),
    [
        ("swizzle(QUAD_PERM,3,2,1,0)", lambda lane: lane ^ 3),
        ("swizzle(SWAP,16)", lambda lane: lane ^ 16),
        ("swizzle(REVERSE,8)", lambda lane: lane ^ 7),
        ("swizzle(BROADCAST,4,1)", lambda lane: lane & ~3 | 1),
        ('swizzle(BITMASK_PERM,"01pip")', lambda lane: (lane & 0b00111 | 0b01000) ^ 0b00010),
    ],
)
def test_swizzles(pattern: str, index: object) -> None:
    values = np.arange(64, dtype=np.uint32) * 7
    w = Bench("gfx942", vectors={"v1": values}).run(f"ds_swizzle_b32 v2, v1 offset:{pattern}\ns_waitcnt lgkmcnt(0)")
    assert callable(index)
    assert w.u32[2][0].tolist() == [7 * (lane & ~31 | index(lane & 31)) for lane in range(64)]


@pytest.mark.parametrize(("arch", "size"), [("gfx942", 4), ("gfx950", 16), ("gfx950", 12), ("gfx90a", 4)])
@pytest.mark.parametrize("form", ["global", "buffer"])
def test_loads_straight_into_lds(arch: str, size: int, form: str) -> None:
    """M0 and the offset say where; lanes lie one after the other."""
    name = {4: "dword", 12: "dwordx3", 16: "dwordx4"}[size]
    data, memory = random_bytes(np.random.default_rng(size), 4096), Memory()
    memory.map(BASE, data, "data")
    offsets = np.random.default_rng(1).permutation(64) * 32
    vectors, scalars = addresses(offsets), {"m0": 64, "s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32, "s6": 4096, "s7": 0}
    text = f"global_load_lds_{name} v[2:3], off offset:16"
    if form == "buffer":
        vectors = {"v2": offsets.astype(np.uint32)}
        text = f"buffer_load_{name} v2, s[4:7], 0 offen offset:16 lds"
    bench = Bench(arch, lds=4096, vectors=vectors, scalars=scalars, memory=memory)
    bench.run(f"{text}\ns_waitcnt vmcnt(0)")
    for lane in range(64):
        begin = 64 + 16 + size * lane
        assert np.array_equal(bench.launch.lds.data[begin : begin + size], data[offsets[lane] + 16 :][:size])


@pytest.mark.parametrize("arch", ALL[1:])  # gfx90a reaches scratch through a buffer resource: test_launch.py
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_scratch_belongs_to_each_lane(arch: str, size: int) -> None:
    width, rng = lanes(arch), np.random.default_rng(size)
    stores = {
        1: ("byte", "b8"),
        2: ("short", "b16"),
        4: ("dword", "b32"),
        8: ("dwordx2", "b64"),
        16: ("dwordx4", "b128"),
    }
    loads = {**stores, 1: ("ubyte", "u8"), 2: ("ushort", "u16")}
    new = arch in RDNA
    values = {f"v{8 + i}": rng.integers(0, 1 << 32, width).astype(np.uint32) for i in range(4)}
    where = rng.integers(0, 4, width).astype(np.uint32) * np.uint32(16)
    text = f"scratch_store_{stores[size][new]} v1, v[8:11], off offset:4\n{wait(arch)}\n"
    text += f"scratch_load_{loads[size][new]} v[12:15], v1, off offset:4\n{wait(arch)}"
    w = Bench(arch, private=80, vectors={"v1": where, **values}).run(text)
    for i in range(-(-size // 4)):
        mask = np.uint32((1 << min(8 * size, 32)) - 1)
        assert np.array_equal(w.u32[12 + i][0], values[f"v{8 + i}"] & mask)
    with pytest.raises(OutOfBounds, match="of scratch"):
        Bench(arch, private=64, vectors={"v1": np.full(width, 64, np.uint32), **values}).run(text)


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [(4092, 8, "end 4 bytes past data"), (1 << 20, 4, "bytes past data"), (-8, 4, "begin 8 bytes before data")],
)
def test_accesses_outside_name_instruction_and_lane(arch: str, offset: int, size: int, text: str) -> None:
    memory, width = Memory(), lanes(arch)
    memory.map(BASE, aligned(np.zeros(4096, np.uint8)), "data")
    memory.map(BASE + (1 << 30), aligned(np.zeros(64, np.uint8)), "another")
    offsets = np.zeros(width, np.int64)
    offsets[5] = offset
    wide = (BASE + offsets).astype(np.uint64)
    vectors = {"v2": wide.astype(np.uint32), "v3": (wide >> np.uint64(32)).astype(np.uint32)}
    name = {4: ("dword", "b32"), 8: ("dwordx2", "b64")}[size][arch in RDNA]
    line = f"global_load_{name} v[8:9], v[2:3], off"
    with pytest.raises(OutOfBounds, match=rf"`{line.replace('[', chr(92) + '[')}`.*wave 0 lane 5: .*{text}"):
        Bench(arch, vectors=vectors, memory=memory).run(line)


@pytest.mark.parametrize("arch", ALL)
def test_misaligned_and_read_only(arch: str) -> None:
    memory, width = Memory(), lanes(arch)
    memory.map(BASE, aligned(np.zeros(4096, np.uint8)), "data", writable=False)
    name = "dword" if arch in CDNA else "b32"
    with pytest.raises(Misaligned, match="lane 0"):
        Bench(arch, vectors=addresses(np.full(width, 2)), memory=memory).run(f"global_load_{name} v8, v[2:3], off")
    with pytest.raises(OutOfBounds, match="data is read-only"):
        vectors = {**addresses(np.zeros(width)), "v8": np.zeros(width, np.uint32)}
        Bench(arch, vectors=vectors, memory=memory).run(f"global_store_{name} v[2:3], v8, off")
    verb = "read" if arch in CDNA else "load"
    with pytest.raises(Misaligned, match="LDS 2"):
        Bench(arch, lds=64, vectors={"v1": np.full(width, 2, np.uint32)}).run(f"ds_{verb}_b32 v2, v1")
    with pytest.raises(OutOfBounds, match="LDS 64 of 64"):
        Bench(arch, lds=64, vectors={"v1": np.full(width, 64, np.uint32)}).run(f"ds_{verb}_b32 v2, v1")


def test_lanes_may_touch_several_allocations() -> None:
    memory = Memory()
    first, second = aligned(np.arange(16, dtype=np.uint32)), aligned(np.arange(100, 116, dtype=np.uint32))
    memory.map(BASE, first, "first")
    memory.map(BASE + 0x1000, second, "second")
    offsets = np.where(np.arange(64) % 2 == 0, 0, 0x1000) + 4 * (np.arange(64) % 16)
    w = Bench("gfx942", vectors=addresses(offsets), memory=memory).run(
        "global_load_dword v8, v[2:3], off\ns_waitcnt vmcnt(0)"
    )
    assert w.u32[8][0].tolist() == [(lane % 16) + (100 if lane % 2 else 0) for lane in range(64)]


def test_allocations_do_not_overlap() -> None:
    memory = Memory()
    memory.map(BASE, np.zeros(64, np.uint8), "one")
    with pytest.raises(ValueError, match="overlaps"):
        memory.map(BASE + 63, np.zeros(64, np.uint8), "two")
    memory.unmap(BASE)
    memory.map(BASE + 63, np.zeros(64, np.uint8), "two")
    with pytest.raises(KeyError):
        memory.unmap(BASE)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_memory_may_begin_anywhere(shift: int) -> None:
    """As at the operands of a kernel: bases are multiples of their element only."""
    room = random_bytes(np.random.default_rng(shift), 1024)
    memory = Memory()
    memory.map(BASE + shift, room[shift:], "data")
    offsets = np.full(64, shift) if shift >= 4 else np.full(64, 4)
    offsets = offsets + 4 * np.arange(64)
    w = Bench("gfx942", vectors=addresses(offsets), memory=memory).run(
        "global_load_dwordx2 v[8:9], v[2:3], off\ns_waitcnt vmcnt(0)"
    )
    want = [int.from_bytes(bytes(room[offset : offset + 8]), "little") for offset in offsets.tolist()]
    assert [int(lo) | int(hi) << 32 for lo, hi in zip(w.u32[8][0], w.u32[9][0], strict=True)] == want
