"""How fast the emulator is: ``PYTHONPATH=tests/native:tests/emulator python tests/emulator/speed.py``.

Wave instructions in a second of one core's own time, so that other processes do not count, while it runs one GEMM on
each arch; the best of three. A hundred thousand is what the test suite needs to stay short.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from gemm_mutants import COMPV4, Mutant
from native_case import Sizes
from test_mutants import made

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


def rate(arch: str, folder: Path) -> float:
    """Wave instructions a second."""
    config = Mutant("none", "", "", "", {**COMPV4, "tile": (128, 128, 64)}).kernel(arch)
    kernel, best = made(None, arch, config, folder), 0.0
    for _ in range(3):  # the first launch pays for the imports
        began = time.process_time()
        report = kernel.run(config, Sizes(256, 256, 512), 1)
        best = max(best, report.wave_instructions / (time.process_time() - began))
    return best


def main() -> None:
    for arch in ARCHS:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"{arch}: {rate(arch, Path(folder)):,.0f} wave instructions/s\n")


if __name__ == "__main__":
    main()
