"""Modifiers of vector instructions (DPP, SDWA, op_sel, clamp, omod, neg, abs, VOPD) and moves between lanes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from alu_harness import WAVES, empty_waves, execute

from tilewright_emulator.errors import UnknownInstruction

Array = np.ndarray  # type: ignore[type-arg]


def numbered(arch: str):  # type: ignore[no-untyped-def]
    """v1 of wave w and lane i holds 100 w + i; v2 holds 7."""
    w = empty_waves(arch)
    w.u32[1][...] = np.arange(w.lanes) + 100 * np.arange(WAVES)[:, None]
    w.u32[2][...] = 7
    return w


# DPP control -> the lane that each lane reads, or None.
CONTROLS: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[3,1,0,2]": lambda i: i // 4 * 4 + (3, 1, 0, 2)[i % 4],
    "row_shl:3": lambda i: i + 3 if i % 16 + 3 < 16 else None,
    "row_shr:2": lambda i: i - 2 if i % 16 >= 2 else None,
    "row_ror:5": lambda i: i // 16 * 16 + (i - 5) % 16,
    "row_mirror": lambda i: i // 16 * 16 + 15 - i % 16,
    "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
}
GFX9 = {
    "row_bcast:15": lambda i: i // 16 * 16 - 1 if i >= 16 else None,
    "row_bcast:31": lambda i: 31 if i >= 32 else None,
    "wave_shl:1": lambda i: i + 1 if i < 63 else None,
    "wave_shr:1": lambda i: i - 1 if i else None,
    "row_newbcast:9": lambda i: i // 16 * 16 + 9,
}
GFX11 = {"row_share:6": lambda i: i // 16 * 16 + 6, "row_xmask:5": lambda i: i ^ 5}


@pytest.mark.parametrize(
    ("arch", "control"),
    [
        *(("gfx90a", control) for control in (*CONTROLS, *GFX9)),
        *(("gfx1201", control) for control in (*CONTROLS, *GFX11)),
    ],
)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_dpp(arch: str, control: str, bound: str) -> None:
    """Lanes without a source (none, or not active) keep the old value, or add zero with bound_ctrl."""
    source = {**CONTROLS, **GFX9, **GFX11}[control]
    rng = np.random.default_rng(1)
    w = numbered(arch)
    active = rng.random((WAVES, w.lanes)) < 0.7
    w.set_exec(active)
    add = "v_add_u32_dpp" if arch == "gfx90a" else "v_add_nc_u32_dpp"
    execute(arch, f"{add} v8, v1, v2 {control} row_mask:0xd bank_mask:0x7{bound}", w)
    for wave in range(WAVES):
        for lane in range(w.lanes):
            other = source(lane)
            valid = other is not None and bool(active[wave, other])
            masked = 0xD >> lane // 16 & 1 and 0x7 >> lane % 16 // 4 & 1
            wanted = 0x5A5A5A5A
            if active[wave, lane] and masked and (valid or bound):
                wanted = (100 * wave + other if valid and other is not None else 0) + 7
            assert w.u32[8][wave, lane] == wanted, (wave, lane)


def test_dpp8_and_negated_floats() -> None:
    w = numbered("gfx1100")
    execute("gfx1100", "v_mov_b32_dpp v8, v1 dpp8:[6,2,1,2,3,4,4,0]", w)
    wanted = [8 * (i // 8) + (6, 2, 1, 2, 3, 4, 4, 0)[i % 8] for i in range(32)]
    np.testing.assert_array_equal(w.u32[8], w.u32[1][:, wanted])
    w.f32[3][...] = np.arange(32, dtype=np.float32) - 16
    w.f32[4][...] = 0.5
    execute("gfx1100", "v_add_f32_e64_dpp v8, -|v3|, v4 row_mirror row_mask:0xf bank_mask:0xf", w)
    mirrored = w.f32[3][:, [i // 16 * 16 + 15 - i % 16 for i in range(32)]]
    np.testing.assert_array_equal(w.f32[8], 0.5 - np.abs(mirrored))


SELECTIONS: dict[str, tuple[int, int]] = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
}  # fmt: skip


@pytest.mark.parametrize("selection", SELECTIONS)
def test_sdwa(selection: str) -> None:
    """Sources with and without sign, results with the rest cleared or kept."""
    first, width = SELECTIONS[selection]
    rng = np.random.default_rng(2)
    values = rng.integers(0, 1 << 32, (2, WAVES, 64), dtype=np.uint32)

    def fresh():  # type: ignore[no-untyped-def]
        w = empty_waves("gfx942")
        w.u32[1][...], w.u32[2][...] = values
        return w

    part = values[0] >> np.uint32(first) & np.uint32((1 << width) - 1)
    extended = part.astype(np.int64) - ((part.astype(np.int64) >> (width - 1)) << width)
    common = f"dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{selection} src1_sel:DWORD"
    w = fresh()
    execute("gfx942", f"v_add_u32_sdwa v8, v1, v2 {common}", w)
    np.testing.assert_array_equal(w.u32[8], part + values[1])
    w = fresh()
    execute("gfx942", f"v_add_u32_sdwa v8, sext(v1), v2 {common}", w)
    np.testing.assert_array_equal(w.u32[8], (extended + values[1]).astype(np.uint32))
    mask = np.uint32((1 << width) - 1)
    placed = (values.sum(axis=0, dtype=np.uint32) & mask) << np.uint32(first)
    for unused, rest in (("PAD", 0), ("PRESERVE", 0x5A5A5A5A & ~(((1 << width) - 1) << first))):
        w = fresh()
        modifiers = f"dst_sel:{selection} dst_unused:UNUSED_{unused} src0_sel:DWORD src1_sel:DWORD"
        execute("gfx942", f"v_add_u32_sdwa v8, v1, v2 {modifiers}", w)
        np.testing.assert_array_equal(w.u32[8], placed | np.uint32(rest))


def halves(low: float, high: float) -> int:
    return int(np.array([low, high], np.float16).view(np.uint32)[0])


@pytest.mark.parametrize(
    ("arch", "text", "wanted"),
    [
        # v1 = (1, 2), v2 = (10, 20), v3 = (100, 200) as halves, low ones first; v8 = (-1, -2) before.
        ("gfx942", "v_pk_add_f16 v8, v1, v2", (11, 22)),
        ("gfx942", "v_pk_add_f16 v8, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]", (12, 21)),
        ("gfx942", "v_pk_mul_f16 v8, v1, v2 neg_lo:[1,0] neg_hi:[0,1]", (-10, -40)),
        ("gfx942", "v_pk_fma_f16 v8, v1, v2, v3", (110, 240)),
        ("gfx942", "v_pk_add_f16 v8, v1, 1.0 op_sel_hi:[1,0]", (2, 3)),
        ("gfx942", "v_pk_min_f16 v8, v1, v2 clamp", (1, 1)),
        ("gfx1201", "v_pk_max_num_f16 v8, v1, v2", (10, 20)),
        ("gfx90a", "v_add_f16_e32 v8, v1, v2", (11, 0)),
        ("gfx90a", "v_fma_f16 v8, v1, v2, v3 op_sel:[1,0,0,0]", (120, -2)),
        ("gfx90a", "v_fma_f16 v8, v1, v2, v3 op_sel:[1,1,1,1]", (-1, 240)),
        ("gfx1100", "v_add_f16_e32 v8.l, v1.h, v2.l", (12, -2)),
        ("gfx1100", "v_mul_f16_e32 v8.h, v1.h, v2.h", (-1, 40)),
        ("gfx1100", "v_fma_mixlo_f16 v8, v1, v2, v3 op_sel:[1,0,0] op_sel_hi:[1,1,1]", (120, -2)),
        ("gfx1100", "v_fma_mixhi_f16 v8, v1, v2, v3 op_sel:[0,1,0] op_sel_hi:[1,1,1]", (-1, 120)),
        ("gfx942", "v_pk_fmac_f16 v8, v1, v2", (9, 38)),
    ],
)
def test_halves(arch: str, text: str, wanted: tuple[float, float]) -> None:
    w = empty_waves(arch)
    for index, pair in ((1, (1, 2)), (2, (10, 20)), (3, (100, 200)), (8, (-1, -2))):
        w.u32[index][...] = halves(*pair)
    execute(arch, text, w)
    assert w.u32[8].view(np.float16)[0, :2].tolist() == list(wanted)
    assert len(np.unique(w.u32[8])) == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # v[2:3] = (1, 2), v[4:5] = (10, 20), s[4:5] = (3, 4)
        ("v_pk_add_f32 v[8:9], v[2:3], v[4:5]", (11, 22)),
        ("v_pk_add_f32 v[8:9], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1]", (12, 21)),
        ("v_pk_mul_f32 v[8:9], v[2:3], s[4:5] neg_lo:[0,1] neg_hi:[1,0]", (-3, -8)),
        ("v_pk_mul_f32 v[8:9], v[2:3], s[4:5] op_sel_hi:[1,0]", (3, 6)),
        ("v_pk_mul_f32 v[8:9], v[2:3], 2.0 op_sel_hi:[1,0]", (2, 4)),
        ("v_pk_fma_f32 v[8:9], v[2:3], v[4:5], v[2:3]", (11, 42)),
        ("v_fma_mix_f32 v8, v2, v4, 0", (10, None)),
        ("v_fma_mix_f32 v8, -v2, |v4|, v6 op_sel:[0,0,1] op_sel_hi:[0,0,1]", (-3, None)),
    ],
)
def test_pairs_of_floats(text: str, wanted: tuple[float, float | None]) -> None:
    w = empty_waves("gfx942")
    for index, value in ((2, 1), (3, 2), (4, 10), (5, 20)):
        w.f32[index][...] = value
    w.s_f32[4][...], w.s_f32[5][...] = 3, 4
    w.u32[6][...] = halves(5, 7)
    execute("gfx942", text, w)
    assert set(w.f32[8].ravel().tolist()) == {wanted[0]}
    if wanted[1] is not None:
        assert set(w.f32[9].ravel().tolist()) == {wanted[1]}


@pytest.mark.parametrize(
    ("suffix", "values", "wanted"),
    [
        (" clamp", (0.25, 3.0, -1.0, math.nan), (0.5, 1.0, 0.0, 0.0)),
        (" mul:2", (0.25, 3.0), (1.0, 12.0)),
        (" mul:4", (0.25, 3.0), (2.0, 24.0)),
        (" div:2", (0.25, 3.0), (0.25, 3.0)),
        (" clamp div:2", (0.25, 3.0), (0.25, 1.0)),
    ],
)
def test_clamp_and_output_modifiers(suffix: str, values: tuple[float, ...], wanted: tuple[float, ...]) -> None:
    """Of v1 + v1."""
    w = empty_waves("gfx942")
    w.f32[1][...] = np.resize(np.array(values, np.float32), 64)
    execute("gfx942", f"v_add_f32_e64 v8, v1, v1{suffix}", w)
    np.testing.assert_array_equal(w.f32[8][0, : len(wanted)], np.array(wanted, np.float32))


def test_signs_of_sources() -> None:
    w = empty_waves("gfx1201")
    w.f32[1][...], w.f32[2][...], w.s_f32[4][...] = -2, 3, -5
    for text, wanted in (
        ("v_add_f32_e64 v8, -v1, v2", 5),
        ("v_add_f32_e64 v8, |v1|, v2", 5),
        ("v_add_f32_e64 v8, -|v1|, v2", 1),
        ("v_fma_f32 v8, -v1, v2, |s4|", 11),
        ("v_mul_f32_e32 v8, 0.5, v1", -1),
        ("v_mul_f32_e32 v8, 0x40400000, v1", -6),
        ("v_mul_f32_e32 v8, -4.0, v1", 8),
    ):
        execute("gfx1201", text, w)
        assert set(w.f32[8].ravel().tolist()) == {wanted}, text


def test_pairs_of_instructions_read_before_they_write() -> None:
    w = numbered("gfx1100")
    before = w.u32[1].copy()
    execute("gfx1100", "v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", w)
    np.testing.assert_array_equal(w.u32[2], before)
    assert (w.u32[1] == 7).all()
    w.f32[3][...], w.f32[4][...] = 2, 3
    w.write_mask(106, np.arange(32) % 2 == 0)
    execute("gfx1100", "v_dual_fmac_f32 v3, v4, v4 :: v_dual_cndmask_b32 v4, v3, v4", w)
    assert set(w.f32[3].ravel().tolist()) == {11.0}
    assert w.f32[4][0, :2].tolist() == [3.0, 2.0]


def test_one_lane() -> None:
    w = numbered("gfx942")
    w.set_exec(np.broadcast_to(np.arange(64) >= 9, (WAVES, 64)))
    execute("gfx942", "v_readfirstlane_b32 s8, v1", w)
    assert w.s_u32[8].ravel().tolist() == [9, 109]
    execute("gfx942", "v_readlane_b32 s8, v1, 3", w)
    assert w.s_u32[8].ravel().tolist() == [3, 103]
    w.s_u32[4][...] = np.array([[5], [70]])
    execute("gfx942", "v_readlane_b32 s8, v1, s4", w)
    assert w.s_u32[8].ravel().tolist() == [5, 106]
    execute("gfx942", "v_writelane_b32 v1, s8, s4", w)
    execute("gfx942", "v_writelane_b32 v1, 42, 63", w)
    assert w.u32[1][:, 5:7].tolist() == [[5, 6], [105, 106]]
    assert w.u32[1][:, 63].tolist() == [42, 42]


def test_counts_of_lanes_below() -> None:
    w = numbered("gfx90a")
    w.s_u32[4][...], w.s_u32[5][...] = 0x0F0F0F0F, 0xFFFF0000
    execute("gfx90a", "v_mbcnt_lo_u32_b32 v8, s4, 0", w)
    execute("gfx90a", "v_mbcnt_hi_u32_b32 v8, s5, v8", w)
    mask = 0xFFFF00000F0F0F0F
    assert w.u32[8][1].tolist() == [(mask & ((1 << lane) - 1)).bit_count() for lane in range(64)]


def test_permutations_of_rows() -> None:
    w = numbered("gfx1201")
    w.s_u32[4][...], w.s_u32[5][...] = 0x76543210, 0x01234567
    picks = [*range(8), *range(7, -1, -1)]
    execute("gfx1201", "v_permlane16_b32 v8, v1, s4, s5", w)
    assert w.u32[8][0].tolist() == [lane // 16 * 16 + picks[lane % 16] for lane in range(32)]
    execute("gfx1201", "v_permlanex16_b32 v8, v1, s4, s5", w)
    assert w.u32[8][1].tolist() == [100 + (16 - lane // 16 * 16) + picks[lane % 16] for lane in range(32)]
    w.u32[8][...] = 0
    w.set_exec(np.broadcast_to(np.arange(32) < 20, (WAVES, 32)))
    execute("gfx1201", "v_permlanex16_b32 v8, v1, s4, s5", w)
    sources = [(16 - lane // 16 * 16) + picks[lane % 16] for lane in range(32)]
    assert w.u32[8][0].tolist() == [s if lane < 20 and s < 20 else 0 for lane, s in enumerate(sources)]
    execute("gfx1201", "v_permlane64_b32 v9, v1", w)
    assert w.u32[9][0, :3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [16, 32])
def test_swaps_of_rows(size: int) -> None:
    """Odd rows of the first register change places with even rows of the second."""
    w = numbered("gfx950")
    w.u32[2][...] = np.arange(64) + 1000
    execute("gfx950", f"v_permlane{size}_swap_b32_e32 v1, v2", w)
    first, second = [], []
    for lane in range(64):
        odd = lane // size % 2
        first.append(lane - size + 1000 if odd else lane)
        second.append(lane + 1000 if odd else lane + size)
    assert w.u32[1][0].tolist() == first
    assert w.u32[2][0].tolist() == second


@pytest.mark.parametrize(
    ("arch", "text", "wanted"),
    [
        ("gfx942", "v_dot4_i32_i8 v8, v1, v2, v3", -1 * 5 + 2 * 6 - 3 * 7 + 4 * -8 + 100),
        ("gfx942", "v_dot4_u32_u8 v8, v1, v2, v3", 255 * 5 + 2 * 6 + 253 * 7 + 4 * 248 + 100),
        ("gfx942", "v_dot4c_i32_i8_e32 v3, v1, v2", -1 * 5 + 2 * 6 - 3 * 7 + 4 * -8 + 100),
        ("gfx1100", "v_dot4_i32_iu8 v8, v1, v2, v3 neg_lo:[1,0,0]", -1 * 5 + 2 * 6 - 3 * 7 + 4 * 248 + 100),
        ("gfx942", "v_dot2_i32_i16 v8, v1, v2, v3", 767 * 1541 + 1277 * -2041 + 100),
    ],
)
def test_integer_dot_products(arch: str, text: str, wanted: int) -> None:
    w = empty_waves(arch)
    for index, octets in ((1, [-1, 2, -3, 4]), (2, [5, 6, 7, -8])):
        w.u32[index][...] = np.array(octets, np.int8).view(np.uint32)[0]
    w.u32[3][...] = 100
    execute(arch, text, w)
    place = 3 if "dot4c" in text else 8
    assert set(w.i32[place].ravel().tolist()) == {wanted}


def test_float_dot_products() -> None:
    w = empty_waves("gfx942")
    w.u32[1][...], w.u32[2][...], w.f32[3][...] = halves(1.5, -2), halves(4, 0.25), 10
    execute("gfx942", "v_dot2_f32_f16 v8, v1, v2, v3", w)
    assert set(w.f32[8].ravel().tolist()) == {1.5 * 4 - 2 * 0.25 + 10}
    execute("gfx942", "v_dot2c_f32_f16_e32 v3, v1, v2", w)
    assert set(w.f32[3].ravel().tolist()) == {1.5 * 4 - 2 * 0.25 + 10}


@pytest.mark.parametrize(
    "text",
    [
        "v_frobnicate_b32 v0, v1",
        "v_add_u32_e64 v0, v1, v2 mul:2",
        "v_mov_b32_dpp v0, v1 row_frob:3 row_mask:0xf bank_mask:0xf",
        "v_and_b32_e64 v0, v1, v2 clamp",
        "v_and_b32_e64 v0, -v1, v2",
        "v_add_u32_e64 v0, v1, v2 op_sel:[1,0,0]",
        "v_add_f32_e64 v0, v1, v2 neg_lo:[1,0]",
        "v_cvt_pk_fp8_f32 v0, v1, v2 clamp",
        "v_dot4_i32_i8 v0, v1, v2, v3 neg_lo:[1,0,0]",
        "v_readlane_b32 s0, v1, 3 frob",
        "v_add_u32_e32 v0, v1",
        "s_round_mode 1",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0",
    ],
)
def test_what_is_not_modelled_is_refused_by_name(text: str) -> None:
    with pytest.raises(UnknownInstruction, match=text.split()[0].removesuffix("_e32").removesuffix("_e64")):
        execute("gfx942", text, empty_waves("gfx942"))


def test_modes_may_be_set_to_what_they_are() -> None:
    w = empty_waves("gfx1201")
    before = w.vectors.copy()
    execute("gfx1201", "s_denorm_mode 15", w)
    execute("gfx1201", "s_round_mode 0x0", w)
    np.testing.assert_array_equal(w.vectors, before)
