"""Template files of plugins, and what their placeholders are filled with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Template

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import digest_of

__all__ = ["symbol_of", "template", "texts"]


def symbol_of(config: KernelConfig) -> str:
    """The exported symbol: the kernel's name as a C identifier, made unique by a digest of all fields."""
    return re.sub(r"\W", "_", config.name) + "_" + digest_of(config.to_dict())[:12]


def texts(values: Mapping[str, object]) -> dict[str, str]:
    """Values as C++ spells them."""
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}


@cache
def template(package: str, file: str) -> Template:
    """The file of that name in the folder ``templates`` of a plugin's package."""
    return Template((resources.files(package) / "templates" / file).read_text("utf-8"))
