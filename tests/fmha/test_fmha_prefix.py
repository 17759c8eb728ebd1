"""Prefixes that sequences share: read once for all of their queries, and put together with what is each one's own."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_memory import scratch_of, stored
from fmha_requests import REFERENCES, Array, desc, drawn, ints
from fmha_runner import FmhaRunner, outputs_of
from test_fmha_gpu_emulated import run

import tilewright_arch
from tilewright_emulator import CodeObject, Memory
from tilewright_emulator.code.compiler import compiler, have_objdump
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.plan.prefix import attention_candidates, attention_refusal, plan_attention
from tilewright_fmha.problem.integer_operands import check_values, value_operands
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import ATTENTION, Family
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.arguments import WORKSPACE
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.errors import InvalidArgumentError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain, resources_of

PAGE, PAGES, OWN, SHARED = 8, 24, 3, 5
"""Tokens of a page, pages, and those of a sequence and of a prefix, at most."""
BOTTOM: dict[str, Any] = {"mask": "bottom_right"}


def tensors(kind: str, kv: str = "", heads: tuple[int, int] = (8, 2), hdim: int = 40, batch: int = 5, rows: int = 1,
            groups: int = 3, values: int = 24) -> dict[str, Any]:  # fmt: skip
    """Sequences of ``rows`` queries over pages, in groups of different sizes."""
    kv = kv or kind
    q = (batch, heads[0], rows, hdim)
    return {
        "q": desc(kind, *q, strides=(rows * heads[0] * hdim, hdim, heads[0] * hdim, 1)),
        "k": desc(kv, PAGES, PAGE, heads[1], hdim), "v": desc(kv, PAGES, PAGE, heads[1], values),
        "block_table": ints(batch, OWN), "seqlens_k": ints(batch),
        "prefix_table": ints(groups, SHARED), "prefix_seqlens": ints(groups), "prefix_starts": ints(groups + 1),
    }  # fmt: skip


def equal(found: dict[str, Any]) -> dict[str, Any]:
    """Groups of one size."""
    return {name: item for name, item in found.items() if name != "prefix_starts"}


def varlen(kind: str) -> dict[str, Any]:
    """Rows of queries end to end."""
    return {**tensors(kind), "q": desc(kind, 9, 8, 40), "cu_seqlens_q": ints(6), "sinks": desc("fp32", 8)}


LENGTHS = {"seqlens_k": [0, 9, 3, 16, 0], "prefix_seqlens": [37, 5, 0], "prefix_starts": [0, 3, 3, 5]}
ROWS = {"cu_seqlens_q": [0, 1, 1, 4, 5, 9], "prefix_starts": [0, 4, 9, 9], "seqlens_k": [4, 2, 7, 1, 20],
        "prefix_seqlens": [40, 12, 7]}  # fmt: skip
FULL = {"return_lse": True, "return_status": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ragged": (tensors("fp32"), FULL, LENGTHS),
    "halves": (tensors("bf16", hdim=64, values=64), {"num_splits": 2, "return_lse": True}, LENGTHS),
    "equal": (equal(tensors("fp16", batch=4, rows=3, groups=2)), BOTTOM,
              {"seqlens_k": [3, 20, 5, 4], "prefix_seqlens": [11, 40]}),
    "one": (equal(tensors("bf16", batch=3, groups=1)), {"max_seqlen_k": 16},
            {"seqlens_k": [1, 0, 16], "prefix_seqlens": [33]}),
    "varlen": (varlen("fp16"), {**BOTTOM, "max_seqlen_q": 4, "max_prefix_rows": 5, "softcap": 4.0}, ROWS),
    "fp8": ({**tensors("bf16", "fp8"), "k_descale": desc("fp32", 2), "v_descale": desc("fp32")}, FULL, LENGTHS),
    "fp8 pages": ({**tensors("fp16", "fp8"), "k_descale": desc("fp32", PAGES, 2)}, {}, LENGTHS),
    # Two rows belong to no group, one of the others is not there.
    "uncovered": ({**tensors("fp32", groups=2), "seqlens_q": ints(5)}, {"return_lse": True},
                  {"seqlens_q": [1, 0, 1, 1, 1], "seqlens_k": [1, 2, 0, 0, 24], "prefix_starts": [0, 2, 3],
                   "prefix_seqlens": [9, 10]}),
    "skipped": (varlen("fp32"), {"max_seqlen_q": 4, "min_seqlen_q": 2, "return_lse": True}, ROWS),
}  # fmt: skip


def case_of(name: str) -> tuple[FmhaProblem, dict[str, Array]]:
    given, words, content = CASES[name]
    request = OperationRequest(ATTENTION, given, {}, words)
    inputs = drawn(request, 5)
    inputs |= {name: np.array(item, np.int32) for name, item in content.items()}
    rng = np.random.default_rng(7)
    order = rng.permutation(PAGES).astype(np.int32)
    for table in ("prefix_table", "block_table"):  # sequences may share pages of their own, too
        inputs[table] = np.resize(order, given[table].shape)
        order = order[::-1]
    problem = parse_attention(request)
    check_values(problem, {name: inputs[name] for name in value_operands(problem)})
    return problem, inputs


def by_concatenation(problem: FmhaProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The truth by another way: every sequence has all of its keys, one after the other."""
    heads, group = problem.heads_q, problem.group
    wide = {name: inputs[name].astype(np.float64) for name in "qkv"}
    for name in "kv":
        factor = np.asarray(inputs.get(f"{name}_descale", 1.0), np.float64)
        axes = (0, 2) if factor.ndim == 2 else (2,)[: factor.ndim]
        wide[name] = wide[name] * np.expand_dims(factor, tuple(axis for axis in range(4) if axis not in axes))
    q = wide["q"] if problem.varlen else wide["q"].swapaxes(1, 2).reshape(-1, heads, problem.hdim_q)
    starts = inputs.get("prefix_starts", np.linspace(0, len(q), len(inputs["prefix_seqlens"]) + 1).astype(int))
    own = inputs.get("cu_seqlens_q", np.arange(problem.batch + 1) * problem.seq_q)
    o, lse = np.zeros((len(q), heads, problem.hdim_v)), np.full((heads, len(q)), -np.inf)
    for b in range(problem.batch):
        rows = inputs["seqlens_q"][b] if "seqlens_q" in inputs else own[b + 1] - own[b]
        keys = int(inputs["seqlens_k"][b])
        for i in range(rows if rows >= problem.min_q else 0):
            r = own[b] + i
            of = [g for g in range(len(starts) - 1) if starts[g] <= r < starts[g + 1]]
            seen = keys if problem.mask.right < 0 else max(i + 1 + keys - rows, 0)
            found = [(inputs["prefix_table"][g], int(inputs["prefix_seqlens"][g])) for g in of]
            found.append((inputs["block_table"][b], seen))
            for h in range(heads):
                k, v = (
                    np.concatenate([lines[table].reshape(-1, *lines.shape[2:])[:n, h // group] for table, n in found])
                    for lines in (wide["k"], wide["v"])
                )
                s = problem.scale * (k @ q[r, h])
                s = problem.softcap * np.tanh(s / problem.softcap) if problem.softcap else s
                s = np.append(s, inputs["sinks"][h]) if "sinks" in inputs else s
                if not len(s):
                    continue
                p = np.exp(s - s.max())
                lse[h, r] = s.max() + np.log(p.sum())
                o[r, h] = (p / p.sum())[: len(v)] @ v
    if problem.varlen:
        return {"o": o, "lse": lse}
    shape = (problem.batch, problem.seq_q, heads)
    return {
        "o": o.reshape(*shape, -1).swapaxes(1, 2), "lse": lse.reshape(heads, *shape[:2]).swapaxes(0, 1),
    }  # fmt: skip


def check(problem: FmhaProblem, found: Mapping[str, Array], truth: Mapping[str, Array], room: float = 1.0) -> None:
    for name, have in found.items():
        if name == "status":
            assert not have.any()
            continue
        want = truth[name]
        if name == "lse":
            assert np.array_equal(np.isneginf(have), np.isneginf(want))
            seen = ~np.isneginf(want)
            assert np.allclose(have[seen], want[seen], rtol=1e-3, atol=1e-3)
            continue
        # Both parts are rounded to the output's type, and so is their sum.
        result = compare(have, want, problem.operand(name).desc.dtype, problem.seq_k + problem.hdim_q + SHARED * PAGE)
        assert result.error <= room * 2 * result.bound, f"{name}: {result}"
        assert result.unwritten == 0, f"{name}: {result}"


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_attention_over_all_keys_of_a_sequence(name: str) -> None:
    problem, inputs = case_of(name)
    found, truth = REFERENCES[ATTENTION](problem, inputs), by_concatenation(problem, inputs)
    for output in ("o", "lse") if problem.lse else ("o",):
        assert np.allclose(found[output], truth[output], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(2)
def test_cpus_put_both_parts_together(name: str, fmha_runner: FmhaRunner, device: DeviceInfo) -> None:
    problem, inputs = case_of(name)
    plan = plan_attention(problem, attention_candidates(problem, device)[0], device)
    assert plan.stages[-1].name == "merge.results"
    check(problem, outputs_of(plan, fmha_runner.run(plan, inputs)), by_concatenation(problem, inputs))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(1)
def test_portable_kernels_of_gpus_do_so_too(name: str, tmp_path: Path) -> None:
    gpu = dataclasses.replace(device_of(tilewright_arch.load("sm_80")), units=4)
    problem, inputs = case_of(name)
    config = next(item for item in attention_candidates(problem, gpu) if item.waves <= 4)
    plan = plan_attention(problem, config, gpu)
    check(problem, run(plan, inputs, gpu, tmp_path), by_concatenation(problem, inputs), 2)


@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_the_last_stage_compiles_for_nvidia_gpus(name: str, tmp_path: Path) -> None:
    """A kernel that spills fails to build."""
    gpu, toolchain = device_of(tilewright_arch.load(name)), NvrtcToolchain([include_dir()])
    problem, _ = case_of("varlen")
    stage = plan_attention(problem, attention_candidates(problem, gpu)[0], gpu).stages[-1]
    assert isinstance(stage.config, FmhaConfig) and stage.config.family is Family.MERGE
    try:
        toolchain.identity()
        compiled = toolchain.compile(generate(stage.config, gpu.arch), tmp_path, gpu.arch)
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    finally:
        toolchain.close()
    assert all(item.registers <= 64 for item in resources_of(compiled.log))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_the_last_stage_is_right_on_amd_gpus(name: str, tmp_path: Path) -> None:
    """The stage alone, in the emulator of their instructions: what others give is the reference's."""
    gpu = dataclasses.replace(device_of(tilewright_arch.load(name)), units=4)
    problem, inputs = case_of("uncovered")
    plan = plan_attention(problem, attention_candidates(problem, gpu)[0], gpu)
    found = emulated(problem, plan, inputs, gpu, tmp_path)
    check(problem, found, by_concatenation(problem, inputs))


def emulated(
    problem: FmhaProblem, plan: ExecutionPlan, inputs: dict[str, Any], gpu: DeviceInfo, folder: Path
) -> dict[str, Array]:
    """The outputs of the last stage of a plan."""
    listed = None if have_objdump() else compiler(folder)
    stage, toolchain = plan.stages[-1], HipToolchain([include_dir()], compiler=listed[0] if listed else "")
    assert isinstance(stage.config, FmhaConfig) and problem.shared is not None
    try:
        toolchain.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    unit = generate(stage.config, gpu.arch)
    built = toolchain.compile(unit, folder, gpu.arch)
    tensors = {item.name: stored(item.desc, inputs.get(item.name)) for item in plan.operands}
    before = REFERENCES[ATTENTION](problem.shared.rest, inputs)
    for output in ("o", "lse"):
        tensors[output].view[...] = before[output]
    scratch, first = scratch_of(plan.workspace_bytes)
    addresses = {name: tensor.address for name, tensor in tensors.items()} | {WORKSPACE: scratch.ctypes.data + first}
    rows = {**inputs, "q": inputs["q"].swapaxes(1, 2).reshape(-1, problem.heads_q, problem.hdim_q)}
    rows |= {"block_table": rows["prefix_table"], "seqlens_k": rows["prefix_seqlens"]}
    rows |= {"cu_seqlens_q": rows["prefix_starts"]}
    shared = REFERENCES[ATTENTION](
        problem.shared.prefix, {key: item for key, item in rows.items() if key != "seqlens_q"}
    )
    assert plan.stages[0].name.startswith("prefix.")
    places = {}
    for given, output in zip(stage.args.fields[1:3], ("o", "lse"), strict=True):
        places[output] = given.fields[0].offset  # type: ignore[union-attr]
        end = first + places[output] + shared[output].size * 4
        scratch[first + places[output] : end].view(np.float32)[:] = shared[output].astype(np.float32).reshape(-1)
    memory = Memory()
    for item in plan.operands:
        tensor, size = tensors[item.name], item.desc.size * item.desc.dtype.bytes
        data = np.frombuffer((ctypes.c_char * size).from_address(tensor.address), np.uint8)
        memory.map(tensor.address, data, item.name, writable=item.role is Role.OUTPUT)
    memory.map(addresses[WORKSPACE], scratch[first : first + plan.workspace_bytes], "workspace", writable=False)
    packed = pack(stage.args)
    block = bytearray(len(packed.template))
    packed.bind(addresses, block, 0)
    CodeObject.load(built.binary).kernel(unit.entries["main"]).launch(
        memory, grid=stage.geometry.grid, block=stage.geometry.block, arguments=bytes(block),
        dynamic_lds=stage.geometry.shared_bytes,
    )  # fmt: skip
    return {item.name: np.array(tensors[item.name].view) for item in plan.operands if item.role is Role.OUTPUT}


# ---- wrong input ----


@pytest.mark.parametrize(
    ("changes", "words", "field", "rule"),
    [
        ({"prefix_seqlens": None}, {}, "prefix_seqlens", "prefix_operands"),
        ({"prefix_table": None}, {}, "prefix_table", "prefix_operands"),
        ({"prefix_seqlens": ints(2)}, {}, "prefix_seqlens.shape", "batch_agrees"),
        ({"prefix_starts": ints(3)}, {}, "prefix_starts.shape", "batch_agrees"),
        ({"prefix_table": ints(15)}, {}, "prefix_table.shape", "tensor_rank"),
        ({"prefix_table": desc("fp32", 3, 5)}, {}, "prefix_table.dtype", "index_dtype"),
        ({"prefix_starts": None}, {}, "prefix_table.shape", "prefix_groups"),
        ({"prefix_starts": None}, {"max_prefix_rows": 3}, "attributes.max_prefix_rows", "prefix_operands"),
        ({}, {"max_prefix_rows": 0}, "attributes.max_prefix_rows", "attribute_range"),
        ({"q": desc("fp32", 5, 8, 2, 40)}, {}, "q.strides", "prefix_rows"),
        ({"alibi_slopes": desc("fp32", 8)}, {}, "alibi_slopes", "prefix_features"),
        ({"bias": desc("fp32", 1, 1, 1, 1)}, {}, "bias", "prefix_features"),
        ({}, {"window_left": 4, "window_right": 0}, "attributes.window_left", "prefix_features"),
        ({}, {"dropout_p": 0.5}, "attributes.dropout_p", "prefix_features"),
        ({"block_table": None, "seqlens_k": None}, {}, "prefix_table", "prefix_paged"),
    ],
)
def test_what_prefixes_cannot_be_is_refused(
    changes: dict[str, Any], words: dict[str, Any], field: str, rule: str
) -> None:
    given = {name: item for name, item in {**tensors("fp32"), **changes}.items() if item is not None}
    with pytest.raises(InvalidArgumentError) as caught:
        parse_attention(OperationRequest(ATTENTION, given, {}, words))
    assert (caught.value.field, caught.value.rule) == (field, rule) and caught.value.fix


def test_factors_of_single_sequences_are_none_of_a_prefix() -> None:
    given = {**tensors("bf16", "fp8"), "k_descale": desc("fp32", 5, 2)}
    with pytest.raises(InvalidArgumentError) as caught:
        parse_attention(OperationRequest(ATTENTION, given, {}, {}))
    assert (caught.value.field, caught.value.rule) == ("k_descale", "prefix_features")


@pytest.mark.parametrize(
    ("name", "content", "field", "rule", "bits"),
    [
        ("prefix_seqlens", [37, 41, 0], "prefix_seqlens[1]", "seqlen_range", 1),
        ("prefix_seqlens", [-1, 5, 0], "prefix_seqlens[0]", "seqlen_range", 1),
        ("prefix_table", None, "prefix_table[2]", "block_table_range", 2),
        ("prefix_starts", [0, 3, 2, 5], "prefix_starts[2]", "cu_seqlens_ascending", 4),
        ("prefix_starts", [0, 3, 3, 6], "prefix_starts[3]", "cu_seqlens_ascending", 4),
    ],
)
def test_wrong_prefixes_are_found_before_a_launch_and_by_kernels(
    name: str, content: Any, field: str, rule: str, bits: int, fmha_runner: FmhaRunner, device: DeviceInfo
) -> None:
    """Lengths beyond a prefix's pages, pages beyond the cache, and groups beyond the rows."""
    problem, inputs = case_of("ragged")
    if content is None:
        content = inputs["prefix_table"].copy()
        content[0, 2] = PAGES
    inputs[name] = np.array(content, np.int32)
    with pytest.raises(InvalidArgumentError) as caught:
        check_values(problem, {name: inputs[name] for name in value_operands(problem)})
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert "prefix" in str(caught.value)
    plan = plan_attention(problem, attention_candidates(problem, device)[0], device)
    found = outputs_of(plan, fmha_runner.run(plan, inputs))
    assert found["status"][0] == bits << 8
    assert np.isfinite(found["o"]).all()


# ---- plans ----


def test_a_prefix_is_read_by_all_rows_of_its_group_at_once(device: DeviceInfo) -> None:
    problem, _ = case_of("varlen")
    assert problem.shared is not None
    prefix, rest = problem.shared.prefix, problem.shared.rest
    assert (prefix.batch, prefix.total_q, prefix.seq_q, prefix.mask.right) == (3, 9, 5, -1)
    assert rest.learned_sinks and not prefix.learned_sinks and rest.lse and prefix.lse
    assert problem.describe()["prefix_groups"] == 3 and problem.describe()["prefix_keys"] == SHARED * PAGE
    plan = plan_attention(problem, attention_candidates(problem, device)[0], device)
    assert [stage.name.split(".")[0] for stage in plan.stages][-1] == "merge"
    assert {"prefix", "rest", "merge"} == {stage.name.split(".")[0] for stage in plan.stages}
    assert problem.flops == rest.flops + 2 * 9 * 8 * SHARED * PAGE * (40 + 24)


def test_hopper_takes_its_own_kernels_for_both_parts() -> None:
    gpu = device_of(tilewright_arch.load("sm_90a"))
    given = tensors("bf16", batch=64, heads=(32, 8), hdim=128, values=128, groups=2)
    given |= {"k": desc("bf16", 4096, 16, 8, 128), "v": desc("bf16", 4096, 16, 8, 128)}
    given |= {"block_table": ints(64, 64), "prefix_table": ints(2, 256)}
    problem = parse_attention(OperationRequest(ATTENTION, given, {}, {}))
    assert attention_refusal(problem, gpu) is None
    config = next(item for item in attention_candidates(problem, gpu) if item.pipeline == "ws")
    plan = plan_attention(problem, config, gpu)
    kernels = {stage.name: stage.config for stage in plan.stages}
    first, last = plan.stages[0].config, plan.stages[-1].config
    assert isinstance(first, FmhaConfig) and isinstance(last, FmhaConfig), kernels
    assert first.pipeline == "ws" and last.family is Family.MERGE
    assert plan.details["alignment"] == {"*": problem.alignment}
