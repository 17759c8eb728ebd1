"""An emulator of AMD GPUs' compute units for tests: it executes the disassembly of a code object over NumPy lanes.

See README.md in the folder above for how it is put together and what it checks.
"""
