"""A first look at an operation: is it one at all? ``check_plugin`` looks at what it does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import require_naming
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.kernel_sets.declare import DeferredDeclarations, KernelSet

__all__ = ["METHODS", "check_operation"]

METHODS = ("parse", "candidates", "mismatches", "generate", "plan", "predict", "reference", "samples")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def check_operation(
    operation: Any, archs: Sequence[ArchSpec] | None = None, every_declaration: bool = False
) -> tuple[str, ...]:
    """Reasons why an object is no ``Operation``; empty if it is one.

    Looks at names, types and the naming of configurations, and asks every kernel set for a first kernel on any of
    ``archs`` (default: all that have a spec). Errors of ``choices`` and rules are findings too. Declarations that a set
    makes when they are asked for are made as far as this needs, unless ``every_declaration`` is to be looked at.
    """
    if inspect.isclass(operation):
        return ("it is a class, not an object",)
    findings = [f"it has no method {name}" for name in METHODS if not callable(getattr(operation, name, None))]
    name = getattr(operation, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        findings.append(f"its name {name!r} is not a word of lower-case letters, digits and underscores")
    version = getattr(operation, "version", None)
    if not isinstance(version, str) or not version:
        findings.append("it has no version")
    findings += _check_config(getattr(operation, "config_type", None), name)
    rules = getattr(operation, "rules", None)
    if not isinstance(rules, RuleBook):
        findings.append("its rules are not a RuleBook")
    sets = getattr(operation, "kernel_sets", None)
    if not isinstance(sets, Mapping) or "default" not in sets:
        findings.append("it has no kernel set named 'default'")
    elif not findings:
        for label, kernels in sets.items():
            findings += _check_set(label, kernels, operation, archs, every_declaration)
    return tuple(findings)


def _check_config(config_type: Any, name: Any) -> list[str]:
    if not (inspect.isclass(config_type) and issubclass(config_type, KernelConfig)):
        return ["its config_type is not a KernelConfig"]
    if config_type.operation != name:
        return [f"its configurations are named for operation {config_type.operation!r}"]
    unmade = [
        field
        for field, hint in inspect.get_annotations(config_type).items()
        if "ClassVar" not in str(hint) and field not in config_type.field_names()
    ]
    if unmade:
        return [f"{config_type.__name__} is not a dataclass of its own: decorate it with @dataclass(frozen=True)"]
    try:
        require_naming(config_type)
        hash(config_type())
        config_type().key("any")
    except (TypeError, ValueError) as error:
        return [str(error)]
    return []


def _check_set(
    label: Any, kernels: Any, operation: Any, archs: Sequence[ArchSpec] | None, every_declaration: bool
) -> list[str]:
    if not isinstance(kernels, KernelSet):
        return [f"kernel set {label!r} is not a KernelSet"]
    where = [*map(tilewright_arch.load, tilewright_arch.names())] if archs is None else archs
    try:
        if every_declaration or not isinstance(kernels.declarations, DeferredDeclarations):
            strangers = {item.config_type for item in kernels.declarations} - {operation.config_type}
            if strangers:
                return [f"kernel set {label!r} declares {', '.join(sorted(item.__name__ for item in strangers))}"]
        found = kernels.find_any(where, operation.rules)
    except Exception as error:  # plugin code: anything may come
        return [f"kernel set {label!r} cannot be expanded: {type(error).__name__}: {error}"]
    if found is None:
        return [f"kernel set {label!r} has no valid kernel on any arch"]
    if type(found) is not operation.config_type:
        return [f"kernel set {label!r} declares {type(found).__name__}"]
    return []
