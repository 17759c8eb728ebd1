"""The Hopper GEMM with its sums in named registers compiles as the shipped one does: no spills, no lost speed.

What the kernels compute, and how fast, bench/sm90_compare.py checks on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # the benchmark's description of a kernel, and of the headers that it compares

import sm90_config  # noqa: E402
from sm90_compare import replaced  # noqa: E402
from sm90_config import Config, compile_source, source_of  # noqa: E402

PINGPONG = Config(scheduler="pingpong", wave=(1, 1), tile=(128, 192, 64))
SWAPPED = Config(tile=(40, 128, 64), wave=(1, 2), swap=True, persistent=False)
SCALED = Config(scale_a="row", scale_b="column", bias="bf16")
FP8 = Config(a="fp8", b="fp8", tile=(128, 128, 128))

SAMPLE = [
    Config(bias="bf16", unary="Gelu", d=("bf16",), binary="Add"),
    PINGPONG,
    replace(SCALED, scheduler="pingpong", wave=(1, 1), tile=(128, 128, 64), d=("fp16",), binary="Add", unary="Gelu"),
    replace(SWAPPED, split_k=3, bias="bf16"),
    replace(SWAPPED, epilogue="default", grouped=True),
    Config(tile=(128, 128, 64), split_k=2, cluster_k=2, persistent=False),
    Config(stream=True),
    replace(FP8, tile=(256, 96, 128), wave=(1, 2), epilogue="default", promote=4),
    replace(FP8, scale_a="row", scale_b="column", d=("bf16",), binary="Multiply", c="fp32"),
    Config(a="int8", b="int8", c="int32", tile=(128, 224, 128), epilogue="default"),
    Config(d=("bf16", "fp32"), binary="Multiply", unary="Clamp", tile=(128, 128, 64), layout="crr"),
]


@pytest.fixture(scope="module", autouse=True)
def headers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The GEMM of sm90/named in place of the shipped one. Skips where NVIDIA's run-time compiler is not installed."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed", exc_type=ImportError)
    with mock.patch.object(sm90_config, "INCLUDE", replaced(tmp_path_factory.mktemp("named"))):
        yield


@pytest.mark.parametrize("config", SAMPLE, ids=lambda config: f"{config.a}-{config.c}-{config.label}")
def test_compiles_clean(config: Config) -> None:
    built = compile_source(source_of(config))
    assert built.warnings == (), "wgmma or setmaxnreg would not do what the template asks for"
    assert built.spills == 0
    assert 0 < built.registers <= 65536 // config.threads // 8 * 8
