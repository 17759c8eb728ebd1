"""An emulator of AMD GPUs' compute units for tests: it executes the disassembly of a code object over NumPy lanes.

See README.md in the folder above for how it is put together and what it checks.
"""

from .code_object import CodeObject, Kernel
from .errors import EmulationError
from .launch import Report
from .memory import Memory
from .run import Checks

__all__ = ["Checks", "CodeObject", "EmulationError", "Kernel", "Memory", "Report"]
