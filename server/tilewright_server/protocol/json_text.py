"""JSON that clients send."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parsed"]


def parsed(text: str) -> Any:
    """The value of ``text``. Raises ``ValueError`` (also for texts that are none: half a pair of surrogates, which JSON
    can write and nothing can encode) and ``RecursionError``."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value
