"""Products with operands of fewer than 8 bits and exponents of blocks of 32 (MX): requests, rules, and kernels of CPUs,
of GPUs on the CPU, and of AMD GPUs in the emulator, compared with float64.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemm_runner import Array, Runner, draw
from hip_runner import configured, results_of
from hip_units import HAVE_HIP, WITHOUT_HIP, toolchain
from test_block_scales import compared, portable
from test_gpu_emulated import Emulated

import tilewright_arch
from tilewright_emulator.code.compiler import WITHOUT_OBJDUMP, have_objdump
from tilewright_gemm.config.block_scales import exponents, takes_packed
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.narrow import NARROW, narrow_a, narrow_b
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.problem.resize import resized_gemm
from tilewright_gemm.references.reference import narrow_values
from tilewright_gemm.vocabulary import Epilogue, ScaleA, ScaleB, ScaleBlock
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_tools.analysis.disassembly import Disassembler

GEMM = GemmOperation()
BLOCKS = ScaleBlock.EXPONENTS.value
of = TensorDesc.of


def asked(m: int, n: int, k: int, a: str = "fp4", b: str = "fp4", **more: Any) -> OperationRequest:
    """A product of packed values, or of 8-bit floats beside them, whose lines are longer than they need be."""
    blocks, gap = -(-k // 32), more.pop("gap", 3)
    nbytes = [NARROW[form].bytes_of(k) if form in NARROW else k for form in (a, b)]
    inputs = {
        "a": of("int8" if a in NARROW else a, (m, nbytes[0]), (nbytes[0] + gap, 1)),
        "b": of("int8" if b in NARROW else b, (nbytes[1], n), (1, nbytes[1] + 2 * gap)),
        "scale_a": of("int8", (m, blocks), (1, m)),
        "scale_b": of("int8", (n, blocks), (blocks + 2, 1)),
        **more.pop("inputs", {}),
    }
    forms = {f"{side}_format": form for side, form in (("a", a), ("b", b)) if form in NARROW}
    return OperationRequest("gemm", inputs, {}, {"scale_block": BLOCKS, "out_dtype": "fp32", **forms, **more})


def drawn(problem: GemmProblem, seed: int = 7) -> dict[str, Array]:
    """Bytes of any bits but for what is left of a last one, 8-bit floats, and exponents that differ much."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for item in problem.operands:
        if item.role is not Role.INPUT:
            continue
        shape = item.desc.shape
        if item.name.startswith("scale_"):
            found[item.name] = exponents(np.exp2(rng.integers(-6, 7, shape)))
        elif item.desc.dtype == "int8":
            form = narrow_a(problem.scale_a) if item.name[0] == "a" else narrow_b(problem.scale_b)
            values, axis = rng.integers(0, 256, shape).astype(np.uint8), -1 if item.name[0] == "a" else -2
            assert form
            lines = np.moveaxis(values, axis, 0)
            lines[-1] &= 0xFF >> (shape[axis] * 8 - problem.k * form.bits)
            found[item.name] = values.view(np.int8)
        else:
            found[item.name] = draw(rng, item.desc)
    return found


def checked(problem: GemmProblem, inputs: dict[str, Array], views: dict[str, Array], name: str) -> None:
    """Results are those of float64, as close as sums of that magnitude can be."""
    positive = {}
    for key, values in inputs.items():
        form = narrow_a(problem.scale_a) if key[0] == "a" else narrow_b(problem.scale_b) if key[0] == "b" else None
        if form:
            bits = np.array([[place < form.bits - 1 for place in range(form.bits)]] * 4).ravel()
            mask = np.packbits(bits, bitorder="little")
            axis = -1 if key[0] == "a" else -2
            whole = np.moveaxis(values, axis, -1)
            repeated = np.resize(mask.view(np.int8), whole.shape[-1])
            positive[key] = np.moveaxis(whole & repeated, -1, axis)
    compared(problem, inputs, views, name, positive)


# ---- requests ----


@pytest.mark.parametrize("name", NARROW)
def test_values_are_those_of_ml_dtypes_packed_from_the_lowest_bits_on(name: str) -> None:
    form = NARROW[name]
    codes = np.arange(1 << form.bits, dtype=np.uint8)
    number = sum(int(code) << (form.bits * place) for place, code in enumerate(codes))
    stored = np.frombuffer(number.to_bytes(form.bytes_of(len(codes)), "little"), np.int8)
    wanted = codes.view(getattr(ml_dtypes, form.numpy)).astype(np.float64)
    np.testing.assert_array_equal(narrow_values(stored, form, len(codes)), wanted)
    assert wanted.max() == {"fp4": 6.0, "fp6": 7.5, "bf6": 28.0}[name]


def test_k_is_what_the_shorter_operand_holds() -> None:
    for k, a, b in ((33, "fp8", "fp4"), (34, "fp4", "fp4"), (33, "fp4", "bf6"), (7, "fp6", "bf8"), (41, "bf6", "fp6")):
        problem = GEMM.parse(asked(5, 40, k, a, b))
        assert (problem.k, problem.layout, problem.narrow) == (k, "rcr", True)
        assert problem.dtype_a == ("fp8" if a in NARROW else a) and problem.dtype_b == ("fp8" if b in NARROW else b)
    assert GEMM.parse(asked(5, 40, 33, "fp4", "fp4")).k == 34  # a whole last byte
    problem = GEMM.parse(asked(5, 40, 64, "fp6", "fp4"))
    assert (problem.scale_a, problem.scale_b) == (ScaleA.FP6_1X32, ScaleB.FP4_1X32)
    other = resized_gemm(problem, {"m": 64, "n": 129, "k": 1000})
    assert other is not None and (other.k, other.scale_a) == (1000, ScaleA.FP6_1X32)


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (asked(5, 40, 64, scale_block="none"), "narrow_operands"),
        (asked(5, 40, 64, inputs={"a": of("fp8", (5, 32))}), "narrow_operands"),
        (asked(5, 40, 64, b="bf16"), "narrow_operands"),
        (asked(5, 40, 64, inputs={"a": of("int8", (5, 30))}), "k_mismatch"),
        (asked(5, 40, 64, inputs={"b": of("int8", (32, 40))}), "narrow_layout"),
        (asked(5, 40, 64, b="fp8", inputs={"b": of("fp8", (64, 40))}), "narrow_layout"),
        (asked(5, 40, 64, inputs={"scale_b": of("int8", (40, 3))}), "block_scale_shape"),
        (asked(5, 40, 64, inputs={"scale_a": of("fp32", (5, 2))}), "block_scale_dtype"),
        (asked(5, 40, 64, a_format="fp5"), "attribute_choice"),
        (asked(5, 40, 64, b_format="int4_128"), "narrow_operands"),
    ],
    ids=["no_blocks", "fp8_bytes", "bf16", "bytes", "rows", "rows_of_fp8", "scales", "fp32_scales", "word", "int4"],
)
def test_what_does_not_fit_is_refused_with_what_would(request_: OperationRequest, rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        GEMM.parse(request_)
    assert caught.value.rule == rule and caught.value.fix


# ---- rules ----


@pytest.mark.parametrize("name", ["x86-64-v3", "sm_90a", "gfx90a", "gfx942", "gfx950", "gfx1201"])
def test_every_device_with_8_bit_floats_has_candidates(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    for a, b in (("fp4", "fp4"), ("bf6", "fp6"), ("fp8", "fp4")):
        for m, n, k in ((1, 7168, 2048), (300, 500, 700)):
            problem = GEMM.parse(asked(m, n, k, a, b))
            found = GEMM.candidates(problem, device)
            assert found and all(config.narrow for config in found)
            assert not any(GEMM.rules.check(config, device.arch) for config in found)
            taken = [takes_packed(config, device.arch) for config in found]
            assert any(taken) if name == "gfx950" and "fp8" not in (a, b) else not any(taken)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("x86-64-v3", {"scale_a": ScaleA.NONE}),
        ("x86-64-v3", {"layout": "rrr"}),
        ("sm_90a", {"dtype_b": "bf8"}),
        ("sm_90a", {"pipeline": "compv4", "stages": 4}),
        ("gfx942", {"pipeline": "compv4"}),
        ("gfx950", {"scale_a": ScaleA.BF6_1X32, "scale_b": ScaleB.FP6_1X32, "pipeline": "comp_async"}),
        ("gfx950", {"scale_a": ScaleA.BLOCK_1X32, "pipeline": "comp_async"}),
        ("gfx950", {"scale_b": ScaleB.BLOCK_128X128}),
    ],
    ids=["half", "layout", "bf8", "ring", "ping", "straight", "widened", "squares"],
)
def test_kernels_that_fall_outside_the_contract_are_corrected(name: str, fields: dict[str, Any]) -> None:
    device = device_of(tilewright_arch.load(name))
    config = GEMM.candidates(GEMM.parse(asked(300, 500, 700)), device)[-1].replace(**fields)
    assert GEMM.rules.check(config, device.arch)
    corrected = GEMM.rules.correct(config, device.arch)
    assert corrected.is_valid, corrected


# ---- kernels of CPUs ----


def run_on_cpu(runner: Runner, device: DeviceInfo, request: OperationRequest) -> None:
    problem = GEMM.parse(request)
    config = next(iter(GEMM.candidates(problem, device)))
    inputs = drawn(problem)
    memory = runner.run(GEMM.plan(problem, config, device), inputs)
    checked(problem, inputs, {name: item.view for name, item in memory.items()}, config.name)


@pytest.mark.parametrize(
    ("a", "b"), [("fp4", "fp4"), ("fp6", "bf6"), ("bf6", "fp8"), ("bf8", "fp6"), ("fp8", "fp4"), ("fp4", "bf6")]
)
@pytest.mark.some(3)
def test_cpu_kernels_multiply_packed_values(a: str, b: str, runner: Runner, device: DeviceInfo) -> None:
    for m, n, k in ((61, 130, 178), (1, 129, 36)):
        run_on_cpu(runner, device, asked(m, n, k, a, b))


def test_cpu_kernels_take_slices_batches_and_groups(runner: Runner, device: DeviceInfo) -> None:
    run_on_cpu(runner, device, asked(9, 140, 1500, "fp6", "fp6", split_k=3))
    batch = {
        "a": of("int8", (3, 20, 50)), "b": of("int8", (3, 50, 130), (6500, 1, 50)), "scale_a": of("int8", (3, 20, 4)),
        "scale_b": of("int8", (130, 4)),
    }  # fmt: skip
    words = {"scale_block": BLOCKS, "out_dtype": "fp32", "a_format": "fp4", "b_format": "fp4"}
    run_on_cpu(runner, device, OperationRequest("gemm", batch, {}, words))
    groups = {
        f"{name}[{place}]": desc
        for place, (m, k) in enumerate(((17, 260), (0, 100), (130, 92)))
        for name, desc in asked(m, 150, k).inputs.items()
    }
    run_on_cpu(runner, device, OperationRequest("gemm", groups, {}, words))


# ---- GPUs ----


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("narrow"))


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (asked(45, 70, 100, "fp4", "bf6"), {}),
        (asked(33, 40, 160, "fp6", "fp8", gap=0), {"split_k": 2, "persistent": True}),
    ],
    ids=["bytes", "words"],
)
def test_portable_gpu_kernels_widen_values(
    request_: OperationRequest, fields: dict[str, Any], emulated: Emulated
) -> None:
    hopper = dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=3)
    problem = GEMM.parse(request_)
    config = portable(problem, tile=(32, 32, 32), pipeline="compv3", stages=0, **fields)
    assert not GEMM.rules.check(config, hopper.arch) and not GEMM.mismatches(problem, config, hopper)
    inputs = drawn(problem)
    memory = emulated.run(GEMM.plan(problem, config, hopper), inputs, hopper)
    checked(problem, inputs, {name: item.view for name, item in memory.items()}, config.name)


WIDE = {"tile": (64, 64, 32), "wave": (2, 2, 1), "warp_tile": (32, 32, 32), "pipeline": "compv3"}
SMALL = {"tile": (32, 32, 32), "wave": (2, 2, 1), "warp_tile": (16, 16, 32), "pipeline": "compv3"}
WMMA = {"tile": (32, 64, 32), "wave": (2, 4, 1), "warp_tile": (16, 16, 16), "pipeline": "compv3"}
INSIDE = {"tile": (32, 32, 128), "wave": (2, 2, 1), "warp_tile": (16, 16, 128)}
LARGE = {"tile": (64, 32, 128), "wave": (2, 1, 1), "warp_tile": (32, 32, 64)}
BATCH = OperationRequest(
    "gemm",
    {
        "a": of("int8", (2, 60, 72)), "b": of("int8", (2, 72, 40), (40 * 72, 1, 72)),
        "scale_a": of("int8", (2, 60, 5)), "scale_b": of("int8", (2, 40, 5)),
    },
    {}, {"scale_block": BLOCKS, "out_dtype": "fp32", "a_format": "fp4", "b_format": "fp4"},
)  # fmt: skip
ROUNDS = {"pipeline": "comp_async", "tile": (128, 64, 128), "wave": (2, 1, 1), "warp_tile": (32, 32, 64)}
WORDS = {"scale_a": of("int8", (67, 34), (36, 1)), "scale_b": of("int8", (70, 34), (40, 1))}
"""Exponents whose lines begin at multiples of 4 bytes."""
MORE = pytest.mark.extended


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize(
    ("name", "request_", "fields"),
    [
        pytest.param("gfx90a", asked(35, 40, 100, "bf6", "fp4"), WIDE, marks=MORE),
        ("gfx942", asked(35, 40, 100, "fp4", "fp8"), SMALL),
        pytest.param("gfx1201", asked(35, 40, 100, "bf8", "fp6"), WMMA, marks=MORE),
        pytest.param("gfx950", asked(35, 47, 420, "fp8", "fp4"), INSIDE | {"pipeline": "compv3"}, marks=MORE),
        ("gfx950", asked(35, 47, 416, gap=0), INSIDE | {"pipeline": "comp_async"}),
        pytest.param("gfx950", asked(61, 40, 403, "fp6", "fp6"), LARGE | {"pipeline": "compv4"}, marks=MORE),
        ("gfx950", asked(61, 40, 384 + 64, "bf6", "fp6", gap=0), INSIDE | {"pipeline": "compv4"}),
        pytest.param(
            "gfx950", asked(33, 20, 1024, "bf6", "bf6", gap=0), LARGE | {"pipeline": "compv3", "tile": (64, 32, 256)},
            marks=MORE,
        ),
        pytest.param(
            "gfx950", asked(20, 40, 1300, gap=6), INSIDE | {"pipeline": "compv4", "split_k": 3}, marks=MORE,
        ),
        pytest.param("gfx950", BATCH, LARGE | {"pipeline": "comp_async"}, marks=MORE),
        pytest.param("gfx950", asked(70, 66, 1120, gap=0), ROUNDS, marks=MORE),
        pytest.param(
            "gfx950", asked(67, 70, 1024 + 64, gap=0, inputs=WORDS),
            ROUNDS | {"tile": (64, 64, 256), "wave": (1, 2, 1)}, marks=MORE,
        ),
        pytest.param(
            "gfx950", asked(67, 270, 1024 + 64, gap=0, inputs=WORDS | {"scale_b": of("int8", (270, 34), (36, 1))}),
            ROUNDS | {"tile": (256, 256, 256), "wave": (2, 4, 1), "epilogue": Epilogue.DEFAULT}, marks=MORE,
        ),
    ],
    ids=[
        "bf16", "fnuz", "wmma", "beside_fp8", "fp4", "fp6_bytes", "fp6", "bf6_deep", "slices", "batch", "rounds",
        "rounds_of_words", "eight_waves",
    ],
)  # fmt: skip
def test_amd_kernels_multiply_packed_values(name: str, request_: OperationRequest, fields: dict[str, Any]) -> None:
    device = device_of(tilewright_arch.load(name), 3)
    problem = GEMM.parse(request_)
    config, inputs = configured(problem, fields), drawn(problem)
    checked(problem, inputs, results_of(problem, config, device, inputs), config.name)


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.skipif(not have_objdump(), reason=WITHOUT_OBJDUMP)
@pytest.mark.parametrize(
    ("a", "b", "fields", "codes"),
    [("fp4", "fp4", INSIDE, ("4", "4")), ("bf6", "fp6", LARGE, ("2", "3"))],
    ids=["fp4", "fp6"],
)
def test_gfx950_multiplies_packed_values_with_their_exponents_in_one_instruction(
    a: str, b: str, fields: dict[str, Any], codes: tuple[str, str], tmp_path: Path
) -> None:
    arch, problem = tilewright_arch.load("gfx950"), GEMM.parse(asked(256, 256, 512, a, b))
    config = with_signature(problem, GemmConfig(dtype_a=problem.dtype_a, pipeline="compv4", **fields))
    image = toolchain().compile(GEMM.generate(config, arch), tmp_path, arch).binary.read_bytes()
    (function,) = Disassembler().disassemble(image)
    products = [item for item in function.instructions if "mfma" in item.mnemonic]
    assert products and all(re.fullmatch(r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4", item.mnemonic) for item in products)
    assert {(item.modifier("cbsz"), item.modifier("blgp")) for item in products} == {codes}  # B is the first operand
