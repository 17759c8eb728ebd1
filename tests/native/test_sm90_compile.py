"""The Hopper GEMM template compiles: without a GPU, spills or performance warnings, within its registers and memory.

Every schedule, type, layout and epilogue is instantiated at least once. What the kernels compute is checked on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tilewright_arch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # the benchmark's description of a kernel, which the tests on GPUs share

from sm90.config import BARRIER_BYTES, SHARED_BYTES, Config, compile_source, source_of  # noqa: E402

PINGPONG = Config(scheduler="pingpong", wave=(1, 1), tile=(64, 256, 64))
DECODE = Config(tile=(16, 64, 128), wave=(1, 1), swap=True, persistent=False)
FP8 = Config(a="fp8", b="fp8", tile=(128, 128, 128))
NARROW = Config(tile=(40, 128, 64), wave=(1, 2), swap=True, persistent=False)
SCALES = Config(scale_a="row", scale_b="column", bias="bf16")
INT8 = Config(a="int8", b="int8", c="int32", tile=(128, 128, 128))

SAMPLE = [
    Config(cluster=(2, 1)),
    Config(tile=(256, 128, 64), cluster=(1, 2), layout="crr", epilogue="default"),
    Config(tile=(256, 192, 64)),
    Config(tile=(128, 128, 64), layout="rrr", cluster=(2, 2), persistent=False),
    Config(tile=(192, 128, 64), wave=(3, 1)),
    Config(tile=(256, 128, 64), wave=(4, 1), layout="ccr"),
    Config(a="fp16", b="fp16", c="fp32", tile=(64, 256, 64), wave=(1, 2)),
    PINGPONG,
    replace(PINGPONG, tile=(128, 192, 64), cluster=(2, 1)),
    replace(PINGPONG, tile=(64, 128, 64), split_k=2),
    DECODE,
    replace(DECODE, split_k=4, epilogue="default"),
    replace(DECODE, split_k=2, cluster_k=2),
    Config(tile=(128, 64, 64), split_k=4, cluster_k=4, persistent=False),
    replace(DECODE, tile=(64, 128, 64), wave=(1, 2), cluster=(1, 2), c="fp32"),
    replace(DECODE, tile=(24, 128, 64), wave=(1, 2), grouped=True),
    Config(stream=True),
    Config(tile=(128, 128, 64), stream=True, cluster=(2, 1)),
    Config(tile=(128, 128, 64), split_k=3),
    Config(grouped=True),
    replace(FP8, b="bf8", scale_a="row", scale_b="column"),
    replace(FP8, a="bf8", promote=4),
    replace(FP8, a="bf8", b="bf8", c="fp16", scale_a="tensor", scale_b="tensor"),
    INT8,
    replace(INT8, epilogue="default", split_k=2),
    replace(INT8, swap=True, tile=(16, 64, 128), wave=(1, 1), c="bf16", scale_a="row", scale_b="column"),
    Config(bias="bf16", unary="Gelu", tile=(128, 128, 64)),
    replace(PINGPONG, tile=(128, 128, 64), d=("fp16",), binary="Add", c="fp32"),
    Config(d=("bf16", "fp32"), binary="Multiply", unary="Clamp", tile=(128, 128, 64)),
    Config(bias="bf16", unary="Gelu", d=("bf16",), binary="Add"),
    replace(SCALES, scheduler="pingpong", wave=(1, 1), tile=(128, 128, 64), d=("fp16",), binary="Add", unary="Gelu"),
    replace(NARROW, split_k=3, bias="bf16"),
    replace(NARROW, epilogue="default", grouped=True),
    Config(tile=(128, 128, 64), split_k=2, cluster_k=2, persistent=False),
    replace(FP8, tile=(256, 96, 128), wave=(1, 2), epilogue="default", promote=4),
    replace(FP8, scale_a="row", scale_b="column", d=("bf16",), binary="Multiply", c="fp32"),
    Config(a="int8", b="int8", c="int32", tile=(128, 224, 128), epilogue="default"),
    Config(d=("bf16", "fp32"), binary="Multiply", unary="Clamp", tile=(128, 128, 64), layout="crr"),
]


def identifier(config: Config) -> str:
    return f"{config.a}-{config.b}-{config.c}-{config.label}"


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    """Skips where NVIDIA's run-time compiler is not installed."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed", exc_type=ImportError)
    try:
        status, _, _ = nvrtc.nvrtcVersion()
    except Exception as missing:  # its own exception types, by version
        pytest.skip(f"NVRTC cannot be loaded: {missing}")
    assert int(status) == 0


def test_registers_are_shared_out_as_the_arch_says() -> None:
    """Rules count with the figures of the spec, kernels run with those of the header."""
    splits = tilewright_arch.load("sm_90a").pipeline("ws").register_splits
    assert len(splits) > 2
    checks = "".join(
        f"static_assert(tw::sm90::RegisterShares<{split.consumers}>::consumer == {split.consumer});\n"
        + f"static_assert(tw::sm90::RegisterShares<{split.consumers}>::producer == {split.producer});\n"
        * (split.consumers > 1)  # one consumer takes nothing from the producer
        for split in splits
    )
    include = '#include "tilewright/sm90/blocks/registers.hpp"\n'
    compile_source(include + checks + 'extern "C" __global__ void tw_kernel() {}\n')
    with pytest.raises(RuntimeError, match="static assertion"):
        compile_source(include + checks.replace("== ", "!= "))


@pytest.mark.parametrize("config", SAMPLE, ids=identifier)
@pytest.mark.some(6)
def test_compiles_clean(config: Config) -> None:
    built = compile_source(source_of(config))
    assert built.warnings == (), "wgmma or setmaxnreg would not do what the template asks for"
    assert built.spills == 0
    # The kernel starts with equal shares of the 64 Ki registers.
    assert 0 < built.registers <= 65536 // config.threads // 8 * 8
    assert built.cubin.startswith(b"\x7fELF")
    assert config.stage_count >= 3, "too few stages to hide the latency of memory"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Config(tile=(96, 128, 64)), "a consumer computes whole pieces of 64 rows"),
        (Config(tile=(128, 72, 64)), "staged rows of C are whole lines of 128 bytes"),
        (replace(FP8, layout="rrr"), "8-bit operands are K-major"),
        (Config(tile=(256, 256, 64)), "too many accumulators"),
        (Config(stages=1), "one stage is filled while another is used"),
        (Config(stages=5), "too much shared memory"),
        (replace(INT8, tile=(128, 40, 128), epilogue="default"), "int8: N is 8, 24 or a multiple of 16"),
        (replace(PINGPONG, persistent=False), "pingpong is persistent"),
        (Config(tile=(128, 128, 64), split_k=2, cluster_k=2), "all slices of a tile in one cluster, not persistent"),
        (Config(stream=True, split_k=2), "Stream-K: one task, persistent, no split-K"),
    ],
)
def test_refuses_what_cannot_work(config: Config, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        compile_source(source_of(config))


def test_shared_memory_is_filled_but_not_exceeded() -> None:
    for config in SAMPLE:
        assert config.shared_bytes <= SHARED_BYTES
        room = SHARED_BYTES - config.shared_bytes
        assert room < config.stage_bytes or config.stage_count == 24
        rest = config.staging_bytes + config.gather_bytes + BARRIER_BYTES
        assert config.shared_bytes == config.stage_count * config.stage_bytes + rest
