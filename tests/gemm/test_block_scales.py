"""Products of 8-bit floats with block scales: requests, rules, and kernels of CPUs, of GPUs on the CPU, and of AMD GPUs
in the emulator, compared with float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from cuda_units import HAVE_NVRTC, WITHOUT_NVRTC, compile_text, statement_of
from gemm_runner import Array, Runner, draw
from hip_runner import results_of
from hip_units import HAVE_HIP, WITHOUT_HIP
from test_gpu_emulated import Emulated

import tilewright_arch
from tilewright_gemm.commands.command import BLOCKS
from tilewright_gemm.config.block_scales import SCALES
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.narrow import NARROW
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.problem.resize import resized_gemm
from tilewright_gemm.vocabulary import LAYOUTS, ScaleA, ScaleB, ScaleBlock
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.tiles.footprint.workgroup import is_specialised, shared_bytes
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
SQUARES, COLUMNS = ScaleBlock.ROWS_AND_SQUARES.value, ScaleBlock.ROWS_AND_COLUMNS.value
of = TensorDesc.of


def asked(
    m: int, n: int, k: int, block: str, layout: str = "rcr", a: str = "fp8", b: str = "fp8", **more: Any
) -> OperationRequest:
    """A product with scales whose memory is as awkward as can be: A's by blocks of k first, B's with gaps."""
    blocks, across = -(-k // 128), n if block == COLUMNS else -(-n // 128)
    inputs = {
        "a": of(a, (m, k), (k, 1) if layout[0] == "r" else (1, m)),
        "b": of(b, (k, n), (n, 1) if layout[1] == "r" else (1, k)),
        "scale_a": of("fp32", (m, blocks), (1, m)),
        "scale_b": of("fp32", (across, blocks), (blocks + 2, 1)),
        **more.pop("inputs", {}),
    }
    return OperationRequest("gemm", inputs, {}, {"scale_block": block, "out_dtype": "fp32", **more})


def drawn(problem: GemmProblem, seed: int = 7) -> dict[str, Array]:
    """Numbers whose blocks differ by orders of magnitude: a factor of the wrong block shows."""
    rng = np.random.default_rng(seed)
    found = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    for name, values in found.items():
        if name.startswith("scale_"):
            found[name] = np.exp2(rng.uniform(-6, 7, values.shape)).astype(np.float32)
    return found


def compared(
    problem: GemmProblem,
    inputs: Mapping[str, Array],
    views: Mapping[str, Array],
    name: str,
    more: Mapping[str, Array] | None = None,
) -> None:
    """Elements are as close as sums of that magnitude can be. ``more``: positive forms of inputs that are bytes."""
    truth = GEMM.reference(problem, inputs)
    positive = {key: x if x.dtype == np.int8 else np.abs(np.asarray(x).astype(np.float64)) for key, x in inputs.items()}
    positive |= more or {}
    magnitude = GEMM.reference(problem, positive)  # exponents stand for positive factors
    for item in problem.operands:
        if item.role is Role.OUTPUT:
            seen, wanted = views[item.name].astype(np.float64), truth[item.name]
            step = {DType.FP32: 2.0**-21, DType.FP16: 2.0**-10, DType.BF16: 2.0**-7}[item.desc.dtype]
            allowed = magnitude[item.name] * 2.0**-18 + np.abs(wanted) * step + 1e-30
            assert np.all(np.isfinite(seen)), name
            worst = np.max(np.abs(seen - wanted) / allowed, initial=0.0)
            assert worst <= 1.0, f"{item.name} of {name}: {worst} times what is allowed"


# ---- requests ----


def test_scales_of_blocks_are_read_by_rows_or_columns_and_then_by_blocks_of_k() -> None:
    problem = GEMM.parse(asked(33, 300, 260, SQUARES))
    assert (problem.scale_a, problem.scale_b) == (ScaleA.BLOCK_1X128, ScaleB.BLOCK_128X128)
    (product,) = problem.products
    assert product.scale_a is not None and (product.scale_a.row_stride, product.scale_a.col_stride) == (1, 33)
    assert product.scale_b is not None and (product.scale_b.row_stride, product.scale_b.col_stride) == (5, 1)
    assert GEMM.parse(asked(33, 300, 260, COLUMNS)).scale_b is ScaleB.BLOCK_1X128


def _without(request: OperationRequest, name: str) -> OperationRequest:
    return dataclasses.replace(request, inputs={key: item for key, item in request.inputs.items() if key != name})


@pytest.mark.parametrize(
    ("request_", "rule", "field"),
    [
        (_without(asked(8, 200, 256, SQUARES), "scale_b"), "block_scale_operands", "scale_b"),
        (_without(asked(8, 200, 256, SQUARES), "scale_a"), "block_scale_operands", "scale_a"),
        (asked(8, 200, 256, SQUARES, inputs={"scale_a": of("fp32", (8, 3))}), "block_scale_shape", "scale_a.shape"),
        (asked(8, 200, 256, SQUARES, inputs={"scale_a": of("fp32", (8, 1))}), "block_scale_shape", "scale_a.shape"),
        (asked(8, 200, 256, SQUARES, inputs={"scale_b": of("fp32", (2, 1))}), "block_scale_shape", "scale_b.shape"),
        (asked(8, 200, 256, COLUMNS, inputs={"scale_b": of("fp32", (2, 2))}), "block_scale_shape", "scale_b.shape"),
        (asked(8, 200, 256, SQUARES, inputs={"scale_a": of("int8", (8, 2))}), "block_scale_dtype", "scale_a.dtype"),
        (asked(8, 200, 256, SQUARES, a="int8", b="int8"), "block_scale_operands", "a.dtype"),
        (asked(8, 200, 256, "2x2"), "attribute_choice", "attributes.scale_block"),
    ],
)  # fmt: skip
def test_a_scale_that_does_not_fit_its_blocks_is_rejected(request_: OperationRequest, rule: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        GEMM.parse(request_)
    assert (caught.value.rule, caught.value.field) == (rule, field) and caught.value.fix


def test_without_the_attribute_the_same_shapes_are_rejected_as_before() -> None:
    request = dataclasses.replace(asked(8, 200, 256, SQUARES), attributes={})
    with pytest.raises(InvalidArgumentError, match="does not broadcast"):
        GEMM.parse(request)


def test_other_sizes_of_the_same_kind_have_scales_of_their_own() -> None:
    problem = GEMM.parse(asked(33, 300, 260, SQUARES))
    other = resized_gemm(problem, {"m": 64, "n": 129, "k": 1000})
    assert other is not None and other.block_scaled
    shapes = {item.name: item.desc.shape for item in other.operands}
    assert (shapes["scale_a"], shapes["scale_b"]) == ((64, 8), (2, 8))


def test_the_reference_is_the_sum_over_blocks() -> None:
    problem = GEMM.parse(asked(3, 130, 129, SQUARES))
    inputs = drawn(problem)
    a, b, scale_a, scale_b = (np.asarray(inputs[name]).astype(np.float64) for name in ("a", "b", "scale_a", "scale_b"))
    out = GEMM.reference(problem, inputs)["out"]
    for i, j in ((0, 0), (2, 127), (1, 128), (2, 129)):
        first = scale_a[i, 0] * scale_b[j // 128, 0] * (a[i, :128] @ b[:128, j])
        np.testing.assert_allclose(out[i, j], first + scale_a[i, 1] * scale_b[j // 128, 1] * a[i, 128] * b[128, j])


def test_the_command_line_has_the_same_blocks() -> None:
    assert set(BLOCKS) == {word.value for word in SCALES}


# ---- rules ----


HALVES: tuple[dict[str, Any], ...] = (
    {"scale_b": ScaleB.COLUMN}, {"scale_b": ScaleB.NONE}, {"scale_a": ScaleA.NONE}, {"scale_a": ScaleA.ROW},
    {"dtype_a": DType.BF16},
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, fields) for name in ("x86-64-v3", "sm_90a", "gfx942") for fields in HALVES),
        *((name, {"promote": 4}) for name in ("sm_90a", "gfx942", "x86-64-v3")),
        ("sm_90a", {"scheduler": "pingpong", "num_wave_groups": 2, "persistent": True}),
        ("sm_90a", {"tile": (128, 256, 128), "warp_tile": (64, 256, 32)}),
        ("x86-64-v3", {"pipeline": "compv1"}),
        ("sm_90a", {"tile": (128, 128, 256)}),
        ("gfx942", {"tile": (64, 64, 96)}),
    ],
    ids=str,
)
def test_kernels_of_half_a_contract_are_corrected(name: str, fields: dict[str, Any]) -> None:
    arch = tilewright_arch.load(name)
    changed = KERNEL_SETS["block_scaled"].expand(arch, GEMM.rules)[0].replace(**fields)
    assert GEMM.rules.check(changed, arch)
    assert GEMM.rules.correct(changed, arch).is_valid


def test_the_set_has_every_kind_of_blocks_and_no_default_kernel() -> None:
    for name in ("x86-64-v3", "sm_90a", "gfx942", "gfx950"):
        arch = tilewright_arch.load(name)
        found = KERNEL_SETS["block_scaled"].expand(arch, GEMM.rules)
        narrow = {form.scale_b for form in NARROW.values()}
        assert {config.scale_b for config in found} == {pair[1] for pair in SCALES.values()} | narrow
        assert all(config.block_scaled for config in found)
        names = {config.name for config in found}
        assert len(names) == len(found) and all("scaleA1x" in item for item in names)


@pytest.mark.skipif(not HAVE_NVRTC, reason=WITHOUT_NVRTC)
def test_shared_memory_has_room_for_factors_as_the_headers_count_it() -> None:
    arch = tilewright_arch.load("sm_90a")
    found = [item for item in KERNEL_SETS["block_scaled"].expand(arch, GEMM.rules) if is_specialised(item, arch)]
    base = next(item for item in found if item.transpose_c and item.scale_b is ScaleB.BLOCK_128X128)
    found.append(base.replace(tile=(160, 128, 128), warp_tile=(160, 64, 32), wave=(1, 2, 1)))
    parts = []
    for number, config in enumerate(found):
        beside = shared_bytes(config, arch)
        expected = (
            f"using Scaled = tw::sm90::GemmPlan<tw::Scaled{config.scale_b}<Config>>;\n"
            f"static_assert(tw::sm90::kSharedFactors<Scaled, true> == {str(config.bytes_beside_stage > 0).lower()});\n"
        )
        slots = "tw::sm90::FactorSlots<Scaled>::bytes" if config.bytes_beside_stage else "0"
        expected += f'static_assert(Kernel::shared_bytes + {slots} == {beside}, "{config.name}");'
        parts.append(statement_of(config, arch, number, expected))
    assert {config.bytes_beside_stage > 0 for config in found} == {False, True}
    log = compile_text("\n".join(parts), arch, ["tilewright/sm90/gemm/scaled.hpp"])
    assert log == "", log[:3000]


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4+bf16+vnni", "sm_90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("block", [SQUARES, COLUMNS])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 7168, 2048), (300, 500, 700), (4096, 4096, 4096)])
def test_every_device_has_candidates_with_and_without_slices(name: str, block: str, m: int, n: int, k: int) -> None:
    device = device_of(tilewright_arch.load(name))
    for layout in ("rcr", "crr"):
        problem = GEMM.parse(asked(m, n, k, block, layout))
        found = GEMM.candidates(problem, device)
        assert found and all(config.block_scaled for config in found)
        assert not any(GEMM.rules.check(config, device.arch) for config in found)


# ---- kernels of CPUs ----


def run_on_cpu(runner: Runner, device: DeviceInfo, request: OperationRequest, **fields: Any) -> None:
    problem = GEMM.parse(request)
    config = next(iter(GEMM.candidates(problem, device)))
    config = config.replace(**fields)
    assert not GEMM.rules.check(config, device.arch)
    inputs = drawn(problem)
    memory = runner.run(GEMM.plan(problem, config, device), inputs)
    compared(problem, inputs, {name: item.view for name, item in memory.items()}, config.name)


@pytest.mark.parametrize("block", [SQUARES, COLUMNS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cpu_kernels_scale_every_block(layout: str, block: str, runner: Runner, device: DeviceInfo) -> None:
    for m, n, k in ((61, 300, 700), (1, 129, 128)):
        run_on_cpu(runner, device, asked(m, n, k, block, layout))


def test_cpu_kernels_take_batches_groups_slices_and_fused_steps(runner: Runner, device: DeviceInfo) -> None:
    steps = {"inputs": {"bias": of("fp32", (200,))}, "unary": "Relu", "alpha": 0.5, "out_dtype": "bf16"}
    run_on_cpu(runner, device, asked(37, 200, 300, SQUARES, b="bf8", **steps))
    run_on_cpu(runner, device, asked(9, 140, 1500, COLUMNS, split_k=3))
    batch = {
        "a": of("fp8", (3, 20, 300)), "b": of("fp8", (3, 300, 130)), "scale_a": of("fp32", (3, 20, 3)),
        "scale_b": of("fp32", (2, 3)),
    }  # fmt: skip
    run_on_cpu(runner, device, OperationRequest("gemm", batch, {}, {"scale_block": SQUARES, "out_dtype": "fp32"}))
    one_b = {**batch, "b": of("fp8", (300, 130), (1, 300))}
    run_on_cpu(runner, device, OperationRequest("gemm", one_b, {}, {"scale_block": SQUARES, "out_dtype": "fp32"}))
    groups = {
        f"{name}[{place}]": desc
        for place, (m, k) in enumerate(((17, 260), (0, 100), (130, 90)))
        for name, desc in asked(m, 150, k, COLUMNS).inputs.items()
    }
    run_on_cpu(runner, device, OperationRequest("gemm", groups, {}, {"scale_block": COLUMNS, "out_dtype": "fp32"}))


# ---- portable kernels of GPUs ----


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("scaled"))


def portable(problem: GemmProblem, **fields: Any) -> GemmConfig:
    config = GemmConfig(dtype_a=problem.dtype_a, tile=(32, 32, 64), wave=(2, 2, 1), warp_tile=(16, 8, 32), stages=3)
    return with_signature(problem, config).replace(**fields)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (asked(45, 150, 300, SQUARES), {}),
        (asked(45, 150, 300, COLUMNS, "rrr", "fp8", "bf8"), {"pipeline": "compv3", "stages": 0}),
        (asked(1, 40, 520, SQUARES, "ccr"), {"split_k": 3, "persistent": True}),
        (asked(33, 130, 129, COLUMNS, "crr", out_dtype="bf16", inputs={"bias": of("fp32", (130,))}, unary="Relu"),
         {"tile": (32, 64, 128)}),
    ],
    ids=["squares", "columns", "slices", "steps"],
)  # fmt: skip
@pytest.mark.some(2)
def test_portable_gpu_kernels_scale_every_block(
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


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize(
    ("name", "request_", "pipeline"),
    [
        ("gfx942", asked(70, 150, 300, SQUARES), "compv4"),
        ("gfx942", asked(35, 140, 260, COLUMNS, "crr", "bf8", "bf8"), "compv3"),
        pytest.param("gfx950", asked(20, 150, 200, COLUMNS), "comp_async", marks=pytest.mark.extended),
    ],
    ids=["squares", "columns", "direct"],
)
def test_amd_kernels_scale_every_block(name: str, request_: OperationRequest, pipeline: str) -> None:
    device = device_of(tilewright_arch.load(name), 3)
    problem = GEMM.parse(request_)
    config = with_signature(
        problem,
        GemmConfig(
            dtype_a=problem.dtype_a, pipeline=pipeline, tile=(64, 64, 128), wave=(2, 2, 1), warp_tile=(16, 16, 32),
        ),
    )  # fmt: skip
    config = GEMM.rules.correct(config, device.arch).config
    assert not GEMM.rules.check(config, device.arch) and config.pipeline == pipeline
    inputs = drawn(problem)
    compared(problem, inputs, results_of(problem, config, device, inputs), config.name)


def test_kernels_without_block_scales_are_what_they_were() -> None:
    """Names of the default set say nothing of blocks, nor do their units."""
    arch = tilewright_arch.load("sm_90a")
    for config in KERNEL_SETS["default"].expand(arch, GEMM.rules):
        assert not config.block_scaled
        text = GEMM.generate(config, arch).text
        assert "Scaled" not in text and "scaled.hpp" not in text
