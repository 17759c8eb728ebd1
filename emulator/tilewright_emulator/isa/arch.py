"""Properties of each GPU beyond the semantics of its instructions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One GPU architecture.

    ``generation``: 9 (CDNA), 11 (RDNA3) or 12 (RDNA4). ``lanes``: of a wave as the kernels here are compiled.
    ``banks``: of LDS, each four bytes wide. ``lds_bytes``: the most that a workgroup may have. ``fnuz``: 8-bit floats
    are of the FNUZ kind, not OCP's. ``several_l2``: of several dies, each with an L2 cache of its own.
    """

    name: str
    machine: int
    generation: int
    lanes: int
    lds_bytes: int
    banks: int
    fnuz: bool = False
    several_l2: bool = False

    @property
    def is_cdna(self) -> bool:
        return self.generation == 9


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("gfx90a", 0x3F, 9, 64, 65536, 32),
        Arch("gfx942", 0x4C, 9, 64, 65536, 32, fnuz=True, several_l2=True),
        Arch("gfx950", 0x4F, 9, 64, 163840, 64, several_l2=True),
        Arch("gfx1100", 0x41, 11, 32, 65536, 32),
        Arch("gfx1201", 0x4E, 12, 32, 65536, 32),
    )
}
BY_MACHINE = {arch.machine: arch for arch in ARCHS.values()}
