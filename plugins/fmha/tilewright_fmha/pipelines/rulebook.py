"""All rules of attention in the order in which they are checked and corrected.

No rule knows an arch's numbers: they come from ``ArchSpec``.
"""

from __future__ import annotations

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.pipelines.records import PIPELINES
from tilewright_fmha.pipelines.template_rules import TEMPLATE_RULES
from tilewright_fmha.rules.families import FAMILY_RULES
from tilewright_fmha.rules.gpu import GPU_RULES
from tilewright_fmha.rules.hip import HIP_RULES
from tilewright_fmha.rules.signature import SIGNATURE_RULES
from tilewright_fmha.rules.tiles import CPU_RULES, TILE_RULES
from tilewright_kit.config.rules import RuleBook

__all__ = ["CUT_RULES", "RULES", "SHAPE_RULES"]

_OF_PIPELINES = tuple(rule for record in PIPELINES for rule in record.rules)
CUT_RULES = (*GPU_RULES, *_OF_PIPELINES, *HIP_RULES)
"""Rules on how GPU kernels are cut."""

SHAPE_RULES = (
    *TILE_RULES[:1], *SIGNATURE_RULES, *FAMILY_RULES, *TILE_RULES[1:], *CPU_RULES, *GPU_RULES[:3],
    *_OF_PIPELINES, *HIP_RULES[:2], *GPU_RULES[3:], *HIP_RULES[2:],
)  # fmt: skip
"""All but those on templates: what a kernel may be, whether or not it can be built yet."""

RULES: RuleBook[FmhaConfig] = RuleBook((*SHAPE_RULES, *TEMPLATE_RULES))
