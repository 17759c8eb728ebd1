"""Our operations under the conformance test that any plugin author can run."""

from __future__ import annotations

from typing import Any

import pytest
from cpu_kernels import Array
from fmha_requests import batch_of, desc, parsed
from fmha_runner import FmhaRunner, outputs_of

import tilewright_arch
from tilewright_fmha import plugin
from tilewright_fmha.vocabulary import OPERATIONS
from tilewright_kit.conformance.check_plugin import check_plugin, device_of
from tilewright_kit.conformance.problems import samples_on
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.errors import UnsupportedError

SETS = ("default", "essential", "tiny", "tests")
"""What is looked at: receipts and ``full`` are cuts of the same kernels, with tests of their own."""


def offered() -> list[Any]:
    found = []
    for operation in plugin.tilewright_operations():
        operation.kernel_sets = {name: operation.kernel_sets[name] for name in SETS}
        found.append(operation)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("operation", offered(), ids=lambda operation: operation.name)
@pytest.mark.parametrize("per_arch", [6, pytest.param(16, marks=pytest.mark.extended)])
@pytest.mark.some(1)
def test_operation_conforms_and_its_samples_are_right(
    operation: Any, fmha_runner: FmhaRunner, device: DeviceInfo, per_arch: int
) -> None:
    def build(unit: Any, arch: Any) -> None:
        assert unit.text and arch

    def run(op: Any, request: OperationRequest, inputs: dict[str, Array]) -> dict[str, Array]:
        problem = op.parse(request)
        plan = op.plan(problem, Selector().select(op, problem, device).config, device)
        return outputs_of(plan, fmha_runner.run(plan, inputs))

    report = check_plugin(operation, device, build, run, archs=[tilewright_arch.load("x86-64-v2")], per_arch=per_arch)
    report.raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("operation", offered(), ids=lambda operation: operation.name)
@pytest.mark.parametrize("name", ["sm_90a", "gfx942"])
@pytest.mark.extended
def test_operation_conforms_on_devices_that_are_not_here(operation: Any, name: str) -> None:
    arch = tilewright_arch.load(name)
    report = check_plugin(operation, device_of(arch), archs=[tilewright_arch.load("x86-64-v3"), arch], per_arch=16)
    if next(samples_on(operation, device_of(arch)), None) is None:
        # Nothing is offered there: every sample is refused, with a reason, and all else must hold.
        report.checks = [check for check in report.checks if check.name != "samples.present"]
        for request in operation.samples():
            with pytest.raises(UnsupportedError) as caught:
                Selector().select(operation, operation.parse(request), device_of(arch))
            assert caught.value.rule not in ("", "no_candidates") and caught.value.fix
    report.raise_if_failed()


@pytest.mark.parametrize(
    "tensors, words, rule",
    [
        ({**batch_of(), "v": desc("fp16", 2, 2, 7, 24, strides=(336, 168, 1, 7))}, {"num_splits": 3}, "splitkv_form"),
        (batch_of("bf8"), {}, "dtype_arch"),
    ],
)
def test_what_no_kernel_has_is_refused_by_name(tensors: Any, words: Any, rule: str, device: DeviceInfo) -> None:
    operation = plugin.FmhaOperation("attention")
    with pytest.raises(UnsupportedError) as caught:
        Selector().select(operation, parsed("attention", tensors, **words), device)
    assert caught.value.rule == rule
    assert caught.value.fix


def test_the_plugin_offers_attention_its_gradients_and_appending() -> None:
    assert [operation.name for operation in plugin.tilewright_operations()] == list(OPERATIONS)
