"""The emulator is fast enough for whole GEMMs: a hundred thousand wave instructions in a second of one core's time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gemm_mutants import COMPV4, Mutant
from native_case import Sizes
from test_mutants import made

FLOOR = 100_000


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_wave_instructions_in_a_second(arch: str, tmp_path: Path) -> None:
    """Of the process's own time, so that other processes do not count; the first launch pays for the imports."""
    config = Mutant("none", "", "", "", {**COMPV4, "tile": (128, 128, 64)}).kernel(arch)
    kernel, rates = made(None, arch, config, tmp_path), []
    for _ in range(3):
        began = time.process_time()
        report = kernel.run(config, Sizes(256, 256, 512), 1)
        rates.append(report.wave_instructions / (time.process_time() - began))
        if rates[-1] >= FLOOR:
            break
    assert max(rates) >= FLOOR, rates
