"""Matrix instructions: every shape and format against products in int64 and float64, element by element placed by hand.

Where an element lies is written here again, as loops over the printed figures of the ISA documents; the index arrays of
the emulator are not used. Values are small integers (exact in every format), so that every sum is exact too.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from alu_harness import WAVES, empty_waves, execute

from tilewright_emulator.errors import EmulationError, UnknownInstruction

Array = np.ndarray  # type: ignore[type-arg]
DTYPES: dict[str, object] = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "u8": np.uint8,
    "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2,
    "fp8z": ml_dtypes.float8_e4m3fnuz, "bf8z": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
OLD, NEW, BOTH = ("gfx90a",), ("gfx942", "gfx950"), ("gfx90a", "gfx942", "gfx950")

# mnemonic: (M, K, blocks, format of A, format of B)
FIGURES: dict[str, tuple[int, int, int, str, str]] = {
    "v_mfma_f32_32x32x2f32": (32, 2, 1, "f32", "f32"),
    "v_mfma_f32_16x16x4f32": (16, 4, 1, "f32", "f32"),
    "v_mfma_f32_32x32x1f32": (32, 1, 2, "f32", "f32"),
    "v_mfma_f32_16x16x1f32": (16, 1, 4, "f32", "f32"),
    "v_mfma_f32_4x4x1f32": (4, 1, 16, "f32", "f32"),
    "v_mfma_f32_32x32x4f16": (32, 4, 2, "f16", "f16"),
    "v_mfma_f32_16x16x4f16": (16, 4, 4, "f16", "f16"),
    "v_mfma_f32_4x4x4f16": (4, 4, 16, "f16", "f16"),
    "v_mfma_f32_32x32x8f16": (32, 8, 1, "f16", "f16"),
    "v_mfma_f32_16x16x16f16": (16, 16, 1, "f16", "f16"),
    "v_mfma_f32_32x32x2bf16": (32, 2, 2, "bf16", "bf16"),
    "v_mfma_f32_32x32x4bf16": (32, 4, 1, "bf16", "bf16"),
    "v_mfma_f32_16x16x8bf16": (16, 8, 1, "bf16", "bf16"),
    "v_mfma_f32_32x32x4bf16_1k": (32, 4, 2, "bf16", "bf16"),
    "v_mfma_f32_32x32x8bf16_1k": (32, 8, 1, "bf16", "bf16"),
    "v_mfma_f32_16x16x16bf16_1k": (16, 16, 1, "bf16", "bf16"),
    "v_mfma_f32_4x4x4bf16_1k": (4, 4, 16, "bf16", "bf16"),
    "v_mfma_i32_32x32x8i8": (32, 8, 1, "i8", "i8"),
    "v_mfma_i32_16x16x16i8": (16, 16, 1, "i8", "i8"),
    "v_mfma_i32_32x32x4i8": (32, 4, 2, "i8", "i8"),
}
FIGURES_NEW: dict[str, tuple[int, int, int, str, str]] = {
    "v_mfma_f32_32x32x2_f32": (32, 2, 1, "f32", "f32"),
    "v_mfma_f32_16x16x4_f32": (16, 4, 1, "f32", "f32"),
    "v_mfma_f32_4x4x4_16b_f16": (4, 4, 16, "f16", "f16"),
    "v_mfma_f32_32x32x8_f16": (32, 8, 1, "f16", "f16"),
    "v_mfma_f32_16x16x16_f16": (16, 16, 1, "f16", "f16"),
    "v_mfma_f32_32x32x8_bf16": (32, 8, 1, "bf16", "bf16"),
    "v_mfma_f32_16x16x16_bf16": (16, 16, 1, "bf16", "bf16"),
    "v_mfma_f32_4x4x4_16b_bf16": (4, 4, 16, "bf16", "bf16"),
    "v_mfma_i32_32x32x16_i8": (32, 16, 1, "i8", "i8"),
    "v_mfma_i32_16x16x32_i8": (16, 32, 1, "i8", "i8"),
    **{f"v_mfma_f32_32x32x16_{a}_{b}": (32, 16, 1, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
    **{f"v_mfma_f32_16x16x32_{a}_{b}": (16, 32, 1, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
}
FIGURES_950: dict[str, tuple[int, int, int, str, str]] = {
    "v_mfma_f32_16x16x32_f16": (16, 32, 1, "f16", "f16"),
    "v_mfma_f32_32x32x16_f16": (32, 16, 1, "f16", "f16"),
    "v_mfma_f32_16x16x32_bf16": (16, 32, 1, "bf16", "bf16"),
    "v_mfma_f32_32x32x16_bf16": (32, 16, 1, "bf16", "bf16"),
    "v_mfma_i32_32x32x32_i8": (32, 32, 1, "i8", "i8"),
    "v_mfma_i32_16x16x64_i8": (16, 64, 1, "i8", "i8"),
}
CASES = [
    *((name, arch) for name in FIGURES for arch in OLD),
    *((name, arch) for name in FIGURES_NEW for arch in NEW),
    *((name, "gfx950") for name in FIGURES_950),
]
EVERY = {**FIGURES, **FIGURES_NEW, **FIGURES_950}


def small(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    return rng.integers(0 if kind == "u8" else -4, 5, shape)


def put(w, first: int, values: Array, kind: str, arch: str) -> None:  # type: ignore[no-untyped-def]
    """Values ``(waves, lanes, elements)`` to registers, the first element lowest."""
    name = kind + "z" if arch == "gfx942" and kind in ("fp8", "bf8") else kind
    raw = np.ascontiguousarray(values.astype(np.float32).astype(DTYPES[name]))  # type: ignore[call-overload]
    words = raw.view(np.uint8).reshape(*values.shape[:2], -1).view(np.uint32)
    for register in range(words.shape[2]):
        w.u32[first + register][...] = words[:, :, register]


def in_lanes(matrix: Array, blocks: int, lanes: int = 64) -> Array:
    """A ``(waves, blocks, rows, K)`` as lanes hold it: k in runs, one lane of a row after the other."""
    waves, _, rows, depth = matrix.shape
    held = rows * depth * blocks // lanes
    out = np.zeros((waves, lanes, held), matrix.dtype)
    for lane in range(lanes):
        row, block, group = lane % rows, lane // rows % blocks, lane // (rows * blocks)
        out[:, lane] = matrix[:, block, row, group * held : (group + 1) * held]
    return out


def from_registers(w, first: int, size: int, blocks: int, integer: bool) -> Array:  # type: ignore[no-untyped-def]
    """D of MFMA as ``(waves, blocks, size, size)``."""
    out = np.zeros((WAVES, blocks, size, size), np.int64 if integer else np.float64)
    rows = w.i32 if integer else w.f32
    for register in range(size * size * blocks // 64):
        for lane in range(64):
            if size == 4:
                block, i, j = lane // 4, register, lane % 4
            else:
                per_block = size * size // 64
                block, inside = register // per_block, register % per_block
                i = 4 * (lane // size) + inside % 4 + (256 // size) * (inside // 4)
                j = lane % size
            out[:, block, i, j] = rows[first + register][:, lane]
    return out


def operands(size: int, depth: int, blocks: int, kind: str) -> int:
    bits = {"f32": 32, "f16": 16, "bf16": 16}.get(kind, 8)
    return size * depth * blocks // 64 * bits // 32


def span(first: int, count: int, file: str = "v") -> str:
    return f"{file}[{first}:{first + count - 1}]" if count > 1 else f"{file}{first}"


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_mfma(name: str, arch: str) -> None:
    """D = A x B + C with accumulators in accumulation registers; which lanes are active does not matter."""
    size, depth, blocks, kind_a, kind_b = EVERY[name]
    rng = np.random.default_rng(1)
    a, b = small(rng, (WAVES, blocks, size, depth), kind_a), small(rng, (WAVES, blocks, size, depth), kind_b)
    w = empty_waves(arch)
    put(w, 0, in_lanes(a, blocks), kind_a, arch)
    put(w, 32, in_lanes(b, blocks), kind_b, arch)
    integer, count = kind_a == "i8", size * size * blocks // 64
    start = rng.integers(-9, 9, (count, WAVES, 64))
    for register in range(count):
        (w.i32 if integer else w.f32)[256 + register][...] = start[register]
    before = from_registers(w, 256, size, blocks, integer)
    w.set_exec(rng.random((WAVES, 64)) < 0.5)
    regs_a, regs_b = operands(size, depth, blocks, kind_a), operands(size, depth, blocks, kind_b)
    c = span(0, count, "a")
    execute(arch, f"{name} {c}, {span(0, regs_a)}, {span(32, regs_b)}, {c}", w)
    wanted = np.matmul(a, b.swapaxes(2, 3)) + before
    np.testing.assert_array_equal(from_registers(w, 256, size, blocks, integer), wanted)
    execute(arch, f"{name} {span(64, count)}, {span(0, regs_a)}, {span(32, regs_b)}, 0", w)
    np.testing.assert_array_equal(from_registers(w, 64, size, blocks, integer), wanted - before)


@pytest.mark.parametrize(("cbsz", "abid"), [(4, 0), (4, 7), (2, 1), (1, 1)])
def test_broadcast_of_blocks_of_a(cbsz: int, abid: int) -> None:
    rng = np.random.default_rng(2)
    a, b = small(rng, (WAVES, 16, 4, 4), "f16"), small(rng, (WAVES, 16, 4, 4), "f16")
    w = empty_waves("gfx942")
    put(w, 0, in_lanes(a, 16), "f16", "gfx942")
    put(w, 32, in_lanes(b, 16), "f16", "gfx942")
    execute("gfx942", f"v_mfma_f32_4x4x4_16b_f16 v[64:67], v[0:1], v[32:33], 0 cbsz:{cbsz} abid:{abid}", w)
    used = np.stack([a[:, block >> cbsz << cbsz | abid] for block in range(16)], 1)
    np.testing.assert_array_equal(from_registers(w, 64, 4, 16, False), np.matmul(used, b.swapaxes(2, 3)))


def test_swizzle_of_lanes_of_b() -> None:
    rng = np.random.default_rng(3)
    a, b = small(rng, (WAVES, 16, 4, 4), "f16"), small(rng, (WAVES, 16, 4, 4), "f16")
    sources = {
        1: lambda x: x % 8,
        2: lambda x: x % 8 + 8,
        3: lambda x: (x + 4) % 16,
        4: lambda x: x % 4,
        6: lambda x: x % 4 + 8,
    }
    for blgp, source in sources.items():  # in blocks of four lanes
        w = empty_waves("gfx90a")
        put(w, 0, in_lanes(a, 16), "f16", "gfx90a")
        put(w, 32, in_lanes(b, 16), "f16", "gfx90a")
        execute("gfx90a", f"v_mfma_f32_4x4x4f16 v[64:67], v[0:1], v[32:33], 0 blgp:{blgp}", w)
        used = np.stack([b[:, source(block)] for block in range(16)], 1)
        np.testing.assert_array_equal(from_registers(w, 64, 4, 16, False), np.matmul(a, used.swapaxes(2, 3)))


NARROW = {
    0: (8, ml_dtypes.float8_e4m3fn), 1: (8, ml_dtypes.float8_e5m2), 2: (6, ml_dtypes.float6_e2m3fn),
    3: (6, ml_dtypes.float6_e3m2fn), 4: (4, ml_dtypes.float4_e2m1fn),
}  # fmt: skip


def packed_lanes(matrix: Array, rows: int, number: int) -> Array:
    """Codes of A ``(waves, rows, K)`` in lanes, packed without gaps: uint32 ``(waves, 64, registers)``.

    8-bit formats: two runs of 16 of k, a quarter or half of a row apart; narrower ones: one run of 32.
    """
    bits, dtype = NARROW[number]
    codes = matrix.astype(np.float32).astype(dtype).view(np.uint8)
    out = np.zeros((WAVES, 64, bits), np.uint32)
    groups = 64 // rows
    for lane in range(64):
        group = lane // rows
        if bits == 8:
            places = [*range(16 * group, 16 * group + 16)]
            places += [16 * groups + place for place in places]
        else:
            places = [*range(32 * group, 32 * group + 32)]
        for wave in range(WAVES):
            number_of = sum(int(codes[wave, lane % rows, k]) << bits * n for n, k in enumerate(places))
            out[wave, lane] = np.frombuffer(number_of.to_bytes(4 * bits, "little"), np.uint32)
    return out


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(("kind_a", "kind_b"), [(0, 0), (0, 1), (1, 0), (4, 4), (2, 3), (0, 4)])
def test_mixed_formats_and_scales(size: int, kind_a: int, kind_b: int) -> None:
    depth = 128 if size == 16 else 64
    rng = np.random.default_rng(4)
    choices = np.array([0, 1, -1, 2, -2, 0.5, 4])
    a, b = rng.choice(choices, (WAVES, size, depth)), rng.choice(choices, (WAVES, size, depth))
    w = empty_waves("gfx950")
    for first, matrix, kind in ((0, a, kind_a), (16, b, kind_b)):
        lanes = packed_lanes(matrix, size, kind)
        for register in range(lanes.shape[2]):
            w.u32[first + register][...] = lanes[:, :, register]
    exponents = rng.integers(125, 130, (2, WAVES, size, depth // 32))
    for which in range(2):
        for lane in range(64):
            w.u32[40 + which][:, lane] = exponents[which, :, lane % size, lane // size] << 8 | 0x33000011
    modifiers = f" cbsz:{kind_a} blgp:{kind_b}"
    shape = f"{size}x{size}x{depth}"
    sources = f"{span(0, NARROW[kind_a][0])}, {span(16, NARROW[kind_b][0])}, 0"
    target = span(64, size * size // 64)
    execute("gfx950", f"v_mfma_f32_{shape}_f8f6f4 {target}, {sources}{modifiers}", w)
    np.testing.assert_array_equal(from_registers(w, 64, size, 1, False)[:, 0], a @ b.swapaxes(1, 2))
    scales = " op_sel:[1,1,0] op_sel_hi:[0,0,0]"
    execute("gfx950", f"v_mfma_scale_f32_{shape}_f8f6f4 {target}, {sources}, v40, v41{scales}{modifiers}", w)
    grown = [x * np.repeat(2.0 ** (exponents[i] - 127.0), 32, axis=2) for i, x in enumerate((a, b))]
    np.testing.assert_array_equal(from_registers(w, 64, size, 1, False)[:, 0], grown[0] @ grown[1].swapaxes(1, 2))


def wmma_lanes(matrix: Array, arch: str) -> Array:
    """A ``(waves, 16, 16)`` as the lanes of a wave of 32 hold it."""
    if arch == "gfx1100":
        return np.concatenate([matrix, matrix], 1)
    return np.concatenate([matrix[:, :, :8], matrix[:, :, 8:]], 1)


def wmma_result(rows: list[Array], first: int, arch: str) -> Array:
    out = np.zeros((WAVES, 16, 16))
    for register in range(8):
        for lane in range(32):
            i = 2 * register + lane // 16 if arch == "gfx1100" else register + 8 * (lane // 16)
            out[:, i, lane % 16] = rows[first + register][:, lane]
    return out


@pytest.mark.parametrize(
    ("arch", "name", "kind_a", "kind_b"),
    [
        *((arch, f"v_wmma_f32_16x16x16_{k}", k, k) for arch in ("gfx1100", "gfx1201") for k in ("f16", "bf16")),
        *(("gfx1201", f"v_wmma_f32_16x16x16_{a}_{b}", a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
        *(
            (arch, "v_wmma_i32_16x16x16_iu8", a, b)
            for arch in ("gfx1100", "gfx1201")
            for a in ("i8", "u8")
            for b in ("i8", "u8")
        ),
    ],
)  # fmt: skip
def test_wmma(arch: str, name: str, kind_a: str, kind_b: str) -> None:
    rng = np.random.default_rng(5)
    a, b = small(rng, (WAVES, 16, 16), kind_a), small(rng, (WAVES, 16, 16), kind_b)
    w = empty_waves(arch)
    put(w, 0, wmma_lanes(a, arch), kind_a, arch)
    put(w, 16, wmma_lanes(b, arch), kind_b, arch)
    integer = name.endswith("iu8")
    rows = w.i32 if integer else w.f32
    for register in range(8):
        rows[32 + register][...] = rng.integers(-9, 9, (WAVES, 32))
    before = wmma_result(rows, 32, arch)
    count = operands(16, 16, 1, kind_a) * (4 if arch == "gfx1100" else 2)
    signs = f" neg_lo:[{int(kind_a == 'i8')},{int(kind_b == 'i8')},0]" if integer else ""
    text = f"{name} v[32:39], {span(0, count)}, {span(16, count)}, v[32:39]{signs}"
    execute(arch, text, w)
    np.testing.assert_array_equal(wmma_result(rows, 32, arch), a @ b.swapaxes(1, 2) + before)
    w.set_exec(rng.random((WAVES, 32)) < 0.5)
    with pytest.raises(EmulationError, match="not active"):
        execute(arch, text, w)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wmma_with_a_16_bit_result(arch: str, kind: str) -> None:
    rng = np.random.default_rng(6)
    a, b = small(rng, (WAVES, 16, 16), kind), small(rng, (WAVES, 16, 16), kind)
    w = empty_waves(arch)
    put(w, 0, wmma_lanes(a, arch), kind, arch)
    put(w, 16, wmma_lanes(b, arch), kind, arch)
    count, held = (8, 8) if arch == "gfx1100" else (4, 4)
    execute(arch, f"v_wmma_{kind}_16x16x16_{kind} {span(32, held)}, {span(0, count)}, {span(16, count)}, 0", w)
    got = np.zeros((WAVES, 16, 16))
    for place in range(8):
        if arch == "gfx1100":
            bits = w.u32[32 + place] & np.uint32(0xFFFF)
            assert (w.u32[32 + place] >> np.uint32(16) == 0x5A5A).all()
        else:
            bits = w.u32[32 + place // 2] >> np.uint32(16 * (place % 2)) & np.uint32(0xFFFF)
        values = bits.astype(np.uint16).view(DTYPES[kind]).astype(np.float64)  # type: ignore[call-overload]
        for lane in range(32):
            i = 2 * place + lane // 16 if arch == "gfx1100" else place + 8 * (lane // 16)
            got[:, i, lane % 16] = values[:, lane]
    product = (a @ b.swapaxes(1, 2)).astype(np.float32)
    np.testing.assert_array_equal(got, product.astype(DTYPES[kind]).astype(np.float64))  # type: ignore[call-overload]


def test_wmma_of_gfx11_wants_both_halves_alike() -> None:
    w = empty_waves("gfx1100")
    w.u32[3][0, 20] ^= 1
    with pytest.raises(EmulationError, match="halves of the wave"):
        execute("gfx1100", "v_wmma_f32_16x16x16_f16 v[32:39], v[0:7], v[8:15], v[32:39]", w)


def test_subnormal_halves_count_as_zeros_on_gfx90a_only() -> None:
    for arch, name, wanted in (
        ("gfx90a", "v_mfma_f32_16x16x16f16", 0.0),
        ("gfx942", "v_mfma_f32_16x16x16_f16", 2.0**-10),
    ):
        w = empty_waves(arch)
        put(w, 0, np.full((WAVES, 64, 4), 2.0**-15), "f16", arch)
        put(w, 32, np.full((WAVES, 64, 4), 2.0), "f16", arch)
        execute(arch, f"{name} v[64:67], v[0:1], v[32:33], 0", w)
        assert set(w.f32[64].ravel().tolist()) == {wanted}


def test_instructions_of_other_chips_are_refused() -> None:
    for arch, text in (
        ("gfx90a", "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], v[0:3]"),
        ("gfx942", "v_mfma_f32_16x16x32_f16 v[0:3], v[4:7], v[8:11], v[0:3]"),
        ("gfx1100", "v_wmma_f32_16x16x16_fp8_fp8 v[0:7], v[8:9], v[10:11], v[0:7]"),
        ("gfx942", "v_mfma_f32_16x16x16_f16 v[0:3], v[4:7], v[8:9], v[0:3]"),
        ("gfx942", "v_mfma_f32_16x16x16_f17 v[0:3], v[4:5], v[8:9], v[0:3]"),
    ):
        with pytest.raises(UnknownInstruction, match=text.split()[0]):
            execute(arch, text, empty_waves(arch))
