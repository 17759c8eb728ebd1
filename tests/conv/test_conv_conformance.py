"""Our operations under the conformance test that any plugin author can run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from conv_runner import Array, ConvRunner
from sampling import partly

import tilewright_arch
from tilewright_grouped_conv import plugin
from tilewright_kit.conformance.check_plugin import check_plugin, device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.selection.strategies import Selector

KERNELS = pytest.mark.parametrize(
    "per_arch",
    [6, pytest.param(16, marks=pytest.mark.extended), pytest.param(48, marks=pytest.mark.exhaustive)],
)
"""Of each arch: few in every run, since sets and rules have tests of their own."""


@pytest.mark.slow
@KERNELS
@pytest.mark.parametrize("operation", plugin.tilewright_operations(), ids=lambda operation: operation.name)
@pytest.mark.some(1)
def test_operation_conforms_and_its_samples_are_right(
    operation: Any, conv_runner: ConvRunner, device: DeviceInfo, per_arch: int
) -> None:
    def build(unit: Any, arch: Any) -> None:
        assert unit.text and arch

    def run(op: Any, request: OperationRequest, inputs: dict[str, Array]) -> dict[str, Array]:
        problem = op.parse(request)
        plan = op.plan(problem, Selector().select(op, problem, device).config, device)
        memory = conv_runner.run(plan, inputs)
        return {item.name: np.array(memory[item.name].view) for item in plan.operands if item.role is Role.OUTPUT}

    archs = [tilewright_arch.load(name) for name in ("x86-64-v2", "gfx942", "sm_90a")]
    report = check_plugin(operation, device, build, run, archs=archs, per_arch=per_arch)
    report.raise_if_failed()


@pytest.mark.slow
@KERNELS
@pytest.mark.parametrize(
    ("name", "operation"),
    partly(
        itertools.product(("sm_90a", "gfx942"), plugin.tilewright_operations()), lambda case: {case[0], case[1].name}
    ),
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.extended
def test_operation_conforms_on_devices_that_are_not_here(name: str, operation: Any, per_arch: int) -> None:
    arch = tilewright_arch.load(name)
    # Some sets are for AMD GPUs alone.
    report = check_plugin(operation, device_of(arch), archs=[arch, tilewright_arch.load("gfx942")], per_arch=per_arch)
    report.raise_if_failed()


def test_the_plugin_offers_three_directions_and_copies() -> None:
    names = [operation.name for operation in plugin.tilewright_operations()]
    assert names == ["conv", "conv_backward_data", "conv_backward_weight", "conv_transform"]
