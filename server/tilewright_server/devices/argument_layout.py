"""Argument blocks: the memory that a launch reads its arguments from, laid out once and patched for every run."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

from tilewright_kit.contract.device import Device, Launch
from tilewright_kit.contract.plan import ARGS, COUNTERS, WORKSPACE
from tilewright_server.devices.contract import ProgramStage

__all__ = ["Block", "BlockLayout", "DeviceProgram"]

_LINE = 64
_WORD = 8


class Block:
    """One copy of all argument blocks of a program, at a fixed address, seen as 64-bit words."""

    __slots__ = ("_memory", "address", "words")

    def __init__(self, nbytes: int) -> None:
        self._memory = (ctypes.c_char * (nbytes + _LINE))()
        start = -ctypes.addressof(self._memory) % _LINE
        self.address = ctypes.addressof(self._memory) + start
        self.words = memoryview(self._memory).cast("B")[start : start + nbytes].cast("Q")


class BlockLayout:
    """Where the arguments of each stage lie in a block, and which words depend on the call.

    ``head`` bytes are left at the beginning for the device's own records, ``counter_bytes`` at the end for counters
    (of a device that shares the host's memory). Blocks are recycled, so that a run allocates nothing: it takes a free
    one, patches a handful of words, and puts it back.
    """

    def __init__(
        self, stages: Sequence[ProgramStage], operands: Sequence[str], head: int = 0, counter_bytes: int = 0
    ) -> None:
        """Raises ``KeyError`` if a stage names an operand that is not listed."""
        places = {name: place for place, name in enumerate(operands)}
        self.offsets: list[int] = []
        self.sizes = [len(stage.args.template) for stage in stages]
        end = head
        for size in self.sizes:
            end = -(-end // _LINE) * _LINE
            self.offsets.append(end)
            end += size
        self._counters = -(-end // _LINE) * _LINE
        end = self._counters + counter_bytes if counter_bytes else end
        self.nbytes = -(-max(end, _WORD) // _WORD) * _WORD
        self._stages = tuple(stages)
        self._free: deque[Block] = deque()
        patches: list[tuple[int, int, int]] = []
        scratch: list[tuple[int, int]] = []
        for offset, stage in zip(self.offsets, stages, strict=True):
            for hole, operand, addend in stage.args.relocations:
                word = (offset + hole) // _WORD
                if operand == WORKSPACE:
                    scratch.append((word, addend))
                elif operand not in (ARGS, COUNTERS):
                    patches.append((word, places[operand], addend))
        self._patches = tuple(patches)
        self._scratch = tuple(scratch)

    def take(self, addresses: Sequence[int], workspace: int) -> Block:
        """A block bound to addresses; give it back when the run is complete."""
        try:
            block = self._free.pop()
        except IndexError:
            block = self._new()
        words = block.words
        for word, place, addend in self._patches:
            words[word] = addresses[place] + addend
        for word, addend in self._scratch:
            words[word] = workspace + addend
        return block

    def give_back(self, block: Block) -> None:
        self._free.append(block)

    def prepare(self, block: Block) -> None:
        """For subclasses: fill the head of a new block."""

    def _new(self) -> Block:
        block = Block(self.nbytes)
        raw = block.words.cast("B")
        for offset, size, stage in zip(self.offsets, self.sizes, self._stages, strict=True):
            raw[offset : offset + size] = stage.args.template
            for hole, operand, addend in stage.args.relocations:
                if operand in (ARGS, COUNTERS):
                    start = offset if operand == ARGS else self._counters
                    block.words[(offset + hole) // _WORD] = block.address + start + addend
        self.prepare(block)
        return block


class DeviceProgram:
    """A program for a device that knows ``Device.run`` only, and shares the host's memory if there are counters."""

    weight = 1

    def __init__(
        self, device: Device, stages: Sequence[ProgramStage], operands: Sequence[str], *, counter_bytes: int = 0
    ) -> None:
        self._device = device
        self._stages = tuple(stages)
        self._layout = BlockLayout(stages, operands, counter_bytes=counter_bytes)

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        layout = self._layout
        block = layout.take(addresses, workspace)
        raw = block.words.cast("B")
        launches = [
            Launch(stage.function, raw[offset : offset + size], stage.geometry)
            for stage, offset, size in zip(self._stages, layout.offsets, layout.sizes, strict=True)
        ]
        total = [0] * len(launches)
        for _ in range(max(1, repeat)):
            total = [sum(pair) for pair in zip(total, self._device.run(launches), strict=True)]
        layout.give_back(block)
        return tuple(total)
