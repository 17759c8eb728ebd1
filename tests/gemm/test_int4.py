"""Products with packed 4-bit weights: requests, rules, and kernels of CPUs, of GPUs on the CPU, and of AMD GPUs in the
emulator, compared with float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_units import HAVE_NVRTC, WITHOUT_NVRTC
from gemm_runner import Array, Runner, draw
from hip_runner import results_of
from hip_units import HAVE_HIP, WITHOUT_HIP
from test_gpu_emulated import Emulated

import tilewright_arch
from tilewright_gemm.commands.cases import INT4 as CASES
from tilewright_gemm.commands.command import INT4
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import has_zeros, is_int4, scale_dtype
from tilewright_gemm.kernel_sets.int4 import INT4_SET
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.problem.resize import resized_gemm
from tilewright_gemm.vocabulary import ScaleA, ScaleB
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.tiles.footprint.workgroup import threads_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain, resources_of

GEMM = GemmOperation()
of = TensorDesc.of
KINDS = tuple(kind for kind in ScaleB if is_int4(kind))


def asked(
    m: int, n: int, k: int, a: str = "bf16", scales: str = "fp16", layout: str = "r", *, zeros: bool = True, **more: Any
) -> OperationRequest:
    """A product whose scales and zero points lie as awkwardly as can be: by groups first, and with gaps."""
    groups, rows = -(-k // 128), -(-k // 2)
    inputs = {
        "a": of(a, (m, k), (k, 1) if layout == "r" else (1, m)),
        "b": of("int8", (rows, n), (1, rows + 3)),
        "scale_b": of(scales, (n, groups), (1, n)),
        **({"zero_b": of("int8", (n, groups), (groups + 2, 1))} if zeros else {}),
        **more.pop("inputs", {}),
    }
    return OperationRequest("gemm", inputs, {}, {"b_format": "int4_128", "out_dtype": "fp32", **more})


def aligned(m: int, n: int, k: int, *args: Any, **more: Any) -> OperationRequest:
    """The same with lines of A and columns of B that begin at multiples of 16 bytes."""
    line, column = -(-k // 16) * 16, -(-k // 32) * 16
    request = asked(m, n, k, *args, **more)
    a = of(request.inputs["a"].dtype, (m, k), (line, 1))
    inputs = {**request.inputs, "a": a, "b": of("int8", (-(-k // 2), n), (1, column))}
    return dataclasses.replace(request, inputs=inputs)


RING: dict[str, Any] = {"pipeline": "compv4", "tile": (32, 32, 128), "stages": 3}


def drawn(problem: GemmProblem, seed: int = 7) -> dict[str, Array]:
    """Bytes of every value, and scales that differ by orders of magnitude: one of the wrong group shows."""
    rng = np.random.default_rng(seed)
    found = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    for name, values in found.items():
        if name.startswith("scale_b"):
            found[name] = np.exp2(rng.uniform(-6, 7, values.shape)).astype(values.dtype)
        if name.startswith("scale_a"):
            found[name] = rng.uniform(0.5, 2, values.shape).astype(np.float32)
        if name.startswith(("b[", "zero_b")) or name == "b":
            found[name] = rng.integers(-128, 128, values.shape, np.int8)
    return found


def compared(problem: GemmProblem, inputs: Mapping[str, Array], views: Mapping[str, Array], name: str) -> None:
    """Elements are as close as sums of that magnitude can be, which weights of 15 bound."""
    truth = GEMM.reference(problem, inputs)
    bound: dict[str, Array] = {}
    for key, values in inputs.items():
        if key == "b" or key.startswith("b["):
            bound[key] = np.full_like(values, -1)
        elif key.startswith("scale_b"):
            bound[key] = values
            bound[key.replace("scale_b", "zero_b")] = np.zeros(values.shape, np.int8)
        elif not key.startswith("zero_b"):
            bound[key] = np.abs(np.asarray(values).astype(np.float64))
    magnitude = GEMM.reference(problem, bound)
    for item in problem.operands:
        if item.role is Role.OUTPUT:
            seen, wanted = views[item.name].astype(np.float64), truth[item.name]
            step = {DType.FP32: 2.0**-21, DType.FP16: 2.0**-10, DType.BF16: 2.0**-7}[item.desc.dtype]
            allowed = np.abs(magnitude[item.name]) * 2.0**-17 + np.abs(wanted) * step + 1e-30
            assert np.all(np.isfinite(seen)), name
            worst = np.max(np.abs(seen - wanted) / allowed, initial=0.0)
            assert worst <= 1.0, f"{item.name} of {name}: {worst} times what is allowed"


# ---- requests ----


def test_b_is_bytes_in_columns_and_scales_are_read_by_columns_and_then_by_groups() -> None:
    problem = GEMM.parse(asked(33, 300, 261))
    assert problem.scale_b is ScaleB.INT4_FP16_ZEROS and problem.layout == "rcr"
    assert (problem.dtype_a, problem.dtype_b, problem.bytes_b) == (DType.BF16, DType.BF16, 1)
    (product,) = problem.products
    assert (product.k, product.b.col_stride) == (261, 134)
    assert product.scale_b is not None and (product.scale_b.row_stride, product.scale_b.col_stride) == (1, 300)
    assert product.zero_b is not None and (product.zero_b.row_stride, product.zero_b.col_stride) == (5, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_scales_with_and_without_zero_points_is_a_kind(kind: ScaleB) -> None:
    request = asked(5, 40, 256, "fp16", scale_dtype(kind).value, zeros=has_zeros(kind))
    assert GEMM.parse(request).scale_b is kind


def _without(request: OperationRequest, name: str) -> OperationRequest:
    return dataclasses.replace(request, inputs={key: item for key, item in request.inputs.items() if key != name})


@pytest.mark.parametrize(
    ("request_", "rule", "field"),
    [
        (_without(asked(8, 200, 256), "scale_b"), "int4_operands", "scale_b"),
        (asked(8, 200, 256, "fp32"), "int4_operands", "a.dtype"),
        (asked(8, 200, 256, "bf8"), "int4_operands", "a.dtype"),
        (asked(8, 200, 256, inputs={"b": of("bf16", (128, 200), (1, 128))}), "int4_operands", "b.dtype"),
        (asked(8, 200, 256, scale_block="1x128_1x128"), "int4_operands", "attributes.scale_block"),
        (asked(8, 200, 256, b_format="plain"), "int4_operands", "zero_b"),
        (asked(8, 200, 256, inputs={"b": of("int8", (256, 200), (1, 256))}), "k_mismatch", "b.shape"),
        (asked(8, 200, 256, inputs={"b": of("int8", (128, 200))}), "int4_layout", "b.strides"),
        (asked(8, 200, 256, inputs={"scale_b": of("fp16", (200, 3))}), "int4_scale_shape", "scale_b.shape"),
        (asked(8, 200, 256, inputs={"scale_b": of("fp16", (200, 1))}), "int4_scale_shape", "scale_b.shape"),
        (asked(8, 200, 256, inputs={"zero_b": of("int8", (2, 200))}), "int4_scale_shape", "zero_b.shape"),
        (asked(8, 200, 256, inputs={"scale_b": of("int8", (200, 2))}), "int4_scale_dtype", "scale_b.dtype"),
        (asked(8, 200, 256, inputs={"zero_b": of("fp16", (200, 2))}), "int4_scale_dtype", "zero_b.dtype"),
        (asked(8, 200, 256, "int8", out_dtype="int32"), "integer_output", "scale_b"),
        (asked(8, 200, 256, b_format="int3"), "attribute_choice", "attributes.b_format"),
    ],
)  # fmt: skip
def test_what_does_not_fit_packed_weights_is_rejected(request_: OperationRequest, rule: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        GEMM.parse(request_)
    assert (caught.value.rule, caught.value.field) == (rule, field) and caught.value.fix


def test_other_sizes_of_the_same_kind_have_groups_of_their_own() -> None:
    problem = GEMM.parse(asked(33, 300, 260, inputs={"scale_a": of("fp32", (33, 1))}))
    other = resized_gemm(problem, {"m": 64, "n": 129, "k": 1001})
    assert other is not None and other.int4 and other.scale_a is ScaleA.ROW
    shapes = {item.name: item.desc.shape for item in other.operands}
    assert (shapes["b"], shapes["scale_b"], shapes["zero_b"]) == ((501, 129), (129, 8), (129, 8))


def test_the_reference_takes_the_even_k_from_the_low_bits() -> None:
    problem = GEMM.parse(asked(3, 4, 131, "fp16", "fp32"))
    inputs = drawn(problem)
    b, zero = inputs["b"].astype(int) & 255, inputs["zero_b"].astype(int) & 15
    wide = np.array([[(b[k // 2, j] >> 4 * (k % 2) & 15) - zero[j, k // 128] for j in range(4)] for k in range(131)])
    wide = wide * inputs["scale_b"].astype(np.float64).T[np.arange(131) // 128]
    np.testing.assert_allclose(GEMM.reference(problem, inputs)["out"], inputs["a"].astype(np.float64) @ wide)
    plain = GEMM.parse(asked(3, 4, 131, "fp16", "fp32", zeros=False))
    eights = {**inputs, "zero_b": np.full((4, 2), 8, np.int8)}
    without = {name: values for name, values in inputs.items() if name != "zero_b"}
    np.testing.assert_array_equal(GEMM.reference(plain, without)["out"], GEMM.reference(problem, eights)["out"])


@pytest.mark.parametrize(("a", "out"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp8", "fp16"), ("int8", "fp16")])
def test_the_result_is_of_the_type_of_a_or_fp16(a: str, out: str) -> None:
    request = asked(3, 8, 128, a)
    assert GEMM.parse(dataclasses.replace(request, attributes={"b_format": "int4_128"})).dtype_c.value == out


def test_the_command_line_has_the_same_kinds() -> None:
    assert {f"int4{word}" for word in INT4} == {kind.value for kind in KINDS}
    assert set(CASES) == set(INT4)


# ---- rules ----


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(
            (name, fields)
            for name in ("x86-64-v3", "sm_90a", "gfx942")
            for fields in (
                {"dtype_a": DType.FP32}, {"dtype_b": "bf16"}, {"layout": "rrr"}, {"scale_a": ScaleA.BLOCK_1X128},
                {"dtype_a": DType.INT8, "dtype_c": "int32"},
            )
        ),
        ("sm_90a", {"tile": (64, 64, 96)}),
        ("sm_90a", {"pipeline": "ws"}),
        ("sm_90a", {"pipeline": "compv4"}),
        ("sm_90a", {"pipeline": "compv4", "tile": (64, 64, 384), "stages": 2}),
        ("sm_90a", {"pipeline": "compv4", "tile": (32, 32, 128), "wave": (1, 4, 1), "stages": 2}),
        ("gfx942", {"pipeline": "compv4"}),
        ("sm_90a", {"tile": (256, 256, 64)}),
        ("x86-64-v3", {"pipeline": "compv1"}),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_of_half_a_contract_are_corrected(name: str, fields: dict[str, Any]) -> None:
    arch = tilewright_arch.load(name)
    changed = KERNEL_SETS["int4"].expand(arch, GEMM.rules)[0].replace(**fields)
    assert GEMM.rules.check(changed, arch)
    assert GEMM.rules.correct(changed, arch).is_valid


def test_the_set_has_every_type_of_a_and_no_default_kernel_is_of_it() -> None:
    for name in ("x86-64-v3", "sm_90a", "gfx942", "gfx1201"):
        found = INT4_SET.expand(tilewright_arch.load(name), GEMM.rules)
        assert {config.a for config in found} == {"fp16", "bf16", "fp8", "int8"}
        assert all(config.int4 for config in found)
        names = {config.name for config in found}
        assert len(names) == len(found) and all("scaleBint4" in item for item in names)
    hopper = tilewright_arch.load("sm_90a")
    assert not any(config.int4 for config in KERNEL_SETS["default"].expand(hopper, GEMM.rules))


@pytest.mark.parametrize("name", ["x86-64-v3", "sm_90a", "gfx942", "gfx950", "gfx1201"])
@pytest.mark.parametrize("a", ["fp16", "bf16", "fp8", "int8"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 7168, 2048), (300, 500, 701), (4096, 4096, 4096)])
def test_every_device_has_candidates(name: str, a: str, m: int, n: int, k: int) -> None:
    device = device_of(tilewright_arch.load(name))
    for layout in "rc":
        problem = GEMM.parse(asked(m, n, k, a, layout=layout))
        found = GEMM.candidates(problem, device)
        assert found and all(config.int4 for config in found)
        assert not any(GEMM.rules.check(config, device.arch) for config in found)


# ---- kernels of CPUs ----


def run_on_cpu(runner: Runner, device: DeviceInfo, request: OperationRequest, **fields: Any) -> None:
    problem = GEMM.parse(request)
    config = next(iter(GEMM.candidates(problem, device)))
    config = config.replace(**fields)
    assert not GEMM.rules.check(config, device.arch)
    inputs = drawn(problem)
    plan = GEMM.plan(problem, config, device)
    memory = runner.run(plan, inputs)
    compared(problem, inputs, {name: item.view for name, item in memory.items()}, config.name)
    if config.split_k == 1 and not problem.is_empty:
        assert runner.workspace(plan) == plan.workspace_bytes


@pytest.mark.parametrize(("a", "scales"), [("bf16", "fp16"), ("fp16", "fp32"), ("fp8", "bf16"), ("int8", "fp32")])
@pytest.mark.some(2)
def test_cpu_kernels_unpack_and_scale_every_group(a: str, scales: str, runner: Runner, device: DeviceInfo) -> None:
    run_on_cpu(runner, device, asked(61, 300, 701, a, scales))
    run_on_cpu(runner, device, asked(1, 129, 128, a, scales, "c", zeros=False))


def test_cpu_kernels_take_batches_groups_slices_and_fused_steps(runner: Runner, device: DeviceInfo) -> None:
    steps = {
        "inputs": {"bias": of("fp32", (200,)), "scale_a": of("fp32", (37, 1)), "d[0]": of("bf16", (37, 200))},
        "unary": "Relu", "alpha": 0.5, "out_dtype": "bf16",
    }  # fmt: skip
    run_on_cpu(runner, device, asked(37, 200, 300, "int8", **steps))
    run_on_cpu(runner, device, asked(9, 140, 1501, "fp16", split_k=3))
    batch = {
        "a": of("bf16", (3, 20, 300)), "b": of("int8", (3, 150, 130), (150 * 130, 1, 150)),
        "scale_b": of("fp16", (3, 130, 3)), "zero_b": of("int8", (130, 3)),
    }  # fmt: skip
    run_on_cpu(runner, device, OperationRequest("gemm", batch, {}, {"b_format": "int4_128", "out_dtype": "fp32"}))
    groups = {
        f"{name}[{place}]": desc
        for place, (m, k) in enumerate(((17, 260), (0, 100), (130, 91)))
        for name, desc in asked(m, 150, k).inputs.items()
    }
    run_on_cpu(runner, device, OperationRequest("gemm", groups, {}, {"b_format": "int4_128", "out_dtype": "fp32"}))


# ---- portable kernels of GPUs ----


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("int4"))


def portable(problem: GemmProblem, **fields: Any) -> GemmConfig:
    size = problem.dtype_a.bytes
    config = GemmConfig(
        dtype_a=problem.dtype_a, pipeline="compv3", tile=(32, 32, 64), wave=(2, 2, 1), warp_tile=(16, 8, 32 // size),
    )  # fmt: skip
    return with_signature(problem, config).replace(**fields)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (asked(45, 150, 301), {}),
        (asked(33, 70, 300, "fp16", "fp32", "c", zeros=False), {"tile": (32, 64, 128)}),
        (asked(1, 40, 520, "int8", "bf16"), {"split_k": 3, "persistent": True}),
        (aligned(45, 150, 301), RING),
        (aligned(33, 70, 384, "fp16", "fp32", zeros=False), {**RING, "tile": (32, 64, 256)}),
        (aligned(5, 40, 700, "int8"),
         {**RING, "split_k": 3, "persistent": True, "tile": (16, 64, 128), "wave": (1, 4, 1)}),
        (aligned(20, 72, 300, "fp8", "bf16"), {**RING, "tile": (32, 64, 256)}),
        (asked(20, 130, 129, "fp8", out_dtype="bf16", unary="Relu",
               inputs={"bias": of("fp32", (130,)), "scale_a": of("fp32", (20, 1)), "d[0]": of("fp16", (20, 130))}), {}),
    ],
    ids=["bf16", "fp16", "slices", "ring-bf16", "ring-fp16", "ring-slices", "ring-fp8", "steps"],
)  # fmt: skip
@pytest.mark.some(3)
def test_portable_gpu_kernels_unpack_and_scale_every_group(
    request_: OperationRequest, fields: dict[str, Any], emulated: Emulated
) -> None:
    hopper = dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=3)
    problem = GEMM.parse(request_)
    config = portable(problem, **fields)
    assert not GEMM.rules.check(config, hopper.arch), GEMM.rules.check(config, hopper.arch)
    assert not GEMM.mismatches(problem, config, hopper)
    inputs = drawn(problem)
    memory = emulated.run(GEMM.plan(problem, config, hopper), inputs, hopper)
    compared(problem, inputs, {name: item.view for name, item in memory.items()}, config.name)


CHOSEN = [
    ("bf16", 64),
    *(
        pytest.param(a, m, marks=pytest.mark.extended)
        for a, m in (("bf16", 1), ("bf16", 2048), ("fp16", 16), ("fp8", 1), ("fp8", 2048), ("int8", 64), ("int8", 2048))
    ),
]


@pytest.mark.skipif(not HAVE_NVRTC, reason=WITHOUT_NVRTC)
@pytest.mark.parametrize(("a", "m"), CHOSEN)
def test_what_is_chosen_compiles_without_spills(a: str, m: int, tmp_path: Path) -> None:
    arch = tilewright_arch.load("sm_90a")
    device, toolchain = device_of(arch), NvrtcToolchain([include_dir()])
    problem = GEMM.parse(aligned(m, 4096, 4096, a, out_dtype="bf16"))
    found = GEMM.candidates(problem, device)
    best = min(found, key=lambda config: GEMM.predict(problem, config, device).seconds)
    assert best.pipeline == "compv4"
    try:
        (resources,) = resources_of(toolchain.compile(GEMM.generate(best, arch), tmp_path, arch).log)
    finally:
        toolchain.close()
    assert resources.spill_bytes == 0 and resources.registers <= arch.registers_per_thread(threads_of(best, arch))


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("gfx942", asked(20, 40, 200, inputs={"b": of("int8", (100, 40), (1, 100))})),
        pytest.param("gfx942", asked(35, 40, 150, "fp8", "fp32", "c"), marks=pytest.mark.extended),
        pytest.param("gfx942", asked(20, 40, 129, "int8", zeros=False), marks=pytest.mark.extended),
        pytest.param("gfx1201", asked(20, 40, 150, "fp16"), marks=pytest.mark.extended),
    ],
    ids=["bf16", "fp8", "int8", "rdna"],
)
def test_amd_kernels_unpack_and_scale_every_group(name: str, request_: OperationRequest) -> None:
    device = device_of(tilewright_arch.load(name), 3)
    problem = GEMM.parse(request_)
    own = INT4_SET.expand(device.arch, GEMM.rules)
    config = with_signature(problem, next(item for item in own if item.dtype_a is problem.dtype_a))
    assert not GEMM.rules.check(config, device.arch) and not GEMM.mismatches(problem, config, device)
    inputs = drawn(problem)
    compared(problem, inputs, results_of(problem, config, device, inputs), config.name)


def test_kernels_without_packed_weights_are_what_they_were() -> None:
    """Units of the default set say nothing of them."""
    arch = tilewright_arch.load("sm_90a")
    for config in KERNEL_SETS["default"].expand(arch, GEMM.rules)[:200]:
        text = GEMM.generate(config, arch).text
        assert "Int4" not in text and "int4" not in text
