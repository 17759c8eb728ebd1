"""The attributes of a GEMM request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_kit.requests.attributes import (
    DEFAULT_ALIGNMENT,
    MAX_SPLIT_K,
    PRODUCT_ATTRIBUTES,
    ProductAttributes,
    known_names,
    refuse,
    take_dtype,
    take_int,
    take_product,
)

__all__ = [
    "DEFAULT_ALIGNMENT",
    "MAX_GROUPS",
    "MAX_SPLIT_K",
    "Attributes",
    "known_names",
    "read_attributes",
    "refuse",
    "take_dtype",
    "take_int",
]

MAX_GROUPS = 4096


@dataclass(frozen=True, slots=True)
class Attributes(ProductAttributes):
    groups: int = 0
    """0: not grouped, unless the operands' names say so."""


def read_attributes(given: Mapping[str, Any]) -> Attributes:
    """Check all attributes of a GEMM request. Raises ``InvalidArgumentError``."""
    known_names(given, (*PRODUCT_ATTRIBUTES, "groups"))
    return Attributes(groups=take_int(given, "groups", 0, 0, MAX_GROUPS), **take_product(given))
