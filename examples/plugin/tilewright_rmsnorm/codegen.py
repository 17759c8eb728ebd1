"""From a configuration to its translation unit: a template file with the configuration's constants filled in."""

from __future__ import annotations

from importlib import resources
from string import Template

from tilewright_arch import ArchSpec
from tilewright_kit.config.naming import digest_of
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import UnsupportedError
from tilewright_rmsnorm import __version__
from tilewright_rmsnorm.config import RmsNormConfig
from tilewright_rmsnorm.rules import RULES

__all__ = ["generate"]


def generate(config: RmsNormConfig, arch: ArchSpec) -> SourceUnit:
    """Raises ``ConfigInvalidError``, or ``UnsupportedError`` for a GPU."""
    RULES.require(config, arch)
    if arch.kind != "cpu":
        raise UnsupportedError("rmsnorm has a CPU template only", field="arch", value=arch.id, rule="template")
    symbol = f"rmsnorm_{digest_of(config.to_dict())[:16]}"
    template = Template((resources.files(__package__) / "templates/rmsnorm.cpp.in").read_text("utf-8"))
    text = template.substitute(name=config.name, symbol=symbol, lanes=config.lanes, unroll=config.unroll)
    return SourceUnit(
        config.name,
        "c++",
        text,
        {"main": symbol},
        # The sum may be reordered: it is written as independent partial sums anyway. Not -ffast-math: what it links
        # makes the whole process flush subnormal numbers to zero.
        flags=("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
        plugin_version=__version__,
    )
