"""How far memory accesses and the instructions of caches reach, by the bits that they carry.

What other workgroups are to see must reach the device. Where all compute units share one L2 cache, stores always do,
and loads do that pass by the nearer caches. The scope that RDNA4's atomics carry is taken at its word; older ones carry
none that tells a workgroup from the device.

GPUs of several dies have an L2 cache in each. What makes an atomic there one for the device is that the contents of the
cache are written back ahead of it (``buffer_wbl2 sc1``): the memory model of LLVM asks for that in every release at the
scope of the device. It is asked for here even of stores that go through by themselves, so that a release for the
workgroup only is not taken for more.
"""

from __future__ import annotations

from typing import Literal

from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction

Access = Literal["load", "store", "atomic"]
WIDE = ("SCOPE_DEV", "SCOPE_SYS")


def reaches_device(instruction: Instruction, arch: Arch, access: Access) -> bool:
    """True if an access is one that workgroups on different compute units agree about."""
    modifiers = instruction.modifiers
    if access == "store":
        return not arch.several_l2
    if arch.generation == 12:
        return modifiers.get("scope", "") in WIDE
    return access == "atomic" or ("sc1" if arch.several_l2 else "glc") in modifiers


def passes_through(instruction: Instruction, arch: Arch) -> bool:
    """True if a store by itself goes on to where the whole device finds it, without being written back."""
    return reaches_device(instruction, arch, "store") or "sc1" in instruction.modifiers


def writes_back(instruction: Instruction) -> bool:
    """True if an instruction writes the contents of its L2 cache back to the device."""
    return instruction.name == "buffer_wbl2" and _has_sc1(instruction)


def invalidates(instruction: Instruction) -> bool:
    """True if loads behind an instruction read what the device holds."""
    if instruction.name == "buffer_inv":
        return _has_sc1(instruction)
    if instruction.name == "global_inv":
        return instruction.modifiers.get("scope", "") in WIDE
    return instruction.name in ("buffer_wbinvl1", "buffer_wbinvl1_vol", "buffer_gl1_inv")


def _has_sc1(instruction: Instruction) -> bool:
    """Where an instruction has nothing else, the bit stands where others have an operand."""
    return "sc1" in instruction.modifiers or any("sc1" in operand.split() for operand in instruction.operands)
