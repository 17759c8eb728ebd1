"""Reading of the wave and warp-tile tables, whose JSON form is compressed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .frozen import FrozenMap
from .reading import Fields
from .spec import TileTable, Triple

DTYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "int8", "int32")
_KEY = re.compile(rf"({'|'.join(DTYPES)})_({'|'.join(DTYPES)})_(fp32|int32)")

Shapes = Mapping[str, list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Tables:
    """A warp-tile table and, per key, the instruction behind each tile."""

    tiles: TileTable
    instructions: FrozenMap[str, FrozenMap[Triple, str]]

    def merged(self, other: Tables) -> Tables:
        """Our tiles; the instructions of both, ``other``'s first where they disagree."""
        keys = (*self.instructions, *(k for k in other.instructions if k not in self.instructions))
        empty: FrozenMap[Triple, str] = FrozenMap()
        both = {key: self.instructions.get(key, empty).updated(other.instructions.get(key, empty)) for key in keys}
        return Tables(self.tiles, FrozenMap(both))


def read_waves(spec: Fields) -> tuple[Triple, ...]:
    """Wave triples, either listed or given as ``{"teams": [sizes]}``.

    The rule stands for every (m, n, 1) with m * n among the sizes; by m, then n.
    """
    if isinstance(spec.get("waves"), dict):
        rule = spec.fields("waves")
        sizes = {rule.positive(f"teams[{index}]", size) for index, size in enumerate(rule.array("teams"))}
        rule.finish()
        if not sizes:
            raise rule.fail("teams", "needs at least 1 entry")
        return tuple(sorted((m, size // m, 1) for size in sizes for m in range(1, size + 1) if size % m == 0))
    waves = [(m, n, k) for m, n, k in spec.tuples("waves", 3)]
    if not waves:
        raise spec.fail("waves", "needs at least 1 entry")
    return tuple(waves)


def read_shapes(spec: Fields) -> Shapes:
    """The named lists of (m, n) that warp-tile rows refer to."""
    sets = spec.fields("warp_tile_sets", {})
    shapes = {name: sets.tuples(name, 2) for name in sets}
    sets.finish()
    return shapes


def read_tiles(owner: Fields, field: str, shapes: Shapes, instructions: Mapping[str, object]) -> Tables:
    """Read a warp-tile table.

    A value is a list of rows, or the name of an earlier key whose list it shares. A row is
    ``{"tiles": [[m, n, k], ...]}`` or ``{"set": name, "k": [k, ...]}``, plus ``instruction``.
    """
    table = owner.fields(field, {})
    found: dict[str, FrozenMap[Triple, str]] = {}
    for key in table:
        if not _KEY.fullmatch(key):
            raise table.fail(key, "must read {a}_{b}_{acc} with known dtypes")
        value = table.get(key)
        if isinstance(value, str):
            if value not in found:
                raise table.fail(key, f"names {value!r}, which is no earlier key of this table")
            found[key] = found[value]
            continue
        rows: dict[Triple, str] = {}
        for index, raw in enumerate(table.array(key)):
            row = Fields(raw, owner.source, f"{table.where(key)}[{index}]")
            name = row.text("instruction", choices=tuple(instructions))
            for tile in _row_tiles(row, shapes):
                if tile in rows:
                    raise row.fail("", f"repeats warp tile {list(tile)}")
                rows[tile] = name
            row.finish()
        if not rows:
            raise table.fail(key, "needs at least 1 entry")
        found[key] = FrozenMap(rows)
    pairs = [key.rpartition("_")[0] for key in found]
    for key in found:
        if pairs.count(key.rpartition("_")[0]) > 1:
            raise table.fail(key, "gives its dtype pair a second accumulator")
    return Tables(
        tiles=FrozenMap({key: tuple(rows) for key, rows in found.items()}),
        instructions=FrozenMap(found),
    )


def _row_tiles(row: Fields, shapes: Shapes) -> list[Triple]:
    if "tiles" in row:
        return [(m, n, k) for m, n, k in row.tuples("tiles", 3)]
    shape = row.text("set", choices=tuple(shapes) or ("(none defined)",))
    depths = [row.positive(f"k[{i}]", depth) for i, depth in enumerate(row.array("k"))]
    return [(m, n, k) for k in depths for m, n in shapes[shape]]
