"""Bugs planted in the project's convolution kernels: every kind is caught, by a check or by a wrong result.

What is not changed gives the right result without a complaint, so that it is the change that was caught.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest
from amd_config import missing_tools
from conv_amd_emulation import launch
from conv_gpu_case import ConvCase
from conv_gpu_cases import CASES
from conv_mutants import CONV_MUTANTS, ConvMutant, build_conv
from native_harness import INCLUDE
from sampling import partly, usual

from tilewright_emulator import Checks, EmulationError

LIMIT = Checks(instruction_limit=400_000)
PLAIN = {mutant.case: mutant for mutant in CONV_MUTANTS}


def run(mutant: ConvMutant, planted: bool, folder: Path) -> None:
    """Launches and compares. Raises ``EmulationError`` or ``AssertionError``."""
    if missing := missing_tools(folder):
        pytest.skip(f"needs {missing}")
    config = mutant.config()
    built = build_conv(mutant if planted else None, config, mutant.arch, folder)
    for more in CASES[mutant.case][1]:
        case = ConvCase(config, rng=np.random.default_rng(1), **more)
        launch(built, "kernel", case, LIMIT)
        case.check()


def shown(mutant: ConvMutant) -> set[Hashable]:
    """What every run has: bugs in each header, in each kind of kernel and direction, on each arch that has some."""
    config = CASES[mutant.case][0]
    return {mutant.file, mutant.arch, (config.kind, config.direction)}


MUTANTS = partly(CONV_MUTANTS, shown)
MET = {mutant.case for mutant in usual(MUTANTS)}
"""Cases that are met by bugs of ``make test-all``."""
UNCHANGED = partly(PLAIN.values(), lambda mutant: {mutant.case} & MET)


@pytest.mark.parametrize("mutant", UNCHANGED, ids=lambda mutant: str(mutant.case))
@pytest.mark.some(2)
@pytest.mark.extended
def test_what_is_not_changed_is_right(mutant: ConvMutant, tmp_path: Path) -> None:
    run(mutant, False, tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.kind.replace(" ", "_"))
@pytest.mark.some(4)
def test_planted_bugs_are_caught(mutant: ConvMutant, tmp_path: Path) -> None:
    with pytest.raises((EmulationError, AssertionError)):
        run(mutant, True, tmp_path)


def test_every_bug_has_its_place() -> None:
    """Of those too that are planted under the marker ``exhaustive`` only."""
    headers = INCLUDE / "tilewright"
    assert [
        mutant.kind for mutant in CONV_MUTANTS if mutant.old not in (headers / "gpu" / mutant.file).read_text()
    ] == []


def test_there_are_many_kinds() -> None:
    assert len({mutant.kind for mutant in CONV_MUTANTS}) == len(CONV_MUTANTS) >= 20
