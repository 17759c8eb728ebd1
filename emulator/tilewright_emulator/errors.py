"""Errors of emulated kernels. Every message names the instruction and where it ran."""

from __future__ import annotations


class EmulationError(Exception):
    """The kernel did something that hardware would punish, or leave undefined."""


class UnknownInstruction(EmulationError):
    """The emulator has no semantics for this instruction (or for one of its modifiers)."""


class OutOfBounds(EmulationError):
    """A memory access outside every allocation, outside LDS, or a store to read-only memory."""


class Misaligned(EmulationError):
    """An access whose address is not a multiple of what its size asks for."""


class UninitialisedLds(EmulationError):
    """A read of LDS that nobody has written."""


class UninitialisedRegister(EmulationError):
    """A read of a register that nothing has written."""


class LdsRace(EmulationError):
    """Two waves touch the same byte of LDS, one of them writing, and no barrier stands between."""


class GlobalRace(EmulationError):
    """Two workgroups write the same byte of memory, neither of them atomically."""


class MissingWait(EmulationError):
    """A value is used before the wait that covers its load."""


class MissingNop(EmulationError):
    """An instruction follows another one sooner than the GPU allows: wait states are missing."""


class BarrierDivergence(EmulationError):
    """Some waves of a workgroup wait at a barrier that the others have ended without."""


class InstructionLimit(EmulationError):
    """More instructions than the launch allows: a loop that does not end."""


class ToolMissing(EmulationError):
    """A program that the emulator needs is not installed."""


class BadCodeObject(EmulationError):
    """Not a code object for one of the emulated GPUs."""


# Faults on their way from the place that finds them to the one that can name the instruction.


class LaneFault(Exception):
    """Something that one of the lanes of an access did. ``lane`` counts the lanes of the access, active ones only."""

    def __init__(self, kind: type[EmulationError], lane: int, message: str) -> None:
        super().__init__(message)
        self.kind, self.lane, self.message = kind, lane, message


class WaveFault(Exception):
    """Something that a wave did; ``wave`` is its place in the lock-step group."""

    def __init__(self, kind: type[EmulationError], wave: int, message: str) -> None:
        super().__init__(message)
        self.kind, self.wave, self.message = kind, wave, message
