"""Rules per arch: each says what it should, every configuration can be mended or is refused with a reason."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from gemm_runner import Runner, draw

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.config.block_scales import block_word, scale_shapes
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.vocabulary import Binary, Epilogue, Reduction, ScaleA, ScaleB, Switch, Unary
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()


def rules_broken(config: GemmConfig, arch: str) -> set[str]:
    return {violation.rule for violation in RULES.check(config, tilewright_arch.load(arch))}


VALID = GemmConfig()
CPU = GemmConfig(
    dtype_a=DType.FP32,
    pipeline="compv3",
    epilogue=Epilogue.DEFAULT,
    tile=(168, 2048, 512),
    wave=(1, 2, 1),
    warp_tile=(14, 32, 1),
)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("dtype_pair", {"dtype_b": "fp8"}, "gfx942"),
    ("dtype_pair", {"dtype_b": "nonsense"}, "gfx942"),
    ("dtype_pair", {"dtype_a": DType.INT32}, "gfx942"),
    ("accumulator_dtype", {"dtype_acc": "fp16"}, "gfx942"),
    ("output_dtype", {"dtype_c": "int32"}, "gfx942"),
    ("output_dtype", {"dtype_c": "fp8"}, "gfx942"),
    ("layout", {"layout": "rcc"}, "gfx942"),
    ("elementwise_operands", {"binary": Binary.ADD, "num_d_tensors": 2}, "gfx942"),
    ("elementwise_operands", {"binary": Binary.MULTI_D_ADD}, "gfx942"),
    ("elementwise_operands", {"unary": Unary.RELU, "num_d_tensors": 1}, "gfx942"),
    ("elementwise_operands", {"num_d_tensors": -1}, "gfx942"),
    ("epilogue_operand_dtypes", {"bias": "int32"}, "gfx942"),
    ("integer_output", {"dtype_a": DType.INT8, "scale_a": ScaleA.ROW}, "gfx942"),
    ("structured_sparsity", {"structured_sparsity": True}, "gfx942"),
    ("positive_sizes", {"tile": (0, 128, 32)}, "gfx942"),
    ("pipeline", {"pipeline": "compv9"}, "gfx942"),
    ("pipeline", {"preshuffle": True}, "gfx942"),
    ("pipeline", {"pipeline": "preshufflev2"}, "gfx942"),
    ("pipeline", {"preshuffle": True}, "gfx1201"),
    ("trait", {"scheduler": "interwave"}, "gfx942"),
    ("trait", {"epilogue": Epilogue.BIAS}, "gfx942"),
    ("wave_table", {"wave": (4, 4, 1)}, "gfx942"),
    ("warp_tile_table", {"warp_tile": (32, 32, 8), "dtype_a": DType.INT8}, "gfx942"),
    ("workgroup_threads", {"block_size": 128}, "gfx942"),
    ("tile_minimum", {"tile": (128, 128, 4)}, "gfx942"),
    ("tile_divisibility", {"tile": (128, 144, 32)}, "gfx942"),
    ("staging_budget", {"tile": (256, 256, 64)}, "gfx942"),
    ("preshuffle_layout", {"preshuffle": True, "pipeline": "preshufflev2", "layout": "rrr"}, "gfx942"),
    ("preshuffle_loads", {"preshuffle": True, "pipeline": "preshufflev2", "tile": (64, 128, 96)}, "gfx942"),
    ("double_buffer", {"double_buffer": Switch.OFF}, "gfx942"),
    ("accumulators_fit_registers", {"tile": (256, 512, 16), "wave": (2, 2, 1)}, "gfx942"),
    ("split_k", {"split_k": 0}, "gfx942"),
    ("split_k", {"split_k": 2, "grouped": True}, "gfx942"),
    ("batched_or_grouped", {"batched": True, "grouped": True}, "gfx942"),
    ("one_work_distribution", {"split_k": 2, "persistent": True}, "gfx942"),
    ("one_work_distribution", {"reduction": Reduction.TREE, "persistent": True}, "gfx942"),
    ("stream_k", {"reduction": Reduction.TREE, "epilogue": Epilogue.DEFAULT}, "gfx942"),
    ("stream_k", {"reduction": Reduction.TREE, "batched": True}, "gfx942"),
    ("wave_groups", {"num_wave_groups": 2}, "gfx942"),
]


@pytest.mark.parametrize(("rule", "changes", "arch"), CASES)
def test_each_rule_speaks_when_it_is_broken(rule: str, changes: dict[str, Any], arch: str) -> None:
    assert rule in rules_broken(VALID.replace(**changes), arch)


CPU_CASES: list[tuple[str, dict[str, Any]]] = [
    ("pipeline", {"pipeline": "compv4"}),
    ("trait", {"epilogue": Epilogue.CSHUFFLE}),
    ("wave_table", {"wave": (1, 5, 1)}),
    ("workgroup_threads", {"wave": (16, 16, 1)}),
    ("warp_tile_table", {"warp_tile": (14, 32, 2)}),
    ("accumulators_fit_registers", {"warp_tile": (16, 32, 1)}),
    ("tile_divisibility", {"tile": (169, 2048, 512)}),
    ("staging_budget", {"tile": (14 * 64, 2048, 4096)}),
    ("shared_block", {"tile": (168, 32768, 512)}),
    ("stream_k", {"reduction": Reduction.ATOMIC}),
    ("transposed_fragments", {"transpose_c": True}),
    ("cpu_waves", {"wave": (1, 2, 2)}),
]


@pytest.mark.parametrize(("rule", "changes"), CPU_CASES)
def test_each_rule_of_cpus_speaks_when_it_is_broken(rule: str, changes: dict[str, Any]) -> None:
    assert not rules_broken(CPU, "x86-64-v4")
    assert rule in rules_broken(CPU.replace(**changes), "x86-64-v4")


def test_tables_are_looked_up_with_the_accumulator_in_the_key() -> None:
    # The original asked for fp16_fp16_fp16, found nothing, and fell back to two tiles of its own.
    arch = tilewright_arch.load("gfx942")
    for tile in arch.warp_tiles["fp16_fp16_fp32"]:
        broken = RULES.check(VALID.replace(warp_tile=tile), arch)
        assert "warp_tile_table" not in {violation.rule for violation in broken}
    assert "warp_tile_table" in rules_broken(VALID.replace(warp_tile=(16, 16, 4)), "gfx942")


def test_budgets_follow_the_arch_not_a_constant() -> None:
    big = VALID.replace(tile=(256, 256, 64))
    assert "staging_budget" in rules_broken(big, "gfx942")
    assert not rules_broken(big, "gfx950")


def test_rules_and_fixes_are_deterministic(arch: ArchSpec) -> None:
    broken = VALID.replace(tile=(100, 100, 100), wave=(3, 3, 3), pipeline="compv9", layout="xyz")
    assert RULES.check(broken, arch) == RULES.check(broken, arch)
    assert RULES.correct(broken, arch) == RULES.correct(broken, arch)


# ---- the stress test ----

SIZES = [0, 1, 4, 6, 8, 14, 16, 24, 32, 48, 64, 96, 128, 168, 192, 256, 512, 2048, 65535, 100000]
DTYPES = [*map(str, DType), "nonsense"]
SEEDS = {60: 18, 1000: 300}
"""Configurations that are drawn, and how many of them can be mended at the least."""


def random_configuration(seed: int, arch: ArchSpec) -> GemmConfig:
    """Anything that a user may write, with a bias towards words that the arch knows."""
    rng = random.Random(seed)
    pick = rng.choice
    keys = [tile for tiles in arch.warp_tiles.values() for tile in tiles]

    def triple(sizes: list[int]) -> tuple[int, int, int]:
        return pick(sizes), pick(sizes), pick(sizes)

    def rarely(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.25 else default

    return GemmConfig(
        dtype_a=pick(list(DType)),
        layout=pick(["rcr", "rrr", "crr", "ccr", "rcc", "", "abcd"]),
        pipeline=pick([*arch.pipelines, "compv4", "nonsense"]),
        epilogue=pick(list(Epilogue)),
        scheduler=pick(["intrawave", "interwave", "auto", "cooperative", "pingpong"]),
        pad_m=pick([True, False]),
        persistent=pick([True, False]),
        tile=triple(SIZES),
        wave=pick([pick(arch.waves), triple([1, 2, 3, 4, 8]), triple(SIZES)]),
        warp_tile=pick([pick(keys), triple(SIZES)]),
        dtype_b=pick(["", "", "", "fp8", "bf8", *DTYPES]),
        dtype_c=rarely(pick(DTYPES), ""),
        dtype_acc=rarely(pick(DTYPES), ""),
        structured_sparsity=rarely(True, False),
        binary=pick(list(Binary)),
        num_d_tensors=pick([-1, 0, 0, 1, 2, 3, 40]),
        dtype_d=tuple(pick(DTYPES) for _ in range(pick([0, 0, 1, 2]))),
        unary=pick(list(Unary)),
        bias=rarely(pick(DTYPES), ""),
        scale_a=pick(list(ScaleA)),
        scale_b=pick(list(ScaleB)),
        split_k=pick([-1, 0, 1, 1, 2, 300]),
        batched=pick([True, False]),
        grouped=pick([True, False]),
        reduction=pick(list(Reduction)),
        preshuffle=pick([True, False]),
        block_size=pick([-1, 0, 1, 64, 128, 256]),
        num_wave_groups=pick([-1, 0, 1, 2, 3]),
        double_buffer=pick(list(Switch)),
        transpose_c=pick([True, False]),
        cluster=rarely(pick([(2, 1, 1), (1, 2, 1), (2, 2, 1), triple(SIZES)]), (1, 1, 1)),
        stages=pick([-1, 0, 0, 2, 4, 100]),
        promote=pick([-1, 0, 0, 1, 4, 100]),
    )


def mended(seed: int, arch: ArchSpec) -> bool:
    """Whether a random configuration could be mended; what could not must be beyond mending."""
    correction = RULES.correct(random_configuration(seed, arch), arch)
    assert correction.config.name
    assert all(violation.reason and violation.rule for violation in correction.remaining)
    # Only what the chip cannot multiply at all is beyond mending.
    broken = {violation.rule for violation in correction.remaining}
    assert not broken or "dtype_pair" in broken, correction.remaining
    return correction.is_valid


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.exhaustive])], ids="{}-drawn".format
)
def test_random_configurations_are_mended_or_refused_with_a_reason(count: int, arch: ArchSpec) -> None:
    first = zlib.crc32(arch.name.encode())  # others for every arch
    assert sum(mended(first + index, arch) for index in range(count)) >= SEEDS[count]


@pytest.mark.extended
def test_a_sample_of_mended_configurations_compiles_and_is_right(
    runner: Runner, cpu: ArchSpec, device: DeviceInfo
) -> None:
    found: dict[GemmConfig, None] = {}
    for seed in range(200):
        drawn = random_configuration(seed, cpu).replace(preshuffle=False)
        few = drawn.replace(num_d_tensors=min(drawn.num_d_tensors, 3), dtype_d=(), pad_m=True)
        correction = RULES.correct(few, cpu)
        # Weights of 4 bits and exponents of blocks are operands of their own: test_int4.py and test_exponent_scales.py.
        own = correction.config.int4 or correction.config.scale_b is ScaleB.BLOCK_1X32
        if correction.is_valid and correction.config.waves <= 8 and not own:
            found[correction.config] = None
    sample = list(found)[:12]
    assert len(sample) == 12
    runner.prepare(sample)
    for config in sample:
        run_configuration(runner, device, config)


def run_configuration(runner: Runner, device: DeviceInfo, config: GemmConfig) -> None:
    """A problem made to fit the configuration, run and compared."""
    import numpy as np

    m, n, k = 37, 53, 90
    rows, columns = config.layout[0], config.layout[1]
    inputs = {
        "a": TensorDesc.of(config.a, (m, k), (k, 1) if rows == "r" else (1, m)),
        "b": TensorDesc.of(config.b, (k, n), (n, 1) if columns == "r" else (1, k)),
    }
    if config.bias:
        inputs["bias"] = TensorDesc.of(config.bias, (n,))
    inputs |= {f"d[{index}]": TensorDesc.of(dtype, (m, n)) for index, dtype in enumerate(config.d)}
    attributes: dict[str, Any] = {"out_dtype": config.c, "unary": config.unary.value}
    if config.block_scaled:
        shapes = scale_shapes(config.scale_b, m, n, k)
        inputs |= {f"scale_{side}": TensorDesc.of("fp32", shape) for side, shape in zip("ab", shapes, strict=True)}
        attributes["scale_block"] = block_word(config.scale_a, config.scale_b).value
    if config.scale_a in (ScaleA.ROW, ScaleA.TENSOR):
        inputs["scale_a"] = TensorDesc.of("fp32", (m,) if config.scale_a is ScaleA.ROW else ())
    if config.scale_b in (ScaleB.COLUMN, ScaleB.TENSOR):
        inputs["scale_b"] = TensorDesc.of("fp32", (n,) if config.scale_b is ScaleB.COLUMN else ())
    if config.num_d_tensors:
        attributes["binary"] = config.binary.value
    if config.unary is Unary.CLAMP:
        attributes["clamp_lo"] = -1.0
    problem = GEMM.parse(OperationRequest("gemm", inputs, {}, attributes))
    many = DeviceInfo(device.id, device.kind, device.name, device.arch, 64, device.memory_bytes)
    mismatches = GEMM.mismatches(problem, config, many)
    assert not mismatches, mismatches
    plan = GEMM.plan(problem, config, many)
    rng = np.random.default_rng(3)
    drawn = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    out = runner.run(plan, drawn)["out"].view
    result = compare(out, GEMM.reference(problem, drawn)["out"], problem.dtype_c, k, problem.dtype_acc)
    assert result.passed, f"{config.name}: {result}"
