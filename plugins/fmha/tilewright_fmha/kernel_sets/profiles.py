"""Profiles: the receipts by name, and ``all``."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.kernel_sets.receipts import EVERY, RECEIPTS, Receipt
from tilewright_kit.kernel_sets.options import named

__all__ = ["DEFAULT_PROFILE", "PROFILES", "profile_of"]

PROFILES: Mapping[str, Receipt] = {item.name: item for item in (*RECEIPTS.values(), EVERY)}
DEFAULT_PROFILE = "ck_default"


def profile_of(name: str) -> Receipt:
    """The profile of that name. Raises ``NotFoundError``, naming those that there are."""
    return named(PROFILES, name, "profile")
