"""Latent caches, whose keys hold their values: problems, plans, and Hopper's own kernels for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import AttentionConfig, FmhaConfig
from tilewright_fmha.config.latent import (
    LATENT_HEADS,
    is_latent,
    latent_algorithms,
    latent_by_rows,
    latent_bytes,
    latent_threads,
)
from tilewright_fmha.launch.splits import choose_splits
from tilewright_fmha.pipelines.candidates import fmha_candidates, fmha_mismatches, fmha_refusal
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.plan.plan import STATUS_BYTES, plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family, FmhaDType, MaskKind, Scheduling
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import Pointer, Struct, TensorMap
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain

ARCH = tilewright_arch.load("sm_90a")
DEVICE = DeviceInfo("cuda:0", "cuda", "one of them", ARCH, 132, 140 << 30)
KEYS, VALUES = LATENT_HEADS


def step(
    heads: int = 16, batch: int = 64, keys: int = 4096, queries: int = 1, page: int = 64, hdim: int = KEYS,
    values: int = VALUES, dtype: str = "bf16", v: TensorDesc | None = None, **attributes: Any,
) -> FmhaProblem:  # fmt: skip
    """A step of decoding over a latent cache."""
    inputs = {"q": TensorDesc.of(dtype, (batch, heads, queries, hdim))}
    if page:
        inputs["k"] = TensorDesc.of(dtype, (batch * keys // page, page, 1, hdim))
        inputs["block_table"] = TensorDesc.of("int32", (batch, keys // page))
        inputs["seqlens_k"] = TensorDesc.of("int32", (batch,))
    else:
        inputs["k"] = TensorDesc.of(dtype, (batch, 1, keys, hdim))
    if v is not None:
        inputs["v"] = v
    words = {"head_dim_v": values, **attributes} if values else attributes
    return parse_attention(OperationRequest("attention", inputs, {}, words))


def kernel(problem: FmhaProblem) -> FmhaConfig:
    (found,) = fmha_candidates(problem, DEVICE)
    return found


def cut(rows: int, **fields: Any) -> FmhaConfig:
    item = next(item for item in latent_algorithms() if item["tile"][0] == rows)
    own = {"family": Family.SPLITKV, "dtype": FmhaDType.BF16, "hdim": LATENT_HEADS, "max_splits_log2": 7}
    return AttentionConfig(**{**own, **item, **fields})


@pytest.fixture(scope="module")
def toolchain() -> Iterator[NvrtcToolchain]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: extra cuda")
    toolchain = NvrtcToolchain([include_dir()])
    yield toolchain
    toolchain.close()


# ---- problems ----


def test_values_are_no_operand_and_count_no_bytes() -> None:
    problem = step()
    assert problem.v_in_k and not problem.has("v") and problem.source("v") == "k"
    assert [item.name for item in problem.operands][:2] == ["q", "k"]
    assert (problem.hdim_q, problem.hdim_v) == (KEYS, VALUES)
    keys = 64 * 4096 * KEYS * 2
    assert keys < problem.bytes_moved < keys * 1.02
    assert problem.describe()["v_in_k"] == "on"
    assert problem.operand("v") is problem.operand("k")


@pytest.mark.parametrize(
    ("words", "field", "rule"),
    [
        ({"values": 0}, "v", "operand_missing"),
        ({"values": 577}, "attributes.head_dim_v", "latent_values"),
        ({"kv_layout": "vectorized"}, "attributes.kv_layout", "latent_values"),
        ({"v": TensorDesc.of("bf16", (4096, 64, 1, VALUES))}, "attributes.head_dim_v", "latent_values"),
    ],
)
def test_what_says_two_things_or_none_is_refused(words: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        step(**words)
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix


@pytest.mark.parametrize("arch", ["sm_80", "gfx942", "gfx1201"])
def test_gpus_without_such_kernels_take_the_values_part_by_part(arch: str) -> None:
    info = device_of(tilewright_arch.load(arch))
    config = next(iter(fmha_candidates(step(), info)))
    assert config.family is Family.PAGEDKV and config.hdim[1] <= 256
    names = [stage.name for stage in plan_fmha(step(), config, info).stages]
    assert names == ["open_scores", *(f"values_{number}" for number in range(-(-VALUES // config.hdim[1])))]
    refusal = fmha_refusal(step(num_splits=4), info)
    assert refusal is not None and refusal.rule == "hdim_multiple_of_8" and "several parts" in refusal.reason


# ---- kernels ----


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_memory_and_threads_are_what_the_template_counts(rows: int, toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    config = cut(rows)
    assert not RULES.check(config, ARCH)
    name, unit = "LatentRowsPlan" if latent_by_rows(config) else "FmhaLatentPlan", generate(config, ARCH)
    plan = f"tw::sm90::{name}<Config>"
    assert latent_bytes(config, ARCH) <= ARCH.lds_bytes
    head = unit.text[: unit.text.index("TW_FMHA_WS_LATENT_")]
    checks = f"static_assert({plan}::shared_bytes == {latent_bytes(config, ARCH)});\n"
    checks += f"static_assert({plan}::threads == {latent_threads(config)});"
    probe = f'{head}\n{checks}\nextern "C" __global__ void {unit.entries["main"]}() {{}}\n'
    toolchain.compile(replace(unit, text=probe), tmp_path, ARCH)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"tile": (12, 64, KEYS, VALUES, 64, KEYS)}, {"m0": 16}),
        ({"tile": (16, 128, KEYS, VALUES, 128, KEYS)}, {"n0": 64}),
        ({"stages": 3}, {"stages": 0}),
        ({"stages": 12}, {"stages": 0}),
        ({"persistent": False}, {"persistent": True}),
        ({"pack_gqa": False}, {"pack_gqa": True}),
        ({"scheduler": Scheduling.PINGPONG}, {"scheduler": Scheduling.DEFAULT}),
        ({"dtype": FmhaDType.BF16FP8}, {"dtype": FmhaDType.BF16}),
    ],
)
def test_what_no_kernel_has_is_corrected(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = cut(16).replace(**fields)
    assert RULES.check(config, ARCH)
    mended = RULES.correct(config, ARCH).config
    assert not RULES.check(mended, ARCH) and is_latent(mended)
    assert {name: getattr(mended, name) for name in wanted} == wanted


@pytest.mark.parametrize(("heads", "queries", "rows"), [(1, 1, 8), (16, 1, 16), (16, 2, 32), (40, 1, 64), (128, 4, 64)])
def test_the_fewest_rows_that_hold_all_heads(heads: int, queries: int, rows: int) -> None:
    config = kernel(step(heads, queries=queries, causal=True, mask_align="bottom_right"))
    assert is_latent(config) and config.m0 == rows and config.mask is MaskKind.CAUSAL


def test_many_rows_fill_those_of_an_instruction() -> None:
    few, many = kernel(step(32)), kernel(step(33))
    assert not latent_by_rows(few)
    assert latent_by_rows(many) and many.warp_tile[:5] == (64, 64, 16, 64, VALUES // 2)
    assert "sm90/fmha/latent.hpp" in generate(few, ARCH).text and "sm90/latent/latent.hpp" in generate(many, ARCH).text
    mended = RULES.correct(many.replace(stages=6), ARCH).config
    assert mended == many


def test_kernels_do_not_take_values_of_their_own() -> None:
    config = cut(16, paged=True)
    assert not fmha_mismatches(step(), config, DEVICE)
    other = step(values=0, v=TensorDesc.of("bf16", (4096, 64, 1, VALUES)))
    assert [item.rule for item in fmha_mismatches(other, config, DEVICE)] == ["latent_values"]
    assert {item.family for item in fmha_candidates(other, DEVICE)} == {Family.PAGEDKV}  # part by part


# ---- plans ----


def pointers(args: Any) -> list[str]:
    if isinstance(args, Pointer):
        return [args.operand]
    return [name for item in args.fields for name in pointers(item)] if isinstance(args, Struct) else []


def test_a_plan_reads_keys_twice_and_no_values() -> None:
    problem = step()
    plan = plan_fmha(problem, kernel(problem), DEVICE)
    (stage,) = plan.stages
    maps = [item for item in stage.args.fields if isinstance(item, TensorMap)]
    assert [item.operand for item in maps] == ["q", "k", "k", "o"]
    assert "v" not in pointers(stage.args) and pointers(stage.args).count("k") == 2


@pytest.mark.parametrize(("batch", "heads", "stages", "tickets"), [(64, 16, 1, 64), (64, 64, 1, 128), (128, 16, 1, 0)])
def test_few_parts_are_added_by_the_kernel(batch: int, heads: int, stages: int, tickets: int) -> None:
    problem = step(heads, batch)
    config = kernel(problem)
    plan = plan_fmha(problem, config, DEVICE)
    assert len(plan.stages) == stages and plan.counter_bytes == STATUS_BYTES + 4 * tickets
    assert (choose_splits(problem, config, DEVICE) == 1) is (tickets == 0)


def test_many_parts_are_added_by_a_second_stage() -> None:
    problem = step(batch=1, keys=65536)
    config = kernel(problem)
    plan = plan_fmha(problem, config, DEVICE)
    assert [stage.name for stage in plan.stages] == ["split", "combine"]
    assert choose_splits(problem, config, DEVICE) > 8 and plan.counter_bytes == STATUS_BYTES
