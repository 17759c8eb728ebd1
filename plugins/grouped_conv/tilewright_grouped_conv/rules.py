"""All rules of grouped convolution in the order in which they are checked and mended."""

from __future__ import annotations

from tilewright_grouped_conv.config import ConvConfig
from tilewright_kit.rules import RuleBook

__all__ = ["RULES"]

RULES: RuleBook[ConvConfig] = RuleBook(())
