"""Plans for AMD GPUs, executed by an emulator that is not ours: it can know nothing of what ours gets wrong.

Skipped unless ``--foreign-emulator COMMAND`` names one (docs/devices.md says how). What it cannot execute is skipped
with its own words; what it executes must come out as in 64-bit arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gemm_runner import draw
from hip_cases import Case, cases
from hip_runner import HipRunner
from hip_units import HAVE_HIP, HIP_ARCHS, WITHOUT_HIP

import tilewright_arch
from tilewright_emulator import Memory
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.plan import Geometry
from tilewright_kit.contract.problem import Role
from tilewright_kit.numerics.compare import compare, poison

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emulator"))

from foreign import Foreign, ForeignError

GEMM = GemmOperation()
UNITS = 3
ALL = [(name, case) for name in HIP_ARCHS for case in cases(tilewright_arch.load(name))]


class Elsewhere(HipRunner):
    """Runs plans in the other emulator, which takes a kernel's addresses for its own: they are where it has nothing."""

    first = 0x1000_0000_0000
    other: Foreign

    def execute(self, image: bytes, symbol: str, memory: Memory, geometry: Geometry, arguments: bytes) -> None:
        self.other.launch(
            image, symbol, self.arch.name, memory, geometry.grid, geometry.block, arguments, geometry.shared_bytes
        )


@pytest.fixture(scope="module")
def other(request: pytest.FixtureRequest) -> Iterator[Foreign]:
    command = request.config.getoption("--foreign-emulator")
    if not command:
        pytest.skip("no other emulator of AMD GPUs: --foreign-emulator COMMAND names one")
    if not HAVE_HIP:
        pytest.skip(WITHOUT_HIP)
    found = Foreign(command)
    yield found
    found.close()


def label(value: object) -> str:
    return "-".join(value.marks.values()) if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("name", "case"), ALL, ids=label)
def test_code_objects_give_right_results_in_another_emulator(
    name: str, case: Case, other: Foreign, record_property: Callable[[str, object], None]
) -> None:
    runner = Elsewhere(tilewright_arch.load(name))
    runner.other = other
    problem = GEMM.parse(case.request)
    plan = GEMM.plan(problem, case.config, device_of(runner.arch, UNITS))
    rng = np.random.default_rng(7)
    inputs = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    try:
        memory = runner.run(plan, inputs, case.lead)
    except ForeignError as error:
        pytest.skip(f"the other emulator: {error}")
    truth = GEMM.reference(problem, inputs)
    depth = max(max(product.k for product in problem.products), 1)
    for item in problem.operands:
        if item.role is Role.OUTPUT:
            before = poison(problem.dtype_c, item.desc.shape)
            view = memory[item.name].view
            result = compare(view, truth[item.name], problem.dtype_c, depth, problem.dtype_acc, before)
            assert result.passed, f"{item.name} of {case.config.name}: {result}"
            record_property(f"error of {item.name}", str(result))
