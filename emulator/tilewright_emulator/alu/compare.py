"""Comparisons: of the vector unit, which give a lane mask, and of the scalar unit, which give scc.

Comparisons of floats whose names begin with "n" are true where the plain ones are false: of a NaN, then, always.
``v_cmpx`` makes the lanes of the result the active ones: on gfx9 besides the printed mask, on gfx11 and later instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright_emulator.decode.registry import semantic
from tilewright_emulator.isa.registers import Array

CDNA = ("gfx90a", "gfx942", "gfx950")
RDNA = ("gfx1100", "gfx1201")
Compare = Callable[[Array, Array], Array]

PLAIN: dict[str, Compare] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _never(a: Array, b: Array) -> Array:
    return np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)


def _always(a: Array, b: Array) -> Array:
    return np.ones(np.broadcast_shapes(a.shape, b.shape), bool)


def _unordered(a: Array, b: Array) -> Array:
    return np.asarray(np.isnan(a) | np.isnan(b))


def _not(compare: Compare) -> Compare:
    return lambda a, b: np.logical_not(compare(a, b))


def _less_or_greater(a: Array, b: Array) -> Array:
    return np.asarray((a < b) | (a > b))


FLOATS: dict[str, Compare] = {
    **PLAIN,
    "f": _never,
    "lg": _less_or_greater,
    "o": _not(_unordered),
    "u": _unordered,
    "nge": _not(np.greater_equal),
    "nlg": _not(_less_or_greater),
    "ngt": _not(np.greater),
    "nle": _not(np.less_equal),
    "neq": np.not_equal,
    "nlt": _not(np.less),
    "tru": _always,
    "t": _always,
}
INTEGERS: dict[str, Compare] = {**PLAIN, "f": _never, "ne": np.not_equal, "lg": np.not_equal, "t": _always}


def _register(name: str, kinds: str, compare: Compare) -> None:
    semantic(f"v_cmp_{name}", dst="mask", src=kinds)(compare)
    semantic(f"v_cmpx_{name}", dst="exec", src=kinds, archs=RDNA)(compare)

    @semantic(f"v_cmpx_{name}", dst="mask exec", src=kinds, archs=CDNA)
    def both(a: Array, b: Array) -> tuple[Array, Array]:
        result = compare(a, b)
        return result, result


for _kind in ("f16", "f32", "f64"):
    for _relation, _compare in FLOATS.items():
        _register(f"{_relation}_{_kind}", f"{_kind} {_kind}", _compare)
for _kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
    for _relation, _compare in INTEGERS.items():
        _register(f"{_relation}_{_kind}", f"{_kind} {_kind}", _compare)
for _kind in ("f16", "f32"):
    for _relation, _compare in FLOATS.items():
        semantic(f"s_cmp_{_relation}_{_kind}", dst="scc", src=f"{_kind} {_kind}")(_compare)


# Classes by bit of the mask: signalling NaN, quiet NaN, minus infinity, minus normal, minus subnormal, minus zero, and
# from plus zero back up to plus infinity.


def _class_bit(a: Array) -> Array:
    """The number of the class that each float is in."""
    unsigned, quiet = {2: (np.uint16, 1 << 9), 4: (np.uint32, 1 << 22), 8: (np.uint64, 1 << 51)}[a.dtype.itemsize]
    size = np.abs(a)
    level = np.select([size == 0, size < np.finfo(a.dtype).tiny, np.isinf(a)], [0, 1, 3], 2)
    number = np.where(np.signbit(a), 5 - level, 6 + level)
    silent = (a.view(unsigned) & unsigned(quiet)) != 0
    return np.where(np.isnan(a), silent.astype(np.int64), number)


def is_class(a: Array, mask: Array) -> Array:
    """True where a float is in one of the classes whose bits are set."""
    return np.asarray((mask.astype(np.int64) >> _class_bit(a) & 1).astype(bool))


for _kind, _mask in (("f16", "u16"), ("f32", "u32"), ("f64", "u32")):
    _register(f"class_{_kind}", f"{_kind} {_mask}", is_class)


# ---- integers in the scalar unit ----

SCALAR_RELATIONS = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip
for _relation, _ufunc in SCALAR_RELATIONS.items():
    for _kind in ("i32", "u32"):
        semantic(f"s_cmp_{_relation}_{_kind}", dst="scc", src=f"{_kind} {_kind}")(_ufunc)
for _relation in ("eq", "lg"):
    semantic(f"s_cmp_{_relation}_u64", dst="scc", src="u64 u64")(SCALAR_RELATIONS[_relation])


def _compare_short(relation: str, kind: str) -> None:
    compare = SCALAR_RELATIONS[relation]
    short = np.int16 if kind == "i32" else np.uint16

    @semantic(f"s_cmpk_{relation}_{kind}", dst="scc", src=f"{kind} {kind}")
    def compare_short(a: Array, b: Array) -> Array:
        return np.asarray(compare(a, b.astype(short).astype(a.dtype)))


for _relation in SCALAR_RELATIONS:
    for _kind in ("i32", "u32"):
        _compare_short(_relation, _kind)
