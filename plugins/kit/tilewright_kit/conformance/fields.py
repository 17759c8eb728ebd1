"""Changing the fields of a configuration in turn: names, keys and sources must change with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.conformance.report import CheckReport, Skipped
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Pool", "check_fields", "neutral_source", "source_findings", "variants"]

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Pool:
    """Valid configurations of an operation per arch, and every value that was seen in each field."""

    configs: Mapping[ArchSpec, Sequence[KernelConfig]]
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        operation: Operation[Any, Any],
        archs: Iterable[ArchSpec],
        per_arch: int,
        examples: Sequence[KernelConfig] = (),
    ) -> Pool:
        """Up to ``per_arch`` kernels for each arch that has any, spread evenly over each kernel set.

        ``examples`` join where the rules allow them.
        """
        configs: dict[ArchSpec, Sequence[KernelConfig]] = {}
        values: dict[str, dict[Any, None]] = {name: {} for name in operation.config_type.field_names()}
        for arch in archs:
            chosen = dict.fromkeys(config for config in examples if operation.rules.allows(config, arch))
            for config in chosen:
                for name, seen in values.items():
                    seen[getattr(config, name)] = None
            for kernels in operation.kernel_sets.values():
                expanded = kernels.expand(arch, operation.rules)
                step = max(1, -(-len(expanded) * len(operation.kernel_sets) // per_arch))
                chosen.update(dict.fromkeys(expanded[::step]))
                for config in expanded[:2000]:
                    for name, seen in values.items():
                        seen[getattr(config, name)] = None
            if chosen:
                configs[arch] = tuple(chosen)
        return cls(configs, {name: tuple(seen) for name, seen in values.items()})

    def bases(self, arch: ArchSpec, count: int) -> Sequence[KernelConfig]:
        """``count`` configurations of an arch, spread evenly."""
        configs = self.configs[arch]
        return configs[:: max(1, -(-len(configs) // count))]

    def every(self) -> tuple[KernelConfig, ...]:
        """All configurations, each once."""
        return tuple(dict.fromkeys(config for configs in self.configs.values() for config in configs))


def variants(config: KernelConfig, name: str, values: Sequence[Any] = (), limit: int = 16) -> Iterator[KernelConfig]:
    """Configurations that differ from ``config`` in field ``name`` alone: with each of ``values``, then invented ones.

    Values that the class rejects, or holds to mean the same, are passed over.
    """
    own = getattr(config, name)
    tried = 0
    for value in dict.fromkeys([*values, *_invent(own, config.__dataclass_fields__[name].default)]):
        if tried == limit:
            return
        try:
            changed = config.replace(**{name: config.coerce(name, value)})
        except (InvalidArgumentError, ValueError):
            continue
        if type(value) is type(own) and changed != config:
            tried += 1
            yield changed


def _invent(value: Any, default: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, Enum):
        return list(type(value))
    if isinstance(value, int):
        return [value + 1, value * 2, value // 2, 0, 1]
    if isinstance(value, str):
        # Most words of configurations are element types.
        return [*(dtype.value for dtype in DType), value + "x", "x", default]
    if isinstance(value, tuple) and not value:
        return [default, (1,), (DType.FP16.value,)]  # one of them fits the annotation
    if isinstance(value, tuple):
        inner = [
            (*value[:index], other, *value[index + 1 :])
            for index, item in enumerate(value)
            for other in _invent(item, item)[:3]
        ]
        return [*inner, default, (), value[::-1], (*value, value[-1])]
    return []


def check_fields(report: CheckReport, operation: Operation[Any, Any], pool: Pool) -> None:
    """For every field: another value gives another name and key, and another source."""
    config_type = operation.config_type
    bases = [config_type(), *pool.every()][:12]
    for name in config_type.field_names():
        report.run(f"naming.{name}", naming_findings, bases, name, pool.values[name])
    report.run("naming.unique", _collisions, pool)
    report.run("naming.round_trip", _round_trips, pool)
    for name in config_type.field_names():
        report.run(f"source.{name}", source_findings, operation, pool, name)
    report.run("source.units", _units, operation, pool)


def naming_findings(bases: Sequence[KernelConfig], name: str, values: Sequence[Any] = ()) -> Iterator[str]:
    """Faults in how field ``name`` enters names and keys."""
    pairs = 0
    for base in bases:
        seen = {base.name: base}
        for changed in variants(base, name, values):
            pairs += 1
            twin = seen.setdefault(changed.name, changed)
            if twin != changed:
                yield f"{getattr(twin, name)!r} and {getattr(changed, name)!r} share the name {changed.name}"
            key, other = base.key("any"), changed.key("any")
            if key == other or key.digest == other.digest:
                yield f"{getattr(base, name)!r} and {getattr(changed, name)!r} share a key"
    if not pairs:
        raise Skipped("no other value of this field is known or could be invented")


def _collisions(pool: Pool) -> Iterator[str]:
    seen: dict[str, KernelConfig] = {}
    for config in pool.every():
        twin = seen.setdefault(config.name, config)
        if twin != config:
            yield f"two configurations are named {config.name}"
        if config.key("one") == config.key("another"):
            yield f"the key of {config.name} does not tell archs apart"


def _round_trips(pool: Pool) -> Iterator[str]:
    for config in pool.every():
        record = json.loads(json.dumps(config.to_dict(), allow_nan=False))
        again = type(config).from_dict(record)
        if again != config or again.key("any") != config.key("any") or hash(again) != hash(config):
            yield f"{config.name} comes back as another configuration from its dict"
        parts = {**config.signature(), **config.algorithm()}
        if len(parts) != len(config.field_names()):
            yield f"{config.name}: a field is in neither or both of signature and algorithm"


def neutral_source(unit: SourceUnit) -> tuple[Any, ...]:
    """The text of a unit without the names that differ anyway: kernel name and entry symbols."""
    text = unit.text
    for word in sorted({unit.name, *unit.entries.values()}, key=len, reverse=True):
        text = text.replace(word, "@")
    return text, unit.flags, tuple(sorted(unit.defines.items())), unit.language


def source_findings(operation: Operation[Any, Any], pool: Pool, name: str, pairs_per_kind: int = 4) -> Iterator[str]:
    """Valid pairs of configurations that differ in field ``name`` alone but generate the same source."""
    if name in operation.config_type.plan_fields:
        raise Skipped("the class says that only the planner reads it")
    found: dict[str, int] = {}
    for arch in pool.configs:
        for base in pool.bases(arch, 24):
            for changed in variants(base, name, pool.values[name]):
                if found.get(arch.kind, 0) >= pairs_per_kind:
                    break
                if not operation.rules.allows(changed, arch):
                    continue
                units = _generated(operation, (base, changed), arch)
                if units is None:
                    continue
                found[arch.kind] = found.get(arch.kind, 0) + 1
                if neutral_source(units[0]) == neutral_source(units[1]):
                    yield (
                        f"on {arch.id}, {getattr(base, name)!r} and {getattr(changed, name)!r} generate the same "
                        f"source ({base.name})"
                    )
    if not found:
        raise Skipped("no two valid configurations that can be generated differ in this field alone")


def _generated(
    operation: Operation[Any, Any], configs: Sequence[KernelConfig], arch: ArchSpec
) -> list[SourceUnit] | None:
    try:
        return [operation.generate(config, arch) for config in configs]
    except UnsupportedError:
        return None


def _units(operation: Operation[Any, Any], pool: Pool) -> Iterator[str]:
    """Every valid kernel has a unit (or an honest refusal): deterministic, named for it, with usable symbols."""
    count = 0
    for arch, configs in pool.configs.items():
        texts: dict[tuple[Any, ...], str] = {}
        for config in configs:
            units = _generated(operation, (config, config), arch)
            if units is None:
                continue
            count += 1
            unit, again = units
            if unit != again:
                yield f"generate({config.name}) gives another unit the second time"
            if unit.name != config.name:
                yield f"the unit of {config.name} is named {unit.name}"
            if unit.plugin_version != operation.version:
                yield f"the unit of {config.name} does not carry the version {operation.version!r}"
            if not unit.entries or not all(_SYMBOL.fullmatch(symbol) for symbol in unit.entries.values()):
                yield f"the unit of {config.name} has no entries, or symbols that no linker takes"
            twin = texts.setdefault((unit.text, unit.flags, tuple(sorted(unit.defines.items()))), config.name)
            if twin != config.name:
                yield f"{twin} and {config.name} have the same unit on {arch.id}"
    if not count:
        raise Skipped("no kernel of any arch can be generated")
