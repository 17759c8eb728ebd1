"""Integer instructions of the vector unit against Python's integers."""

from __future__ import annotations

import struct

import pytest
from alu_harness import ALL, CDNA, M32, RDNA, Case, check_all

G12, G950 = ("gfx1201",), ("gfx950",)


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def octets(x: int) -> bytes:
    return struct.pack("<I", x)


def distance(a: int, b: int) -> int:
    return sum(abs(x - y) for x, y in zip(octets(a), octets(b), strict=True))


def permuted(a: int, b: int, c: int) -> int:
    pool = octets(b) + octets(a)

    def pick(selector: int) -> int:
        if selector < 8:
            return pool[selector]
        if selector < 12:
            return 255 if pool[2 * (selector - 8) + 1] & 0x80 else 0
        return 0 if selector == 12 else 255

    return int.from_bytes(bytes(pick(selector) for selector in octets(c)), "little")


def field(x: int, offset: int, width: int) -> int:
    return x >> (offset & 31) & ((1 << (width & 31)) - 1)


def signed_field(x: int, offset: int, width: int) -> int:
    width &= 31
    return signed(x >> (offset & 31), width) if width else 0


def middle(*values: int) -> int:
    return sorted(values)[1]


def table_logic(table: int, a: int, b: int, c: int) -> int:
    return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))


def leading(x: int) -> int:
    return 32 - x.bit_length() if x else -1


def both(low: int, high: int) -> int:
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def pairwise(function):  # type: ignore[no-untyped-def]
    """A function of 16-bit halves as one of pairs."""
    return lambda *sources: both(function(*(s & 0xFFFF for s in sources)), function(*(s >> 16 for s in sources)))


WORDS = [
    Case("v_mov_b32_e32", "u", "u", lambda a: a),
    Case("v_mov_b64_e32", "U", "U", lambda a: a, ("gfx942", "gfx950")),
    Case("v_cndmask_b32_e32", "u", "uum", lambda a, b, m: b if m else a),
    Case("v_cndmask_b32_e64", "u", "uum", lambda a, b, m: b if m else a),
    Case("v_add_u32_e32", "u", "uu", lambda a, b: a + b, CDNA),
    Case("v_add_nc_u32_e32", "u", "uu", lambda a, b: a + b, RDNA),
    Case("v_sub_u32_e32", "u", "uu", lambda a, b: a - b, CDNA),
    Case("v_subrev_nc_u32_e32", "u", "uu", lambda a, b: b - a, RDNA),
    Case("v_add_u32_e64", "u", "uu", lambda a, b: min(a + b, M32), CDNA, " clamp"),
    Case("v_sub_nc_u32_e64", "u", "uu", lambda a, b: max(a - b, 0), RDNA, " clamp"),
    Case("v_add_i32", "i", "ii", lambda a, b: clamp(a + b, -(1 << 31), (1 << 31) - 1), CDNA, " clamp"),
    Case("v_sub_nc_i32", "i", "ii", lambda a, b: clamp(a - b, -(1 << 31), (1 << 31) - 1), RDNA, " clamp"),
    Case("v_add_co_u32_e32", "um", "uu", lambda a, b: (a + b, a + b > M32), CDNA),
    Case("v_add_co_u32", "um", "uu", lambda a, b: (a + b, a + b > M32), RDNA),
    Case("v_sub_co_u32_e64", "um", "uu", lambda a, b: (a - b, a < b), CDNA),
    Case("v_subrev_co_u32_e64", "um", "uu", lambda a, b: (b - a, b < a), CDNA),
    Case("v_addc_co_u32_e32", "um", "uum", lambda a, b, c: (a + b + c, a + b + c > M32), CDNA),
    Case("v_add_co_ci_u32_e64", "um", "uum", lambda a, b, c: (a + b + c, a + b + c > M32), RDNA),
    Case("v_subb_co_u32_e64", "um", "uum", lambda a, b, c: (a - b - c, a < b + c), CDNA),
    Case("v_subbrev_co_u32_e64", "um", "uum", lambda a, b, c: (b - a - c, b < a + c), CDNA),
    Case("v_sub_co_ci_u32_e32", "um", "uum", lambda a, b, c: (a - b - c, a < b + c), RDNA),
    Case("v_subrev_co_ci_u32_e64", "um", "uum", lambda a, b, c: (b - a - c, b < a + c), RDNA),
    Case("v_add3_u32", "u", "uuu", lambda a, b, c: a + b + c),
    Case("v_lshl_add_u32", "u", "uuu", lambda a, b, c: (a << (b & 31)) + c),
    Case("v_add_lshl_u32", "u", "uuu", lambda a, b, c: ((a + b) & M32) << (c & 31)),
    Case("v_lshl_or_b32", "u", "uuu", lambda a, b, c: (a << (b & 31)) | c),
    Case("v_and_or_b32", "u", "uuu", lambda a, b, c: (a & b) | c),
    Case("v_or3_b32", "u", "uuu", lambda a, b, c: a | b | c),
    Case("v_xor3_b32", "u", "uuu", lambda a, b, c: a ^ b ^ c, RDNA),
    Case("v_xad_u32", "u", "uuu", lambda a, b, c: (a ^ b) + c),
    Case("v_lshl_add_u64", "U", "UuU", lambda a, b, c: (a << (b & 7)) + c, ("gfx942", "gfx950")),
    Case("v_mul_lo_u32", "u", "uu", lambda a, b: a * b),
    Case("v_mul_hi_u32", "u", "uu", lambda a, b: a * b >> 32),
    Case("v_mul_hi_i32", "i", "ii", lambda a, b: a * b >> 32),
    Case("v_mul_u32_u24_e32", "u", "uu", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    Case("v_mul_i32_i24_e32", "i", "ii", lambda a, b: signed(a, 24) * signed(b, 24)),
    Case("v_mul_hi_u32_u24_e32", "u", "uu", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    Case("v_mad_u32_u24", "u", "uuu", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    Case("v_mad_i32_i24", "i", "iii", lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    Case("v_mad_u64_u32", "Um", "uuU", lambda a, b, c: (a * b + c, a * b + c >= 1 << 64), CDNA),
    Case("v_mad_co_u64_u32", "Um", "uuU", lambda a, b, c: (a * b + c, a * b + c >= 1 << 64), G12),
    Case("v_mad_i64_i32", "Im", "iiI", lambda a, b, c: (a * b + c, not -(1 << 63) <= a * b + c < 1 << 63), CDNA),
    Case("v_min_u32_e32", "u", "uu", min),
    Case("v_max_u32_e32", "u", "uu", max),
    Case("v_min_i32_e32", "i", "ii", min),
    Case("v_max_i32_e32", "i", "ii", max),
    Case("v_min3_i32", "i", "iii", min),
    Case("v_max3_u32", "u", "uuu", max),
    Case("v_med3_i32", "i", "iii", middle),
    Case("v_med3_u32", "u", "uuu", middle),
    Case("v_minmax_u32", "u", "uuu", lambda a, b, c: max(min(a, b), c), RDNA),
    Case("v_maxmin_i32", "i", "iii", lambda a, b, c: min(max(a, b), c), RDNA),
    Case("v_sad_u8", "u", "uuu", lambda a, b, c: c + distance(a, b)),
    Case(
        "v_lerp_u8", "u", "uuu",
        lambda a, b, c: int.from_bytes(
            bytes((x + y + (z & 1)) >> 1 for x, y, z in zip(octets(a), octets(b), octets(c), strict=True)), "little"
        ),
    ),
]  # fmt: skip
BITS = [
    Case("v_and_b32_e32", "u", "uu", lambda a, b: a & b),
    Case("v_or_b32_e32", "u", "uu", lambda a, b: a | b),
    Case("v_xor_b32_e32", "u", "uu", lambda a, b: a ^ b),
    Case("v_xnor_b32_e32", "u", "uu", lambda a, b: ~(a ^ b)),
    Case("v_not_b32_e32", "u", "u", lambda a: ~a),
    Case("v_bfi_b32", "u", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    Case("v_lshlrev_b32_e32", "u", "uu", lambda a, b: b << (a & 31)),
    Case("v_lshrrev_b32_e32", "u", "uu", lambda a, b: b >> (a & 31)),
    Case("v_ashrrev_i32_e32", "i", "ii", lambda a, b: b >> (a & 31)),
    Case("v_lshlrev_b64", "U", "uU", lambda a, b: b << (a & 63), (*CDNA, "gfx1100")),
    Case("v_lshlrev_b64_e32", "U", "uU", lambda a, b: b << (a & 63), G12),
    Case("v_lshrrev_b64", "U", "uU", lambda a, b: b >> (a & 63)),
    Case("v_ashrrev_i64", "I", "uI", lambda a, b: b >> (a & 63)),
    Case("v_bfe_u32", "u", "uuu", field),
    Case("v_bfe_i32", "i", "iii", signed_field),
    Case("v_bfm_b32", "u", "uu", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    Case("v_alignbit_b32", "u", "uuu", lambda a, b, c: (a << 32 | b) >> (c & 31), (*CDNA, "gfx1201")),
    Case("v_alignbyte_b32", "u", "uuu", lambda a, b, c: (a << 32 | b) >> 8 * (c & 3), (*CDNA, "gfx1201")),
    Case("v_bfrev_b32_e32", "u", "u", lambda a: int(f"{a:032b}"[::-1], 2)),
    Case("v_ffbl_b32_e32", "i", "u", lambda a: (a & -a).bit_length() - 1, CDNA),
    Case("v_ctz_i32_b32_e32", "i", "u", lambda a: (a & -a).bit_length() - 1, RDNA),
    Case("v_ffbh_u32_e32", "i", "u", leading, CDNA),
    Case("v_clz_i32_u32_e32", "i", "u", leading, RDNA),
    Case("v_cls_i32_e32", "i", "i", lambda a: leading(a ^ -1 if a < 0 else a), RDNA),
    Case("v_bcnt_u32_b32", "u", "uu", lambda a, b: a.bit_count() + b),
    Case("v_perm_b32", "u", "uuu", permuted),
    *(
        Case("v_bitop3_b32", "u", "uuu", lambda a, b, c, t=table: table_logic(t, a, b, c), G950, f" bitop3:{table:#x}")
        for table in (0x6C, 0xEC, 0x11, 0xFE)
    ),
]
SHORTS = [
    Case("v_add_u16_e32", "w", "ww", lambda a, b: a + b, CDNA),
    Case("v_sub_u16_e32", "w", "ww", lambda a, b: a - b, CDNA),
    Case("v_mul_lo_u16_e32", "w", "ww", lambda a, b: a * b, CDNA),
    Case("v_add_u16_e64", "w", "ww", lambda a, b: min(a + b, 0xFFFF), CDNA, " clamp"),
    Case("v_add_i16", "x", "xx", lambda a, b: clamp(a + b, -(1 << 15), (1 << 15) - 1), CDNA, " clamp"),
    Case("v_lshlrev_b16_e32", "w", "ww", lambda a, b: b << (a & 15), CDNA),
    Case("v_lshrrev_b16_e32", "w", "ww", lambda a, b: b >> (a & 15), CDNA),
    Case("v_ashrrev_i16_e32", "x", "xx", lambda a, b: b >> (a & 15), CDNA),
    Case("v_min_i16_e32", "x", "xx", min, CDNA),
    Case("v_max_u16_e32", "w", "ww", max, CDNA),
    Case("v_mad_u16", "w", "www", lambda a, b, c: a * b + c, CDNA),
    Case("v_mad_legacy_u16", "w", "www", lambda a, b, c: a * b + c, CDNA),
    Case("v_med3_i16", "x", "xxx", middle, CDNA),
    Case("v_mad_u32_u16", "u", "wwu", lambda a, b, c: a * b + c, CDNA),
    Case("v_mad_i32_i16", "i", "xxi", lambda a, b, c: a * b + c, CDNA),
    Case("v_pk_add_u16", "u", "uu", pairwise(lambda a, b: a + b)),
    Case("v_pk_sub_i16", "u", "uu", pairwise(lambda a, b: a - b)),
    Case("v_pk_mul_lo_u16", "u", "uu", pairwise(lambda a, b: a * b)),
    Case("v_pk_mad_u16", "u", "uuu", pairwise(lambda a, b, c: a * b + c)),
    Case("v_pk_lshlrev_b16", "u", "uu", pairwise(lambda a, b: b << (a & 15))),
    Case("v_pk_lshrrev_b16", "u", "uu", pairwise(lambda a, b: b >> (a & 15))),
    Case("v_pk_ashrrev_i16", "u", "uu", pairwise(lambda a, b: signed(b, 16) >> (a & 15))),
    Case("v_pk_max_i16", "u", "uu", pairwise(lambda a, b: max(signed(a, 16), signed(b, 16)))),
    Case("v_pk_min_u16", "u", "uu", pairwise(min)),
    Case("v_pk_add_u16", "u", "uu", pairwise(lambda a, b: min(a + b, 0xFFFF)), ALL, " clamp"),
    Case("v_pk_add_u16", "u", "uu", lambda a, b: both(a + b, a + b), ALL, " op_sel_hi:[0,0]"),
    Case("v_pk_add_u16", "u", "uu", lambda a, b: both((a >> 16) + b, (a >> 16) + (b >> 16)), ALL, " op_sel:[1,0]"),
    Case("v_pack_b32_f16", "u", "uu", both, CDNA),
    Case("v_pack_b32_f16", "u", "uu", lambda a, b: both(a >> 16, b), CDNA, " op_sel:[1,0,0]"),
    Case("v_pk_mov_b32", "U", "UU", lambda a, b: (a & M32) | (b & M32) << 32, CDNA),
    Case("v_pk_mov_b32", "U", "UU", lambda a, b: (a >> 32) | (b >> 32) << 32, CDNA, " op_sel:[1,1]"),
]
COMPARES = [
    Case(f"v_cmp_{name}_{kind}_e64", "m", letter * 2, f)
    for kind, letter in (("i32", "i"), ("u32", "u"), ("i64", "I"), ("u64", "U"))
    for name, f in (
        ("lt", lambda a, b: a < b),
        ("eq", lambda a, b: a == b),
        ("le", lambda a, b: a <= b),
        ("gt", lambda a, b: a > b),
        ("ne", lambda a, b: a != b),
        ("ge", lambda a, b: a >= b),
    )
]
CASES = [*WORDS, *BITS, *SHORTS, *COMPARES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vector_integers(case: Case) -> None:
    check_all(case)
