"""Products of 8-bit floats with exponents of blocks of 32 (MX): requests, rules, and kernels of CPUs, of GPUs on the
CPU, and of AMD GPUs in the emulator, compared with float64.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemm_runner import Array, Runner, draw
from hip_runner import configured, results_of
from hip_units import HAVE_HIP, WITHOUT_HIP, toolchain
from test_block_scales import compared, portable
from test_gpu_emulated import Emulated

import tilewright_arch
from tilewright_emulator.code.compiler import WITHOUT_OBJDUMP, have_objdump
from tilewright_gemm.config.block_scales import bytes_of_rounds, exponents, factors, takes_exponents
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.problem.resize import resized_gemm
from tilewright_gemm.vocabulary import LAYOUTS, ScaleA, ScaleB, ScaleBlock
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_tools.analysis.disassembly import Disassembler
from tilewright_tools.analysis.loops import main_loop

GEMM = GemmOperation()
BLOCKS = ScaleBlock.EXPONENTS.value
of = TensorDesc.of


def asked(m: int, n: int, k: int, layout: str = "rcr", a: str = "fp8", b: str = "fp8", **more: Any) -> OperationRequest:
    """A product with scales whose memory is as awkward as can be: A's by blocks of k first, B's with gaps."""
    blocks = -(-k // 32)
    inputs = {
        "a": of(a, (m, k), (k, 1) if layout[0] == "r" else (1, m)),
        "b": of(b, (k, n), (n, 1) if layout[1] == "r" else (1, k)),
        "scale_a": of("int8", (m, blocks), (1, m)),
        "scale_b": of("int8", (n, blocks), (blocks + 2, 1)),
        **more.pop("inputs", {}),
    }
    return OperationRequest("gemm", inputs, {}, {"scale_block": BLOCKS, "out_dtype": "fp32", **more})


def drawn(problem: GemmProblem, seed: int = 7) -> dict[str, Array]:
    """Numbers whose blocks differ by orders of magnitude: a factor of the wrong block shows."""
    rng = np.random.default_rng(seed)
    found = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    for name, values in found.items():
        if name.startswith("scale_"):
            found[name] = exponents(np.exp2(rng.integers(-6, 7, values.shape)))
    return found


# ---- requests ----


def test_exponents_stand_for_powers_of_two() -> None:
    every = np.arange(256).astype(np.uint8).view(np.int8)
    wide = factors(every, ScaleB.BLOCK_1X32)
    assert wide[0] == 2.0**-127 and wide[127] == 1.0 and wide[254] == 2.0**127 and np.isnan(wide[255])
    np.testing.assert_array_equal(exponents(wide[:255]), every[:255])


def test_blocks_of_32_have_exponents_and_other_blocks_have_none() -> None:
    problem = GEMM.parse(asked(33, 300, 260))
    assert (problem.scale_a, problem.scale_b) == (ScaleA.BLOCK_1X32, ScaleB.BLOCK_1X32)
    other = resized_gemm(problem, {"m": 64, "n": 129, "k": 1000})
    assert other is not None and {item.name: str(item.desc) for item in other.operands}["scale_a"] == str(
        of("int8", (64, 32))
    )
    for wrong, rule in (
        (asked(33, 300, 260, inputs={"scale_a": of("fp32", (33, 9))}), "block_scale_dtype"),
        (asked(33, 300, 260, scale_block="1x128_1x128"), "block_scale_dtype"),
        (asked(33, 300, 260, inputs={"scale_b": of("int8", (300, 3))}), "block_scale_shape"),
        (asked(33, 300, 260, a="bf16", b="bf16"), "block_scale_operands"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            GEMM.parse(wrong)
        assert caught.value.rule == rule and caught.value.fix


def test_the_reference_is_the_sum_over_blocks() -> None:
    problem = GEMM.parse(asked(3, 5, 33))
    inputs = drawn(problem)
    a, b = (np.asarray(inputs[name]).astype(np.float64) for name in "ab")
    scale_a, scale_b = (factors(inputs[f"scale_{side}"], ScaleB.BLOCK_1X32) for side in "ab")
    out = GEMM.reference(problem, inputs)["out"]
    first = scale_a[2, 0] * scale_b[4, 0] * (a[2, :32] @ b[:32, 4])
    np.testing.assert_allclose(out[2, 4], first + scale_a[2, 1] * scale_b[4, 1] * a[2, 32] * b[32, 4])


# ---- rules ----


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {"scale_a": ScaleA.BLOCK_1X128}) for name in ("x86-64-v3", "sm_90a", "gfx942", "gfx950")),
        *((name, {"scale_b": ScaleB.NONE}) for name in ("x86-64-v3", "sm_90a", "gfx942", "gfx950")),
        ("sm_90a", {"tile": (64, 64, 128)}),
        ("gfx942", {"tile": (64, 64, 128)}),
        ("gfx950", {"pipeline": "mem", "tile": (64, 64, 128), "warp_tile": (16, 16, 128), "wave": (2, 2, 1)}),
        ("gfx950", {"pipeline": "compv4", "tile": (64, 64, 64), "warp_tile": (16, 16, 64), "wave": (2, 2, 1)}),
    ],
    ids=str,
)
def test_kernels_that_fall_outside_the_contract_are_corrected(name: str, fields: dict[str, Any]) -> None:
    arch = tilewright_arch.load(name)
    own = [item for item in KERNEL_SETS["block_scaled"].expand(arch, GEMM.rules) if item.scale_b == ScaleB.BLOCK_1X32]
    changed = own[0].replace(**fields)
    assert GEMM.rules.check(changed, arch)
    assert GEMM.rules.correct(changed, arch).is_valid


@pytest.mark.parametrize(
    "name", ["x86-64-v3", "x86-64-v4+bf16+vnni", "sm_90a", "gfx90a", "gfx942", "gfx950", "gfx1201"]
)
def test_every_device_with_8_bit_floats_has_candidates(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    for layout in ("rcr", "crr"):
        for m, n, k in ((1, 7168, 2048), (300, 500, 700)):
            problem = GEMM.parse(asked(m, n, k, layout))
            found = GEMM.candidates(problem, device)
            assert found and not any(GEMM.rules.check(config, device.arch) for config in found)
            taken = [takes_exponents(config, device.arch) for config in found]
            assert all(taken) if name == "gfx950" else not any(taken)


# ---- kernels of CPUs ----


def run_on_cpu(runner: Runner, device: DeviceInfo, request: OperationRequest) -> None:
    problem = GEMM.parse(request)
    config = next(iter(GEMM.candidates(problem, device)))
    inputs = drawn(problem)
    memory = runner.run(GEMM.plan(problem, config, device), inputs)
    compared(problem, inputs, {name: item.view for name, item in memory.items()}, config.name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.some(2)
def test_cpu_kernels_scale_every_block(layout: str, runner: Runner, device: DeviceInfo) -> None:
    for m, n, k in ((61, 300, 177), (1, 129, 32)):
        run_on_cpu(runner, device, asked(m, n, k, layout))


def test_cpu_kernels_take_slices_batches_and_groups(runner: Runner, device: DeviceInfo) -> None:
    run_on_cpu(runner, device, asked(9, 140, 1500, split_k=3, b="bf8"))
    batch = {
        "a": of("fp8", (3, 20, 100)), "b": of("fp8", (3, 100, 130)), "scale_a": of("int8", (3, 20, 4)),
        "scale_b": of("int8", (130, 4)),
    }  # fmt: skip
    run_on_cpu(runner, device, OperationRequest("gemm", batch, {}, {"scale_block": BLOCKS, "out_dtype": "fp32"}))
    groups = {
        f"{name}[{place}]": desc
        for place, (m, k) in enumerate(((17, 260), (0, 100), (130, 90)))
        for name, desc in asked(m, 150, k).inputs.items()
    }
    run_on_cpu(runner, device, OperationRequest("gemm", groups, {}, {"scale_block": BLOCKS, "out_dtype": "fp32"}))


def test_the_least_exponent_is_subnormal_and_the_last_is_no_number(runner: Runner, device: DeviceInfo) -> None:
    problem = GEMM.parse(asked(4, 33, 64))
    inputs = drawn(problem)
    inputs |= {name: np.ones_like(inputs[name]) for name in "ab"}
    rows = np.array([[0, 1], [127, 0], [255, 127], [127, 127]], np.uint8)
    inputs["scale_a"], inputs["scale_b"] = rows.view(np.int8), np.full((33, 2), 200, np.uint8).view(np.int8)
    plan = GEMM.plan(problem, next(iter(GEMM.candidates(problem, device))), device)
    seen = runner.run(plan, inputs)["out"].view
    wanted = GEMM.reference(problem, inputs)["out"]
    np.testing.assert_allclose(seen, wanted, rtol=1e-6)
    assert np.all(np.isnan(seen[2])) and np.all(seen[0] == 32 * 3 * 2.0**-54)


# ---- GPUs ----


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("exponents"))


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (asked(45, 150, 100, "crr"), {}),
        (
            asked(33, 40, 161, "rcr", "fp8", "bf8"),
            {"pipeline": "compv3", "stages": 0, "split_k": 2, "persistent": True},
        ),
    ],
    ids=["steps", "slices"],
)
def test_portable_gpu_kernels_scale_every_block(
    request_: OperationRequest, fields: dict[str, Any], emulated: Emulated
) -> None:
    hopper = dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=3)
    problem = GEMM.parse(request_)
    config = portable(problem, tile=(32, 32, 32), **fields)
    assert not GEMM.rules.check(config, hopper.arch) and not GEMM.mismatches(problem, config, hopper)
    inputs = drawn(problem)
    memory = emulated.run(GEMM.plan(problem, config, hopper), inputs, hopper)
    compared(problem, inputs, {name: item.view for name, item in memory.items()}, config.name)


SMALL = {"tile": (32, 32, 32), "wave": (2, 2, 1)}
WIDE = {"tile": (64, 64, 32), "wave": (2, 2, 1), "warp_tile": (32, 32, 32)}
WMMA = {"tile": (32, 64, 32), "wave": (2, 4, 1), "warp_tile": (16, 16, 16)}
INSIDE = {"tile": (32, 32, 128), "wave": (2, 2, 1), "warp_tile": (16, 16, 128)}
LARGE = {"tile": (64, 32, 128), "wave": (2, 1, 1), "warp_tile": (32, 32, 64)}


BATCH = OperationRequest(
    "gemm",
    {
        "a": of("fp8", (2, 60, 144)), "b": of("fp8", (2, 144, 40), (40 * 144, 1, 144)),
        "scale_a": of("int8", (2, 60, 5)), "scale_b": of("int8", (2, 40, 5)),
    },
    {}, {"scale_block": BLOCKS, "out_dtype": "fp32"},
)  # fmt: skip


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize(
    ("name", "request_", "fields"),
    [
        pytest.param("gfx90a", asked(35, 40, 100), WIDE, marks=pytest.mark.extended),
        ("gfx942", asked(35, 40, 100), SMALL | {"warp_tile": (16, 16, 32), "pipeline": "compv3"}),
        pytest.param(
            "gfx1201", asked(35, 40, 100, "crr", "bf8"), WMMA,
            marks=pytest.mark.extended,
        ),
        ("gfx950", asked(35, 47, 420), INSIDE | {"pipeline": "comp_async"}),
        ("gfx950", asked(61, 40, 403, "crr", "bf8", "fp8"), LARGE | {"pipeline": "compv4"}),
        pytest.param("gfx950", asked(33, 20, 352, "rrr"), LARGE | {"pipeline": "compv3"}, marks=pytest.mark.extended),
        pytest.param(
            "gfx950", asked(20, 40, 1300, "rcr", "fp8", "bf8"), INSIDE | {"pipeline": "compv4", "split_k": 3},
            marks=pytest.mark.extended,
        ),
        pytest.param("gfx950", BATCH, INSIDE | {"tile": (64, 32, 128)}, marks=pytest.mark.extended),
    ],
    ids=["widened", "fnuz", "wmma", "direct", "columns", "one_tile", "slices", "batch"],
)  # fmt: skip
def test_amd_kernels_scale_every_block(name: str, request_: OperationRequest, fields: dict[str, Any]) -> None:
    device = device_of(tilewright_arch.load(name), 3)
    problem = GEMM.parse(request_)
    config, inputs = configured(problem, fields), drawn(problem)
    compared(problem, inputs, results_of(problem, config, device, inputs), config.name)


ROUNDS = {"pipeline": "comp_async", "tile": (128, 64, 128), "wave": (2, 1, 1), "warp_tile": (32, 32, 64)}


def in_rows(m: int, n: int, k: int, **more: Any) -> OperationRequest:
    """Exponents of blocks that are neighbours, in lines that begin at multiples of 4 bytes and are longer than need
    be.
    """
    blocks = -(-k // 32)
    line = -(-blocks // 4) * 4 + 4
    scales = {"scale_a": of("int8", (m, blocks), (line, 1)), "scale_b": of("int8", (n, blocks), (line, 1))}
    return asked(m, n, k, inputs=scales, **more)


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (in_rows(131, 66, 1072), ROUNDS),
        pytest.param(asked(70, 66, 1072, "rcr", "bf8", "fp8"), ROUNDS, marks=pytest.mark.extended),
        pytest.param(
            in_rows(67, 130, 1536 + 128, b="bf8"),
            ROUNDS | {"tile": (128, 128, 128), "wave": (2, 2, 1), "warp_tile": (16, 16, 128)},
            marks=pytest.mark.extended,
        ),
        pytest.param(in_rows(64, 70, 2400, split_k=2), ROUNDS | {"split_k": 2}, marks=pytest.mark.extended),
    ],
    ids=["words", "bytes", "16x16x128", "slices"],
)
def test_gfx950_takes_exponents_in_rounds(request_: OperationRequest, fields: dict[str, Any]) -> None:
    device = device_of(tilewright_arch.load("gfx950"), 3)
    problem = GEMM.parse(request_)
    config, inputs = configured(problem, fields), drawn(problem)
    assert bytes_of_rounds(config) and not GEMM.rules.check(config, device.arch)
    compared(problem, inputs, results_of(problem, config, device, inputs), config.name)


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.skipif(not have_objdump(), reason=WITHOUT_OBJDUMP)
def test_a_round_of_exponents_is_chosen_from_by_byte(tmp_path: Path) -> None:
    arch, problem = tilewright_arch.load("gfx950"), GEMM.parse(in_rows(256, 256, 1024))
    config = with_signature(problem, GemmConfig(dtype_a=problem.dtype_a, **ROUNDS))
    image = toolchain().compile(GEMM.generate(config, arch), tmp_path, arch).binary.read_bytes()
    loop = main_loop(Disassembler().disassemble(image)[0])
    assert loop is not None
    products = [item for item in loop.body if "mfma" in item.mnemonic]
    selected = {(item.modifier("op_sel"), item.modifier("op_sel_hi")) for item in products}
    assert len(products) == 4 * 8 and len(selected) == 4  # four steps, every byte of a word
    lanes_read = sum({"ds_read_b64": 1, "ds_read2st64_b64": 2}.get(item.mnemonic, 0) for item in loop.body)
    assert lanes_read == 2 + 2  # of exponents: a wave's rows and columns of instructions, once for all four steps


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.skipif(not have_objdump(), reason=WITHOUT_OBJDUMP)
@pytest.mark.parametrize("fields", [INSIDE, LARGE], ids=["16x16x128", "32x32x64"])
def test_gfx950_multiplies_blocks_with_their_factors_in_one_instruction(fields: dict[str, Any], tmp_path: Path) -> None:
    arch, problem = tilewright_arch.load("gfx950"), GEMM.parse(asked(256, 256, 512))
    config = with_signature(problem, GemmConfig(dtype_a=problem.dtype_a, pipeline="compv4", **fields))
    image = toolchain().compile(GEMM.generate(config, arch), tmp_path, arch).binary.read_bytes()
    (function,) = Disassembler().disassemble(image)
    products = [item.mnemonic for item in function.instructions if "mfma" in item.mnemonic]
    assert products and all(re.fullmatch(r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4", name) for name in products)
