"""Plans of attention: the struct that kernels read, stages, and memory, as they are said on both sides."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cpu_kernels import compiler
from fmha_cases import Case, request_of
from fmha_configs import all_templates, valid
from fmha_requests import ROTARY, VARLEN, append_of, append_paged_of, batch_of, paged_of, parsed, prefill_of, varlen_of
from fmha_runner import FmhaRunner
from kernel_structs import declared_fields

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import CONFIGS, FmhaConfig, config_of
from tilewright_fmha.config.pipelines import FEW_ROWS
from tilewright_fmha.footprint.cpu import backward_bytes, forward_bytes, lanes_of
from tilewright_fmha.footprint.gpu import shared_bytes
from tilewright_fmha.launch.kernel_args import ARRAYS, POINTERS, SCALARS, SCALES, TENSORS
from tilewright_fmha.pipelines.candidates import fmha_candidates, with_signature
from tilewright_fmha.plan.backward import MOST_SLICES, choose_slices
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention, parse_backward
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND, Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, F64, I64, WORKSPACE, ExecutionPlan, Pointer, Stage, Struct, pack
from tilewright_kit.types.errors import UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

STRUCT_BYTES = 1344


def kernel_of(problem: FmhaProblem, device: DeviceInfo, family: Family | None = None, **fields: Any) -> FmhaConfig:
    config = with_signature(problem, family or problem.family, device)
    team = fields.pop("team", 1)
    return config.replace(wave=(team, *config.wave[1:]), **fields)


def plan_of(problem: FmhaProblem, device: DeviceInfo, family: Family | None = None, **fields: Any) -> ExecutionPlan:
    return plan_fmha(problem, kernel_of(problem, device, family, **fields), device)


def scalars(stage: Stage) -> dict[str, int]:
    found = stage.args.fields[-4 - len(SCALARS) : -4]
    return {name: item.value for name, item in zip(SCALARS, found, strict=True) if isinstance(item, I64)}


def test_the_struct_is_that_of_the_header() -> None:
    header = declared_fields("tw_fmha_args", "fmha.h")
    doubles = ["scale", "softcap", "keep_scale", "p_scale"]
    assert header == [*TENSORS, *SCALES, *POINTERS, *ARRAYS, "workspace", "counters", *SCALARS, *doubles]
    assert declared_fields("tw_fmha_tensor", "fmha.h") == ["ptr", "batch", "head", "row", "col", "chunk"]
    assert declared_fields("tw_fmha_scale", "fmha.h") == ["ptr", "batch", "head", "block", "block_rows"]


def test_every_field_has_the_headers_place(device: DeviceInfo) -> None:
    stage = plan_of(parsed(ATTENTION, batch_of("fp32"), causal=True), device).stages[0]
    packed = pack(stage.args)
    assert len(packed.template) == STRUCT_BYTES
    kinds = [type(item) for item in stage.args.fields]
    assert kinds == [Struct] * 19 + [Pointer] * 22 + [I64] * len(SCALARS) + [F64] * 4
    said = scalars(stage)
    assert (said["seq_q"], said["seq_k"], said["hdim_q"], said["hdim_v"], said["right"]) == (5, 7, 16, 24, 0)
    q = stage.args.fields[0]
    assert isinstance(q, Struct) and q.fields[0] == Pointer("q")
    assert [item.value for item in q.fields[1:] if isinstance(item, I64)] == [320, 80, 16, 1, 0]


STAGES: dict[str, tuple[str, dict[str, TensorDesc], dict[str, Any], Family | None, list[str]]] = {
    "forward": (ATTENTION, batch_of("fp32"), {}, None, ["forward"]),
    "varlen": (ATTENTION, varlen_of("bf16"), VARLEN, None, ["forward"]),
    "paged": (ATTENTION, paged_of("fp32"), {}, None, ["forward"]),
    "prefill": (ATTENTION, prefill_of("fp32"), {"max_seqlen_q": 8}, None, ["forward"]),
    "split": (ATTENTION, batch_of("fp32"), {"num_splits": 2}, Family.SPLITKV, ["split", "combine"]),
    "append": (KV_APPEND, append_of("fp32") | ROTARY, {}, None, ["append"]),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages(device: DeviceInfo, name: str) -> None:
    operation, tensors, words, family, stages = STAGES[name]
    fields = {"max_splits_log2": 3} if family else {}
    plan = plan_of(parsed(operation, tensors, **words), device, family, **fields)
    assert [stage.name for stage in plan.stages] == stages
    assert {stage.role for stage in plan.stages} == {"main"}
    assert {stage.geometry.team for stage in plan.stages} == {1}
    assert ExecutionPlan.from_dict(plan.to_dict(), CONFIGS) == plan
    used = {item.operand for stage in plan.stages for item in _pointers(stage.args)}
    assert {item.name for item in plan.operands} <= used
    assert COUNTERS not in used
    if plan.workspace_bytes == 0:
        assert WORKSPACE not in used


def _pointers(struct: Struct) -> list[Pointer]:
    found = []
    for item in struct.fields:
        if isinstance(item, Pointer) and item.operand:
            found.append(item)
        elif isinstance(item, Struct):
            found += _pointers(item)
    return found


def test_parts_of_split_keys_are_kept_apart(device: DeviceInfo) -> None:
    problem = parsed(ATTENTION, batch_of("fp32"), num_splits=3, return_lse=True)
    plan = plan_of(problem, device, Family.SPLITKV, max_splits_log2=2)
    split, combine = plan.stages
    assert combine.config.family is Family.COMBINE and combine.config.lse  # type: ignore[attr-defined]
    assert scalars(split)["splits"] == scalars(combine)["splits"] == plan.details["splits"] == 3
    o_acc, lse_acc, scratch = (item.offset for item in _pointers(split.args) if item.operand == WORKSPACE)
    rows = 3 * 2 * 4 * 5
    assert lse_acc - o_acc >= 4 * rows * split.config.hdim[1] and lse_acc % 256 == 0  # type: ignore[attr-defined]
    assert scratch - lse_acc >= 4 * rows and plan.workspace_bytes > scratch
    with pytest.raises(UnsupportedError) as caught:
        plan_of(problem, device, Family.SPLITKV, pipeline="ws")
    assert caught.value.rule == "template_exists" and "qr" in (caught.value.fix or "")


def test_caches_may_be_appended_to_in_place(device: DeviceInfo) -> None:
    pairs = [["k_cache", "k_past"], ["v_cache", "v_past"]]
    plan = plan_of(parsed(KV_APPEND, append_paged_of("fp32")), device)
    assert plan.details["in_place"] == pairs
    lengths = TensorDesc.of("int32", (3,))
    plan = plan_of(parsed(KV_APPEND, append_paged_of("fp32"), {"seqlens_out": lengths}), device)
    assert plan.details["in_place"] == [*pairs, ["seqlens_out", "seqlens_k"]]
    with_tables = plan_of(parsed(KV_APPEND, append_of("fp32") | ROTARY), device)
    assert scalars(with_tables.stages[0])["k_tiles"] == 32  # positions of the tables


def test_gradients_have_three_stages_and_hand_on(device: DeviceInfo) -> None:
    problem = parse_backward(request_of(Case(bias="head", dbias=True, seq=(9, 300)), ATTENTION_BACKWARD))
    plan = plan_of(problem, device, team=2)
    assert [stage.name for stage in plan.stages] == ["dot_do_o", "dq_dk_dv", "convert_dq"]
    assert [stage.config.family.value for stage in plan.stages] == [  # type: ignore[attr-defined]
        "bwd_dot_do_o",
        "bwd_dq_dk_dv",
        "bwd_convert_dq",
    ]
    places = [[item.offset for item in _pointers(stage.args) if item.operand == WORKSPACE] for stage in plan.stages]
    assert places[0] == places[1] == places[2] and sorted(set(places[0])) == places[0]
    assert all(offset % 256 == 0 for offset in places[0]) and len(places[0]) == 4
    assert {scalars(stage)["splits"] for stage in plan.stages} == {1}  # two key heads for two threads


def test_slices_share_out_keys_where_heads_are_few(device: DeviceInfo) -> None:
    for heads, batch, team, expected in (((4, 1), 1, 2, 3), ((4, 4), 1, 2, 1), ((3, 3), 1, 2, 3), ((3, 3), 3, 2, 1)):
        problem = parse_backward(request_of(Case(heads=heads, seq=(9, 300)), ATTENTION_BACKWARD, batch=batch))
        config = kernel_of(problem, device, team=team, tile=(64, 128, 32, 64, 32, 64, 128, 32, 32))
        assert choose_slices(problem, config, device) == expected, (heads, batch, team)
    # A gradient that items share is added by one of them: slices are what is left to share out.
    problem = parse_backward(request_of(Case(bias="head", dbias=True, heads=(1, 1), seq=(9, 5000)), ATTENTION_BACKWARD))
    config = kernel_of(problem, device, team=64)
    assert choose_slices(problem, config, device) == MOST_SLICES


def test_memory_of_attention_is_linear_in_the_length(device: DeviceInfo) -> None:
    lengths = (1024, 2048, 4096, 16384)
    for operation, fields, family in (
        (ATTENTION, {"max_splits_log2": 4}, Family.SPLITKV),
        (ATTENTION_BACKWARD, {"team": 2}, Family.DQ_DK_DV),
        (ATTENTION, {}, Family.FWD),
    ):
        needed = []
        for length in lengths:
            words = {"num_splits": 4} if family is Family.SPLITKV else {}
            case = Case(mask="causal", seq=(length, length), heads=(3, 3))
            request = request_of(case, operation, batch=1, **words)
            problem = parse_backward(request) if operation == ATTENTION_BACKWARD else parse_attention(request)
            needed.append(plan_of(problem, device, family, **fields).workspace_bytes)
        steps = [later - earlier for earlier, later in pairwise(needed)]
        assert steps[1] == 2 * steps[0] and steps[2] == 6 * steps[1], (family, needed)
        assert max(needed) < 16384 * 3 * 16384 * 4 / 8


@pytest.fixture(scope="module")
def runner(cpu: ArchSpec, kernel_folder: Path) -> FmhaRunner:
    return FmhaRunner(cpu, compiler(), kernel_folder)


@pytest.mark.extended
def test_kernels_say_the_same_figure_of_scratch_memory(runner: FmhaRunner, device: DeviceInfo) -> None:
    plans = []
    for case, operation in (
        (Case(), ATTENTION),
        (Case(dtype="bf16", heads=(6, 2), hdim=(192, 128), seq=(127, 65)), ATTENTION),
        (Case(seq=(1, 200), heads=(4, 1)), ATTENTION),
        (Case(dtype="bf16", hdim=(72, 40)), ATTENTION_BACKWARD),
        (Case(dtype="fp16", hdim=(40, 24), bias="full", dbias=True), ATTENTION_BACKWARD),
    ):
        request = request_of(case, operation)
        problem = parse_backward(request) if operation == ATTENTION_BACKWARD else parse_attention(request)
        plans += [plan_of(problem, device, team=team) for team in (1, 2)]
    runner.prepare(plans)
    for plan in plans:
        stage = next(stage for stage in plan.stages if stage.config.is_main)  # type: ignore[attr-defined]
        assert scalars(stage)["workspace_bytes"] == runner.workspace(stage, plan) > 0


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "aarch64"])
def test_scratch_memory_follows_from_the_vectors(name: str) -> None:
    arch = tilewright_arch.load(name)
    device = DeviceInfo("cpu:0", "cpu", name, arch, 2, 1 << 32)
    problem = parse_backward(request_of(Case(), ATTENTION_BACKWARD))
    config = kernel_of(problem, device)
    assert 0 < backward_bytes(config, lanes_of(arch)) < 1 << 20
    forward = parse_attention(request_of(Case()))
    assert 0 < forward_bytes(forward, kernel_of(forward, device), lanes_of(arch)) < 1 << 20


def test_nothing_to_write_needs_no_stages(device: DeviceInfo) -> None:
    plan = plan_of(parse_attention(request_of(Case(seq=(0, 5)))), device)
    assert plan.stages == () and plan.workspace_bytes == 0


@pytest.mark.parametrize("name", ["sm_90a", "gfx942"])
def test_what_has_no_template_is_refused(name: str) -> None:
    arch = tilewright_arch.load(name)
    device = DeviceInfo("gpu:0", arch.kind, name, arch, 100, 1 << 36)
    problem = parse_backward(request_of(Case(dtype="fp16", hdim=(64, 64)), ATTENTION_BACKWARD))
    config = config_of(Family.DQ_DK_DV)(hdim=(64, 64), deterministic=True, pipeline="qs")
    with pytest.raises(UnsupportedError) as caught:
        plan_fmha(problem, config, device)
    assert caught.value.rule == "template_exists" and caught.value.fix


@pytest.mark.parametrize("splits", [1, 5])
def test_waves_that_share_keys_add_up_their_parts(splits: int) -> None:
    """One stage; a ticket for each tile of rows, and parts in the workspace, where there are several."""
    arch = tilewright_arch.load("sm_90a")
    device = DeviceInfo("gpu:0", arch.kind, arch.id, arch, 100, 1 << 36)
    problem = parse_attention(
        request_of(Case(dtype="bf16", heads=(6, 2), hdim=(64, 64), seq=(1, 900)), num_splits=splits)
    )
    kernel = next(item for item in fmha_candidates(problem, device) if item.pipeline == FEW_ROWS and item.pack_gqa)
    plan = plan_fmha(problem, kernel, device)
    (stage,) = plan.stages
    assert stage.geometry.grid[0] == 3 * 2 * splits and plan.details["splits"] == splits
    assert plan.counter_bytes == (0 if splits == 1 else 64 + 4 * 3 * 2)
    assert (plan.workspace_bytes > 0) == (splits > 1) == (COUNTERS in {item.operand for item in _pointers(stage.args)})


@pytest.mark.parametrize("name", ["sm_90a", "gfx942"])
def test_grids_of_gpus(name: str) -> None:
    """A workgroup for every tile, or so many rows; counters where kernels must tell something at the end."""
    arch = tilewright_arch.load(name)
    device = DeviceInfo("gpu:0", arch.kind, name, arch, 100, 1 << 36)
    case = Case(dtype="bf16", mask="causal", heads=(6, 2), hdim=(64, 64), seq=(200, 300))
    with all_templates():
        forward = parse_attention(request_of(case, return_status=True))
        kernel = next(
            item for item in fmha_candidates(forward, device) if item.family is Family.FWD and not item.pack_gqa
        )
        plan = plan_fmha(forward, kernel, device)
        assert plan.counter_bytes == 64 and plan.workspace_bytes == 0
        (stage,) = plan.stages
        tiles = -(-200 // kernel.m0)
        assert stage.geometry.grid == (3 * 6 * tiles, 1, 1) and scalars(stage)["q_tiles"] == tiles
        assert stage.geometry.block[0] == kernel.waves * arch.wave_size
        assert stage.geometry.shared_bytes == shared_bytes(kernel, arch) > 0
        assert COUNTERS in {item.operand for item in _pointers(stage.args)}
        split = valid(arch, Family.SPLITKV, "qr", mask=kernel.mask, num_splits=4)
        first, combine = plan_fmha(parse_attention(request_of(case)), split, device).stages
        tiles = -(-200 // split.m0)
        heads = 2 * -(-200 * 3 // split.m0) if split.pack_gqa else 6 * tiles
        assert first.geometry.grid[0] == 4 * 3 * heads and combine.geometry.grid[0] == 3 * 6 * 200
        problem = parse_backward(request_of(case, ATTENTION_BACKWARD))
        kernel = fmha_candidates(problem, device)[0]
        dot, main, convert = plan_fmha(problem, kernel, device).stages
        slices = scalars(main)["splits"]
        assert main.geometry.grid[0] == 3 * 2 * slices and 1 <= slices <= -(-300 // kernel.n0)
        assert dot.geometry.grid[0] == convert.geometry.grid[0] == 3 * 6 * 4
        assert dot.geometry.block[0] == combine.geometry.block[0] == 128
        append = parsed(KV_APPEND, append_of("fp32"), {"seqlens_out": TensorDesc.of("int32", (2,))})
        plan = plan_fmha(append, fmha_candidates(append, device)[0], device)
        assert plan.counter_bytes == 64 and plan.stages[0].geometry.grid[0] >= 2 * 2
