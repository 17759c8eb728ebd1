"""Tables, budgets and trait rules, spelled out for the cases that others build on."""

from __future__ import annotations

import pytest

import tilewright_arch as arch

CDNA3_WAVES = {(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
RDNA_WAVES = {(2, 4, 1), (1, 8, 1), (8, 1, 1), (4, 2, 1)}
V4_SHAPES = [(14, 32), (12, 32), (8, 48), (6, 64), (8, 32), (4, 64), (1, 64), (24, 16), (16, 16)]


@pytest.mark.parametrize(
    ("name", "waves"),
    [
        ("gfx90a", {(1, 4, 1), (2, 2, 1), (4, 1, 1)}),
        ("gfx942", CDNA3_WAVES),
        ("gfx950", CDNA3_WAVES | {(8, 2, 1), (4, 4, 1)}),
        ("gfx1100", RDNA_WAVES),
        ("gfx1201", RDNA_WAVES),
    ],
)
def test_amd_wave_tables(name: str, waves: set[arch.Triple]) -> None:
    assert set(arch.load(name).waves) == waves


@pytest.mark.parametrize(
    ("name", "key", "tiles"),
    [
        ("gfx90a", "fp32_fp32_fp32", {(16, 16, 4), (16, 16, 8), (16, 16, 16), (32, 32, 4), (32, 32, 8)}),
        (
            "gfx942",
            "bf16_bf16_fp32",
            {(32, 32, 8), (16, 16, 16), (32, 32, 16), (16, 16, 32), (4, 64, 16), (64, 4, 16)},
        ),
        ("gfx90a", "fp8_fp8_fp32", {(32, 32, 16), (32, 32, 32)}),
        ("gfx942", "fp8_fp8_fp32", {(32, 32, 16), (32, 32, 32), (16, 16, 32), (16, 16, 64)}),
        ("gfx942", "bf8_fp8_fp32", {(32, 32, 16)}),
        (
            "gfx950",
            "bf8_bf8_fp32",
            {(32, 32, 16), (32, 32, 32), (16, 16, 32), (16, 16, 64), (16, 16, 128), (32, 32, 64)},
        ),
        ("gfx950", "int8_int8_int32", {(32, 32, 16), (16, 16, 32), (32, 32, 32), (16, 16, 64)}),
        ("gfx1100", "fp16_fp16_fp32", {(16, 16, 16)}),
        ("gfx1201", "fp32_fp32_fp32", {(16, 8, 4)}),
        ("gfx1201", "fp8_bf8_fp32", {(16, 16, 16)}),
        ("sm_80", "fp32_fp32_fp32", {(16, 8, 4)}),
        ("sm_80", "int8_int8_int32", {(16, 8, 32)}),
    ],
)
def test_gpu_warp_tiles(name: str, key: str, tiles: set[arch.Triple]) -> None:
    assert set(arch.load(name).warp_tiles[key]) == tiles


@pytest.mark.parametrize(
    ("name", "wave_size", "lds_kib", "fp8"),
    [
        ("gfx90a", 64, 64, "fnuz"),
        ("gfx942", 64, 64, "fnuz"),
        ("gfx950", 64, 160, "ocp"),
        ("gfx1100", 32, 64, "none"),
        ("gfx1201", 32, 64, "ocp"),
        ("sm_80", 32, 163, "none"),
        ("sm_90a", 32, 227, "ocp"),
    ],
)
def test_gpu_limits(name: str, wave_size: int, lds_kib: int, fp8: str) -> None:
    spec = arch.load(name)
    assert (spec.wave_size, spec.lds_bytes, spec.fp8_encoding) == (wave_size, lds_kib * 1024, fp8)


def test_preshuffle_drops_the_4x64_tile_and_rdna_has_none() -> None:
    fp16 = set(arch.load("gfx942").preshuffle_warp_tiles["fp16_fp16_fp32"])
    assert fp16 == {(32, 32, 8), (16, 16, 16), (32, 32, 16), (16, 16, 32), (64, 4, 16)}
    wider = set(arch.load("gfx950").preshuffle_warp_tiles["bf16_bf16_fp32"])
    assert wider == fp16 | {(32, 32, 32), (16, 16, 64)}
    assert arch.load("gfx942").preshuffle_pipelines == ("preshufflev2",)
    for name in ("gfx1100", "gfx1201"):
        assert not arch.load(name).preshuffle_warp_tiles
        assert "preshufflev2" not in arch.load(name).pipelines


@pytest.mark.parametrize(
    ("name", "pipeline", "budget"),
    [
        ("gfx942", "compv3", 65536),
        ("gfx942", "compv4", 32768),
        ("gfx942", "preshufflev2", 32768),
        ("gfx950", "compv4", 81920),
        ("gfx950", "comp_async", 81920),
        ("gfx1100", "mem", 65536),
        ("sm_90a", "ws", 116224),
        ("x86-64-v4", "compv3", 786432),
    ],
)
def test_lds_budget_is_the_pipelines_share_of_the_lds(name: str, pipeline: str, budget: int) -> None:
    assert arch.load(name).lds_budget(pipeline) == budget


def test_an_unknown_pipeline_is_a_typed_error_with_a_hint() -> None:
    with pytest.raises(arch.UnknownPipelineError, match="did you mean 'compv4'") as caught:
        arch.load("gfx942").lds_budget("compv44")
    assert caught.value.name == "compv44"


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_only_mem_takes_interwave_on_amd(name: str) -> None:
    spec = arch.load(name)
    for epilogue in ("cshuffle", "default"):
        takers = {p for p in spec.pipelines if spec.supports_trait(p, epilogue, "interwave")}
        assert takers == {"mem"}
    refused = {(t.pipeline, t.epilogue, t.scheduler) for t in spec.unsupported_traits}
    for pipeline in ("compv3", "compv4"):
        assert {(pipeline, "cshuffle", "interwave"), (pipeline, "default", "interwave")} <= refused


def test_a_refused_trait_says_why() -> None:
    spec = arch.load("gfx942")
    assert spec.trait_refusal("compv4", "cshuffle", "intrawave") is None
    assert spec.trait_refusal("compv4", "cshuffle", "interwave") == (
        "pipeline compv4 takes scheduler intrawave, not interwave"
    )
    assert "epilogue" in (spec.trait_refusal("compv4", "tdm", "intrawave") or "")
    assert "compv4" in (spec.trait_refusal("comp_v4", "default", "intrawave") or "")


def test_acc_dtype_names_the_accumulator_or_nothing() -> None:
    assert arch.load("gfx942").acc_dtype("fp8", "bf8") == "fp32"
    assert arch.load("gfx942").acc_dtype("int8", "int8") == "int32"
    assert arch.load("gfx90a").acc_dtype("fp8", "bf8") is None
    assert arch.load("sm_80").acc_dtype("fp8", "fp8") is None
    assert arch.load("sm_80").acc_dtype("fp16", "fp32") is None


def test_cpu_pipelines_schedulers_and_epilogues() -> None:
    spec = arch.load("x86-64-v4")
    assert {name: p.schedulers for name, p in spec.pipelines.items()} == {
        "mem": ("intrawave",),
        "compv1": ("intrawave",),
        "compv3": ("intrawave", "interwave"),
        "preshufflev2": ("intrawave", "interwave"),
    }
    assert all(p.epilogues == ("default",) for p in spec.pipelines.values())


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("x86-64-v2", [(6, 8), (4, 12), (4, 8), (1, 16)]),
        ("x86-64-v3", [(6, 16), (4, 24), (4, 16), (1, 32), (12, 8)]),
        ("x86-64-v4", V4_SHAPES),
        ("aarch64", [(8, 12), (6, 16), (4, 16), (1, 32), (12, 8)]),
    ],
)
def test_cpu_warp_tiles_without_features_have_depth_one(name: str, shapes: list[tuple[int, int]]) -> None:
    spec = arch.load(name)
    assert len(spec.warp_tiles) == 8
    for tiles in spec.warp_tiles.values():
        assert list(tiles) == [(m, n, 1) for m, n in shapes]
    assert spec.preshuffle_warp_tiles == spec.warp_tiles


def test_hopper_keeps_wgmma_to_ws_and_mma_to_the_rest() -> None:
    spec = arch.load("sm_90a")
    key = "bf16_bf16_fp32"
    tiles = set(spec.warp_tiles_for(key, "ws"))
    assert {(64, n, 16) for n in (8, 16, 24, 32, 64, 96, 128, 192, 256)} <= tiles
    assert {(n, 64, 16) for n in (8, 16, 24, 32, 40, 48, 56, 64, 128, 256)} <= tiles
    assert all(64 in tile[:2] and tile[2] == 16 for tile in tiles)
    assert spec.warp_tiles_for(key, "compv4") == ((16, 8, 16),)
    assert {tile[2] for tile in spec.warp_tiles_for("fp8_fp8_fp32", "ws")} == {32}
    assert spec.warp_tiles_for("fp32_fp32_fp32", "ws") == ()
    assert not spec.supports_trait("ws", "cshuffle", "intrawave")


def test_integers_take_only_the_n_that_their_instruction_has() -> None:
    # PTX ISA, wgmma: with integers N is a multiple of 16 above 32.
    spec = arch.load("sm_90a")
    taken = {m if n == 64 else n for m, n, _ in spec.warp_tiles_for("int8_int8_int32", "ws")}
    assert taken == {8, 16, 24, 32, 48, *range(64, 257, 16)}
    floats = {m if n == 64 else n for m, n, _ in spec.warp_tiles_for("fp8_fp8_fp32", "ws")}
    assert floats == taken | {40, 56}


def test_hopper_states_its_clusters_stages_and_registers() -> None:
    spec = arch.load("sm_90a")
    ws = spec.pipeline("ws")
    assert ws.clusters[0] == (1, 1, 1) and {(2, 1, 1), (1, 2, 1), (1, 1, 2)} <= set(ws.clusters)
    assert (ws.min_stages, ws.max_stages) == (2, 24)
    for split in ws.register_splits:
        # Registers change hands within what the launch was given: 128 threads each, in blocks of eight.
        launched = spec.registers_per_thread(128 * (1 + split.consumers)) * (1 + split.consumers)
        assert split.producer + split.consumer * split.consumers <= max(launched, 2 * 168)
        # With a single consumer registers stay as launched: no thread can have more.
        assert split.consumers == 1 or split.producer % 8 == split.consumer % 8 == 0
    assert ws.register_split(2) == arch.RegisterSplit(2, 40, 232) and ws.register_split(5) is None
    assert spec.bulk_copy == arch.BulkCopy(max_box=256, alignment=16, swizzle_bytes=128, swizzle_rows=8)
    assert spec.pipeline("compv4").clusters == ((1, 1, 1),) and spec.pipeline("compv3").max_stages == 1


def test_threads_share_the_register_file() -> None:
    spec = arch.load("sm_80")
    assert [spec.registers_per_thread(threads) for threads in (128, 256, 384, 512, 1024)] == [255, 255, 168, 128, 64]
    # AMD: of a CDNA unit's four SIMDs, each holds 512 registers for one wave of 64; RDNA's waves have 256 at most.
    cdna = arch.load("gfx942")
    assert [cdna.registers_per_thread(threads) for threads in (64, 256, 512, 1024)] == [512, 512, 256, 128]
    rdna = arch.load("gfx1100")
    assert [rdna.registers_per_thread(threads) for threads in (32, 256, 512, 1024)] == [256, 256, 192, 96]


def test_threads_of_a_workgroup_count_warpgroups_and_producers() -> None:
    spec = arch.load("sm_90a")
    key = "fp16_fp16_fp32"
    assert spec.threads_per_workgroup("ws", (2, 1, 1), key, (64, 256, 16)) == 384
    assert spec.threads_per_workgroup("compv4", (2, 2, 1), key, (16, 8, 16)) == 128
    gfx = arch.load("gfx950")
    assert gfx.threads_per_workgroup("compv3", (4, 4, 1), key, (16, 16, 16)) == 1024
