"""Section of an architecture's spec for kernels of attention, ``operations.attention``, typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright_arch import ArchSpec, FrozenMap
from tilewright_arch.reading import Fields

__all__ = ["AttentionSpec", "attention_of", "read_attention"]

Triple = tuple[int, int, int]
Hdim = tuple[int, int]
Numbers = tuple[int, ...]
_SWEPT = ("m0", "n0", "k0")
_HDIMS = re.compile(r"[0-9]+x[0-9]+")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Words are those of configurations of attention; sizes of heads are elements of (q and k, v).

    ``tiles`` are the cuts worth trying, by ``"{q}x{v}"``; ``sweep`` are all that m0, n0 and k0
    may be (no entry: anything), and ``forms`` narrow that for some sizes of heads, ``"*"`` for all
    others. ``waves`` are those that may share a tile's rows. Empty tables leave a question open.
    """

    dtypes: tuple[str, ...]
    pipelines: tuple[str, ...]
    trload: bool
    hdims: FrozenMap[str, tuple[Hdim, ...]]
    sweep: FrozenMap[str, Numbers]
    forms: FrozenMap[str, FrozenMap[str, Numbers]]
    tiles: FrozenMap[str, tuple[Numbers, ...]]
    backward_tiles: FrozenMap[str, tuple[Numbers, ...]]
    waves: Numbers
    warp_tiles: FrozenMap[str, tuple[Triple, ...]]
    k0max: FrozenMap[str, int]
    async_lds_bytes: int
    async_vector_bytes: int
    mfma_groups: int
    combine_columns: int
    page_sizes: Numbers
    kv_layouts: tuple[str, ...]
    kv_lookups: tuple[str, ...]

    def hdim_for(self, dtype: str, q: int, v: int, columns: int = 1) -> Hdim | None:
        """The smallest sizes of heads that hold ``q`` and ``v``, the latter a multiple of ``columns``;
        None if there are none.
        """
        fitting = [
            pair for pair in self.hdims.get(dtype, ()) if pair[0] >= q and pair[1] >= v and pair[1] % columns == 0
        ]
        return min(fitting, key=lambda pair: (sum(pair), pair), default=None)


def attention_of(arch: ArchSpec) -> AttentionSpec | None:
    """Section of ``arch``, read once; None if it has no attention. A mistake in it is a ``SpecError``."""
    return arch.section("attention", read_attention)


def read_attention(fields: Fields) -> AttentionSpec:
    """Read the section ``attention`` of a spec."""
    found = AttentionSpec(
        dtypes=fields.texts("dtypes", minimum=1),
        pipelines=fields.texts("pipelines", minimum=1),
        trload=fields.boolean("trload", False),
        hdims=_hdims(fields.fields("hdims")),
        sweep=_lists(fields.fields("sweep", {}), _SWEPT),
        forms=_forms(fields.fields("forms", {})),
        tiles=_tuples(fields.fields("tiles", {}), 6),
        backward_tiles=_tuples(fields.fields("backward_tiles", {}), 9),
        waves=_numbers(fields, "waves", []),
        warp_tiles=_triples(fields.fields("warp_tiles", {})),
        k0max=_integers(fields.fields("k0max", {})),
        async_lds_bytes=fields.integer("async_lds_bytes", 0),
        async_vector_bytes=fields.integer("async_vector_bytes", 0),
        mfma_groups=fields.integer("mfma_groups", 0),
        combine_columns=fields.integer("combine_columns", minimum=1),
        page_sizes=_numbers(fields, "page_sizes"),
        kv_layouts=fields.texts("kv_layouts", minimum=1),
        kv_lookups=fields.texts("kv_lookups", minimum=1),
    )
    for name in found.hdims:
        if name not in found.dtypes:
            raise fields.fail(f"hdims.{name}", "is not among the dtypes")
    for name in found.dtypes:
        if name not in found.hdims:
            raise fields.fail(f"hdims.{name}", "is missing")
    fields.finish()
    return found


def _hdims(fields: Fields) -> FrozenMap[str, tuple[Hdim, ...]]:
    """A list of sizes, one for both or a pair; ``{"each": sizes}`` for all pairs; or the name of an earlier entry."""
    found: dict[str, tuple[Hdim, ...]] = {}
    for name in fields:
        value = fields.get(name)
        if isinstance(value, str):
            if value not in found:
                raise fields.fail(name, f"names {value!r}, which is no earlier entry")
            found[name] = found[value]
            continue
        if isinstance(value, Mapping):
            entry = fields.fields(name)
            sizes = _numbers(entry, "each")
            entry.finish()
            found[name] = tuple((q, v) for q in sizes for v in sizes)
            continue
        pairs: list[Hdim] = []
        for index, item in enumerate(fields.array(name)):
            both: Sequence[object] = item if isinstance(item, (list, tuple)) else (item, item)
            if len(both) != 2:
                raise fields.fail(f"{name}[{index}]", "must be a size, or those of q and of v")
            q, v = (fields.positive(f"{name}[{index}]", size) for size in both)
            pairs.append((q, v))
        found[name] = tuple(pairs)
        if not pairs:
            raise fields.fail(name, "needs at least 1 entry")
    return FrozenMap(found)


def _numbers(fields: Fields, key: str, *default: object) -> Numbers:
    values = fields.array(key, *default)
    return tuple(fields.positive(f"{key}[{index}]", value) for index, value in enumerate(values))


def _lists(fields: Fields, known: Sequence[str]) -> FrozenMap[str, Numbers]:
    found = FrozenMap({name: _numbers(fields, name) for name in fields if name in known})
    fields.finish()
    return found


def _forms(fields: Fields) -> FrozenMap[str, FrozenMap[str, Numbers]]:
    _check_hdims(fields, others=True)
    return FrozenMap({name: _lists(entry, (*_SWEPT, "async_m0")) for name, entry in fields.entries()})


def _check_hdims(fields: Fields, others: bool = False) -> None:
    """Check that the keys are sizes of heads such as ``192x128``, or with ``others`` an asterisk."""
    for name in fields:
        if not (_HDIMS.fullmatch(name) or (others and name == "*")):
            raise fields.fail(name, "is no pair of sizes of heads such as 192x128" + (", and not *" if others else ""))


def _integers(fields: Fields) -> FrozenMap[str, int]:
    return FrozenMap({name: fields.integer(name, minimum=1) for name in fields})


def _tuples(fields: Fields, size: int) -> FrozenMap[str, tuple[Numbers, ...]]:
    _check_hdims(fields)
    return FrozenMap({name: tuple(fields.tuples(name, size)) for name in fields})


def _triples(fields: Fields) -> FrozenMap[str, tuple[Triple, ...]]:
    """A list of warp tiles by element type, or the name of an earlier entry."""
    found: dict[str, tuple[Triple, ...]] = {}
    for name in fields:
        value = fields.get(name)
        if isinstance(value, str):
            if value not in found:
                raise fields.fail(name, f"names {value!r}, which is no earlier entry")
            found[name] = found[value]
        else:
            found[name] = tuple((m, n, k) for m, n, k in fields.tuples(name, 3))
    return FrozenMap(found)
