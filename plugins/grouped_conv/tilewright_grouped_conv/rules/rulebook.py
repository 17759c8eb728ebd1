"""All rules of grouped convolution in the order in which they are checked and corrected.

The signature's are in ``rules.signature``, the algorithm's in ``rules.algorithm``, ``rules.cuda``, ``rules.im2col`` and
``rules.taps``, those on tiles and their resources in the kit. No rule knows an arch's numbers: they come from
``ArchSpec``.
"""

from __future__ import annotations

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.rules.algorithm import CONV_RULES, TILE_RULES
from tilewright_grouped_conv.rules.cuda import GPU_CONV_RULES
from tilewright_grouped_conv.rules.im2col import IM2COL_RULES
from tilewright_grouped_conv.rules.signature import SIGNATURE_RULES
from tilewright_grouped_conv.rules.taps import TAPS_RULES
from tilewright_kit.config.rules import RuleBook

__all__ = ["RULES"]

RULES: RuleBook[ConvConfig] = RuleBook(
    (*SIGNATURE_RULES, *CONV_RULES, *TILE_RULES, *IM2COL_RULES, *TAPS_RULES, *GPU_CONV_RULES)
)
