"""An emulator of AMD GPUs' compute units: it executes the disassembly of a code object over NumPy lanes.

docs/emulator.md says how it is put together and which errors it finds.
"""

from tilewright_emulator.errors import EmulationError
from tilewright_emulator.launch.code_object import CodeObject, Kernel
from tilewright_emulator.launch.launch import Report
from tilewright_emulator.memory.allocations import Memory
from tilewright_emulator.state.run import Checks

__all__ = ["Checks", "CodeObject", "EmulationError", "Kernel", "Memory", "Report"]
