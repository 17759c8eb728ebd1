"""ISA facts: architectures, registers, instructions as text, number formats, reach of memory accesses."""
