"""Hopper's kernels of many rows over parts of the keys: which configurations and problems they take, what plans hand
them, that they compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import AttentionConfig, FmhaConfig
from tilewright_fmha.config.decode import decodes, splits_tiles
from tilewright_fmha.config.warp_specialised import HEADS, parts_algorithm, specialised_bytes
from tilewright_fmha.launch.splits import choose_splits
from tilewright_fmha.pipelines.candidates import fmha_candidates, fmha_mismatches
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.plan.prefix import attention_candidates, plan_attention, predict_attention
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family, FmhaDType, MaskKind, Mode
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import TensorMap
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain

ARCH = tilewright_arch.load("sm_90a")
DEVICE = DeviceInfo("cuda:0", "cuda", "one of them", ARCH, 132, 140 << 30)


def cut(hdim: tuple[int, int], **fields: Any) -> FmhaConfig:
    own = {"family": Family.SPLITKV, "dtype": FmhaDType.BF16, "hdim": hdim, "max_splits_log2": 7, "pack_gqa": True}
    return AttentionConfig(**{**own, **parts_algorithm(hdim), **fields})


def rows_over(
    rows: int, heads: tuple[int, int] = (32, 8), keys: int = 8192, items: int = 1, **attributes: Any
) -> FmhaProblem:
    """Queries of whole groups over pages, as prefixes have them: heads of a row are neighbours."""
    q = TensorDesc(
        TensorDesc.of("bf16", (1,)).dtype, (items, heads[0], rows, 128),
        (rows * heads[0] * 128, 128, heads[0] * 128, 1),
    )  # fmt: skip
    k = TensorDesc.of("bf16", (items * keys // 16, 16, heads[1], 128))
    given = {"q": q, "k": k, "v": k, "block_table": TensorDesc.of("int32", (items, keys // 16))}
    given["seqlens_k"] = TensorDesc.of("int32", (items,))
    return parse_attention(OperationRequest("attention", given, {}, attributes))


def kernels(problem: FmhaProblem) -> list[FmhaConfig]:
    return [item for item in fmha_candidates(problem, DEVICE) if splits_tiles(item)]


@pytest.fixture(scope="module")
def toolchain() -> Iterator[NvrtcToolchain]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: extra cuda")
    toolchain = NvrtcToolchain([include_dir()])
    yield toolchain
    toolchain.close()


@pytest.mark.parametrize("hdim", HEADS, ids=lambda item: str(item[0]))
def test_memory_is_what_the_template_counts(hdim: tuple[int, int], toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    config = cut(hdim, paged=True)
    assert not RULES.check(config, ARCH) and not decodes(config)
    unit = generate(config, ARCH)
    head = unit.text[: unit.text.index("TW_FMHA_WS_PARTS_KERNEL")]
    check = f"static_assert(tw::sm90::FmhaPlan<Config>::shared_bytes == {specialised_bytes(config, ARCH)});"
    probe = f'{head}\n{check}\nextern "C" __global__ void {unit.entries["main"]}() {{}}\n'
    toolchain.compile(replace(unit, text=probe), tmp_path, ARCH)


@pytest.mark.parametrize(
    "config",
    [
        cut((128, 128), paged=True, lse=True, mode=Mode.GROUP, softcap=True),
        cut((64, 64), dtype=FmhaDType.FP16, pack_gqa=False),
        cut((256, 256), paged=True, skip_min_seqlen_q=True, mode=Mode.GROUP),
    ],
    ids=lambda item: str(item.hdim[0]),
)
@pytest.mark.some(1)
def test_kernels_compile_without_spills(config: FmhaConfig, toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    assert not RULES.check(config, ARCH)
    toolchain.compile(generate(config, ARCH), tmp_path, ARCH)


@pytest.mark.parametrize(
    "fields", [{"mask": MaskKind.CAUSAL}, {"learned_sinks": True}, {"dtype": FmhaDType.BF16FP8}], ids=repr
)  # fmt: skip
def test_what_they_lack_kernels_for_few_rows_have(fields: dict[str, Any]) -> None:
    mended = RULES.correct(cut((128, 128), **fields), ARCH).config
    assert not RULES.check(mended, ARCH) and decodes(mended)


def test_heads_of_a_key_head_are_rows_of_one_tile() -> None:
    problem = rows_over(64)
    kernel = next(item for item in kernels(problem) if item.pack_gqa)
    split, combine = plan_fmha(problem, kernel, DEVICE).stages
    parts = choose_splits(problem, kernel, DEVICE)
    assert split.geometry.grid == (16 * parts, 1, 1) and parts == 8  # two tiles of each key head
    assert combine.name == "combine"
    q = next(item for item in split.args.fields if isinstance(item, TensorMap))
    assert (q.sizes, q.box) == ((128, 4, 64, 8), (64, 4, 32, 1))
    assert q.strides == (256, 32 * 256, 4 * 256)


@pytest.mark.parametrize(
    ("problem", "packed"),
    [
        (rows_over(33, (10, 2)), False),  # five heads do not divide a tile
        (rows_over(40, (16, 2), items=2), True),
        (rows_over(200, (4, 4)), False),
    ],
    ids=["five", "items", "alone"],
)
def test_tiles_have_all_heads_where_these_divide_their_rows(problem: FmhaProblem, packed: bool) -> None:
    assert {item.pack_gqa for item in kernels(problem)} == {False, True} if packed else {False}


def test_rows_of_items_that_do_not_follow_each_other_are_not_packed() -> None:
    kernel = next(item for item in kernels(rows_over(40, items=2)) if item.pack_gqa)
    apart = TensorDesc.of("bf16", (2, 32, 40, 128))
    problem = rows_over(40, items=2)
    given = {item.name: item.desc for item in problem.operands if item.name != "o"} | {"q": apart}
    found = fmha_mismatches(parse_attention(OperationRequest("attention", given, {}, {})), kernel, DEVICE)
    assert [(item.rule, item.fix) for item in found] == [("copy_strides", {"pack_gqa": False})]


@pytest.mark.parametrize("change", [{"mask": "bottom_right"}, {"causal": True}])
def test_masked_rows_have_other_kernels(change: dict[str, Any]) -> None:
    problem = rows_over(64, **change)
    assert fmha_candidates(problem, DEVICE) and not kernels(problem)


def _seconds(problem: FmhaProblem, config: FmhaConfig) -> float:
    return predict_attention(problem, config, DEVICE).seconds


@pytest.mark.parametrize(
    ("step", "wide"),
    [
        ((64, 1, 32, 8, 8192, 256), True),
        ((64, 4, 32, 8, 8192, 256), True),
        ((32, 1, 32, 32, 8192, 256), True),
        ((16, 4, 32, 8, 8192, 256), False),
    ],
)
def test_prefixes_fill_the_device(step: tuple[int, ...], wide: bool) -> None:
    """Many workgroups have the prefix, all kernels are Hopper's own, and large pools of pages change nothing."""
    batch, groups, heads, key_heads, shared, own = step
    plans = []
    for pages in (groups * shared // 16 + batch * own // 16, 1 << 20):
        given = {"q": TensorDesc.of("bf16", (batch, heads, 1, 128))}
        given |= {name: TensorDesc.of("bf16", (pages, 16, key_heads, 128)) for name in "kv"}
        for name, shape in (
            ("block_table", (batch, own // 16)), ("seqlens_k", (batch,)),
            ("prefix_table", (groups, shared // 16)), ("prefix_seqlens", (groups,)),
        ):  # fmt: skip
            given[name] = TensorDesc.of("int32", shape)
        problem = parse_attention(OperationRequest("attention", given, {}, {}))
        best = min(attention_candidates(problem, DEVICE), key=partial(_seconds, problem))
        plans.append(plan_attention(problem, best, DEVICE))
    plan, large = plans
    first, rest = (next(stage for stage in plan.stages if stage.name.startswith(name)) for name in ("prefix", "rest"))
    assert isinstance(first.config, FmhaConfig) and isinstance(rest.config, FmhaConfig)
    assert first.geometry.grid[0] >= 120 and decodes(rest.config) and first.config.pipeline == "ws"
    assert not wide or splits_tiles(first.config)
    assert [stage.config for stage in plan.stages] == [stage.config for stage in large.stages]
