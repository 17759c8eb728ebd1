"""A launch: what the command processor sets up, workgroup after workgroup."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tilewright_emulator.access.global_memory import PRIVATE_APERTURE, SHARED_APERTURE
from tilewright_emulator.code.kernel import KernelCode
from tilewright_emulator.errors import BadCodeObject, OutOfBounds
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Operand, register_bits
from tilewright_emulator.isa.registers import EXEC, M0, POISON, SCALARS, TTMP, Array
from tilewright_emulator.launch.scheduler import Scheduler
from tilewright_emulator.memory.allocations import Memory
from tilewright_emulator.memory.lds import Lds
from tilewright_emulator.state.publication import Publication
from tilewright_emulator.state.run import Checks, Run, Traffic
from tilewright_emulator.state.waves import Waves
from tilewright_emulator.state.weak import WeakMemory

# Where the emulator's own things lie: no process has its heap or its mappings there.
CODE, KERNARG, PACKET, QUEUE = 0x0E00_0000_0000, 0x0E10_0000_0000, 0x0E20_0000_0000, 0x0E30_0000_0000
DYNAMIC_STACK = 16384  # bytes of a lane, for kernels that do not know
LOCKSTEP = 32  # waves that run together, if there are so many: more lanes for the price of one instruction


@dataclass(frozen=True)
class Report:
    """``wave_instructions``: executed, by all waves. ``by_class``: the same by kind: "matrix", "vector", "scalar",
    "lds", "global", "wait", "branch". ``traffic``: counted only with ``Checks.traffic``."""

    wave_instructions: int
    by_class: dict[str, int]
    by_name: dict[str, int]
    traffic: Traffic


def class_of(name: str) -> str:
    """The kind of an instruction, by its name."""
    if name.startswith(("v_mfma", "v_wmma", "v_smfma", "v_swmma")):
        return "matrix"
    if name.startswith(("s_wait", "s_barrier", "s_nop", "s_delay", "s_clause", "s_sleep", "s_setprio")):
        return "wait"
    if name.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc", "s_call")):
        return "branch"
    prefixes = {"v_": "vector", "s_": "scalar", "ds_": "lds"}
    return next((kind for prefix, kind in prefixes.items() if name.startswith(prefix)), "global")


@dataclass(eq=False)
class _Launch:
    kernel: KernelCode
    memory: Memory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int
    checks: Checks
    kernarg: bytes
    publication: Publication | None
    weak: WeakMemory | None

    @property
    def arch(self) -> Arch:
        return self.kernel.arch

    @property
    def items(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def per_group(self) -> int:
        return -(-self.items // self.arch.lanes)

    def coordinates(self, number: int) -> tuple[int, int, int]:
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def batch(self, numbers: Array, executed: list[int], traffic: Traffic) -> None:
        """Runs workgroups of these numbers."""
        groups = numbers.size
        size = self.kernel.descriptor.lds + self.dynamic_lds
        lds = Lds(size, groups, self.checks.lds_races, self.checks.uninitialised_lds)
        slots = np.repeat(np.arange(groups), self.per_group)
        run = Run(
            self.arch, self.memory, lds, self.checks, slots, self.per_group, numbers, traffic, self.publication,
            self.weak, CODE,
        )  # fmt: skip
        names = {slot: self.coordinates(number) for slot, number in enumerate(numbers.tolist())}
        Scheduler(self.kernel.program, run, names, executed).start(self._waves(run, names))

    def _waves(self, run: Run, names: dict[int, tuple[int, int, int]]) -> Waves:
        count, lanes, program = run.groups.size, self.arch.lanes, self.kernel.program
        vectors = np.full((program.registers, count, lanes), POISON, np.uint32)
        w = Waves(vectors, np.full((count, SCALARS), POISON, np.uint32), lanes, run)
        item = (np.arange(count)[:, None] % self.per_group) * lanes + np.arange(lanes)
        x, y, _ = self.block
        # All three indices in one register, those that the kernel asked for.
        wanted = self.kernel.descriptor.rsrc2 >> 11 & 3
        ids = item % x
        if wanted >= 1:
            ids = ids | item // x % y << 10
        if wanted >= 2:
            ids = ids | item // (x * y) << 20
        w.u32[0][...] = ids
        w.bases = np.repeat((run.groups * run.lds.stride)[:, None], lanes, axis=1)
        w.refresh_marks()
        dynamic = DYNAMIC_STACK if self.kernel.metadata.get(".uses_dynamic_stack") else 0
        words = -(-max(self.kernel.descriptor.private, dynamic) // 4)
        w.private = np.full((words, count, lanes), POISON, np.uint32)
        w.scalars[:, EXEC : EXEC + 2] = 0
        w.set_exec(item < self.items)
        w.pc = program.at[self.kernel.entry]
        ready = self._scalars(w, np.array([names[slot] for slot in run.groups.tolist()], np.uint32))
        if self.checks.uninitialised_registers and not program.calls:
            everything = (1 << 512 + TTMP) - 1
            w.unwritten = everything & ~ready & ~register_bits(Operand.parse("v0"))
            w.hazard = w.unwritten
        return w

    def _scalars(self, w: Waves, groups: Array) -> int:
        """The initial scalar registers, in the order of the ABI; gives those that are set, as bits."""
        d, s, at = self.kernel.descriptor, w.scalars, 0
        pointers = (
            (1, 4, 0), (2, 2, PACKET), (4, 2, QUEUE), (8, 2, KERNARG), (16, 2, 0), (32, 2, 0), (64, 1, d.private),
        )  # fmt: skip
        for bit, registers, value in pointers:
            if d.properties & bit:
                if bit == 1:  # the descriptor of private memory: swizzled
                    s[:, at : at + 4] = [0, 1 << 31, 0xFFFFFFFF, 0]
                else:
                    s[:, at] = value & 0xFFFFFFFF
                    if registers == 2:
                        s[:, at + 1] = value >> 32
                at += registers
        length, offset = d.preload & 0x7F, d.preload >> 7
        for word in range(length):
            (s[:, at],) = struct.unpack_from("<I", self.kernarg, 4 * (offset + word))
            at += 1
        at = max(at, d.rsrc2 >> 1 & 31)
        if self.arch.generation >= 12:
            s[:, TTMP + 9] = groups[:, 0]
            s[:, TTMP + 7] = groups[:, 1] | groups[:, 2] << np.uint32(16)
        else:
            for axis in range(3):
                if d.rsrc2 >> (7 + axis) & 1:
                    s[:, at] = groups[:, axis]
                    at += 1
        if d.rsrc2 >> 10 & 1:
            at += 1
        if d.rsrc2 & 1 or d.properties & 1:  # where the wave's private memory begins: all is relative to it here
            s[:, at] = 0
            at += 1
        s[:, M0] = 0xFFFFFFFF
        s[:, 102:104] = 0
        return ((1 << at) - 1 | 3 << 102) << 512


def kernel_arguments(
    kernel: KernelCode, arguments: bytes, grid: tuple[int, ...], block: tuple[int, ...], lds: int
) -> bytes:
    """The kernel argument segment: explicit arguments, and the hidden ones that the metadata lists.

    Raises ``BadCodeObject`` if the arguments are not as long as the kernel's explicit ones.
    """
    entries = kernel.metadata.get(".args", [])
    explicit = max(
        (a[".offset"] + a[".size"] for a in entries if not a[".value_kind"].startswith("hidden_")), default=0
    )
    if len(arguments) < explicit or len(arguments) > max(explicit, kernel.kernarg_bytes):
        raise BadCodeObject(f"{kernel.name}: takes {explicit} bytes of arguments, not {len(arguments)}")
    segment = bytearray(max(kernel.kernarg_bytes, len(arguments), 16))
    segment[: len(arguments)] = arguments
    values = {"hidden_grid_dims": max((i + 1 for i in range(3) if grid[i] * block[i] > 1), default=1)}
    for axis, letter in enumerate("xyz"):
        values |= {f"hidden_block_count_{letter}": grid[axis], f"hidden_group_size_{letter}": block[axis]}
    values |= {"hidden_dynamic_lds_size": lds, "hidden_private_base": PRIVATE_APERTURE}
    values |= {"hidden_shared_base": SHARED_APERTURE, "hidden_queue_ptr": QUEUE}
    for entry in entries:
        if entry[".value_kind"].startswith("hidden_"):
            value = values.get(entry[".value_kind"], 0)
            segment[entry[".offset"] : entry[".offset"] + entry[".size"]] = value.to_bytes(entry[".size"], "little")
    return bytes(segment)


def dispatch_packet(kernel: KernelCode, grid: tuple[int, ...], block: tuple[int, ...], lds: int) -> bytes:
    """The 64 bytes of an AQL kernel dispatch packet; its grid counts work-items."""
    dimensions = max((i + 1 for i in range(3) if grid[i] > 1 or block[i] > 1), default=1)
    items = [g * b for g, b in zip(grid, block, strict=True)]
    return struct.pack(
        "<HHHHHHIIIIIQQQQ", 2, dimensions, *block, 0, *items, kernel.descriptor.private, kernel.descriptor.lds + lds,
        CODE + kernel.descriptor.address, KERNARG, 0, 0,
    )  # fmt: skip


def _aligned(data: bytes, size: int = 0) -> Array:
    """The bytes as an array at a multiple of 16."""
    length = max(size, len(data))
    store = np.zeros(length + 16, np.uint8)
    begin = -store.ctypes.data % 16
    array = store[begin : begin + length]
    array[: len(data)] = np.frombuffer(data, np.uint8)
    return array


def launch(
    kernel: KernelCode,
    memory: Memory,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: bytes,
    dynamic_lds: int,
    checks: Checks,
) -> Report:
    """Runs a kernel; see ``Kernel.launch``."""
    _check_shape(kernel, block, dynamic_lds)
    kernarg = kernel_arguments(kernel, arguments, grid, block, dynamic_lds)
    own = [
        memory.map(KERNARG, _aligned(kernarg), "kernel arguments", writable=False),
        memory.map(PACKET, _aligned(dispatch_packet(kernel, grid, block, dynamic_lds)), "dispatch packet", False),
        memory.map(QUEUE, _aligned(_queue()), "queue", writable=False),
    ]
    own += [
        memory.map(CODE + segment.address, _aligned(segment.data, segment.size), "code object", writable=False)
        for segment in kernel.code.elf.segments
    ]
    memory.forget_owners()
    groups = grid[0] * grid[1] * grid[2]
    publication = Publication(groups) if checks.publication else None
    weak = WeakMemory() if checks.weak else None
    made = _Launch(kernel, memory, grid, block, dynamic_lds, checks, kernarg, publication, weak)
    executed, traffic = [0] * (len(kernel.program.steps)), Traffic()
    together = max(1, LOCKSTEP // made.per_group)
    try:
        with np.errstate(all="ignore"):
            numbers = _ordered(groups, checks.order)
            for first in range(0, groups, together):
                made.batch(numbers[first : first + together], executed, traffic)
    finally:
        for allocation in own:
            memory.unmap(allocation.start)
    return _report(kernel, executed, traffic)


def _ordered(groups: int, order: int) -> Array:
    """Numbers of workgroups in the order in which they run."""
    numbers: Array = np.arange(groups)
    if order < 0:
        numbers = np.flip(numbers)
    elif order:
        np.random.default_rng(order).shuffle(numbers)
    return numbers


def _queue() -> bytes:
    """The fields of ``amd_queue_t`` that code reads: the high words of the apertures."""
    return bytes(64) + struct.pack("<II", SHARED_APERTURE, PRIVATE_APERTURE) + bytes(184)


def _check_shape(kernel: KernelCode, block: tuple[int, int, int], dynamic_lds: int) -> None:
    items, most = block[0] * block[1] * block[2], int(kernel.metadata[".max_flat_workgroup_size"])
    if not 0 < items <= most:
        raise BadCodeObject(f"{kernel.name}: {items} work-items in a workgroup, it takes 1 to {most}")
    lds = kernel.descriptor.lds + dynamic_lds
    if lds > kernel.arch.lds_bytes:
        raise OutOfBounds(f"{kernel.name}: {lds} bytes of LDS, {kernel.arch.name} has {kernel.arch.lds_bytes}")


def _report(kernel: KernelCode, executed: list[int], traffic: Traffic) -> Report:
    by_class: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for instruction, count in zip(kernel.program.instructions, executed, strict=False):
        if count:
            by_class[class_of(instruction.name)] += count
            by_name[instruction.name] += count
    return Report(sum(executed), dict(by_class), dict(by_name), traffic)
