"""Configurations as rows of numbers, and rows as configurations: tables of the wide spaces of operations.

A field that is a number or a flag is a column; a tuple is one for each of its numbers; words and enumerations are
numbered in an order that the operation states. Learned models see these columns beside numbers of the problem and what
the analytical model says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.config.kernel_config import KernelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["ABSENT", "FieldTable", "as_features", "rows_of_table"]

ABSENT = -1
"""Number of what a shorter tuple does not have."""


class FieldTable:
    """The columns of some fields. Immutable."""

    def __init__(self, **fields: int | Sequence[Any]) -> None:
        """``fields`` says by name how each is written: 0, a number or a flag; n, a tuple of at most n numbers; a
        sequence, one of these words or members.
        """
        self._fields = fields
        self._places = {
            name: {word: place for place, word in enumerate(how)}
            for name, how in fields.items()
            if not isinstance(how, int)
        }
        self.names: tuple[str, ...] = tuple(
            column for name, how in fields.items() for column in _columns(name, how if isinstance(how, int) else 0)
        )
        """Names of the columns in their order."""

    def holds(self, config: KernelConfig) -> bool:
        """True if every word of the configuration has a number, and no tuple is too long."""
        for name, how in self._fields.items():
            value = getattr(config, name)
            if isinstance(how, int):
                if how and len(value) > how:
                    return False
            elif value not in self._places[name]:
                return False
        return True

    def row(self, config: KernelConfig) -> tuple[int, ...]:
        """The numbers of a configuration that the table ``holds``."""
        found: list[int] = []
        for name, how in self._fields.items():
            value = getattr(config, name)
            if not isinstance(how, int):
                found.append(self._places[name][value])
            elif how:
                found += [*value, *(ABSENT,) * (how - len(value))]
            else:
                found.append(int(value))
        return tuple(found)

    def columns(self, configs: Sequence[KernelConfig]) -> dict[str, Array]:
        """The columns of some configurations, in their order."""
        import numpy as np

        rows = np.array([self.row(config) for config in configs], np.float64).reshape(len(configs), len(self.names))
        return {name: np.ascontiguousarray(rows[:, place]) for place, name in enumerate(self.names)}

    def fields(self, table: Mapping[str, Array], row: int, like: type[KernelConfig]) -> dict[str, Any]:
        """The fields of a row, in the types of ``like``'s defaults."""
        found: dict[str, Any] = {}
        for name, how in self._fields.items():
            if not isinstance(how, int):
                found[name] = how[int(table[name][row])]
            elif how:
                numbers = (int(table[column][row]) for column in _columns(name, how))
                found[name] = tuple(number for number in numbers if number != ABSENT)
            else:
                number = int(table[name][row])
                found[name] = bool(number) if isinstance(getattr(like, name), bool) else number
        return found


def _columns(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}.{place}" for place in range(count)) if count else (name,)


def rows_of_table(table: Mapping[str, Array]) -> int:
    """The number of rows."""
    return len(next(iter(table.values()), ()))


def as_features(
    numbers: Mapping[str, float], table: Mapping[str, Array], names: Sequence[str], parts: Mapping[str, Array]
) -> npt.NDArray[np.float32]:
    """One row for each kernel: logarithms of the problem's ``numbers`` (of one and each), the columns ``names``, and
    the ``parts`` of its analytical time.
    """
    import numpy as np

    count = rows_of_table(table)
    columns = [np.full(count, np.log2(1.0 + value)) for value in numbers.values()]
    columns += [table[name] for name in names]
    columns += list(parts.values())
    found: npt.NDArray[np.float32] = np.stack(columns, axis=1).astype(np.float32)
    return found
