"""Which kernels are tried on a problem."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.records import config_of_record
from tilewright_kit.contract.abilities import Tunable
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Operation, predictions_of
from tilewright_kit.contract.problem import Problem
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.selection.strategies import Heuristic
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError

__all__ = ["PLANNED", "choose_configs", "cross"]

PLANNED = frozenset({"split_k"})
"""Fields of a signature that planners choose: kernel sets need not have been declared for them."""


def choose_configs(
    operation: Operation[Any, Any],
    problem: Problem,
    device: DeviceInfo,
    wanted: str,
    *,
    pattern: str = "",
    limit: int = 0,
) -> list[KernelConfig]:
    """Kernels that can compute the problem, the model's favourites first, none twice.

    ``wanted`` is ``candidates`` (what the operation proposes), ``all`` (those and every algorithm of its kernel sets),
    the name of a kernel set or of a space for tuning (``spaces``), or a file of configurations (JSON lines, or one
    list). Algorithms of sets and files take the problem's element types, layout and epilogue. ``pattern`` is a shell
    pattern over names; ``limit`` keeps the first. Raises ``NotFoundError`` for an unknown set,
    ``InvalidArgumentError`` for a damaged file.
    """
    candidates: Sequence[KernelConfig] = operation.candidates(problem, device)
    known = predictions_of(candidates)
    pool: dict[KernelConfig, None] = {}
    if wanted in ("candidates", "all"):
        pool.update(dict.fromkeys(candidates))
    if wanted != "candidates":
        signatures = _signatures(candidates)
        for config in _declared(operation, device, wanted):
            for signature in signatures:
                pool[config.replace(**signature)] = None
    usable = [
        config
        for config in pool
        if (not pattern or fnmatchcase(config.name, pattern))
        and operation.rules.allows(config, device.arch)
        and not operation.mismatches(problem, config, device)
    ]
    predicted = Candidates(usable, (known.get(config) for config in usable))
    ranked = [item.config for item in Heuristic().rank(operation, problem, predicted, device)]
    return ranked[:limit] if limit else ranked


def cross(
    operation: Operation[Any, Any],
    problem: Problem,
    device: DeviceInfo,
    parents: Sequence[KernelConfig],
    tried: Collection[KernelConfig],
    limit: int,
) -> list[KernelConfig]:
    """Kernels that nobody declared: a parent with one trait of another kernel, or another with one trait of a parent.

    Others are the operation's candidates and kernel sets. Valid ones that were not tried, the model's favourites first.
    """
    others = choose_configs(operation, problem, device, "all")
    found: dict[KernelConfig, None] = {}
    for parent in parents:
        signature = {name for name in parent.signature_fields if name not in PLANNED}
        for other in (*parents, *others):
            for name in parent.field_names():
                ours, theirs = getattr(parent, name), getattr(other, name)
                if name not in signature and ours != theirs:
                    found[parent.replace(**{name: theirs})] = None
                    found[other.replace(**{name: ours})] = None
    fresh = [
        config
        for config in found
        if config not in tried
        and operation.rules.allows(config, device.arch)
        and not operation.mismatches(problem, config, device)
    ]
    return [item.config for item in Heuristic().rank(operation, problem, fresh, device)[:limit]]


def _signatures(candidates: Sequence[KernelConfig]) -> list[dict[str, Any]]:
    """Signatures of the candidates; fields that planners choose stay as declared."""
    found: dict[str, dict[str, Any]] = {}
    for config in candidates:
        signature = {name: getattr(config, name) for name in config.signature_fields if name not in PLANNED}
        found[repr(signature)] = signature
    return list(found.values())


def _declared(operation: Operation[Any, Any], device: DeviceInfo, wanted: str) -> Iterator[KernelConfig]:
    spaces: Mapping[str, KernelSet[Any]] = operation.spaces if isinstance(operation, Tunable) else {}
    if wanted == "all":
        names: Iterable[str] = operation.kernel_sets
    elif wanted in operation.kernel_sets:
        names = (wanted,)
    elif wanted in spaces:
        # Whole spaces are too large to be remembered.
        yield from spaces[wanted].iterate(device.arch, operation.rules)
        return
    elif Path(wanted).is_file():
        yield from _from_file(operation, Path(wanted))
        return
    else:
        raise NotFoundError(
            f"{operation.name} has no kernel set {wanted!r}, and there is no such file",
            field="configs",
            value=wanted,
            rule="kernel_set_name",
            fix="use candidates, all, a file of configurations, or one of "
            + ", ".join([*operation.kernel_sets, *spaces]),
        )
    for name in names:
        yield from operation.kernel_sets[name].expand(device.arch, operation.rules)


def _from_file(operation: Operation[Any, Any], path: Path) -> Iterator[KernelConfig]:
    text = path.read_text("utf-8")
    try:
        records = _records(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{path.name} is not JSON: {error}",
            field="configs",
            value=path.name,
            rule="configs_file",
            fix="write a configuration, a list of them, or one a line, as `tilewright kernels show --config` prints it",
        ) from None
    for record in records:
        fields = record if isinstance(record, dict) else {}
        if not isinstance(fields.get("config"), dict):
            yield config_of_record(fields, {operation.name: operation}, operation.name)
        elif fields.get("operation", operation.name) == operation.name:  # of a catalog, which may have others as well
            yield config_of_record(fields["config"], {operation.name: operation}, operation.name)


def _records(text: str) -> list[Any]:
    """A configuration, a list of them, those of an exported catalog, or one a line. Raises ``ValueError``."""
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(whole, dict):
        return list(whole["kernels"]) if isinstance(whole.get("kernels"), list) else [whole]
    return list(whole) if isinstance(whole, list) else [whole]
