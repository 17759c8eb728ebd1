"""Serves launches with tinygrad's emulator of AMD GPUs: run by an interpreter that has tinygrad, not by the tests'.

``PYTHON foreign_tinygrad.py CHECKOUT``: ``CHECKOUT`` is a folder that holds tinygrad's ``test`` package, which its
releases leave out. One line of standard input names a folder (see ``foreign.py``), one line of standard output answers.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path
from typing import Any

FAMILIES = {"gfx90a": "cdna", "gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}
PAGE = mmap.PAGESIZE
AS_ON_GFX942 = ("16X16X4_F32", "32X32X2_F32", "4X4X4_16B_F16", "16X16X16_F16", "32X32X8_F16")
NEVER_OVER = 0x100000  # MAP_FIXED_NOREPLACE: a mapping that is there already is an error, not replaced
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
NOTHING = 0xBF800000.to_bytes(4, "little")
INVALIDATIONS = {
    "rdna3": [(word).to_bytes(8, "little") for word in (0xE0AC0000, 0xE0B00000)],
    "rdna4": [
        (word | scope << 32).to_bytes(12, "little")
        for word in (0xEE0AC07C, 0xEE0B007C)
        for scope in (0, 0x40000, 0x80000, 0xC0000)
    ],
}
"""``buffer_gl0_inv`` and ``buffer_gl1_inv``; ``global_inv`` and ``global_wb`` at each scope."""


def place(address: int, data: bytes) -> tuple[int, int]:
    """Memory of this process at ``address``: the emulator takes the kernel's addresses for its own."""
    start = address // PAGE * PAGE
    size = -(-(address + len(data) - start) // PAGE) * PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NEVER_OVER
    if LIBC.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != start:
        raise RuntimeError(f"no memory at {address:#x}")
    ctypes.memmove(address, data, len(data))
    return start, size


def without_invalidations(code: bytearray, arch: str, start: int) -> None:
    """Puts ``s_nop`` where a kernel of gfx11 or gfx12 empties caches or writes them back: the emulator does not know
    these instructions.

    It has no caches either. All words are compared: what looks like one in the middle of others would have to hold 64
    bits of it.
    """
    for instruction in INVALIDATIONS.get(FAMILIES[arch], ()):
        size = len(instruction)
        for at in range(start, len(code) - size + 1, 4):
            if code[at : at + size] == instruction:
                code[at : at + size] = NOTHING * (size // 4)


def differing(name: str, arch: str, returns: bool) -> str:
    """Why this emulator's result of an instruction is not what the ISA documents say; empty if it seems to be."""
    bytes_of_floats = any(part in name for part in ("FP8", "BF8"))
    if "MFMA" in name and arch == "gfx90a" and name.removeprefix("V_MFMA_F32_") not in AS_ON_GFX942:
        return "it knows the numbers that gfx942 gives its matrix instructions, where gfx90a has others"
    if "MFMA" in name and "32X32X" in name:
        return "it gives a lane rows one after another, where the documents have blocks of four, eight apart"
    if "MFMA" in name and bytes_of_floats and arch != "gfx950":
        return "it reads bytes as OCP's formats, which only gfx950 has"
    if "WMMA" in name and bytes_of_floats:
        return "it does not convert 8-bit floats"
    if "ATOMIC" in name and returns:
        return "it asks for the old value by a bit that this family has elsewhere, and loses the value"
    return ""


def refusing(decode: Any, arch: str) -> Any:
    """``decode`` for one arch, which raises ``NotImplementedError`` for what is executed otherwise than documented."""

    def checked(data: bytes, family: str) -> Any:
        found = decode(data, family)
        name = getattr(getattr(found, "op", None), "name", "")
        returns = bool(getattr(found, "sc0", 0) or (getattr(found, "th", 0) or 0) & 1)
        if why := differing(name, arch, returns):
            raise NotImplementedError(f"{name.lower()}: {why}")
        return found

    return checked


def user_registers(properties: int, preloaded: int, arguments: int) -> list[int]:
    """What the dispatcher leaves in the first scalar registers: of all that exists only the arguments' address."""
    if preloaded or properties & 0b0110 or not properties & 0b1000:
        raise RuntimeError(f"user registers that are not set up here: {properties:#x}, {preloaded} preloaded")
    private = [0] * 4 if properties & 1 else []  # where it would lie: kernels that have any are not built
    return [*private, arguments & 0xFFFFFFFF, arguments >> 32]


def launch(folder: Path, emulator: Any, decode: Any, elf_loader: Any, kernel_descriptor: Any) -> None:
    """One launch; writes every writable file of it anew."""
    order = json.loads((folder / "launch.json").read_text())
    emulator.decode_inst = refusing(decode, order["arch"])
    image, sections, _ = elf_loader((folder / "image.co").read_bytes())
    at = order["descriptor_at"]
    descriptor = kernel_descriptor.from_buffer_copy(bytes(image[at : at + ctypes.sizeof(kernel_descriptor)]))
    code = bytearray(image)
    without_invalidations(code, order["arch"], next(item.header.sh_addr for item in sections if item.name == ".text"))
    blocks = [(order["code_at"], bytes(code)), (order["kernarg_at"], (folder / "kernarg").read_bytes())]
    blocks += [(item["address"], (folder / item["file"]).read_bytes()) for item in order["memory"]]
    placed = []
    try:
        for address, data in blocks:
            placed.append(place(address, data))
        granules = -(-(descriptor.group_segment_fixed_size + order["lds"]) // 512)
        registers = user_registers(descriptor.kernel_code_properties, descriptor.kernarg_preload, order["kernarg_at"])
        emulator.run_asm(
            order["code_at"] + at + descriptor.kernel_code_entry_byte_offset,
            len(image),
            *order["grid"],
            *order["block"],
            order["kernarg_at"],
            (descriptor.compute_pgm_rsrc2 & ~(0x1FF << 15)) | granules << 15,
            descriptor.private_segment_fixed_size,
            FAMILIES[order["arch"]],
            registers,
        )
        for item in order["memory"]:
            if item["writable"]:
                (folder / item["file"]).write_bytes(ctypes.string_at(item["address"], item["bytes"]))
    finally:
        for start, size in placed:
            LIBC.munmap(start, size)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from test.mockgpu.amd import emu  # type: ignore[import-not-found]
    from tinygrad.runtime.autogen import amdgpu_kd  # type: ignore[import-not-found]
    from tinygrad.runtime.support.elf import elf_loader  # type: ignore[import-not-found]

    decode = emu.decode_inst
    for line in sys.stdin:
        try:
            launch(Path(line.strip()), emu, decode, elf_loader, amdgpu_kd.llvm_amdhsa_kernel_descriptor_t)
            answer = {}
        except Exception as error:  # whatever it cannot do is said in its own words
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
