"""Bugs planted in the project's attention kernels: every kind is caught by a wrong result, of threads that are fibers.

What is not changed gives the right result, so that it is the change that was caught.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import fmha_gpu_case
import gpu_emulation
import pytest
import test_fmha_gpu_emulated
from fmha_mutants import FMHA_MUTANTS, PLANNED, FmhaMutant, kernel_of, planted, run, run_planned
from native_harness import INCLUDE
from sampling import partly, usual

CASES = {(mutant.suite, mutant.case): mutant for mutant in FMHA_MUTANTS}
PLAIN = [mutant for mutant in CASES.values() if mutant.suite not in PLANNED]


def shown(mutant: FmhaMutant) -> set[Hashable]:
    """What every run has: bugs in each header, and some that each suite meets."""
    return {mutant.file, mutant.suite}


MUTANTS = partly(FMHA_MUTANTS, shown)
MET = {(mutant.suite, mutant.case) for mutant in usual(MUTANTS)}
"""Cases that are met by bugs of ``make test-all``."""


@pytest.mark.parametrize(
    "mutant",
    partly(PLAIN, lambda mutant: {(mutant.suite, mutant.case)} & MET),
    ids=lambda mutant: f"{mutant.suite}_{mutant.case}",
)
@pytest.mark.some(2)
def test_what_is_not_changed_is_right(mutant: FmhaMutant, tmp_path: Path) -> None:
    run(mutant, fmha_gpu_case.HostKernels(tmp_path, [kernel_of(mutant)]))


@pytest.mark.parametrize(
    "mutant",
    partly(
        [mutant for mutant in CASES.values() if mutant.suite in PLANNED],
        lambda mutant: {(mutant.suite, mutant.case)} & MET,
    ),
    ids=lambda mutant: mutant.case,
)
@pytest.mark.extended
def test_planned_kernels_that_are_not_changed_are_right(mutant: FmhaMutant, tmp_path: Path) -> None:
    run_planned(mutant, tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.kind.replace(" ", "_"))
@pytest.mark.some(4)
@pytest.mark.extended
def test_planted_bugs_are_caught(mutant: FmhaMutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = planted(mutant, tmp_path)
    for module in (gpu_emulation, test_fmha_gpu_emulated):  # headers in quotes are looked for there first
        monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-iquote", str(include)))
    if mutant.suite in PLANNED:
        with pytest.raises(AssertionError):
            run_planned(mutant, tmp_path)
        return
    kernels = fmha_gpu_case.HostKernels(tmp_path, [kernel_of(mutant)])
    with pytest.raises(AssertionError):
        run(mutant, kernels)


def test_every_bug_has_its_place() -> None:
    """Of those too that are planted under the marker ``exhaustive`` only."""
    headers = INCLUDE / "tilewright"
    assert [mutant.kind for mutant in FMHA_MUTANTS if mutant.old not in (headers / mutant.file).read_text()] == []


def test_there_are_many_kinds() -> None:
    assert len({mutant.kind for mutant in FMHA_MUTANTS}) == len(FMHA_MUTANTS) >= 20
