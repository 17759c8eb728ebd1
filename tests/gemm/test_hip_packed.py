"""B packed ahead of time on AMD GPUs: packed and multiplied in the emulator, for every warp tile that reads it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from gemm_runner import Array, draw
from hip_runner import HipRunner
from hip_units import HAVE_HIP, WITHOUT_HIP
from sampling import partly

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.config.packing import VectorFormat, parse_packing
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.plugin import GemmOperation, PackBOperation
from tilewright_gemm.references.reference import unpack
from tilewright_kit.conformance.check_plugin import device_of, plan_findings
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare, poison
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.tiles.footprint.workgroup import size_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

GEMM, PACK = GemmOperation(), PackBOperation()
SHUFFLING = ("gfx90a", "gfx942", "gfx950")
M, N, K = 40, 100, 300
of = TensorDesc.of
needs_compiler = pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)


@cache
def runner_of(name: str) -> HipRunner:
    return HipRunner(tilewright_arch.load(name))


def device(name: str) -> DeviceInfo:
    return device_of(tilewright_arch.load(name), 3)


def packed(runner: HipRunner, b: Array, desc: TensorDesc, text: str, target: DeviceInfo) -> tuple[TensorDesc, Array]:
    """What the device makes of B in that format."""
    problem = PACK.parse(OperationRequest("gemm_pack_b", {"b": desc}, {}, {"format": text}))
    (config,) = PACK.candidates(problem, target)
    assert not PACK.mismatches(problem, config, target)
    plan = PACK.plan(problem, config, target)
    out = next(item.desc for item in plan.operands if item.role is Role.OUTPUT)
    assert out.packing == text
    return out, np.array(runner.run(plan, {"b": b})["out"].view)


def kernel(arch: ArchSpec, key: str, warp: Triple, scheduler: str) -> GemmConfig:
    """Of that warp tile, with a tile as small as the rules let it be."""
    a, b, _ = key.split("_")
    plain = GemmConfig(dtype_a=DType(a), dtype_b=b, pipeline="preshufflev2", preshuffle=True, scheduler=scheduler)
    found = []
    for wave in arch.waves:
        tile = (wave[0] * warp[0], wave[1] * warp[1], max(128 // size_of(a), warp[2]))
        config = GEMM.rules.correct(plain.replace(wave=wave, warp_tile=warp, tile=tile), arch)
        if config.is_valid and config.config.warp_tile == warp:
            found.append(config.config)
    return min(found, key=lambda config: config.tile[0] * config.tile[1])


CASES = [
    (name, key, warp)
    for name in SHUFFLING
    for key, tiles in tilewright_arch.load(name).preshuffle_warp_tiles.items()
    for warp in tiles
]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "key", "warp"), partly(CASES, lambda case: {(case[0], case[1]), (case[0], case[2]), (case[1], case[2])})
)
@pytest.mark.extended
def test_products_with_packed_b_are_right(name: str, key: str, warp: Triple) -> None:
    target = device(name)
    runner = runner_of(name)
    a, b, _ = key.split("_")
    number = CASES.index((name, key, warp))
    rng = np.random.default_rng(number)
    inputs = {"a": of(a, (M, K)), "b": of(b, (K, N), (1, K + 3) if number % 2 else (N + 1, 1))}
    values = {item: draw(rng, desc) for item, desc in inputs.items()}
    text = str(VectorFormat(b, warp[1]))
    desc, raw = packed(runner, values["b"], inputs["b"], text, target)
    assert np.array_equal(unpack(raw, parse_packing(text, "b"), K, N), values["b"].astype(np.float64))
    problem = GEMM.parse(OperationRequest("gemm", {"a": inputs["a"], "b": desc}))
    config = with_signature(problem, kernel(target.arch, key, warp, "intrawave" if number % 3 else "default"))
    assert not GEMM.mismatches(problem, config, target), GEMM.mismatches(problem, config, target)
    memory = runner.run(GEMM.plan(problem, config, target), {"a": values["a"], "b": raw})
    truth = GEMM.reference(problem, values)["out"]
    before = poison(problem.dtype_c, truth.shape)
    result = compare(memory["out"].view, truth, problem.dtype_c, K, problem.dtype_acc, before)
    assert result.passed, f"{config.name}: {result}"


@pytest.mark.parametrize("name", SHUFFLING)
@pytest.mark.parametrize(("dtype", "m"), [("fp16", 1), ("bf16", 64), ("fp8", 4096)])
def test_a_format_is_chosen_and_kernels_read_it(name: str, dtype: str, m: int) -> None:
    target = device_of(tilewright_arch.load(name))
    pack = PACK.parse(OperationRequest("gemm_pack_b", {"b": of(dtype, (4096, 4096))}, {}, {"m": m}))
    plan = PACK.plan(pack, Selector().select(PACK, pack, target).config, target)
    out = next(item.desc for item in plan.operands if item.role is Role.OUTPUT)
    assert out.packed_bytes == 4096 * 4096 * DType(dtype).bytes
    assert isinstance(parse_packing(out.packing, "b"), VectorFormat)
    problem = GEMM.parse(OperationRequest("gemm", {"a": of(dtype, (m, 4096)), "b": out}))
    kernels = GEMM.candidates(problem, target)
    assert kernels and {(config.pipeline, config.preshuffle) for config in kernels} == {("preshufflev2", True)}
    for config in kernels:
        assert not list(plan_findings(GEMM, problem, config, target))
    details = GEMM.plan(problem, kernels[0], target).details
    assert details["alignment"]["b"] == 16


def test_what_reads_another_packing_says_so() -> None:
    other = TensorDesc(DType.FP16, (128, 64), (), packing="bpanel-fp32-nr16-vk1", packed_bytes=128 * 64 * 4)
    problem = GEMM.parse(OperationRequest("gemm", {"a": of("fp16", (32, 128)), "b": other}))
    assert GEMM.candidates(problem, device("gfx942")) == ()
    config = GemmConfig(pipeline="preshufflev2", preshuffle=True, tile=(128, 128, 64))
    assert {item.rule for item in GEMM.mismatches(problem, with_signature(problem, config), device("gfx942"))} == {
        "packing"
    }
    with pytest.raises(UnsupportedError) as caught:
        pack = PACK.parse(OperationRequest("gemm_pack_b", {"b": of("fp16", (128, 64))}))
        Selector().select(PACK, pack, device("gfx1100"))
    assert "gfx1100" in str(caught.value)


def test_sizes_of_a_packed_matrix_are_checked() -> None:
    packing = VectorFormat("fp16", 16)
    assert (packing.stride(100), packing.nbytes(100, 50), packing.values) == (128 * 16, 4 * 128 * 16 * 2, 8)
    wrong = TensorDesc(DType.FP16, (100, 50), (), packing=str(packing), packed_bytes=100)
    with pytest.raises(InvalidArgumentError) as caught:
        GEMM.parse(OperationRequest("gemm", {"a": of("fp16", (8, 100)), "b": wrong}))
    assert caught.value.rule == "packed_size"
    with pytest.raises(InvalidArgumentError):
        parse_packing("bvector-fp12-n16", "b")


def test_what_a_buffer_does_not_hold_is_not_packed_and_not_read() -> None:
    """A buffer of 2**31 bytes and more had none: the product was zero."""
    target, k = device("gfx942"), 8192
    for n, fits in ((128256, True), (131072, False)):
        pack = PACK.parse(OperationRequest("gemm_pack_b", {"b": of("bf16", (k, n))}))
        packing = VectorFormat("bf16", 16)
        b = TensorDesc(DType.BF16, (k, n), (), packing=str(packing), packed_bytes=packing.nbytes(k, n))
        problem = GEMM.parse(OperationRequest("gemm", {"a": of("bf16", (16, k)), "b": b}))
        assert bool(PACK.candidates(pack, target)) == bool(GEMM.candidates(problem, target)) == fits
        if not fits:
            for operation, asked in ((PACK, pack), (GEMM, problem)):
                with pytest.raises(UnsupportedError, match="pack ranges of its columns"):
                    Selector().select(operation, asked, target)
