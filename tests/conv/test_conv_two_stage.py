"""Gradients of weights in slices: two stages, and the same bits on every run and with every team."""

from __future__ import annotations

import pytest
from conv_cases import FIRST, LAST, SMALL, Case
from conv_runner import ConvRunner
from conv_truth import check, planned

import tilewright_arch
from tilewright_grouped_conv.launch.gpu import gpu_stages
from tilewright_grouped_conv.pipelines.candidates import conv_candidates
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import Pointer, WorkspaceLayout
from tilewright_kit.tiles.footprint.workgroup import shared_bytes
from tilewright_tools.analysis.kernels import launch_of

WEIGHT = Direction.BACKWARD_WEIGHT
DENSE = Case(5, 20, 36, 1, (17, 19), (3, 3), padding=(1, 1, 1, 1), name="dense")
GROUPS = Case(5, 24, 36, 12, (17, 19), (3, 2), stride=(2, 1), padding=(1, 1, 0, 1), name="groups")
DEPTHWISE = Case(5, 21, 21, 21, (17, 19), (3, 3), padding=(1, 1, 1, 1), name="depthwise")
RUNS = 20


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", [DENSE, GROUPS, DEPTHWISE], ids=str)
@pytest.mark.some(4)
def test_slices_are_added_in_a_second_stage(
    conv_runner: ConvRunner, device: DeviceInfo, case: Case, dtype: str
) -> None:
    item = check(conv_runner, device, case.request(WEIGHT, dtype, split_k=3))
    assert [stage.role for stage in item.plan.stages] == ["partial", "reduce"]
    # The sums of every slice, in fp32.
    assert item.plan.workspace_bytes >= 3 * case.k * (case.c // case.groups) * 4


@pytest.mark.parametrize("order", [LAST, FIRST], ids=str)
@pytest.mark.parametrize("split", [0, 1, 4])
@pytest.mark.parametrize("case", [DENSE, GROUPS, DEPTHWISE], ids=str)
@pytest.mark.some(8)
def test_results_are_the_same_bits_on_every_run_and_with_every_team(
    conv_runner: ConvRunner, device: DeviceInfo, case: Case, split: int, order: Order
) -> None:
    item = planned(case.request(WEIGHT, "bf16", order, split_k=split, out_dtype="fp32"), device)
    inputs = item.draw(7)
    found = {conv_runner.run(item.plan, inputs, team)["dw"].view.tobytes() for team in (1, 2) for _ in range(RUNS // 2)}
    assert len(found) == 1


def test_a_short_reduction_has_fewer_slices_and_says_so(conv_runner: ConvRunner, device: DeviceInfo) -> None:
    item = check(conv_runner, device, SMALL[9].request(WEIGHT, "fp32", split_k=40))
    assert [stage.role for stage in item.plan.stages] == ["main"]
    assert any("slices" in note for note in item.plan.notes)


@pytest.mark.parametrize("case", [DENSE, DEPTHWISE], ids=str)
def test_what_is_accumulated_is_added_once(conv_runner: ConvRunner, device: DeviceInfo, case: Case) -> None:
    old = case.tensor("dw", "fp32", FIRST)
    for in_place in (False, True):
        request = case.request(
            WEIGHT, "fp32", more={"acc": old}, outputs={"dw": old}, accumulate=True, split_k=4, alpha=0.25
        )
        item = check(conv_runner, device, request, in_place=in_place)
        assert [stage.role for stage in item.plan.stages] == ["partial", "reduce"]


@pytest.mark.extended
def test_nothing_is_read_where_the_workspace_was_not_written(conv_runner: ConvRunner, device: DeviceInfo) -> None:
    """The runner fills workspaces with NaNs: one that is read shows in the result."""
    for case in (DENSE, GROUPS, DEPTHWISE):
        for split in (1, 2, 7):
            check(conv_runner, device, case.request(WEIGHT, "fp32", split_k=split))


@pytest.mark.parametrize(("name", "early"), [("sm_90a", True), ("sm_80", False)])
def test_the_second_launch_begins_early_where_its_kernel_waits_for_the_first(name: str, early: bool) -> None:
    device = device_of(tilewright_arch.load(name))
    problem = parse_conv(Case(5, 24, 24, 24, (17, 19), (3, 3), name="").request(WEIGHT, "fp16"), WEIGHT)
    config = next(config for config in conv_candidates(problem, device) if not config.is_matrix)
    main, convert = gpu_stages(problem, config, device, WorkspaceLayout(), Pointer())[0]
    assert (main.role, convert.role) == ("main", "convert")
    assert not main.geometry.dependent and convert.geometry.dependent is early


def test_workgroups_of_two_stages_share_a_unit_of_amd_gpus() -> None:
    """The first stage has no room for results, so that two tiles of 256x128 fit LDS: the cost model counts on both,
    since a workgroup alone works out places while nobody multiplies.
    """
    device = device_of(tilewright_arch.load("gfx942"))
    operation = ConvOperation(WEIGHT)
    problem = parse_conv(Case(32, 256, 256, 1, (28, 28), (3, 3), padding=(1,) * 4).request(WEIGHT, "bf16"), WEIGHT)
    wide = [item for item in conv_candidates(problem, device) if item.two_stage and item.tile == (256, 128, 32)]
    config = min(wide, key=lambda item: operation.predict(problem, item, device).seconds)
    main, _ = gpu_stages(problem, config, device, WorkspaceLayout(), Pointer())[0]
    assert 2 * main.geometry.shared_bytes <= device.arch.lds_bytes < 2 * shared_bytes(config, device.arch)
    assert main.geometry.grid[0] > 1.9 * device.arch.throughput.units
    _, seen = launch_of(operation, config, device.arch, "32,256,256,28x28,3x3,1,1,1")
    assert seen == main.geometry
