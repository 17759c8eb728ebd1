"""New names of the kit's modules by former names, for the errors of plugins that import these."""

from __future__ import annotations

import re

__all__ = ["MOVED", "moved"]

MOVED: dict[str, str] = {
    "tilewright_kit.arguments": "tilewright_kit.contract.arguments",
    "tilewright_kit.attributes": "tilewright_kit.requests.attributes",
    "tilewright_kit.candidates": "tilewright_kit.selection.candidates",
    "tilewright_kit.check_operation": "tilewright_kit.loading.check_operation",
    "tilewright_kit.check_plugin": "tilewright_kit.conformance.check_plugin",
    "tilewright_kit.compare": "tilewright_kit.numerics.compare",
    "tilewright_kit.config": "tilewright_kit.config.kernel_config",
    "tilewright_kit.cost": "tilewright_kit.tiles.cost.units and tilewright_kit.types.arithmetic",
    "tilewright_kit.declare": "tilewright_kit.kernel_sets.declare",
    "tilewright_kit.describe": "tilewright_kit.requests.describe",
    "tilewright_kit.device": "tilewright_kit.contract.device",
    "tilewright_kit.dtypes": "tilewright_kit.types.dtypes",
    "tilewright_kit.elementwise": "tilewright_kit.numerics.elementwise",
    "tilewright_kit.errors": "tilewright_kit.types.errors",
    "tilewright_kit.explain": "tilewright_kit.selection.explain",
    "tilewright_kit.fit": "tilewright_kit.selection.applicability",
    "tilewright_kit.hookspecs": "tilewright_kit.loading.hookspecs",
    "tilewright_kit.measured": "tilewright_kit.selection.measured",
    "tilewright_kit.measurements": "tilewright_kit.selection.measurements",
    "tilewright_kit.naming": "tilewright_kit.config.naming",
    "tilewright_kit.neighbours": "tilewright_kit.selection.neighbours",
    "tilewright_kit.operation": "tilewright_kit.contract.operation",
    "tilewright_kit.options": "tilewright_kit.kernel_sets.options",
    "tilewright_kit.plan": "tilewright_kit.contract.plan",
    "tilewright_kit.plugins": "tilewright_kit.loading.loader",
    "tilewright_kit.problem": "tilewright_kit.contract.problem",
    "tilewright_kit.registry": "tilewright_kit.kernel_sets.registry",
    "tilewright_kit.registry_json": "tilewright_kit.kernel_sets.registry_json",
    "tilewright_kit.requests": "tilewright_kit.requests.operands",
    "tilewright_kit.rules": "tilewright_kit.config.rules",
    "tilewright_kit.select": "tilewright_kit.selection.strategies",
    "tilewright_kit.source": "tilewright_kit.contract.source",
    "tilewright_kit.templates": "tilewright_kit.contract.templates",
    "tilewright_kit.tensor": "tilewright_kit.types.tensor",
    "tilewright_kit.tiles.cpu_cost": "tilewright_kit.tiles.cost.cpu",
    "tilewright_kit.tiles.cpu_workspace": "tilewright_kit.tiles.footprint.cpu",
    "tilewright_kit.tiles.epilogue_rules": "tilewright_kit.tiles.rules.epilogue",
    "tilewright_kit.tiles.footprint": "tilewright_kit.tiles.footprint.workgroup",
    "tilewright_kit.tiles.hip_footprint": "tilewright_kit.tiles.footprint.hip",
    "tilewright_kit.tiles.resources": "tilewright_kit.tiles.rules.resources",
    "tilewright_kit.tiles.rules": "tilewright_kit.tiles.rules.tiling",
    "tilewright_kit.tiles.signature_rules": "tilewright_kit.tiles.rules.signature",
    "tilewright_kit.words": "tilewright_kit.types.vocabulary",
}

_FROM_PACKAGE = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def moved(error: ImportError) -> str:
    """The old and the new name of the module that an import missed, as a sentence; empty if it is none of these."""
    wanted = error.name or ""
    # ``from tilewright_kit import plan`` names the package, and the module only in its text.
    if found := _FROM_PACKAGE.match(str(error)):
        wanted = next((name for name in (f"{found[2]}.{found[1]}", found[2]) if name in MOVED), wanted)
    return f"{wanted} is now {MOVED[wanted]}" if wanted in MOVED else ""
