"""Adversarial orders of waves for the host's platform: with an odd seed one wave of a workgroup runs until it waits
at a barrier for all, before the next one begins; with an even one waves take turns, as the header alone has it.

The header belongs to the kernels, whose compile gates it would make stale: so the tests compile with a copy.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from native_harness import INCLUDE

__all__ = ["ordered_platform"]

NAME = "tilewright/gpu/host/platform.hpp"
EDITS = (
    ("  bool failed = false;\n", "  bool failed = false, eager = false;\n"),
    (
        "  for (Fiber* fiber : meeting.waiting) group.ready.push_back(fiber);\n",
        "  const auto at = group.eager && &meeting != &group.all ? group.ready.begin() + (long)group.next\n"
        "                                                        : group.ready.end();\n"
        "  group.ready.insert(at, meeting.waiting.begin(), meeting.waiting.end());\n",
    ),
    (
        "  while (group.next < group.ready.size() && !group.failed) {\n",
        "  if (group.eager)  // the last wave first\n"
        "    for (size_t t = 0; t < fibers.size(); t++)\n"
        "      group.ready[t] = &fibers[fibers.size() - (t / kWave + 1) * kWave + t % kWave];\n"
        "  while (group.next < group.ready.size() && !group.failed) {\n",
    ),
    ("  group.shared.assign((size_t)shared_bytes, 0xff);\n  for (int index : order) {\n",
     "  group.shared.assign((size_t)shared_bytes, 0xff);\n  group.eager = drawn % 2;\n  for (int index : order) {\n"),
    ("  std::vector<int> order((size_t)grid);\n",
     "  const unsigned drawn = seed;\n  std::vector<int> order((size_t)grid);\n"),
)  # fmt: skip
"""Lines that stand in the header once, and those that take their place."""


def ordered_platform(folder: Path) -> str:
    """The compiler's option that finds the copy, written below ``folder``. Raises ``ValueError`` if the header has
    changed so that an edit does not fit."""
    text = (INCLUDE / NAME).read_text("utf-8")
    for old, new in EDITS:
        if text.count(old) != 1:
            raise ValueError(f"{NAME} does not have once: {old.strip()}")
        text = text.replace(old, new)
    root = folder / f"host-order-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = root / NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text, "utf-8")
        partial.rename(path)
    return f"-iquote{root}"
