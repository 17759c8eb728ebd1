"""Bugs planted in convolutions whose steps keep within a tap: every one is caught, by a check or by a wrong result.

What is not changed passes ``tests/native/test_conv_taps.py``, with the same cases.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest
from amd_config import missing_tools
from conv_amd_emulation import launch
from conv_gpu_case import ConvCase
from conv_mutants import build_conv
from conv_tap_cases import CASES
from conv_tap_mutants import TAP_MUTANTS, TapMutant
from native_harness import INCLUDE
from sampling import partly

from tilewright_emulator import Checks, EmulationError

LIMIT = Checks(instruction_limit=400_000)


def shown(mutant: TapMutant) -> set[Hashable]:
    return {mutant.file, mutant.arch, mutant.case}


@pytest.mark.parametrize("mutant", partly(TAP_MUTANTS, shown), ids=lambda mutant: mutant.kind.replace(" ", "_"))
@pytest.mark.some(1)
def test_bugs_planted_in_steps_within_taps_are_caught(mutant: TapMutant, tmp_path: Path) -> None:
    if missing := missing_tools(tmp_path):
        pytest.skip(f"needs {missing}")
    config = mutant.config()
    built = build_conv(mutant, config, mutant.arch, tmp_path)
    with pytest.raises((EmulationError, AssertionError)):
        for more in CASES[mutant.case][1]:
            for at_end in (True, False):
                case = ConvCase(config, rng=np.random.default_rng(1), at_end=at_end, **more)
                launch(built, "kernel", case, LIMIT)
                case.check()


def test_every_bug_of_steps_within_taps_has_its_place() -> None:
    headers = INCLUDE / "tilewright" / "gpu"
    assert [mutant.kind for mutant in TAP_MUTANTS if mutant.old not in (headers / mutant.file).read_text()] == []
    assert len({mutant.kind for mutant in TAP_MUTANTS}) == len(TAP_MUTANTS) >= 20
