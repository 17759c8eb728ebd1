"""Rows of 16 bits that become 8-bit floats when they are appended to a cache: every value, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cpu_kernels import Array, compiler
from fmha_requests import ROTARY, append_of, append_rounded_of, desc, drawn, ints, parsed
from fmha_runner import FmhaRunner, outputs_of
from test_fmha_gpu_emulated import run as run_emulated

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_fmha.codegen import generate
from tilewright_fmha.pipelines.candidates import fmha_candidates, with_signature
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.vocabulary import KV_APPEND, Family, QScale
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import InvalidArgumentError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain, resources_of

EVERY = {
    **{name: desc("fp16", 1, 1, 256, 256) for name in ("k_new", "v_new")},
    **{name: desc("fp8", 1, 1, 256, 256) for name in ("k_past", "v_past")},
    "seqlens_k": ints(1),
    "v_descale": desc("fp32", 1),
}
"""As many elements as fp16 has values."""


@pytest.fixture
def on_cpu(cpu: ArchSpec, device: DeviceInfo, kernel_folder: Path) -> Callable[[OperationRequest, Any], Any]:
    def run(request: OperationRequest, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        problem = parsed(KV_APPEND, request.inputs)
        plan = plan_fmha(problem, with_signature(problem, Family.APPENDKV, device), device)
        runner = FmhaRunner(cpu, compiler(), kernel_folder)
        runner.prepare([plan])
        return outputs_of(plan, runner.run(plan, inputs, in_place=True))

    return run


@pytest.fixture
def emulated(tmp_path: Path) -> Callable[[OperationRequest, Any], Any]:
    def run(request: OperationRequest, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        gpu = dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=4)
        problem = parsed(KV_APPEND, request.inputs)
        return run_emulated(plan_fmha(problem, fmha_candidates(problem, gpu)[0], gpu), inputs, gpu, tmp_path)

    return run


@pytest.mark.parametrize("runs", ["on_cpu", pytest.param("emulated", marks=pytest.mark.extended)])
def test_every_value_is_rounded_to_the_nearest_that_the_cache_holds(runs: str, request: pytest.FixtureRequest) -> None:
    asked = OperationRequest(KV_APPEND, EVERY, {}, {})
    inputs = drawn(asked)
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    inputs |= {name: values.reshape(1, 1, 256, 256) for name in ("k_new", "v_new")}
    inputs |= {"seqlens_k": np.zeros(1, np.int32), "v_descale": np.array([3.0], np.float32)}
    found = request.getfixturevalue(runs)(asked, inputs)
    for name, factor in (("k", 1.0), ("v", 3.0)):
        with np.errstate(invalid="ignore"):
            wide = values.astype(np.float32) / np.float32(factor)
            want = np.clip(wide, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        have = np.asarray(found[f"{name}_cache"]).astype(np.float32).ravel()
        assert np.array_equal(have, want, equal_nan=True)
        assert np.array_equal(np.signbit(have), np.signbit(wide))


def test_rows_of_fp8_are_stored_as_they_come() -> None:
    assert parsed(KV_APPEND, append_of("fp8")).qscale is QScale.NONE
    assert parsed(KV_APPEND, append_rounded_of("bf16")).qscale is QScale.PERTENSOR


@pytest.mark.parametrize(
    ("tensors", "field", "rule", "fix"),
    [
        (
            {**append_of("fp8"), "k_new": desc("fp32", 2, 2, 3, 16)},
            "k_new.dtype", "dtype_combination", {name: desc("fp16", 2, 2, 3, size) for name, size in
                                                 (("k_new", 16), ("v_new", 24))},
        ),
        (
            {**append_rounded_of("bf16", paged=False), "v_new": desc("fp8", 2, 2, 3, 24)},
            "v_new.dtype", "dtype_combination", {"v_new": desc("bf16", 2, 2, 3, 24)},
        ),
        (
            {**append_rounded_of("bf16", paged=False), **ROTARY, "q": desc("fp16", 2, 4, 3, 16)},
            "q.dtype", "dtype_combination", {"q": desc("bf16", 2, 4, 3, 16)},
        ),
        (
            {**append_of("fp8"), "k_descale": desc("fp32")},
            "k_descale", "scale_dtype", {name: desc("fp16", 2, 2, 3, size) for name, size in
                                         (("k_new", 16), ("v_new", 24))},
        ),
        ({**append_of("bf16"), "v_descale": desc("fp32")}, "v_descale", "scale_dtype", {"v_descale": None}),
        (
            append_rounded_of("bf16", paged=False, k=(3,)),
            "k_descale.shape", "descale_shape", {"k_descale": desc("fp32", 2)},
        ),
        (
            {**append_rounded_of("bf16", paged=False), "k_descale": desc("fp16", 2)},
            "k_descale.dtype", "scale_dtype", {"k_descale": desc("fp32", 2)},
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_rounded_is_refused_with_a_fix_that_holds(
    tensors: Mapping[str, Any], field: str, rule: str, fix: Mapping[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parsed(KV_APPEND, tensors)
    assert (caught.value.field, caught.value.rule) == (field, rule), caught.value
    followed = {**tensors, **fix}
    parsed(KV_APPEND, {name: item for name, item in followed.items() if item is not None})


@pytest.mark.extended
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "gfx942", "gfx950"])
def test_it_compiles_for_gpus(name: str, tmp_path: Path) -> None:
    arch = tilewright_arch.load(name)
    toolchain = (NvrtcToolchain if arch.kind == "cuda" else HipToolchain)([include_dir()])
    try:
        toolchain.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    tensors = {**append_rounded_of("bf16", k=(3, 2), v=(2,)), **ROTARY, "q": desc("bf16", 3, 4, 3, 16)}
    problem = parsed(KV_APPEND, tensors)
    built = toolchain.compile(generate(fmha_candidates(problem, device_of(arch))[0], arch), tmp_path, arch)
    toolchain.close()
    assert arch.kind != "cuda" or not any(item.spill_bytes for item in resources_of(built.log))
