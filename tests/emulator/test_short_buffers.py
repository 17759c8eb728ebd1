"""Buffer accesses of less than a dword on gfx9, by hand: what the ISA document says of each, byte by byte.

AMD, "Instinct MI300 Instruction Set Architecture", MUBUF: BUFFER_LOAD_USHORT is ``VDATA.u32 = {16'0, MEM[addr].u16}``,
BUFFER_LOAD_SHORT_D16_HI writes the upper half alone, BUFFER_STORE_SHORT writes ``MEM[addr].b16`` alone, and so on.
Another emulator moves whole dwords for all of them (docs/emulator.md).
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from emulator_compile import load, zeros

from tilewright_emulator import Memory

OLD = 0xA1B2C3D4
BYTES = bytes([0x11, 0x82, 0x33, 0xC4, 0x55, 0x66, 0xF7, 0x08])
LOADS = {
    "ubyte": lambda at: BYTES[at],
    "sbyte": lambda at: BYTES[at] - 256 * (BYTES[at] >> 7) & 0xFFFFFFFF,
    "ushort": lambda at: _half(at),
    "sshort": lambda at: _half(at) - 65536 * (_half(at) >> 15) & 0xFFFFFFFF,
    "short_d16": lambda at: OLD & 0xFFFF0000 | _half(at),
    "short_d16_hi": lambda at: OLD & 0xFFFF | _half(at) << 16,
    "ubyte_d16": lambda at: OLD & 0xFFFF0000 | BYTES[at],
    "ubyte_d16_hi": lambda at: OLD & 0xFFFF | BYTES[at] << 16,
}
STORES = {
    "byte": lambda at: BYTES[:at] + b"\xd4" + BYTES[at + 1 :],
    "byte_d16_hi": lambda at: BYTES[:at] + b"\xb2" + BYTES[at + 1 :],
    "short": lambda at: BYTES[:at] + b"\xd4\xc3" + BYTES[at + 2 :],
    "short_d16_hi": lambda at: BYTES[:at] + b"\xb2\xa1" + BYTES[at + 2 :],
}
BASE, OUT = 0x1000_0000_0000, 0x1000_0001_0000

TEXT = """
typedef __attribute__((ext_vector_type(4))) u32 V;
KERNEL(64) access(u32* out, u64 base, u32 size, u32 at) {{
  const V buffer = {{(u32)base, (u32)(base >> 32), size, 0x00020000}};
  u32 value = {old}u, offset = at;
  asm volatile("buffer_{name} %0, %1, %2, 0 offen\\n s_waitcnt vmcnt(0)"
               : "+v"(value) : "v"(offset), "s"(buffer) : "memory");
  if (thread() == 0) *out = value;
}}
"""


def _half(at: int) -> int:
    return BYTES[at] | BYTES[at + 1] << 8


def executed(folder: Path, arch: str, name: str, at: int, size: int = 8) -> tuple[int, bytes]:
    """The register and the memory after one access at byte ``at`` of a buffer of ``size`` bytes."""
    code = load(folder, TEXT.format(old=OLD, name=name), arch)
    out, data, memory = zeros(1), zeros(2), Memory()
    data.view("u1")[:] = list(BYTES)
    memory.map(OUT, out, "out")
    memory.map(BASE, data, "data")
    arguments = struct.pack("<QQII", OUT, BASE, size, at)
    code.kernel("access").launch(memory, grid=(1, 1, 1), block=(1, 1, 1), arguments=arguments)
    return int(out[0]), data.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("arch", ["gfx942", "gfx90a"])
@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.some(4)
def test_loads_take_their_own_bytes(folder: Path, arch: str, kind: str) -> None:
    step = 1 if "byte" in kind else 2
    for at in range(0, 8, step):
        assert executed(folder, arch, f"load_{kind}", at) == (LOADS[kind](at), BYTES), at
    outside, _ = executed(folder, arch, f"load_{kind}", 6, size=6)
    kept = {"d16": OLD & 0xFFFF0000, "hi": OLD & 0xFFFF}.get(kind.rsplit("_", 1)[-1], 0)
    assert outside == kept, "zeros take the place of what lies beyond the buffer"


@pytest.mark.parametrize("arch", ["gfx942", "gfx90a"])
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.some(2)
def test_stores_leave_their_neighbours(folder: Path, arch: str, kind: str) -> None:
    step = 1 if "byte" in kind else 2
    for at in range(0, 8, step):
        assert executed(folder, arch, f"store_{kind}", at) == (OLD, STORES[kind](at)), at
    assert executed(folder, arch, f"store_{kind}", 6, size=6) == (OLD, BYTES)
