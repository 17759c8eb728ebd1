"""Our operations under the conformance test that any plugin author can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gemm_runner import Array, Runner

import tilewright_arch
from tilewright_gemm import plugin
from tilewright_gemm.config.packing import PackedFormat
from tilewright_gemm.references.reference import unpack
from tilewright_kit.conformance.check_plugin import check_plugin, device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.selection.strategies import Selector


@pytest.mark.slow
@pytest.mark.parametrize("operation", plugin.tilewright_operations(), ids=lambda operation: operation.name)
@pytest.mark.parametrize("per_arch", [6, pytest.param(48, marks=pytest.mark.extended)])
@pytest.mark.some(1)
def test_operation_conforms_and_its_samples_are_right(
    operation: Any, runner: Runner, device: DeviceInfo, per_arch: int
) -> None:
    def build(unit: Any, arch: Any) -> None:
        assert unit.text and arch

    def run(op: Any, request: OperationRequest, inputs: dict[str, Array]) -> dict[str, Array]:
        problem = op.parse(request)
        plan = op.plan(problem, Selector().select(op, problem, device).config, device)
        memory = runner.run(plan, inputs)
        found = {}
        for item in plan.operands:
            if item.role is Role.OUTPUT:
                view = memory[item.name].view
                if item.desc.packing:
                    layout = PackedFormat.parse(item.desc.packing, item.name)
                    view = unpack(view, layout, *item.desc.shape).astype(item.desc.dtype.numpy)
                found[item.name] = np.array(view)
        return found

    archs = [tilewright_arch.load(name) for name in ("x86-64-v2", "gfx942", "sm_90a")]
    report = check_plugin(operation, device, build, run, archs=archs, per_arch=per_arch)
    report.raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
@pytest.mark.some(1)
def test_products_conform_on_devices_that_are_not_here(name: str) -> None:
    arch = tilewright_arch.load(name)
    # Some sets are for other archs alone.
    report = check_plugin(plugin.GemmOperation(), device_of(arch), archs=[arch, tilewright_arch.load("gfx942")])
    report.raise_if_failed()
    assert {f"plan@{name}", f"candidates.valid@{name}", f"predict@{name}"} <= {
        check.name for check in report.checks if check.status.value == "passed"
    }


def test_the_plugin_offers_both_operations() -> None:
    assert [operation.name for operation in plugin.tilewright_operations()] == ["gemm", "gemm_pack_b"]
