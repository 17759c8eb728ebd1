"""Portable GPU kernels of attention, generated and planned as for a device, run on the CPU: what a plan says is what a
kernel reads. The host platform of the kernels makes every thread of a workgroup a fiber.
"""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_memory import CANARY, scratch_of, stored
from cpu_kernels import INCLUDE, Array, compiler
from fmha_requests import (
    REFERENCES,
    ROTARY,
    append_of,
    append_rounded_of,
    backward_of,
    batch_of,
    desc,
    drawn,
    ints,
    paged_of,
)

import tilewright_arch
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.pipelines.candidates import fmha_candidates
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND, Family
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType

FLAGS = (
    "-std=c++17", "-Og", "-shared", "-fPIC", "-fvisibility=hidden", "-DTW_PLATFORM_HOST", "-DTW_HOST_WAVE=32",
    "-Wno-unknown-pragmas",
)  # fmt: skip
LONG = {name: desc("bf16", 1, 2, rows, 32) for name, rows in (("q", 3), ("k", 300), ("v", 300))}
REQUESTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Family]] = {
    "forward": (ATTENTION, batch_of("fp16"), {"causal": True, "return_lse": True, "return_status": True}, Family.FWD),
    "paged": (ATTENTION, paged_of("fp16"), {"return_status": True}, Family.PAGEDKV),
    "split": (ATTENTION, LONG, {"num_splits": 3, "return_lse": True}, Family.SPLITKV),
    "gradients": (
        ATTENTION_BACKWARD,
        {**backward_of("fp16"), "sinks": desc("fp32", 4), "bias": desc("fp32", 2, 4, 5, 7)},
        {"causal": True, "return_dbias": True, "dropout_p": 0.3, "seed": 1 << 40, "return_randval": True},
        Family.DQ_DK_DV,
    ),
    "append": (KV_APPEND, {**append_of("fp16"), **ROTARY, "q": desc("fp16", 2, 4, 3, 16)}, {}, Family.APPENDKV),
    "append fp8 turned": (KV_APPEND, {**append_of("fp8"), **ROTARY}, {"rope": "half"}, Family.APPENDKV),
    "append rounded": (
        KV_APPEND,
        {**append_rounded_of("bf16", k=(3, 2), v=(2,)), **ROTARY, "q": desc("bf16", 3, 4, 3, 16)},
        {},
        Family.APPENDKV,
    ),
    "append rounded rows": (KV_APPEND, append_rounded_of("fp16", paged=False, v=()), {}, Family.APPENDKV),
}


@pytest.fixture(scope="module")
def gpu() -> DeviceInfo:
    return dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def built(config: FmhaConfig, device: DeviceInfo, folder: Path, stem: str) -> Any:
    unit = generate(config, device.arch)
    source, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
    if not library.exists():
        source.write_text(unit.text)
        command = [*compiler(), *FLAGS, f"-I{INCLUDE}", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
    return getattr(ctypes.CDLL(str(library)), unit.entries["main"])


def run(
    plan: ExecutionPlan, inputs: Mapping[str, Array], device: DeviceInfo, folder: Path, seeds: Sequence[int] = (1,)
) -> dict[str, Array]:
    """A run for each seed, from which the order of workgroups is drawn, with the same workspace and counters."""
    memory = {
        item.name: stored(item.desc, inputs[item.name] if item.role is Role.INPUT else None) for item in plan.operands
    }
    scratch, first = scratch_of(plan.workspace_bytes)
    counters = np.zeros(plan.counter_bytes // 4 + 1, np.uint32)
    addresses = {name: item.address for name, item in memory.items()}
    addresses |= {WORKSPACE: scratch.ctypes.data + first, COUNTERS: counters.ctypes.data}
    launches = []
    for stage in plan.stages:
        packed = pack(stage.args)
        block = bytearray(len(packed.template))
        store = (ctypes.c_char * (len(block) + 64))()
        base = -(-ctypes.addressof(store) // 64) * 64
        packed.bind(addresses, block, base)
        ctypes.memmove(base, bytes(block), len(block))
        config = stage.config
        assert isinstance(config, FmhaConfig)
        function = built(config, device, folder, f"{stage.name}_{abs(hash(config.name))}")
        launches.append((function, base, store, stage.geometry))
    outputs: dict[str, Array] = {}
    for seed in seeds:
        for function, base, _, geometry in launches:
            status = function(ctypes.c_void_p(base), geometry.grid[0], geometry.shared_bytes, ctypes.c_uint(seed))
            assert status == 0, f"{plan.operation} failed"
        before = outputs
        outputs = {item.name: np.array(memory[item.name].view) for item in plan.operands if item.role is Role.OUTPUT}
        for name, values in before.items():
            assert np.array_equal(values.view(np.uint8), outputs[name].view(np.uint8)), f"{name}: another order of sums"
    assert not counters.any(), "the launch leaves its counters as it found them"
    assert np.all(scratch[first + plan.workspace_bytes :] == CANARY), "the workspace was overrun"
    assert not any(item.overrun() for item in memory.values())
    return outputs


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.some(2)
@pytest.mark.extended
def test_planned_kernels_are_right(name: str, gpu: DeviceInfo, folder: Path) -> None:
    operation, tensors, words, family = REQUESTS[name]
    outputs = {"seqlens_out": ints(*tensors["seqlens_k"].shape)} if operation == KV_APPEND else {}
    request = OperationRequest(operation, tensors, outputs, words)
    problem = PARSERS[operation](request)
    # Hopper's own kernels want its copy engine, which a CPU has not.
    portable = (item for item in fmha_candidates(problem, gpu) if item.pipeline != "ws")
    config = next(item for item in portable if item.family is family and item.waves <= 4)
    plan = plan_fmha(problem, config, gpu)
    inputs = drawn(request, 3)
    truth = REFERENCES[operation](problem, inputs)
    for output, have in run(plan, inputs, gpu, folder).items():
        if have.dtype.kind == "i":
            assert np.array_equal(have, truth[output]), output
            continue
        result = compare(have, truth[output], problem.operand(output).desc.dtype, problem.seq_k + problem.hdim_q)
        near = output == "lse" and np.allclose(have, truth[output], rtol=1e-3, atol=1e-3)
        # Probabilities are rounded to the type of the queries.
        fine = result.error <= 2 * result.bound and result.unwritten == 0 and result.misplaced == 0
        assert near or fine, f"{output}: {result}"


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(5, 0), (0, 7)])
@pytest.mark.extended
def test_gradients_without_queries_or_keys_are_zeros(
    queries: int, keys: int, deterministic: bool, gpu: DeviceInfo, folder: Path
) -> None:
    q, k, lse = desc("fp16", 2, 4, queries, 32), desc("fp16", 2, 2, keys, 32), desc("fp32", 2, 4, queries)
    tensors = {"q": q, "k": k, "v": k, "o": q, "do": q, "lse": lse}
    request = OperationRequest(ATTENTION_BACKWARD, tensors, {}, {"deterministic": deterministic})
    problem = PARSERS[ATTENTION_BACKWARD](request)
    plan = plan_fmha(problem, fmha_candidates(problem, gpu)[0], gpu)
    found = run(plan, drawn(request, 3), gpu, folder)
    assert sorted(found) == ["dk", "dq", "dv"]
    assert not any(np.any(value) for value in found.values())


LAYOUTS: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    "whole rows": ("bf16", "bf16", (2 * 70 * 40, 70 * 40, 40, 1)),
    "rows between others": ("bf16", "bf16", (70 * 2 * 40, 40, 2 * 40, 1)),
    "rows at odd places": ("bf16", "bf16", (2 * 70 * 41, 70 * 41, 41, 1)),
    "columns apart": ("bf16", "bf16", (2 * 70 * 40, 70 * 40, 1, 70)),
    "fp32": ("fp32", "fp32", (2 * 70 * 41, 70 * 41, 41, 1)),
    "more bytes than operands": ("fp8", "fp32", (2 * 70 * 40, 70 * 40, 40, 1)),
    "more bytes, columns apart": ("fp8", "fp32", (2 * 70 * 40, 70 * 40, 1, 70)),
}
"""Types of operands and results, and the strides of 2 x 2 heads of 70 rows of 40 results."""


@pytest.mark.parametrize("pipeline", ["qr", "qr_async"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.some(4)
@pytest.mark.extended
def test_results_have_any_layout(name: str, pipeline: str, gpu: DeviceInfo, folder: Path) -> None:
    dtype, results, strides = LAYOUTS[name]
    tensors = {"q": desc(dtype, 2, 2, 70, 24), "k": desc(dtype, 2, 1, 75, 24), "v": desc(dtype, 2, 1, 75, 40)}
    outputs = {"o": desc(results, 2, 2, 70, 40, strides=strides)}
    request = OperationRequest(ATTENTION, tensors, outputs, {"causal": True})
    problem = PARSERS[ATTENTION](request)
    config = next(item for item in fmha_candidates(problem, gpu) if item.pipeline == pipeline)
    inputs = drawn(request, 5)
    have = run(plan_fmha(problem, config, gpu), inputs, gpu, folder)["o"]
    # Probabilities are rounded to the type that is multiplied.
    product = DType.FP16 if dtype == "fp8" else problem.operand("q").desc.dtype
    result = compare(have, REFERENCES[ATTENTION](problem, inputs)["o"], product, 75 + 24)
    assert result.error <= 2 * result.bound and result.unwritten == 0 and result.misplaced == 0, f"{result}"


@pytest.mark.parametrize("strides", [(75 * 40, 75 * 40, 40, 1), (75 * 41, 75 * 41, 41, 1), (75 * 40, 75 * 40, 1, 75)])
def test_gradients_in_fp32_have_any_layout(strides: tuple[int, ...], gpu: DeviceInfo, folder: Path) -> None:
    q, k = desc("fp32", 2, 2, 70, 40), desc("fp32", 2, 1, 75, 40)
    tensors = {"q": q, "k": k, "v": k, "o": q, "do": q, "lse": desc("fp32", 2, 2, 70)}
    outputs = {name: desc("fp32", 2, 1, 75, 40, strides=strides) for name in ("dk", "dv")}
    request = OperationRequest(ATTENTION_BACKWARD, tensors, {**outputs, "dq": q}, {"causal": True})
    problem = PARSERS[ATTENTION_BACKWARD](request)
    inputs = drawn(request, 7)
    truth = REFERENCES[ATTENTION_BACKWARD](problem, inputs)
    for name, have in run(plan_fmha(problem, fmha_candidates(problem, gpu)[0], gpu), inputs, gpu, folder).items():
        result = compare(have, truth[name], DType.FP32, 70 + 40)
        assert result.error <= 2 * result.bound and result.unwritten == 0 and result.misplaced == 0, f"{name}: {result}"
