"""Scores as an output, and a bias together with slopes: both are written by a stage of their own."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_memory import stored
from fmha_requests import REFERENCES, desc, drawn, ints
from fmha_runner import FmhaRunner, outputs_of
from test_fmha_gpu_emulated import run

import tilewright_arch
from tilewright_emulator import CodeObject, Memory
from tilewright_emulator.code.compiler import compiler, have_objdump
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.pipelines.candidates import fmha_candidates
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, Family, Scores
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.errors import InvalidArgumentError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain, resources_of

STAGES = [item.value for item in Scores if item is not Scores.NONE]
BOTTOM: dict[str, Any] = {"causal": True, "mask_align": "bottom_right"}
BOTH = {"bias": desc("fp32", 1, 4, 1, 70), "alibi_slopes": desc("fp32", 4)}
LENGTHS = {"seqlens_q": ints(2), "seqlens_k": ints(2)}
STARTS = {"cu_seqlens_q": ints(4), "cu_seqlens_k": ints(4)}


def qkv(dtype: str, hdim: int = 41, rows: int = 19) -> dict[str, Any]:
    return {"q": desc(dtype, 2, 4, rows, hdim), "k": desc(dtype, 2, 2, 70, hdim), "v": desc(dtype, 2, 2, 70, 24)}


def sequences(dtype: str) -> dict[str, Any]:
    tensors = {"q": desc(dtype, 30, 4, 24), "k": desc(dtype, 60, 2, 24), "v": desc(dtype, 60, 2, 24)}
    return {**tensors, **STARTS, "bias": desc(dtype, 1, 4, 16, 1), "alibi_slopes": desc("fp32", 4)}


def gradients(dtype: str, keys: int = 30) -> dict[str, Any]:
    q, k = desc(dtype, 2, 4, 9, 24), desc(dtype, 2, 2, keys, 24)
    tensors = {"q": q, "k": k, "v": k, "o": q, "do": q, "lse": desc("fp32", 2, 4, 9)}
    return {**tensors, "bias": desc(dtype, 1, 4, 1, keys), "alibi_slopes": desc("fp32", 2, 4)}


PAGES = {
    "q": desc("fp16", 3, 4, 1, 64), "k": desc("fp16", 10, 8, 2, 64), "v": desc("fp16", 10, 8, 2, 64),
    "block_table": ints(3, 4), "seqlens_k": ints(3), "bias": desc("fp32", 1, 4, 1, 32),
    "alibi_slopes": desc("fp32", 4),
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{
        stage: (ATTENTION, {**qkv(dtype), **BOTH, **LENGTHS}, {**BOTTOM, "softcap": 3.0, "return_scores": stage})
        for stage, dtype in zip(STAGES, ("fp32", "bf16", "fp16", "bf16"), strict=True)
    },
    "sinks": (
        ATTENTION,
        {**qkv("fp32"), "sinks": desc("fp32", 4)},
        {"window_left": 9, "window_right": 0, "return_scores": "probabilities", "return_lse": True},
    ),
    "split": (ATTENTION, qkv("bf16", rows=1), {"return_scores": "probabilities", "num_splits": 3}),
    "varlen": (
        ATTENTION,
        sequences("fp16"),
        {"max_seqlen_q": 16, "max_seqlen_k": 24, "mask": "bottom_right", "return_scores": "masked"},
    ),
    "dropout": (ATTENTION, qkv("fp32"), {"dropout_p": 0.5, "seed": 3, "return_scores": "probabilities"}),
    "slopes": (
        ATTENTION,
        {**qkv("bf16"), "bias": desc("bf16", 2, 1, 19, 70), "alibi_slopes": desc("fp32", 2, 4)},
        {"return_lse": True},
    ),
    "pages": (ATTENTION, PAGES, {"mask": "bottom_right"}),
    "gradients": (ATTENTION_BACKWARD, gradients("fp16"), {"return_dbias": True, "causal": True}),
    "no_keys": (ATTENTION, {name: item for name, item in gradients("fp32", 0).items() if name in "qkv"},
                {"return_scores": "probabilities"}),
}  # fmt: skip
LARGE = (ATTENTION, {"q": desc("fp32", 1, 2, 5, 700), "k": desc("fp32", 1, 1, 9, 700), "v": desc("fp32", 1, 1, 9, 3)},
         {"return_scores": "softcap", "softcap": 20.0})  # fmt: skip


def problem_of(case: tuple[str, dict[str, Any], dict[str, Any]]) -> tuple[OperationRequest, FmhaProblem]:
    operation, tensors, words = case
    request = OperationRequest(operation, tensors, {}, words)
    return request, PARSERS[operation](request)


def check(problem: FmhaProblem, found: dict[str, Any], truth: dict[str, Any], room: float = 1.0) -> None:
    for name, have in found.items():
        want = truth[name]
        if name in ("lse", "scores"):
            assert np.array_equal(np.isneginf(have), np.isneginf(want)), name
            seen = ~np.isneginf(want)
            assert np.allclose(have[seen], want[seen], rtol=1e-5, atol=1e-5 if name == "scores" else 1e-3), name
            continue
        result = compare(have, want, problem.operand(name).desc.dtype, problem.seq_k + problem.hdim_q)
        assert result.error <= room * result.bound, f"{name}: {result}"
        assert result.unwritten == result.misplaced == 0, f"{name}: {result}"


@pytest.mark.parametrize("name", [*CASES, "large"])
@pytest.mark.some(4)
def test_scores_and_sums_are_right_on_cpus(name: str, fmha_runner: FmhaRunner, device: DeviceInfo) -> None:
    request, problem = problem_of(LARGE if name == "large" else CASES[name])
    config = fmha_candidates(problem, device)[0]
    plan, inputs = plan_fmha(problem, config, device), drawn(request)
    truth = REFERENCES[problem.operation](problem, inputs)
    check(problem, outputs_of(plan, fmha_runner.run(plan, inputs)), truth)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(1)
def test_kernels_of_gpus_write_them_too(name: str, tmp_path: Path) -> None:
    gpu = dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=4)
    request, problem = problem_of(CASES[name])
    # Hopper's own kernels want its copy engine, which a CPU has not.
    config = next(item for item in fmha_candidates(problem, gpu) if item.pipeline != "ws" and item.waves <= 4)
    inputs = drawn(request)
    truth = REFERENCES[problem.operation](problem, inputs)
    check(problem, run(plan_fmha(problem, config, gpu), inputs, gpu, tmp_path), truth, 2)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_the_stage_is_right_on_amd_gpus(name: str, tmp_path: Path) -> None:
    """The stage alone, in the emulator of their instructions: what other stages give is as good as the reference's."""
    gpu = dataclasses.replace(device_of(tilewright_arch.load(name)), units=4)
    tensors = {"q": desc("fp16", 2, 2, 5, 35), "k": desc("fp16", 2, 1, 70, 35), "v": desc("fp16", 2, 1, 70, 24)}
    tensors |= {"bias": desc("fp32", 1, 2, 1, 70), "alibi_slopes": desc("fp32", 2), **LENGTHS}
    request, problem = problem_of((ATTENTION, tensors, {**BOTTOM, "return_scores": "masked", "softcap": 3.0}))
    plan = plan_fmha(problem, fmha_candidates(problem, gpu)[0], gpu)
    assert [stage.name for stage in plan.stages] == ["bias", "forward", "scores"]
    inputs = drawn(request)
    found = emulated(plan, inputs, gpu, tmp_path)
    check(problem, {"scores": found}, REFERENCES[ATTENTION](problem, inputs))


@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_the_stage_compiles_for_nvidia_gpus(name: str, tmp_path: Path) -> None:
    """A kernel that spills fails to build."""
    gpu, toolchain = device_of(tilewright_arch.load(name)), NvrtcToolchain([include_dir()])
    _, problem = problem_of(CASES["probabilities"])
    stage = plan_fmha(problem, fmha_candidates(problem, gpu)[0], gpu).stages[-1]
    assert isinstance(stage.config, FmhaConfig)
    try:
        toolchain.identity()
        compiled = toolchain.compile(generate(stage.config, gpu.arch), tmp_path, gpu.arch)
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    finally:
        toolchain.close()
    assert all(item.registers <= 128 for item in resources_of(compiled.log))


def emulated(plan: ExecutionPlan, inputs: dict[str, Any], gpu: DeviceInfo, folder: Path) -> Any:
    """The output of the last stage of a plan."""
    listed = None if have_objdump() else compiler(folder)
    stage, toolchain = plan.stages[-1], HipToolchain([include_dir()], compiler=listed[0] if listed else "")
    assert isinstance(stage.config, FmhaConfig) and stage.config.family is Family.SCORES
    try:
        toolchain.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    unit = generate(stage.config, gpu.arch)
    built = toolchain.compile(unit, folder, gpu.arch)
    tensors = {item.name: stored(item.desc, inputs.get(item.name)) for item in plan.operands}
    memory = Memory()
    for item in plan.operands:
        tensor, size = tensors[item.name], item.desc.size * item.desc.dtype.bytes
        data = np.frombuffer((ctypes.c_char * size).from_address(tensor.address), np.uint8)
        memory.map(tensor.address, data, item.name, writable=item.role is Role.OUTPUT)
    packed = pack(stage.args)
    block = bytearray(len(packed.template))
    packed.bind({name: tensor.address for name, tensor in tensors.items()}, block, 0)
    CodeObject.load(built.binary).kernel(unit.entries["main"]).launch(
        memory, grid=stage.geometry.grid, block=stage.geometry.block, arguments=bytes(block),
        dynamic_lds=stage.geometry.shared_bytes,
    )  # fmt: skip
    return np.array(tensors["scores"].view)


def test_a_sum_that_all_items_share_is_made_once(device: DeviceInfo) -> None:
    """Scores of 2 items, 4 heads, 19 queries and 70 keys, in fp32."""
    sizes = []
    for words in ({"causal": True}, BOTTOM):
        _, problem = problem_of((ATTENTION, {**qkv("fp32"), **BOTH, **LENGTHS}, words))
        joint = plan_fmha(problem, fmha_candidates(problem, device)[0], device).workspace_bytes
        _, plain = problem_of((ATTENTION, {**qkv("fp32"), "bias": BOTH["bias"], **LENGTHS}, words))
        sizes.append(joint - plan_fmha(plain, fmha_candidates(plain, device)[0], device).workspace_bytes)
    once = 4 * 4 * 19 * 70
    assert [round(size / once) for size in sizes] == [1, 2]  # from the bottom right it follows from the lengths


@pytest.mark.parametrize(
    ("tensors", "field", "rule"),
    [
        (PAGES, "attributes.return_scores", "scores_operands"),
        (qkv("fp8"), "attributes.return_scores", "scores_operands"),
    ],
)
def test_what_has_no_scores_in_memory_is_refused(tensors: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        problem_of((ATTENTION, tensors, {"return_scores": "masked"}))
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix
