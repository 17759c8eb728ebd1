"""Hopper's specialised kernels: which configurations and problems they take, what plans hand them, that all compile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import AttentionConfig, FmhaConfig
from tilewright_fmha.config.decode import decodes
from tilewright_fmha.config.warp_specialised import HEADS, specialised_algorithms, specialised_bytes
from tilewright_fmha.pipelines.algorithms import valid_algorithms
from tilewright_fmha.pipelines.candidates import fmha_candidates, fmha_mismatches, predict_fmha
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import BiasKind, Family, FmhaDType, MaskKind, Mode, Scheduling
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, Pointer, Struct, TensorMap
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain

ARCH = tilewright_arch.load("sm_90a")
DEVICE = DeviceInfo("cuda:0", "cuda", "one of them", ARCH, 132, 140 << 30)
CUTS = [(hdim, item) for hdim in HEADS for item in specialised_algorithms(hdim)]


def cuts_of(hdim: tuple[int, int]) -> list[tuple[tuple[int, int], Any]]:
    return [(heads, item) for heads, item in CUTS if heads == hdim]


FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"mask": MaskKind.CAUSAL, "lse": True},
    {"mask": MaskKind.WINDOW, "sink": True, "mode": Mode.GROUP, "lse": True, "skip_min_seqlen_q": True},
    {"mask": MaskKind.WINDOW, "softcap": True, "learned_sinks": True, "dtype": FmhaDType.FP16},
    {"mode": Mode.GROUP, "mask": MaskKind.CAUSAL, "lse": True, "learned_sinks": True},
)


def described(
    q: tuple[int, ...] = (2, 8, 300, 128),
    k: tuple[int, ...] = (2, 2, 500, 128),
    dtype: str = "bf16",
    strides: dict[str, tuple[int, ...]] | None = None,
    inputs: dict[str, TensorDesc] | None = None,
    **attributes: Any,
) -> FmhaProblem:
    strides = strides or {}
    found = {name: TensorDesc.of(dtype, shape, strides.get(name)) for name, shape in (("q", q), ("k", k), ("v", k))}
    return parse_attention(OperationRequest("attention", found | (inputs or {}), {}, attributes))


def kernel(problem: FmhaProblem, **fields: Any) -> FmhaConfig:
    return next(item for item in fmha_candidates(problem, DEVICE) if item.pipeline == "ws").replace(**fields)


def test_every_size_of_heads_has_kernels_with_two_consumers_and_more() -> None:
    assert {hdim for hdim, item in CUTS if item["wave"][0] > 1} == set(HEADS)


def test_one_consumer_is_offered_for_problems_without_features() -> None:
    def consumers(problem: FmhaProblem) -> set[int]:
        return {item.waves for item in fmha_candidates(problem, DEVICE) if item.pipeline == "ws"}

    assert 1 in consumers(described()) and 1 in consumers(described(causal=True))
    for options in ({"return_lse": True}, {"window_left": 64}, {"softcap": 30.0}, {"dtype": "fp16"}):
        found = consumers(described(**options))  # type: ignore[arg-type]
        assert found and 1 not in found
    assert not consumers(described(return_status=True))


@pytest.fixture(scope="module")
def toolchain() -> Iterator[NvrtcToolchain]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: extra cuda")
    toolchain = NvrtcToolchain([include_dir()])
    yield toolchain
    toolchain.close()


@pytest.mark.parametrize(
    ("features", "hdim"),
    list(zip(FEATURES, (*HEADS, HEADS[0]), strict=True)),
    ids=lambda item: "-".join(map(str, item)) or "plain",
)
@pytest.mark.some(1)
def test_kernels_that_the_rules_take_compile_without_spills(
    features: dict[str, Any], hdim: tuple[int, int], toolchain: NvrtcToolchain, tmp_path: Path
) -> None:
    """The first of each size, which is what planners mostly take."""
    cuts = [AttentionConfig(**{"dtype": FmhaDType.BF16, "hdim": hdim, **features, **item}) for _, item in cuts_of(hdim)]
    config = next(item for item in cuts if not RULES.check(item, ARCH))
    toolchain.compile(generate(config, ARCH), tmp_path, ARCH)


PAGED = ({"family": Family.PAGEDKV}, {"family": Family.BATCH_PREFILL, "mode": Mode.GROUP})


@pytest.mark.parametrize("fields", PAGED, ids=lambda item: str(item["family"]))
def test_kernels_of_caches_in_pages_compile_without_spills(
    fields: dict[str, Any], toolchain: NvrtcToolchain, tmp_path: Path
) -> None:
    more = {"mask": MaskKind.CAUSAL, "lse": True, "learned_sinks": True, "paged": True, "dtype": FmhaDType.BF16}
    hdim = HEADS[0 if fields["family"] is Family.PAGEDKV else 1]
    cuts = [AttentionConfig(**{**fields, **more, "hdim": hdim, **item}) for _, item in cuts_of(hdim)]
    config = next(item for item in cuts if not RULES.check(item, ARCH))
    toolchain.compile(generate(config, ARCH), tmp_path, ARCH)


@pytest.mark.parametrize("fields", PAGED, ids=lambda item: str(item["family"]))
def test_a_tile_that_no_page_suits_is_corrected(fields: dict[str, Any]) -> None:
    """Three consumers leave few registers to who looks pages up; pages divide blocks, or the reverse."""
    for shape, wanted in (((192, 128), (128, 128)), ((128, 192), (128, 128)), ((128, 160), (128, 128))):
        hdim, item = next((hdim, item) for hdim, item in CUTS if item["tile"][:2] == shape)
        config = AttentionConfig(**{**fields, "dtype": FmhaDType.BF16, "paged": True, "hdim": hdim, **item})
        assert {found.rule for found in RULES.check(config, ARCH)} == {"ws_form"}
        mended = RULES.correct(config, ARCH).config
        assert mended.tile[:2] == wanted and not RULES.check(mended, ARCH)


@pytest.mark.parametrize("hdim", [(128, 128), (256, 256)], ids=str)
def test_portable_kernels_of_windows_over_pages_compile_without_spills(
    hdim: tuple[int, int], toolchain: NvrtcToolchain, tmp_path: Path
) -> None:
    """The last resort where the copy engine cannot go, in its preferred cut."""
    fields = {"family": Family.BATCH_PREFILL, "mode": Mode.GROUP, "paged": True, "mask": MaskKind.WINDOW, "hdim": hdim}
    plain = AttentionConfig(**{**fields, "dtype": FmhaDType.BF16, "lse": True})
    cuts = [plain.replace(**item) for item in valid_algorithms(plain, ARCH) if item["pipeline"] == "qr"]
    config = next(item for item in cuts if not RULES.check(item, ARCH))
    toolchain.compile(generate(config, ARCH), tmp_path, ARCH)


def test_a_kernel_that_would_need_more_registers_is_corrected() -> None:
    hdim, item = next((hdim, item) for hdim, item in CUTS if item["tile"][1] == 176)
    config = AttentionConfig(dtype=FmhaDType.BF16, hdim=hdim, **item)
    assert not RULES.check(config, ARCH)
    capped = config.replace(softcap=True)
    assert {found.rule for found in RULES.check(capped, ARCH)} == {"ws_form"}
    mended = RULES.correct(capped, ARCH).config
    assert mended.n0 == 144 and mended.softcap and not RULES.check(mended, ARCH)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"bias": BiasKind.ALIBI}, "template_exists"),
        ({"dropout": True}, "template_exists"),
        ({"pack_gqa": True}, "template_exists"),
        ({"hdim": (96, 96)}, "ws_form"),
        ({"stages": 9}, "ws_form"),
    ],
)
def test_what_no_specialised_kernel_does_is_refused_by_name(fields: dict[str, Any], rule: str) -> None:
    hdim, item = CUTS[0]
    found = RULES.check(AttentionConfig(**{"dtype": FmhaDType.BF16, "hdim": hdim, **item, **fields}), ARCH)
    assert rule in {violation.rule for violation in found} and all(violation.reason for violation in found)


def test_a_tile_beyond_shared_memory_is_refused() -> None:
    hdim, item = next((hdim, item) for hdim, item in CUTS if item["tile"][1] == 176)
    deep = AttentionConfig(dtype=FmhaDType.BF16, hdim=hdim, **item, stages=3)
    assert specialised_bytes(deep, ARCH) > ARCH.lds_bytes
    assert RULES.correct(deep, ARCH).config.stages == 0


def test_results_have_room_of_their_own_where_there_is_any() -> None:
    sizes = {
        (hdim[0], item["tile"][:2]): AttentionConfig(dtype=FmhaDType.BF16, hdim=hdim, **item) for hdim, item in CUTS
    }
    rings = 2 * 128 * (128 + 128) * 2
    assert specialised_bytes(sizes[128, (128, 128)], ARCH) == 128 * 128 * 2 * 2 + rings + 320
    assert specialised_bytes(sizes[128, (128, 176)], ARCH) == 128 * 128 * 2 + 2 * 176 * 256 * 2 + 320
    assert all(specialised_bytes(item, ARCH) <= ARCH.lds_bytes for item in sizes.values())


# ---- problems ----


def test_the_planner_takes_specialised_kernels_of_the_next_larger_heads() -> None:
    for elements, held in ((40, 64), (64, 64), (96, 128), (128, 128), (200, 256)):
        problem = described((2, 16, 2048, elements), (2, 4, 2048, elements))
        best = min(fmha_candidates(problem, DEVICE), key=lambda item: predict_fmha(problem, item, DEVICE).seconds)
        assert best.pipeline == "ws" and best.hdim == (held, held)


def pages_of(page: int, heads: int = 128, rows: int = 1024, varlen: bool = True, **attributes: Any) -> FmhaProblem:
    """Four sequences of 4096 keys, 8 heads of them, and ``rows`` queries each."""
    inputs = {
        "block_table": TensorDesc.of("int32", (4, 4096 // page)),
        "seqlens_k": TensorDesc.of("int32", (4,)),
    }
    q = (4, 32, rows, heads)
    if varlen:
        q, attributes = (4 * rows, 32, heads), {**attributes, "max_seqlen_q": rows}
        inputs["cu_seqlens_q"] = TensorDesc.of("int32", (5,))
    return described(q, (4 * 4096 // page, page, 8, heads), inputs=inputs, **attributes)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
def test_the_planner_takes_specialised_kernels_for_prompts_over_pages(heads: int, varlen: bool) -> None:
    problem = pages_of(16, heads, varlen=varlen, causal=True)
    best = min(fmha_candidates(problem, DEVICE), key=lambda item: predict_fmha(problem, item, DEVICE).seconds)
    assert best.pipeline == "ws" and best.paged and best.waves == 2
    few = pages_of(16, heads, rows=1, varlen=varlen)
    best = min(fmha_candidates(few, DEVICE), key=lambda item: predict_fmha(few, item, DEVICE).seconds)
    assert decodes(best)


def test_pages_of_a_few_rows_have_portable_kernels() -> None:
    assert "page_rows" in {found.rule for found in fmha_mismatches(pages_of(4), kernel(pages_of(16)), DEVICE)}
    found = fmha_candidates(pages_of(4), DEVICE)
    assert found and all(item.pipeline != "ws" for item in found)


@pytest.mark.parametrize(("page", "rows"), [(16, 16), (256, 128)])
def test_maps_of_pages_are_cut_by_page_or_by_block(page: int, rows: int) -> None:
    problem = pages_of(page)
    _, k, v, _ = maps_of(problem, kernel(problem))
    assert k.sizes == v.sizes == (128, page, 8, 4 * 4096 // page) and k.box == v.box == (64, rows, 1, 1)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("alignment", {"alignment": 4}),
        ("positive_scale", {"scale": -0.5}),
        ("softcap_digits", {"softcap": 5000.0}),
        ("empty_keys", {"k": (2, 2, 0, 128)}),
        ("copy_strides", {"strides": {"q": (8 * 300 * 132, 300 * 132, 132, 1)}}),
        ("copy_strides", {"strides": {"k": (2 * 500 * 128, 500 * 128, 1, 500)}}),
        ("copy_strides", {"strides": {"v": (0, 500 * 128, 128, 1)}}),
    ],
)
def test_problems_beyond_the_copy_engine_have_portable_kernels(rule: str, change: dict[str, Any]) -> None:
    config = kernel(described())
    problem = described(**change)
    assert rule in {found.rule for found in fmha_mismatches(problem, config, DEVICE)}
    found = fmha_candidates(problem, DEVICE)
    assert found and all(item.pipeline != "ws" for item in found)


# ---- plans ----


def maps_of(problem: FmhaProblem, config: FmhaConfig) -> list[TensorMap]:
    (stage,) = plan_fmha(problem, config, DEVICE).stages
    maps = [item for item in stage.args.fields if isinstance(item, TensorMap)]
    assert len(stage.args.fields) == len(maps) + 1 == 5 and isinstance(stage.args.fields[4], Struct)
    return maps


def test_maps_say_where_heads_rows_and_items_lie() -> None:
    problem = described()
    config = kernel(problem)
    q, k, v, o = maps_of(problem, config)
    assert (q.operand, k.operand, v.operand, o.operand) == ("q", "k", "v", "o")
    assert q.sizes == o.sizes == (128, 300, 8, 2) and k.sizes == v.sizes == (128, 500, 2, 2)
    assert q.strides == (256, 300 * 256, 8 * 300 * 256) and k.strides == (256, 500 * 256, 2 * 500 * 256)
    assert q.box == (64, config.m0, 1, 1) and k.box == v.box == (64, config.n0, 1, 1) and o.box == (64, 64, 1, 1)


def test_maps_of_other_layouts_differ_in_strides_alone() -> None:
    shape, bshd = (2, 8, 300, 128), (300 * 8 * 128, 128, 8 * 128, 1)
    q = maps_of(described(strides={"q": bshd}), kernel(described()))[0]
    assert q.sizes == (shape[3], shape[2], shape[1], shape[0]) and q.strides == (8 * 256, 256, 300 * 8 * 256)


def test_sequences_end_to_end_are_one_item() -> None:
    starts = {name: TensorDesc.of("int32", (4,)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    problem = described((700, 8, 128), (900, 2, 128), inputs=starts, max_seqlen_q=300, max_seqlen_k=400)
    q, k, _, o = maps_of(problem, kernel(problem))
    assert q.sizes == o.sizes == (128, 700, 8, 1) and k.sizes == (128, 900, 2, 1)
    assert q.strides[:2] == (8 * 256, 256) and all(step % 16 == 0 for step in q.strides)


def test_a_cache_has_items_of_its_own() -> None:
    index = {"cache_index": TensorDesc.of("int32", (2,))}
    problem = described(k=(5, 2, 500, 128), inputs=index)
    assert maps_of(problem, kernel(problem))[1].sizes == (128, 500, 2, 5)


def pointers(item: Any) -> Iterator[Pointer]:
    if isinstance(item, Pointer):
        yield item
    elif isinstance(item, Struct):
        for field in item.fields:
            yield from pointers(field)


@pytest.mark.parametrize("causal", [False, True])
def test_workgroups_that_stay_draw_tiles_of_different_lengths_from_counters(causal: bool) -> None:
    problem = described((4, 32, 2048, 128), (4, 32, 2048, 128), causal=causal)
    plan = plan_fmha(problem, kernel(problem), DEVICE)
    (stage,) = plan.stages
    assert stage.geometry.grid == (132, 1, 1) and stage.geometry.dependent
    assert (plan.counter_bytes > 0) is causal
    assert any(item.operand == COUNTERS for item in pointers(stage.args)) is causal
    single = plan_fmha(problem, kernel(problem, persistent=False), DEVICE)
    tiles = 4 * 32 * math.ceil(2048 / kernel(problem).m0)
    assert single.stages[0].geometry.grid == (tiles, 1, 1) and single.counter_bytes == 0


def test_consumers_that_take_turns_are_another_kernel() -> None:
    found = [AttentionConfig(hdim=hdim, **item) for hdim, item in CUTS if item["tile"][:2] == (128, 128)]
    pair = [item for item in found if item.hdim == (128, 128)]
    assert {item.scheduler for item in pair} == {Scheduling.PINGPONG, Scheduling.DEFAULT}
    assert len({generate(item, ARCH).text for item in pair}) == len({item.name for item in pair}) == 2
