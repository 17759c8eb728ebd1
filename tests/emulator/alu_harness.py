"""Executes one instruction over random and special values and compares every lane with a function of Python numbers.

A case is a mnemonic, the types of its destination and sources by letter, and the function. Types: u, i, f: 32 bits;
U, I, d: 64 bits; w, x, h: 16 bits (unsigned, signed, float16) in the low half; b: bool from or to scc; m: a lane mask.
Floats reach the function as Python floats, whose exact values ``Fraction`` gives; expected floats are numbers that are
rounded here, once, to the destination's format.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tilewright_emulator.decode import steps as decode
from tilewright_emulator.isa.arch import ARCHS
from tilewright_emulator.isa.registers import SCALARS, VCC
from tilewright_emulator.state.waves import Waves

CDNA, RDNA = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201")
ALL = (*CDNA, *RDNA)
M16, M32, M64 = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
WAVES = 2

WIDTH = {"u": 32, "i": 32, "f": 32, "U": 64, "I": 64, "d": 64, "w": 16, "x": 16, "h": 16}
FLOAT = {"f": ("<f", "<I", 24, -149), "d": ("<d", "<Q", 53, -1074), "h": ("<e", "<H", 11, -24)}
SPECIAL = {
    32: [0, 1, 2, 31, 32, 0x7F, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF, 0x800000],
    64: [0, 1, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, M64],
    16: [0, 1, 15, 16, 0x7FFF, 0x8000, 0xFFFF, 0xFF],
}
SPECIAL_FLOATS = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, math.inf, -math.inf, math.nan, 1e-3, 100.0, -7.75, 65504.0,
    0.1, 1 / 3, 2.0**-14, -(2.0**-24),
]  # fmt: skip
WIDE_FLOATS = [1e30, -1e38, 2.0**-126, 2.0**-149, -(2.0**-130), 3.4028234e38, 4294967296.0, -2147483648.0, 2147483520.0]


def bits_of(value: float, letter: str) -> int:
    """A Python float in a format, to nearest even."""
    pattern, whole, _, _ = FLOAT[letter]
    try:
        return int(struct.unpack(whole, struct.pack(pattern, value))[0])
    except OverflowError:
        return int(struct.unpack(whole, struct.pack(pattern, math.copysign(math.inf, value)))[0])


def float_of(bits: int, letter: str) -> float:
    pattern, whole, _, _ = FLOAT[letter]
    return float(struct.unpack(pattern, struct.pack(whole, bits))[0])


def rounded(value: Fraction, letter: str) -> float:
    """A number rounded once to a format, to nearest even; beyond its range infinity."""
    _, _, bits, least = FLOAT[letter]
    if value == 0:
        return 0.0
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    step = Fraction(2) ** max(exponent - bits + 1, least)
    result = round(value / step) * step
    limit = {"f": Fraction(2) ** 128, "d": Fraction(2) ** 1024, "h": Fraction(2) ** 16}[letter]
    sign = -1.0 if value < 0 else 1.0
    return sign * (math.inf if abs(result) >= limit else float(abs(result)))


def finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


@dataclass(frozen=True)
class Case:
    """``name``: the mnemonic. ``dst``, ``src``: letters. ``suffix``: modifiers. ``exact``: compare bits (NaN: any)."""

    name: str
    dst: str
    src: str
    function: Callable[..., Any]
    archs: Sequence[str] = ALL
    suffix: str = ""
    ulps: int = 0

    def __str__(self) -> str:
        return self.name + self.suffix

    def text(self, arch: str) -> str:
        """The instruction as llvm-objdump prints it: sources v0, v2, ..., result v8; scalars likewise."""
        places = [*(self._place(letter, 8 + 4 * i, arch) for i, letter in enumerate(self.dst))]
        places += [self._place(letter, 2 * i, arch) for i, letter in enumerate(self.src)]
        return f"{self.name} {', '.join(place for place in places if place)}{self.suffix}"

    def _place(self, letter: str, index: int, arch: str) -> str:
        if letter == "b":
            return ""
        if letter == "m":
            return ("vcc" if arch in CDNA else "vcc_lo") if "_e32" in self.name else mask_name(arch, index)
        file = "s" if self.name.startswith("s_") else "v"
        return f"{file}[{index}:{index + 1}]" if WIDTH[letter] == 64 else f"{file}{index}"


def mask_name(arch: str, index: int) -> str:
    return f"s[{20 + index}:{21 + index}]" if arch in CDNA else f"s{20 + index}"


def raw_values(letter: str, count: int, rng: np.random.Generator) -> list[int]:
    """Bits: random ones, and a share of special ones."""
    width = WIDTH[letter]
    raw = [int(x) for x in rng.integers(0, (1 << width) - 1, count, dtype=np.uint64, endpoint=True)]
    if letter not in FLOAT:
        pool = SPECIAL[width]
        return [pool[int(rng.integers(len(pool)))] if rng.random() < 0.4 else value for value in raw]
    pool = [bits_of(x, letter) for x in SPECIAL_FLOATS + (WIDE_FLOATS if letter != "h" else [])]
    tame = [bits_of(float(x), letter) for x in rng.standard_normal(count) * 10]
    kinds = rng.integers(0, 3, count).tolist()
    quiet = {"f": 1 << 22, "d": 1 << 51, "h": 1 << 9}[letter]  # Python's floats know no signalling NaN
    raw = [bits | quiet if math.isnan(float_of(bits, letter)) else bits for bits in raw]
    return [(raw[i], tame[i], pool[int(rng.integers(len(pool)))])[kind] for i, kind in enumerate(kinds)]


def as_number(bits: int, letter: str) -> Any:
    if letter in FLOAT:
        return float_of(bits, letter)
    if letter in "iIx" and bits >> (WIDTH[letter] - 1):
        return bits - (1 << WIDTH[letter])
    return bits


def empty_waves(arch: str) -> Waves:
    """Registers full of a pattern that no result has."""
    lanes = ARCHS[arch].lanes
    vectors = np.full((512, WAVES, lanes), 0x5A5A5A5A, np.uint32)
    scalars = np.full((WAVES, SCALARS), 0x5A5A5A5A, np.uint32)
    scalars[:, 126:128] = M32
    return Waves(vectors, scalars, lanes)


def execute(arch: str, text: str, w: Waves) -> None:
    with np.errstate(all="ignore"):
        decode.make_step(decode.parse(text), ARCHS[arch])(w)


def _store(w: Waves, scalar: bool, index: int, letter: str, values: np.ndarray) -> None:  # type: ignore[type-arg]
    rows = w.s_u32 if scalar else w.u32
    rows[index][...] = (values & np.uint64(M32)).astype(np.uint32)
    if WIDTH[letter] == 64:
        rows[index + 1][...] = (values >> np.uint64(32)).astype(np.uint32)


def check_all(case: Case) -> None:
    """On the first and the last architecture that has it."""
    for seed, arch in enumerate(sorted({case.archs[0], case.archs[-1]})):
        check(case, arch, seed)


def check(case: Case, arch: str, seed: int = 0) -> None:
    """Runs the case with some lanes off and compares every lane of every wave."""
    rng = np.random.default_rng(seed)
    w = empty_waves(arch)
    scalar = case.name.startswith("s_")
    shape = (WAVES, 1) if scalar else (WAVES, w.lanes)
    repeats = 12 if scalar else 1
    for _ in range(repeats):
        active = np.ones((WAVES, w.lanes), bool) if scalar else rng.random((WAVES, w.lanes)) < 0.8
        w.set_exec(active)
        sources: list[list[Any]] = []
        for i, letter in enumerate(case.src):
            if letter in "bm":
                bits = rng.random(shape) < 0.5
                if letter == "b":
                    w.scc = bits
                else:
                    w.write_mask(VCC if "_e32" in case.name else 20 + 2 * i, bits)
                sources.append(bits.ravel().tolist())
                continue
            raw = raw_values(letter, int(np.prod(shape)), rng)
            # The high half of a 16-bit operand's register holds something else.
            noise = int(rng.integers(1 << 16)) << 16 if WIDTH[letter] == 16 else 0
            _store(w, scalar, 2 * i, letter, np.array([x | noise for x in raw], np.uint64).reshape(shape))
            sources.append([as_number(x, letter) for x in raw])
        execute(arch, case.text(arch), w)
        expected = [case.function(*values) for values in zip(*sources, strict=True)]
        _compare(
            case, w, scalar, active if not scalar else np.ones(shape, bool), expected, list(zip(*sources, strict=True))
        )


def _compare(case: Case, w: Waves, scalar: bool, active: Any, expected: list[Any], sources: list[Any]) -> None:
    for i, letter in enumerate(case.dst):
        wanted = [value[i] for value in expected] if len(case.dst) > 1 else expected
        if letter in "bm":
            got = w.scc if letter == "b" else w.read_mask(VCC if "_e32" in case.name else 20 + 8 + 4 * i)
            bools = np.array(wanted, bool).reshape(active.shape) & active
            np.testing.assert_array_equal(got, bools, err_msg=str(case))
            continue
        rows, index = (w.s_u32 if scalar else w.u32), 8 + 4 * i
        raw = rows[index].astype(np.uint64)
        if WIDTH[letter] == 64:
            raw = raw | (rows[index + 1].astype(np.uint64) << np.uint64(32))
        for bits, value, on, source in zip(raw.ravel().tolist(), wanted, active.ravel().tolist(), sources, strict=True):
            if not on:
                assert bits & M32 == 0x5A5A5A5A, f"{case}: an inactive lane was written"
                continue
            _same(case, letter, bits & ((1 << WIDTH[letter]) - 1), value, source)
    if not scalar:
        for i, _ in enumerate(case.dst):
            w.u32[8 + 4 * i][...] = 0x5A5A5A5A


def _same(case: Case, letter: str, bits: int, value: Any, source: Any) -> None:
    if letter not in FLOAT:
        assert bits == value & ((1 << WIDTH[letter]) - 1), f"{case} of {source}: {bits:#x}, not {value:#x}"
        return
    got = float_of(bits, letter)
    if isinstance(value, Fraction):
        value = rounded(value, letter)
    if math.isnan(value):
        assert math.isnan(got), f"{case} of {source}: {got}, not a NaN"
        return
    want = bits_of(value, letter)
    if case.ulps and math.isfinite(got):
        assert abs(_ordered(bits, letter) - _ordered(want, letter)) <= case.ulps, (
            f"{case} of {source}: {got}, not {value}"
        )
        return
    same = bits == want or (value == 0 and got == 0 and isinstance(source, tuple) and case.ulps < 0)
    assert same, f"{case} of {source}: {got} ({bits:#x}), not {value} ({want:#x})"


def _ordered(bits: int, letter: str) -> int:
    """Bits as an integer that grows with the number."""
    top = 1 << (WIDTH[letter] - 1)
    return -(bits - top) if bits & top else bits
