"""Bugs planted in the project's own kernels: every kind is caught, by a check or by a wrong result.

What is not changed gives the right result without a complaint, so that it is the change that was caught.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amd_config import AmdConfig, Built
from gemm_amd_mutants import AMD_MUTANTS
from gemm_mutants import COMPV3, COMPV4, DIRECT_LDS, MEM, MUTANTS, Mutant, build
from native_case import Call, Sizes
from native_harness import INCLUDE
from sampling import partly
from test_amd_pipelines import pack

from tilewright_emulator import Checks, CodeObject, EmulationError, Report
from tilewright_emulator.code.compiler import MISSING, compiler
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.state.waits import waits_of
from tilewright_emulator.state.waves import Waves

LIMIT = Checks(instruction_limit=30_000)
PLAIN = {f"{m.config}{m.sizes}{m.split_k}": m for m in reversed(MUTANTS)}
AMD_PLAIN = {f"{m.config}{m.sizes}{m.split_k}": m for m in AMD_MUTANTS}


class OneKernel:
    """A compiled kernel with the interface of the native tests' kernels."""

    def __init__(self, path: Path) -> None:
        self._built = Built(path)

    def built(self, config: AmdConfig) -> tuple[Built, str]:
        return self._built, "kernel"

    def run(self, config: AmdConfig, sizes: Sizes, split_k: int, order: int = 0) -> Report:
        """Launches and compares. Raises ``EmulationError`` or ``AssertionError``."""
        from amd_emulation import AmdKernels

        call = Call(config, [sizes], np.random.default_rng(1), split_k=split_k)
        if config.pipeline == "preshufflev2":
            pack(call)
        report = AmdKernels.launch(self, call, checks=replace(LIMIT, order=order))  # type: ignore[arg-type]
        call.check()
        return report


def made(mutant: Mutant | None, arch: str, config: AmdConfig, folder: Path) -> OneKernel:
    if compiler(folder) is None:
        pytest.skip(f"needs {MISSING}")
    return OneKernel(build(mutant, arch, folder, config))


@pytest.mark.parametrize("case", PLAIN.values(), ids=lambda case: str(case.kind))
@pytest.mark.some(3)
@pytest.mark.extended
def test_what_is_not_changed_is_right(case: Mutant, tmp_path: Path) -> None:
    config = case.kernel("gfx942")
    report = made(None, "gfx942", config, tmp_path).run(config, case.sizes, case.split_k, case.order)
    assert report.by_class["matrix"] > 0


def shown(case: tuple[Mutant, str]) -> set[Hashable]:
    """What every run has: bugs in each header, of each area of it, in each kernel and problem that meets some, on each
    arch."""
    mutant, arch = case
    area = mutant.kind.partition(":")[0] if ":" in mutant.kind else mutant.file
    return {mutant.file, area, str(mutant.config), str(mutant.sizes), mutant.split_k, arch}


@pytest.mark.parametrize(
    ("mutant", "arch"),
    partly([(m, m.arch or ("gfx942", "gfx942", "gfx950", "gfx90a")[i % 4]) for i, m in enumerate(MUTANTS)], shown),
    ids=lambda part: part if isinstance(part, str) else part.kind,
)
@pytest.mark.some(4)
@pytest.mark.extended
def test_planted_bugs_are_caught(mutant: Mutant, arch: str, tmp_path: Path) -> None:
    config = mutant.kernel(arch)
    kernel = made(mutant, arch, config, tmp_path)
    with pytest.raises((EmulationError, AssertionError)):
        kernel.run(config, mutant.sizes, mutant.split_k, mutant.order)


@pytest.mark.parametrize("case", AMD_PLAIN.values(), ids=lambda case: str(case.kind))
@pytest.mark.some(1)
def test_what_has_none_of_the_further_bugs_is_right(case: Mutant, tmp_path: Path) -> None:
    config = case.kernel(case.arch or "gfx942")
    report = made(None, config.arch, config, tmp_path).run(config, case.sizes, case.split_k, case.order)
    assert report.by_class["matrix"] > 0


@pytest.mark.parametrize("mutant", AMD_MUTANTS, ids=lambda mutant: str(mutant.kind))
@pytest.mark.some(2)
@pytest.mark.extended
def test_further_planted_bugs_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    config = mutant.kernel(mutant.arch or "gfx942")
    kernel = made(mutant, config.arch, config, tmp_path)
    with pytest.raises((EmulationError, AssertionError)):
        kernel.run(config, mutant.sizes, mutant.split_k, mutant.order)


def test_every_bug_has_its_place() -> None:
    """Of those too that are planted under the marker ``exhaustive`` only."""
    headers = INCLUDE / "tilewright"
    planted = [*MUTANTS, *AMD_MUTANTS]
    assert [mutant.kind for mutant in planted if mutant.old not in (headers / "gpu" / mutant.file).read_text()] == []


def test_there_are_many_kinds() -> None:
    assert len({mutant.kind for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert len({mutant.kind for mutant in AMD_MUTANTS}) == len(AMD_MUTANTS) >= 20


WAITS = re.compile(r"s_wait(cnt|cnt_vscnt|_(load|store|ds|km)cnt|_loadcnt_dscnt)$")


LEFT_OUT = [
    *itertools.product(["gfx942", "gfx1201"], [COMPV3, COMPV4, MEM]),
    ("gfx1100", COMPV3),
    ("gfx950", DIRECT_LDS),
]


@pytest.mark.parametrize(("arch", "pipeline"), partly(LEFT_OUT, lambda case: {case[0], str(case[1])}))
@pytest.mark.some(1)
@pytest.mark.extended
def test_every_wait_and_barrier_is_needed(arch: str, pipeline: dict[str, Any], tmp_path: Path) -> None:
    """Takes one wait or barrier after the other out of a finished kernel; a wait together with what repeats it.

    Waits count where they have something to wait for; some of those are stricter than the data asks for.
    """
    config = Mutant("none", "", "", "", pipeline).kernel(arch)
    kernel = made(None, arch, config, tmp_path)
    sizes = Sizes(64, 64, 160)
    executed = kernel.run(config, sizes, 1)
    program = CodeObject.load(tmp_path / "unit.co").kernel("kernel").program
    caught: dict[str, list[bool]] = {"wait": [], "barrier": []}
    for at, instruction in enumerate(program.instructions):
        kind = "barrier" if instruction.name in ("s_barrier", "s_barrier_wait") else "wait"
        if kind == "wait" and not WAITS.match(instruction.name):
            continue
        reached, places = list[bool](), _with_repeats(program.instructions, at)
        before = [program.steps[place] for place in places]
        for place in places:
            program.steps[place] = _left_out(instruction, kind, reached)
        try:
            kernel.run(config, sizes, 1)
            fails = False
        except (EmulationError, AssertionError):
            fails = True
        for place, step in zip(places, before, strict=True):
            program.steps[place] = step
        if any(reached):
            caught[kind].append(fails)
    assert executed.by_class["matrix"] > 0
    assert len(caught["barrier"]) >= 2
    assert len(caught["wait"]) >= 5
    assert sum(caught["barrier"]) >= len(caught["barrier"]) - 1  # mem ends with one that the epilogue repeats
    assert sum(caught["wait"]) >= 0.85 * len(caught["wait"])


def _with_repeats(instructions: Sequence[Instruction], at: int) -> list[int]:
    """Places of an instruction and, if it is a wait, of the same ones behind it with only arithmetic in between."""
    places = [at]
    for place in range(at + 1, len(instructions)):
        if instructions[place].text == instructions[at].text:
            places.append(place)
        elif not instructions[place].name.startswith(("v_", "s_add", "s_and", "s_cselect", "s_mov", "s_wait")):
            break
    return places if WAITS.match(instructions[at].name) else [at]


def _left_out(instruction: Instruction, kind: str, reached: list[bool]) -> Callable[[Waves], None]:
    """A step that does nothing but note whether there was something to wait for."""
    waits = waits_of(instruction) if kind == "wait" else []

    def step(w: Waves) -> None:
        late = [p for counter, most in waits for p in w.queues.by_counter.get(counter, [])[: -most or None]]
        reached.append(kind == "barrier" or any(p.kind != "store" for p in late))

    return step
