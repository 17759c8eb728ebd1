"""Hopper's specialised kernels for few rows of queries: which configurations and problems they take, what plans hand
them, that all compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import AttentionConfig, FmhaConfig
from tilewright_fmha.config.decode import DECODE_THREADS, decode_algorithms, decode_bytes, decode_resident, decodes
from tilewright_fmha.launch.splits import choose_splits, shares_keys
from tilewright_fmha.pipelines.candidates import fmha_candidates, fmha_mismatches, predict_fmha
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.plan.plan import STATUS_BYTES, plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import BiasKind, Family, FmhaDType, MaskKind, Mode, QScale, Scheduling, VLayout
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import TensorMap
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain

ARCH = tilewright_arch.load("sm_90a")
DEVICE = DeviceInfo("cuda:0", "cuda", "one of them", ARCH, 132, 140 << 30)
HEADS = {FmhaDType.BF16: ((64, 64), (128, 128), (192, 128), (256, 256)), FmhaDType.BF16FP8: ((64, 64), (128, 128))}
ALL: dict[str, Any] = {
    "mask": MaskKind.WINDOW, "sink": True, "softcap": True, "lse": True, "learned_sinks": True, "mode": Mode.GROUP,
    "skip_min_seqlen_q": True, "paged": True,
}  # fmt: skip


def cut(dtype: FmhaDType, hdim: tuple[int, int], place: int = 0, **fields: Any) -> FmhaConfig:
    item = list(decode_algorithms(hdim, dtype))[place]
    return AttentionConfig(**{"family": Family.SPLITKV, "dtype": dtype, "hdim": hdim, **item, **fields})


CUTS = [
    cut(dtype, hdim, place)
    for dtype, every in HEADS.items()
    for hdim in every
    for place in range(len(list(decode_algorithms(hdim, dtype))))
]


def step(
    heads: tuple[int, int] = (32, 8),
    keys: int = 8192,
    hdim: int = 128,
    cache: str = "bf16",
    batch: int = 4,
    queries: int = 1,
    page: int = 0,
    inputs: dict[str, TensorDesc] | None = None,
    **attributes: Any,
) -> FmhaProblem:
    """A step of decoding."""
    kept = (batch, heads[1], keys, hdim)
    found = dict(inputs or {})
    if page:
        kept = (batch * keys // page, page, heads[1], hdim)
        found["block_table"] = TensorDesc.of("int32", (batch, keys // page))
        found["seqlens_k"] = TensorDesc.of("int32", (batch,))
    q = TensorDesc.of("bf16", (batch, heads[0], queries, hdim))
    k = TensorDesc.of(cache, kept)
    return parse_attention(OperationRequest("attention", {"q": q, "k": k, "v": k, **found}, {}, attributes))


def kernels(problem: FmhaProblem) -> list[FmhaConfig]:
    return [item for item in fmha_candidates(problem, DEVICE) if decodes(item)]


@pytest.fixture(scope="module")
def toolchain() -> Iterator[NvrtcToolchain]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: extra cuda")
    toolchain = NvrtcToolchain([include_dir()])
    yield toolchain
    toolchain.close()


# ---- configurations ----


@pytest.mark.parametrize("config", CUTS, ids=lambda item: f"{item.dtype}-{item.hdim[0]}-{item.m0}x{item.n0}")
def test_every_cut_is_valid_and_its_memory_is_what_the_template_counts(
    config: FmhaConfig, toolchain: NvrtcToolchain, tmp_path: Path
) -> None:
    assert not RULES.check(config, ARCH)
    plan, unit = "tw::sm90::FmhaDecodePlan<Config>", generate(config, ARCH)
    wanted = (decode_bytes(config, ARCH), decode_resident(config), DECODE_THREADS)
    names = ("shared_bytes", "resident", "threads")
    checks = "\n".join(f"static_assert({plan}::{name} == {value});" for name, value in zip(names, wanted, strict=True))
    head = unit.text[: unit.text.index("TW_FMHA_WS_DECODE_KERNEL")]
    probe = f'{head}\n{checks}\nextern "C" __global__ void {unit.entries["main"]}() {{}}\n'
    toolchain.compile(replace(unit, text=probe), tmp_path, ARCH)


@pytest.mark.parametrize(
    "config",
    [
        cut(FmhaDType.BF16, (128, 128)),
        cut(FmhaDType.FP16, (64, 64), 1, **ALL),
        cut(FmhaDType.BF16, (256, 256), 2, **ALL),
        cut(FmhaDType.BF16FP8, (64, 64), mask=MaskKind.CAUSAL, lse=True),
        cut(FmhaDType.BF16FP8, (128, 128), 1, qscale=QScale.PERTENSOR, **ALL),
    ],
    ids=lambda item: f"{item.dtype}-{item.hdim[0]}-{item.m0}",
)
@pytest.mark.some(1)
def test_kernels_that_the_rules_take_compile_without_spills(
    config: FmhaConfig, toolchain: NvrtcToolchain, tmp_path: Path
) -> None:
    assert not RULES.check(config, ARCH)
    toolchain.compile(generate(config, ARCH), tmp_path, ARCH)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"hdim": (96, 96)}, {"hdim": (128, 128)}),
        ({"tile": (12, 64, 128, 128, 64, 128)}, {"m0": 16}),
        ({"tile": (8, 100, 128, 128, 100, 128)}, {"n0": 64}),
        ({"wave": (2, 1, 1, 2, 1, 1, 1, 1, 1)}, {"waves": 1}),
        ({"stages": 9}, {"stages": 0}),
        ({"persistent": False}, {"persistent": True}),
        ({"pack_gqa": False}, {"pack_gqa": True}),
        ({"scheduler": Scheduling.PINGPONG}, {"scheduler": Scheduling.DEFAULT}),
    ],
)
def test_what_no_kernel_has_is_corrected(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = cut(FmhaDType.BF16, (128, 128)).replace(**fields)
    assert RULES.check(config, ARCH)
    mended = RULES.correct(config, ARCH).config
    assert not RULES.check(mended, ARCH) and decodes(mended)
    assert {name: getattr(mended, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"bias": BiasKind.ALIBI}, "template_exists"),
        ({"dropout": True}, "template_exists"),
        ({"qscale": QScale.BLOCKSCALE, "dtype": FmhaDType.BF16FP8}, "template_exists"),
        ({"v_layout": VLayout.VC}, "column_v_template"),
        ({"dtype": FmhaDType.FP8BF16}, "dtype_template"),
        ({"dtype": FmhaDType.FP32}, "dtype_template"),
    ],
)
def test_features_that_it_lacks_are_refused_by_name(fields: dict[str, Any], rule: str) -> None:
    found = RULES.check(cut(FmhaDType.BF16, (128, 128)).replace(**fields), ARCH)
    assert rule in {violation.rule for violation in found}


# ---- problems ----


@pytest.mark.parametrize(
    ("heads", "queries", "rows"),
    [((32, 8), 1, 8), ((8, 8), 1, 8), ((32, 2), 1, 16), ((32, 2), 2, 32), ((32, 2), 4, 32)],
)
def test_tiles_are_the_smallest_that_hold_all_heads_of_a_key_head(
    heads: tuple[int, int], queries: int, rows: int
) -> None:
    assert [item.m0 for item in kernels(step(heads, queries=queries))] == [rows]


@pytest.mark.parametrize(("hdim", "held"), [(40, 64), (80, 128), (128, 128), (200, 256)])
def test_heads_are_the_next_larger_ones(hdim: int, held: int) -> None:
    assert [item.hdim for item in kernels(step(hdim=hdim))] == [(held, held)]


@pytest.mark.parametrize(
    "change",
    [
        {"page": 4}, {"queries": 200}, {"scale": -1.0}, {"cache": "fp8", "hdim": 72},
        {"cache": "fp8", "hdim": 256}, {"dropout_p": 0.5, "seed": 1},
    ],
    ids=lambda item: "-".join(item),
)  # fmt: skip
def test_other_problems_have_portable_kernels(change: dict[str, Any]) -> None:
    problem = step(**change)
    assert fmha_candidates(problem, DEVICE) and not kernels(problem)


def test_what_the_copy_engine_cannot_reach_is_refused_by_name() -> None:
    (kernel,) = kernels(step(page=16))
    found = fmha_mismatches(step(page=4), kernel, DEVICE)
    assert "page_rows" in {item.rule for item in found}


# ---- plans ----


@pytest.mark.parametrize(("cache", "hdim", "elements", "swizzle"), [
    ("bf16", 128, 64, 128), ("bf16", 64, 64, 128), ("fp8", 128, 128, 128), ("fp8", 64, 64, 64),
])  # fmt: skip
@pytest.mark.parametrize("page", [0, 16, 1024])
def test_boxes_are_lines_of_a_block_or_of_a_page(cache: str, hdim: int, elements: int, swizzle: int, page: int) -> None:
    problem = step(cache=cache, hdim=hdim, page=page)
    (kernel,) = kernels(problem)
    (stage,) = plan_fmha(problem, kernel, DEVICE).stages
    _, k, v, _ = (item for item in stage.args.fields if isinstance(item, TensorMap))
    rows = min(page or kernel.n0, kernel.n0)
    assert k.box == v.box == (elements, rows, 1, 1) and k.swizzle == v.swizzle == swizzle
    assert k.fetch == v.fetch == 128


@pytest.mark.parametrize(
    ("batch", "keys", "page", "cache", "parts"),
    [
        (64, 8192, 0, "bf16", 1),  # work for all
        (1, 65536, 0, "bf16", 32),
        (64, 8192, 16, "bf16", 3),  # lengths differ, and token sinks allow no shares: pieces are drawn
        (8, 16384, 16, "bf16", 8),
        (64, 4096, 16, "fp8", 1),
    ],
)
def test_keys_are_cut_where_workgroups_would_idle(batch: int, keys: int, page: int, cache: str, parts: int) -> None:
    sinks: dict[str, Any] = {"window_left": keys, "window_right": 0, "sink_size": 4} if page else {}
    problem = step(batch=batch, keys=keys, page=page, cache=cache, **sinks)
    (kernel,) = kernels(problem)
    assert choose_splits(problem, kernel, DEVICE) == parts


@pytest.mark.parametrize(("batch", "keys", "grid"), [(64, 8192, 264), (1, 65536, 264), (2, 512, 64), (300, 512, 264)])
def test_keys_are_shared_equally_where_lengths_are_data(batch: int, keys: int, grid: int) -> None:
    """A workgroup has two places for results that others have parts of, every tile a ticket."""
    problem = step(batch=batch, keys=keys, page=16)
    (kernel,) = kernels(problem)
    plan = plan_fmha(problem, kernel, DEVICE)
    (stage,) = plan.stages
    assert stage.geometry.grid == (grid, 1, 1)
    assert plan.counter_bytes == STATUS_BYTES + 4 * batch * 8
    assert plan.workspace_bytes == 2 * grid * 8 * (128 + 1) * 4
    assert not shares_keys(problem, kernel.replace(num_splits=3))
    assert not shares_keys(step(batch=batch, keys=keys), kernel)
    assert not shares_keys(step(batch=batch, keys=256, page=16), kernel)


@pytest.mark.parametrize(("batch", "splits"), [(64, 1), (1, 32)])
def test_workgroups_stay_and_tiles_have_tickets(batch: int, splits: int) -> None:
    problem = step(batch=batch, keys=65536 // batch * 4)
    (kernel,) = kernels(problem)
    plan = plan_fmha(problem, kernel.replace(num_splits=splits), DEVICE)
    (stage,) = plan.stages
    pieces, slots = batch * 8 * splits, 132 * decode_resident(kernel)
    assert stage.geometry.grid == (min(pieces, slots), 1, 1) and stage.geometry.block == (DECODE_THREADS, 1, 1)
    assert plan.counter_bytes == STATUS_BYTES + (4 * batch * 8 if splits > 1 else 0)
    assert bool(plan.workspace_bytes) == (splits > 1)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    ("change", "specialised"),
    [
        ({}, True),
        ({"cache": "fp8"}, True),
        ({"cache": "fp8", "page": 16}, True),
        ({"hdim": 256, "page": 64}, True),
        ({"page": 4}, False),
        ({"inputs": {"bias": TensorDesc.of("bf16", (1, 32, 1, 8192))}}, False),
    ],
)
def test_the_planner_takes_them_where_it_can(change: dict[str, Any], specialised: bool, batch: int) -> None:
    problem = step(batch=batch, **change)
    best = min(fmha_candidates(problem, DEVICE), key=lambda item: predict_fmha(problem, item, DEVICE).seconds)
    assert decodes(best) is specialised and best.family is Family.SPLITKV
