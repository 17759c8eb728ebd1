"""How gradients are cut on GPUs: what the planner says of a tile is what the template declares, and layouts of waves
that it does not know are refused with one that it does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_kernels import INCLUDE, compiler
from fmha_requests import backward_of, desc

import tilewright_arch
from tilewright_fmha.codegen import render_gpu
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.footprint.gpu import shared_bytes
from tilewright_fmha.footprint.tile_products import threads_of
from tilewright_fmha.pipelines.candidates import fmha_candidates
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.plan.backward import choose_slices
from tilewright_fmha.problem.parse.attention import parse_backward
from tilewright_fmha.vocabulary import ATTENTION_BACKWARD
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_server.engine.types import EngineOptions

HOPPER = tilewright_arch.load("sm_90a")
HEADS = (32, 64, 80, 96, 128, 160, 192, 256)


def cuts(dtype: str) -> Iterator[FmhaConfig]:
    for hdim in HEADS:
        rows = desc(dtype, 2, 4, 70, hdim)
        names = {**backward_of(dtype), **dict.fromkeys(("do", "q", "k", "v", "o"), rows), "lse": desc("fp32", 2, 4, 70)}
        problem = parse_backward(OperationRequest(ATTENTION_BACKWARD, names, {}, {}))
        yield from (item for item in fmha_candidates(problem, device_of(HOPPER)) if item.pipeline == "bwd")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_shared_memory_and_threads_are_the_template_s(dtype: str, tmp_path: Path) -> None:
    found = list(cuts(dtype))
    assert {item.hdim[0] for item in found} == set(HEADS), "every head has a kernel"
    text = ""
    for index, config in enumerate(found):
        unit = render_gpu(config, HOPPER).text.partition("TW_FMHA_BACKWARD_KERNEL")[0]
        text += unit.replace("struct Config", f"struct Config{index}")
        kind = f"tw::gpu::FmhaBackward<Config{index}>"
        text += f'static_assert({kind}::shared_bytes == {shared_bytes(config, HOPPER)}, "{config.name}");\n'
        text += f'static_assert({kind}::threads == {threads_of(config, HOPPER)}, "{config.name}");\n'
    source = tmp_path / "asserts.cpp"
    source.write_text(text)
    flags = ("-std=c++17", "-fsyntax-only", "-DTW_PLATFORM_HOST", "-DTW_HOST_WAVE=32", "-Wno-unknown-pragmas")
    done = subprocess.run([*compiler(), *flags, f"-I{INCLUDE}", str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def large(batch: int, heads: int, heads_k: int, rows: int) -> OperationRequest:
    """Gradients in bf16 of heads of 128."""
    queries, keys = desc("bf16", batch, heads, rows, 128), desc("bf16", batch, heads_k, rows, 128)
    names = dict.fromkeys(("do", "q", "o"), queries) | dict.fromkeys(("k", "v"), keys)
    inputs = {name: names.get(name, item) for name, item in backward_of("bf16").items()}
    return OperationRequest(ATTENTION_BACKWARD, {**inputs, "lse": desc("fp32", batch, heads, rows)}, {}, {})


@pytest.mark.parametrize("sizes", [(1, 32, 8, 16384), (2, 32, 8, 16384), (1, 28, 4, 16384), (1, 64, 8, 32768)])
def test_slices_of_dq_leave_room_for_other_plans(sizes: tuple[int, int, int, int], tmp_path: Path) -> None:
    """What is asked for by default fits into what a server gives by default."""
    problem, device = parse_backward(large(*sizes)), device_of(HOPPER)
    config = next(item for item in fmha_candidates(problem, device) if item.deterministic)
    slices = choose_slices(problem, config, device)
    assert slices >= 1
    assert slices * 4 * 128 * sizes[0] * sizes[1] * sizes[3] <= EngineOptions(tmp_path).workspace_bytes // 2


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "wave", [(2, 2, 1, 4, 1, 1, 2, 2, 1), (1, 4, 1, 4, 1, 1, 4, 2, 1), (2, 4, 1, 2, 4, 1, 8, 1, 1)]
)
def test_other_layouts_of_waves_are_refused(dtype: str, wave: tuple[int, ...]) -> None:
    config = next(item for item in cuts(dtype) if item.hdim == (128, 128)).replace(wave=wave)
    broken = [item for item in RULES.check(config, HOPPER) if item.rule == "wave_table"]
    assert broken, "the rule says so"
    mended = config.replace(**broken[0].fix)
    assert not [item for item in RULES.check(mended, HOPPER) if item.rule == "wave_table"]
