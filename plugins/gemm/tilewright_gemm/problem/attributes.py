"""The attributes of a GEMM request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_kit.requests.attributes import integer, known_names, refuse, take_dtype, take_int
from tilewright_kit.requests.products import PRODUCT_ATTRIBUTES, ProductAttributes, take_product

__all__ = [
    "ATTRIBUTES",
    "MAX_GROUPS",
    "Attributes",
    "known_names",
    "read_attributes",
    "refuse",
    "take_dtype",
    "take_int",
]

MAX_GROUPS = 4096

GROUPS = integer(
    "groups",
    "Products of one call, each with operands of its own: `a[0]`, `b[0]`, `out[0]`, `a[1]`, ...",
    0,
    0,
    MAX_GROUPS,
    constraint="0: as the operands' names say. Groups share element types, layouts, and the operands that they have.",
)
ATTRIBUTES = (*PRODUCT_ATTRIBUTES, GROUPS)


@dataclass(frozen=True, slots=True)
class Attributes(ProductAttributes):
    groups: int = 0
    """0: not grouped, unless the operands' names say so."""


def read_attributes(given: Mapping[str, Any]) -> Attributes:
    """Check all attributes of a GEMM request. Raises ``InvalidArgumentError``."""
    known_names(given, ATTRIBUTES)
    return Attributes(groups=take_int(given, GROUPS), **take_product(given))
