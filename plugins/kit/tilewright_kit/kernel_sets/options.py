"""Options of ``Operation.select_set``: values or lists of them, which ``kernels generate`` hands on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tilewright_kit.types.errors import NotFoundError

__all__ = ["TRIPLES", "as_list", "named", "triple_axes"]

T = TypeVar("T")

TRIPLES = {"tile": "tile", "warp": "wave", "warp_tile": "warp_tile"}
"""Prefixes of options that end in ``_m``, ``_n`` and ``_k``, and the fields that they make: ``warp_m`` counts waves.
"""


def as_list(value: Any) -> list[Any]:
    """A list as it is, anything else as the only value."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def named(items: Mapping[str, T], name: str, what: str, field: str = "", known: Iterable[str] = ()) -> T:
    """One of ``items``. Raises ``NotFoundError``, naming ``field`` (default: ``what``) and those that are ``known``
    (default: all).
    """
    if name not in items:
        raise NotFoundError(
            f"there is no {what} {name!r}",
            field=field or what,
            value=name,
            rule="known_name",
            fix=f"use one of: {', '.join(known or items)}",
        )
    return items[name]


def triple_axes(given: dict[str, Any], unsaid: Callable[[str], Sequence[Any]]) -> Iterator[tuple[str, list[list[Any]]]]:
    """Takes the options of ``TRIPLES`` out of ``given``: each field of which any is there, with every combination of
    their values. ``unsaid`` tells of a field the three values that stand for what is not given.
    """
    for prefix, field in TRIPLES.items():
        keys = [f"{prefix}_{letter}" for letter in "mnk"]
        if any(key in given for key in keys):
            lists = [as_list(given.pop(key, value)) for key, value in zip(keys, unsaid(field), strict=True)]
            yield field, [list(sizes) for sizes in itertools.product(*lists)]
