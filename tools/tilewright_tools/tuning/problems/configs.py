"""Which kernels are tried on a problem."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.records import config_of_record
from tilewright_kit.contract.abilities import Searchable, Tunable
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Operation, predictions_of
from tilewright_kit.contract.problem import Problem
from tilewright_kit.kernel_sets.declare import KernelSet
from tilewright_kit.selection.strategies import Heuristic
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError

__all__ = ["PLANNED", "WIDE", "choose_configs", "cross"]

WIDE = "wide"
_FAVOURED = 0.6
"""Part of a sample of the wide space that the analytical model likes best; the rest is drawn from what it gives a
chance.
"""
_CHANCE = 3.0
"""Predicted time, in parts of the least, up to which a kernel is drawn."""
_COMMON = 4
"""One of so many kernels is drawn before all others, on every problem, so that fewer are built."""

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
    ``wide`` (those and the wide space of a ``Searchable`` operation; ``limit`` takes a sample of it),
    the name of a kernel set or of a space for tuning (``spaces``), or a file of configurations (JSON lines, or one
    list). Algorithms of sets and files take the problem's element types, layout and epilogue. ``pattern`` is a shell
    pattern over names; ``limit`` keeps the first. Raises ``NotFoundError`` for an unknown set,
    ``InvalidArgumentError`` for a damaged file.
    """
    candidates: Sequence[KernelConfig] = operation.candidates(problem, device)
    if wanted == WIDE:
        return _wide(operation, problem, device, candidates, pattern, limit)
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


def _wide(
    operation: Operation[Any, Any],
    problem: Problem,
    device: DeviceInfo,
    candidates: Sequence[KernelConfig],
    pattern: str,
    limit: int,
) -> list[KernelConfig]:
    """The wide space by predicted time, without what cannot win; with a ``limit`` a sample that is the same each time.
    The operation's candidates take part in any case, the model's favourite first.
    """
    favourites = [item.config for item in Heuristic().rank(operation, problem, candidates, device)]
    found: list[KernelConfig] = []
    if isinstance(operation, Searchable) and operation.search_class(problem, device):
        space, table = _space(operation, problem, device)
        times = operation.search_times(problem, table, device)
        order = [int(place) for place in np.argsort(times, kind="stable") if np.isfinite(times[place])]
        if limit:
            order = _sampled(order, times, [space[place].name for place in order], limit)
        for place in order:
            config = operation.search_config(problem, table, place, device)
            valid = config == space[place] or operation.rules.allows(config, device.arch)
            if valid and not operation.mismatches(problem, config, device):
                found.append(config)
    whole = dict.fromkeys((*favourites, *found))
    return [config for config in whole if not pattern or fnmatchcase(config.name, pattern)]


_spaces: dict[tuple[str, str, str], tuple[Sequence[KernelConfig], Mapping[str, Any]]] = {}


def _space(operation: Any, problem: Problem, device: DeviceInfo) -> tuple[Sequence[KernelConfig], Mapping[str, Any]]:
    """The space of the problem's class and its table, of which the last ones are kept."""
    key = (
        operation.name,
        device.arch.id,
        f"{operation.search_class(problem, device)} {problem.operands[0].desc.dtype}",
    )
    if key not in _spaces:
        if len(_spaces) > 8:
            _spaces.clear()
        space = operation.search_space(problem, device)
        _spaces[key] = space, operation.search_table(space, device)
    return _spaces[key]


def _sampled(order: Sequence[int], times: Any, names: Sequence[str], limit: int) -> list[int]:
    """The fastest by the model, and others drawn by their names."""
    first = list(order[: int(limit * _FAVOURED)])
    draws = {place: crc32(name.encode()) for place, name in zip(order, names, strict=True)}
    rest = [place for place in order[len(first) :] if times[place] <= _CHANCE * times[order[0]]]
    rest.sort(key=lambda place: (draws[place] % _COMMON != 0, crc32(draws[place].to_bytes(4, "little"))))
    return first + rest[: limit - len(first)]


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
