"""Instructions of the scalar unit against Python's integers."""

from __future__ import annotations

import pytest
from alu_harness import ALL, CDNA, M32, RDNA, Case, check_all

OLD = (*CDNA, "gfx1100")


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def overflows(x: int) -> bool:
    return not -(1 << 31) <= x < 1 << 31


def field(x: int, control: int, bits: int) -> int:
    offset, width = control & (bits - 1), min(control >> 16 & 0x7F, bits)
    return x >> offset & ((1 << width) - 1)


def signed_field(x: int, control: int) -> int:
    offset, width = control & 31, min(control >> 16 & 0x7F, 32)
    part = signed(x) >> offset & ((1 << width) - 1)
    return signed(part, width) if width else 0


def flag(value: int, bits: int = 32) -> tuple[int, bool]:
    value &= (1 << bits) - 1
    return value, value != 0


def leading(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else -1


def sign_run(x: int) -> int:
    x = signed(x)
    return leading(x ^ -1 if x < 0 else x, 32)


CASES = [
    Case("s_mov_b32", "u", "u", lambda a: a),
    Case("s_mov_b64", "U", "U", lambda a: a),
    Case("s_cselect_b32", "u", "uub", lambda a, b, c: a if c else b),
    Case("s_cselect_b64", "U", "UUb", lambda a, b, c: a if c else b),
    Case("s_add_u32", "ub", "uu", lambda a, b: (a + b, a + b > M32), OLD),
    Case("s_add_co_u32", "ub", "uu", lambda a, b: (a + b, a + b > M32), ("gfx1201",)),
    Case("s_sub_u32", "ub", "uu", lambda a, b: (a - b, a < b), OLD),
    Case("s_addc_u32", "ub", "uub", lambda a, b, c: (a + b + c, a + b + c > M32), OLD),
    Case("s_add_co_ci_u32", "ub", "uub", lambda a, b, c: (a + b + c, a + b + c > M32), ("gfx1201",)),
    Case("s_subb_u32", "ub", "uub", lambda a, b, c: (a - b - c, a < b + c), OLD),
    Case("s_sub_co_ci_u32", "ub", "uub", lambda a, b, c: (a - b - c, a < b + c), ("gfx1201",)),
    Case("s_add_i32", "ib", "ii", lambda a, b: (a + b, overflows(a + b)), OLD),
    Case("s_sub_i32", "ib", "ii", lambda a, b: (a - b, overflows(a - b)), OLD),
    Case("s_sub_co_i32", "ib", "ii", lambda a, b: (a - b, overflows(a - b)), ("gfx1201",)),
    Case("s_add_nc_u64", "U", "UU", lambda a, b: a + b, ("gfx1201",)),
    Case("s_sub_nc_u64", "U", "UU", lambda a, b: a - b, ("gfx1201",)),
    Case("s_mul_u64", "U", "UU", lambda a, b: a * b, ("gfx1201",)),
    Case("s_mul_i32", "i", "ii", lambda a, b: a * b),
    Case("s_mul_hi_u32", "u", "uu", lambda a, b: a * b >> 32),
    Case("s_mul_hi_i32", "i", "ii", lambda a, b: a * b >> 32),
    Case("s_abs_i32", "ib", "i", lambda a: flag(abs(a))),
    Case("s_absdiff_i32", "ib", "ii", lambda a, b: flag(abs(signed(a - b)))),
    *(
        Case(f"s_lshl{n}_add_u32", "ub", "uu", lambda a, b, n=n: ((a << n) + b, (a << n) + b > M32))
        for n in (1, 2, 3, 4)
    ),
    Case("s_min_i32", "ib", "ii", lambda a, b: (min(a, b), a < b)),
    Case("s_max_u32", "ub", "uu", lambda a, b: (max(a, b), a > b)),
    Case("s_min_u32", "ub", "uu", lambda a, b: (min(a, b), a < b)),
    Case("s_max_i32", "ib", "ii", lambda a, b: (max(a, b), a > b)),
    Case("s_lshl_b32", "ub", "uu", lambda a, b: flag(a << (b & 31))),
    Case("s_lshr_b32", "ub", "uu", lambda a, b: flag(a >> (b & 31))),
    Case("s_ashr_i32", "ib", "ii", lambda a, b: flag(a >> (b & 31))),
    Case("s_lshl_b64", "Ub", "Uu", lambda a, b: flag(a << (b & 63), 64)),
    Case("s_lshr_b64", "Ub", "Uu", lambda a, b: flag(a >> (b & 63), 64)),
    Case("s_ashr_i64", "Ib", "Iu", lambda a, b: flag(a >> (b & 63), 64)),
    Case("s_not_b32", "ub", "u", lambda a: flag(~a)),
    Case("s_not_b64", "Ub", "U", lambda a: flag(~a, 64)),
    Case("s_bfe_u32", "ub", "uu", lambda a, b: flag(field(a, b, 32))),
    Case("s_bfe_i32", "ib", "iu", lambda a, b: flag(signed_field(a, b))),
    Case("s_bfe_u64", "Ub", "Uu", lambda a, b: flag(field(a, b, 64), 64)),
    Case("s_bfm_b32", "u", "uu", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    Case("s_brev_b32", "u", "u", lambda a: int(f"{a:032b}"[::-1], 2)),
    Case("s_bcnt1_i32_b32", "ub", "u", lambda a: flag(a.bit_count())),
    Case("s_bcnt1_i32_b64", "ub", "U", lambda a: flag(a.bit_count())),
    Case("s_ff1_i32_b32", "i", "u", lambda a: (a & -a).bit_length() - 1, CDNA),
    Case("s_ctz_i32_b64", "i", "U", lambda a: (a & -a).bit_length() - 1, RDNA),
    Case("s_flbit_i32_b32", "i", "u", lambda a: leading(a, 32), CDNA),
    Case("s_clz_i32_u64", "i", "U", lambda a: leading(a, 64), RDNA),
    Case("s_flbit_i32", "i", "i", sign_run, CDNA),
    Case("s_sext_i32_i8", "i", "i", lambda a: signed(a, 8)),
    Case("s_sext_i32_i16", "i", "i", lambda a: signed(a, 16)),
    Case("s_pack_ll_b32_b16", "u", "uu", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16),
    Case("s_pack_lh_b32_b16", "u", "uu", lambda a, b: (a & 0xFFFF) | (b >> 16) << 16),
    Case("s_pack_hh_b32_b16", "u", "uu", lambda a, b: (a >> 16) | (b >> 16) << 16),
    Case("s_bitcmp1_b32", "b", "uu", lambda a, b: a >> (b & 31) & 1 == 1),
    Case("s_bitcmp0_b64", "b", "Uu", lambda a, b: a >> (b & 63) & 1 == 0),
    *(
        Case(f"s_{name}_b{bits}", f"{letter}b", letter * 2, lambda a, b, f=f, n=bits: flag(f(a, b), n), archs)
        for name, f, archs in (
            ("and", lambda a, b: a & b, ALL),
            ("or", lambda a, b: a | b, ALL),
            ("xor", lambda a, b: a ^ b, ALL),
            ("nand", lambda a, b: ~(a & b), ALL),
            ("nor", lambda a, b: ~(a | b), ALL),
            ("xnor", lambda a, b: ~(a ^ b), ALL),
            ("andn2", lambda a, b: a & ~b, CDNA),
            ("and_not1", lambda a, b: a & ~b, RDNA),
            ("orn2", lambda a, b: a | ~b, CDNA),
            ("or_not1", lambda a, b: a | ~b, RDNA),
        )
        for bits, letter in ((32, "u"), (64, "U"))
    ),
    *(
        Case(f"s_cmp_{name}_{kind}", "b", letter * 2, f)
        for kind, letter in (("i32", "i"), ("u32", "u"))
        for name, f in (
            ("eq", lambda a, b: a == b),
            ("lg", lambda a, b: a != b),
            ("gt", lambda a, b: a > b),
            ("ge", lambda a, b: a >= b),
            ("lt", lambda a, b: a < b),
            ("le", lambda a, b: a <= b),
        )
    ),
    Case("s_cmp_eq_u64", "b", "UU", lambda a, b: a == b),
    Case("s_cmp_lg_u64", "b", "UU", lambda a, b: a != b),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scalar_instructions(case: Case) -> None:
    check_all(case)
