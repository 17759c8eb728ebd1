"""All rules of attention in the order in which they are checked and mended."""

from __future__ import annotations

from tilewright_fmha.config import FmhaConfig
from tilewright_kit.rules import RuleBook

__all__ = ["RULES"]

RULES: RuleBook[FmhaConfig] = RuleBook(())
