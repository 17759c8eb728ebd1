"""Instructions that the other tests' tables have no room for: variants, immediates in the instruction, masks, modes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from alu_harness import CDNA, M32, RDNA, WAVES, Case, check_all, empty_waves, execute
from emulator_text import Bench
from test_alu_float import fused, larger, propagate, smaller, total, unfused

from tilewright_emulator.errors import UninitialisedRegister

G12, G950 = ("gfx1201",), ("gfx950",)


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def leading(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else -1


def field64(x: int, control: int) -> tuple[int, bool]:
    offset, width = control & 63, min(control >> 16 & 0x7F, 64)
    part = x >> offset & ((1 << width) - 1)
    value = signed(part, width) if width else 0
    return value, value != 0


def quotient(q: float, d: float, n: float) -> Any:
    """What v_div_fixup makes of an approximation that is right."""
    if math.isnan(n) or math.isnan(d) or n == d == 0 or (math.isinf(n) and math.isinf(d)):
        return math.nan
    sign = math.copysign(1, n) * math.copysign(1, d)
    if d == 0 or math.isinf(n):
        return sign * math.inf
    return sign * 0.0 if math.isinf(d) or n == 0 else sign * abs(q)


def near16(function):  # type: ignore[no-untyped-def]
    def wrapped(a: float) -> float:
        try:
            return float(function(a))
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return wrapped


CASES = [
    Case("s_add_co_i32", "ib", "ii", lambda a, b: (a + b, not -(1 << 31) <= a + b < 1 << 31), G12),
    Case("s_sub_co_u32", "ub", "uu", lambda a, b: (a - b, a < b), G12),
    Case("s_bfe_i64", "Ib", "Iu", field64),
    Case("s_clz_i32_u32", "i", "u", lambda a: leading(a, 32), RDNA),
    Case("s_flbit_i32_b64", "i", "U", lambda a: leading(a, 64), CDNA),
    Case("s_ctz_i32_b32", "i", "u", lambda a: (a & -a).bit_length() - 1, RDNA),
    Case("s_ff1_i32_b64", "i", "U", lambda a: (a & -a).bit_length() - 1, CDNA),
    Case("s_cmp_u_f32", "b", "ff", lambda a, b: math.isnan(a) or math.isnan(b), G12),
    Case("s_cmp_lt_f32", "b", "ff", lambda a, b: a < b, G12),
    Case("s_cvt_f16_f32", "h", "f", lambda a: a, G12),
    Case("s_cvt_f32_f16", "f", "h", lambda a: a, G12),
    Case("s_cvt_f32_u32", "f", "u", float, G12),
    Case("s_add_f32", "f", "ff", total, G12),
    Case("v_ffbh_i32_e32", "i", "i", lambda a: leading(a ^ -1 if a < 0 else a, 32), CDNA),
    Case("v_mad_co_i64_i32", "Im", "iiI", lambda a, b, c: (a * b + c, not -(1 << 63) <= a * b + c < 1 << 63), G12),
    Case("v_minmax_i32", "i", "iii", lambda a, b, c: max(min(a, b), c), RDNA),
    Case("v_subrev_u32_e32", "u", "uu", lambda a, b: b - a, CDNA),
    Case("v_sub_i16", "x", "xx", lambda a, b: a - b, CDNA),
    Case("v_bitop3_b16", "w", "www", lambda a, b, c: (a & b) ^ c, G950, " bitop3:0x6a"),
    Case("v_min3_f16", "h", "hhh", lambda a, b, c: smaller(smaller(a, b), c), CDNA),
    Case("v_min3_num_f32", "f", "fff", lambda a, b, c: smaller(smaller(a, b), c), G12),
    Case("v_minmax_num_f32", "f", "fff", lambda a, b, c: larger(smaller(a, b), c), G12),
    Case("v_maximumminimum_f32", "f", "fff", lambda a, b, c: propagate(smaller)(propagate(larger)(a, b), c), G12),
    Case("v_exp_f16_e32", "h", "h", near16(lambda a: 2.0**a), CDNA, ulps=1),
    Case("v_log_f16_e32", "h", "h", near16(lambda a: -math.inf if a == 0 else math.log2(a)), CDNA, ulps=1),
    Case("v_sqrt_f16_e32", "h", "h", near16(math.sqrt), CDNA, ulps=1),
    Case("v_rcp_f16_e32", "h", "h", near16(lambda a: 1 / a if a else math.copysign(math.inf, a)), CDNA, ulps=1),
    Case("v_div_fixup_f16", "h", "hhh", quotient, CDNA),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_variants(case: Case) -> None:
    check_all(case)


IMMEDIATES = [
    ("s_movk_i32 s8, 0x8001", -0x7FFF, None),
    ("s_addk_i32 s8, 0xfffe", 5, None),
    ("s_mulk_i32 s8, 0x3", 21, None),
    ("s_cmpk_gt_i32 s8, 0xfff0", None, True),
    ("s_cmpk_gt_u32 s8, 0xfff0", None, False),
    ("s_cmpk_lt_u32 s8, 0x8", None, True),
]


@pytest.mark.parametrize(("text", "value", "flag"), IMMEDIATES)
def test_immediates_in_the_instruction(text: str, value: int | None, flag: bool | None) -> None:
    """With 7 in s8 before."""
    w = empty_waves("gfx942")
    w.s_i32[8][...] = 7
    execute("gfx942", text, w)
    assert w.s_i32[8].ravel().tolist() == [7 if value is None else value] * WAVES
    if flag is not None:
        assert w.scc.ravel().tolist() == [flag] * WAVES


SAVES = [
    ("s_and_saveexec_b64", CDNA, lambda s, e: s & e),
    ("s_andn2_saveexec_b64", CDNA, lambda s, e: s & ~e),
    ("s_or_saveexec_b64", CDNA, lambda s, e: s | e),
    ("s_xor_saveexec_b64", CDNA, lambda s, e: s ^ e),
    ("s_and_saveexec_b32", RDNA, lambda s, e: s & e),
    ("s_and_not1_saveexec_b32", RDNA, lambda s, e: s & ~e),
    ("s_or_saveexec_b32", RDNA, lambda s, e: s | e),
    ("s_and_not0_saveexec_b32", RDNA, lambda s, e: ~s & e),
]


@pytest.mark.parametrize(("name", "archs", "function"), SAVES, ids=[name for name, _, _ in SAVES])
def test_saving_the_active_lanes(name: str, archs: tuple[str, ...], function: Any) -> None:
    """The first register gets exec as it was; then exec is a function of both; scc says whether a lane is left."""
    for arch in {archs[0], archs[-1]}:
        w = empty_waves(arch)
        rng = np.random.default_rng(1)
        exec_before, mask = rng.random((2, WAVES, w.lanes)) < 0.5
        mask[1] = name.startswith("s_and_n") and "not0" not in name
        w.set_exec(exec_before)
        w.write_mask(20, mask)
        wide = arch in CDNA
        execute(arch, f"{name} {'s[24:25]' if wide else 's24'}, {'s[20:21]' if wide else 's20'}", w)
        np.testing.assert_array_equal(w.read_mask(24), exec_before)
        wanted = function(mask, exec_before)
        np.testing.assert_array_equal(w.exec, wanted)
        np.testing.assert_array_equal(w.scc, wanted.any(axis=1, keepdims=True))


@pytest.mark.parametrize("relation", ["eq", "ne", "lt", "gt"])
def test_comparisons_that_set_the_active_lanes(relation: str) -> None:
    plain = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "gt": np.greater}[relation]
    for arch, place in (("gfx942", "vcc, "), ("gfx1100", "")):
        w = empty_waves(arch)
        rng = np.random.default_rng(2)
        w.u32[1][...], active = rng.integers(0, 3, w.u32[1].shape), rng.random((WAVES, w.lanes)) < 0.8
        w.set_exec(active)
        execute(arch, f"v_cmpx_{relation}_u32_e32 {place}1, v1", w)
        wanted = plain(1, w.u32[1]) & active
        np.testing.assert_array_equal(w.exec, wanted)
        if place:
            np.testing.assert_array_equal(w.read_mask(106), wanted)


def random_floats(seed: int, count: int = 3) -> list[np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((WAVES, 64)) * 4).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize(
    ("arch", "text", "function"),
    [
        ("gfx942", "v_fmac_f32_e32 v8, v1, v2", lambda a, b, c: fused(a, b, c)),
        ("gfx90a", "v_mac_f32_e32 v8, v1, v2", unfused),
        ("gfx942", "v_fmamk_f32 v8, v1, 0x40600000, v2", lambda a, b, c: fused(a, 3.5, b)),
        ("gfx942", "v_fmaak_f32 v8, v1, v2, 0x40600000", lambda a, b, c: fused(a, b, 3.5)),
        ("gfx90a", "v_madmk_f32 v8, v1, 0x40600000, v2", lambda a, b, c: unfused(a, 3.5, b)),
        ("gfx942", "v_fmac_f32_e64 v8, -v1, |v2|", lambda a, b, c: fused(-a, abs(b), c)),
    ],
)
def test_sums_onto_the_destination(arch: str, text: str, function: Any) -> None:
    w = empty_waves(arch)
    a, b, c = random_floats(3)
    w.f32[1][...], w.f32[2][...], w.f32[8][...] = a, b, c
    execute(arch, text, w)
    for x, y, z, got in zip(*(part.ravel().tolist() for part in (a, b, c, w.f32[8])), strict=True):
        value = function(x, y, z)
        exact = value if isinstance(value, Fraction) else Fraction(value)
        assert abs(Fraction(got) - exact) <= abs(exact) / 2**24


def test_scalar_sums_onto_the_destination() -> None:
    w = empty_waves("gfx1201")
    w.s_f32[8][...], w.s_f32[2][...], w.s_f32[4][...] = 1, 2, 3
    execute("gfx1201", "s_fmac_f32 s8, s2, s4", w)
    assert w.s_f32[8].ravel().tolist() == [7.0] * WAVES
    execute("gfx1201", "v_s_rcp_f32 s8, s4", w)
    np.testing.assert_allclose(w.s_f32[8], 1 / 3, rtol=2**-23)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # halves: v1 = (1, 2), v2 = (3, -4), v3 = (0.5, 8), v8 = (10, 20)
        ("v_fmac_f16_e32 v8.l, v1.l, v2.h", (6, 20)),
        ("v_add_nc_u16 v8.l, v1.h, v1.l", None),
        ("v_mov_b16_e32 v8.h, v2.l", (10, 3)),
        ("v_max_f16_e32 v8.h, v1.h, v2.l", (10, 3)),
        ("v_min_f16_e32 v8.l, v2.h, v2.l", (-4, 20)),
        ("v_minmax_f16 v8.l, v2.l, v1.l, v3.h", (8, 20)),
        ("v_sqrt_f16_e32 v8.l, v2.h", (math.nan, 20)),
        ("v_cndmask_b16 v8.h, v1.l, v2.l, s20", (10, 3)),
        ("v_pk_max_f16 v8, v1, v2", (3, 2)),
        ("v_cvt_f32_f16_e32 v8, v2.h", None),
    ],
)
def test_named_halves(text: str, wanted: tuple[float, float] | None) -> None:
    w = empty_waves("gfx1100")
    for index, pair in ((1, (1, 2)), (2, (3, -4)), (3, (0.5, 8)), (8, (10, 20))):
        w.u32[index][...] = np.array(pair, np.float16).view(np.uint32)[0]
    w.s_u32[20][...] = M32
    execute("gfx1100", text, w)
    if wanted is not None:
        np.testing.assert_array_equal(w.u32[8].view(np.float16)[0, :2], np.array(wanted, np.float16))
    elif text.startswith("v_cvt"):
        assert set(w.f32[8].ravel().tolist()) == {-4.0}
    else:
        assert {x & 0xFFFF for x in w.u32[8].ravel().tolist()} == {0x3C00 + 0x4000}


def test_packed_extremes_that_keep_nans() -> None:
    w = empty_waves("gfx1201")
    for index, pair in ((1, (1, math.nan)), (2, (3, -4)), (3, (0.5, 8))):
        w.u32[index][...] = np.array(pair, np.float16).view(np.uint32)[0]
    for text, wanted in (
        ("v_pk_maximum3_f16 v8, v1, v2, v3", (3, math.nan)),
        ("v_pk_minimum3_f16 v8, v1, v2, v3", (0.5, math.nan)),
        ("v_pk_min_num_f16 v8, v1, v2", (1, -4)),
        ("v_pk_maximum_f16 v8, v1, v2", (3, math.nan)),
    ):
        execute("gfx1201", text, w)
        np.testing.assert_array_equal(w.u32[8].view(np.float16)[0, :2], np.array(wanted, np.float16))


def test_accumulation_registers_and_swaps() -> None:
    w = empty_waves("gfx942")
    w.u32[1][...], w.u32[2][...] = 11, 22
    execute("gfx942", "v_accvgpr_write_b32 a3, v1", w)
    execute("gfx942", "v_accvgpr_mov_b32 a4, a3", w)
    execute("gfx942", "v_accvgpr_read_b32 v8, a4", w)
    assert set(w.u32[8].ravel().tolist()) == {11}
    w.set_exec(np.broadcast_to(np.arange(64) < 2, (WAVES, 64)))
    execute("gfx942", "v_swap_b32 v1, v2", w)
    assert w.u32[1][0, :3].tolist() == [22, 22, 11]
    assert w.u32[2][0, :3].tolist() == [11, 11, 22]


def test_double_division_is_right_to_the_last_place() -> None:
    """The sequence that compilers emit: reciprocals of float64 are coarse, so its corrections have work to do."""
    lines = (
        "v_div_scale_f64 v[4:5], s[0:1], v[0:1], v[0:1], v[2:3]", "v_rcp_f64_e32 v[6:7], v[4:5]",
        "v_fma_f64 v[10:11], -v[4:5], v[6:7], 1.0", "v_fma_f64 v[6:7], v[6:7], v[10:11], v[6:7]",
        "v_fma_f64 v[10:11], -v[4:5], v[6:7], 1.0", "v_fma_f64 v[6:7], v[6:7], v[10:11], v[6:7]",
        "v_div_scale_f64 v[12:13], vcc, v[2:3], v[0:1], v[2:3]", "v_mul_f64 v[14:15], v[12:13], v[6:7]",
        "v_fma_f64 v[4:5], -v[4:5], v[14:15], v[12:13]", "v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[14:15]",
        "v_div_fixup_f64 v[8:9], v[4:5], v[0:1], v[2:3]",
    )  # fmt: skip
    rng = np.random.default_rng(6)
    w = empty_waves("gfx942")
    x, y = rng.standard_normal((2, WAVES, 64)) * 10.0 ** rng.integers(-150, 150, (2, WAVES, 64))
    x[0, :4], y[0, :4] = (0, 1, np.inf, 3), (0, 0, 2, np.inf)
    for first, values in ((0, y), (2, x)):
        bits = values.view(np.uint64)
        w.u32[first][...], w.u32[first + 1][...] = bits & np.uint64(M32), bits >> np.uint64(32)
    for line in lines:
        execute("gfx942", line, w)
    got = (w.u32[8].astype(np.uint64) | w.u32[9].astype(np.uint64) << np.uint64(32)).view(np.float64)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, x / y)


def test_coarse_functions_of_float64() -> None:
    """Near enough to start from, and no nearer than hardware is."""
    rng = np.random.default_rng(7)
    values = rng.uniform(0.1, 10, (WAVES, 64))
    w = empty_waves("gfx90a")
    w.u32[0][...], w.u32[1][...] = values.view(np.uint64) & np.uint64(M32), values.view(np.uint64) >> np.uint64(32)
    for name, function in (("rcp", lambda x: 1 / x), ("rsq", lambda x: 1 / np.sqrt(x))):
        execute("gfx90a", f"v_{name}_f64_e32 v[8:9], v[0:1]", w)
        got = (w.u32[8].astype(np.uint64) | w.u32[9].astype(np.uint64) << np.uint64(32)).view(np.float64)
        error = np.abs(got / function(values) - 1)
        assert 2.0**-40 < error.max() < 2.0**-27


def test_half_of_a_scalar_pair_may_be_undefined_where_it_is_only_copied() -> None:
    """Compilers copy a pair whole and then use the lower half for both elements of packed arithmetic."""
    start = "s_mov_b32 s20, 1.0\nv_mov_b64_e32 v[8:9], s[20:21]\n"
    used = "v_pk_add_f32 v[10:11], v[8:9], v[8:9] op_sel_hi:{}"
    w = Bench("gfx942").run(start + used.format("[0,0]"))
    assert set(w.f32[11].ravel().tolist()) == {2.0}
    with pytest.raises(UninitialisedRegister, match="reads v11"):
        Bench("gfx942").run(start + used.format("[1,0]") + "\nv_mov_b32_e32 v12, v11")
