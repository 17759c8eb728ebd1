"""Declarations of kernels, with wildcards: the sets from which candidates come.

A declaration gives values to fields of a configuration: one value, a list of values, or ``ANY``. A ``KernelSet``
expands its declarations against an arch: every combination of the values, the wildcards filled in by the operation's
``choices``, filtered by its rules.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Final, Generic, TypeVar, overload

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.types.errors import ConfigInvalidError, InvalidArgumentError

__all__ = ["ANY", "AnyValue", "Choices", "Declaration", "DeferredDeclarations", "KernelSet", "Prefilter", "declare"]

C = TypeVar("C", bound=KernelConfig)
T = TypeVar("T")

REMEMBERED = 16
"""Archs that a kernel set caches its expansion for: more than a server has devices."""


class AnyValue(Enum):
    """The type of ``ANY``."""

    ANY = "*"

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = AnyValue.ANY
"""Every value that the operation offers for the field on the arch. The string ``"*"`` means the same."""

Choices = Callable[[str, ArchSpec, Mapping[str, Any]], Iterable[Any] | None]
"""``choices(field, arch, partial)``: the values that ``ANY`` stands for, given the fields that are already known.

Known are all fields with one value and, of the others, those before ``field`` in the configuration. ``None`` means that
the operation has nothing to say: flags and enumerations then take all their values.
"""

Prefilter = Callable[[Mapping[str, Any], ArchSpec], bool]
"""``prefilter(partial, arch)``: False if no completion of ``partial`` can be valid. Asked after each field is filled.

It only saves time: it must not reject what the rules accept, and ``rejected`` does not ask it.
"""


@dataclass(frozen=True)
class Declaration(Generic[C]):
    """Values and wildcards for the fields of one configuration class; fields that are not named keep their defaults."""

    config_type: type[C]
    fields: Mapping[str, tuple[Any, ...] | AnyValue | _Pattern]
    archs: tuple[str, ...] = ()
    """Shell patterns of arch names; none means every arch."""
    kinds: tuple[str, ...] = ()
    """Kinds of device; none means every kind."""
    conditions: tuple[Callable[[ArchSpec], bool], ...] = ()
    """All of them hold of an arch: what its spec offers."""
    tags: frozenset[str] = frozenset()

    @property
    def has_wildcards(self) -> bool:
        return any(not isinstance(values, tuple) for values in self.fields.values())

    def on(self, *patterns: str) -> Declaration[C]:
        """The same declaration, for archs whose name matches one of the shell patterns, for example ``gfx9*``."""
        return dataclasses.replace(self, archs=(*self.archs, *patterns))

    def for_kinds(self, *kinds: str) -> Declaration[C]:
        """The same declaration, for kinds of device."""
        return dataclasses.replace(self, kinds=(*self.kinds, *kinds))

    def where(self, condition: Callable[[ArchSpec], bool]) -> Declaration[C]:
        """The same declaration, for archs of which ``condition`` holds too."""
        return dataclasses.replace(self, conditions=(*self.conditions, condition))

    def applies_to(self, arch: ArchSpec) -> bool:
        """True if kernels are declared for the arch."""
        named = not self.archs or any(fnmatchcase(arch.name, pattern) for pattern in self.archs)
        return named and (not self.kinds or arch.kind in self.kinds) and all(holds(arch) for holds in self.conditions)


@dataclass(frozen=True)
class _Pattern:
    """A tuple some of whose members are wildcards."""

    members: tuple[Any, ...]

    def matches(self, value: tuple[Any, ...]) -> bool:
        return len(value) == len(self.members) and all(
            want is ANY or have == want for have, want in zip(value, self.members, strict=True)
        )


def declare(config_type: type[C], **fields: Any) -> Declaration[C]:
    """Declare kernels: each field takes a value, a list of values, or ``ANY`` (or ``"*"``).

    A tuple may have wildcards for members: ``wave=(ANY, ANY, 1)``. Values are converted as in
    ``KernelConfig.from_dict``. Raises ``InvalidArgumentError`` for an unknown field or a value of the wrong type.
    """
    return Declaration(config_type, {name: _known_values(config_type, name, value) for name, value in fields.items()})


_known: dict[Any, Any] = {}
_MOST_KNOWN = 1 << 14
"""Values that are kept: several times those of all plugins, and no more however many are asked about."""


def _known_values(config_type: type[KernelConfig], name: str, value: Any) -> Any:
    """``_values``, of the same value once: plugins declare thousands of kernels whenever they are imported."""
    key = (config_type, name, _typed(value))
    try:
        is_known = key in _known
    except TypeError:  # an unhashable value, which the field rejects or not
        return _values(config_type, name, value)
    if is_known:
        return _known[key]
    found = _values(config_type, name, value)
    if len(_known) < _MOST_KNOWN:
        _known[key] = found
    return found


def _typed(value: Any) -> Any:
    """A key that tells equal values apart: 1, 1.0 and True are different values of a field."""
    kind = type(value)
    return (kind, *map(_typed, value)) if kind is tuple or kind is list else (kind, value)


def _values(config_type: type[KernelConfig], name: str, value: Any) -> tuple[Any, ...] | AnyValue | _Pattern:
    if _is_any(value):
        config_type.coerce(name, getattr(config_type(), name, None))  # rejects an unknown field
        return ANY
    if isinstance(value, tuple) and any(_is_any(member) for member in value):
        default = getattr(config_type(), name, None)
        config_type.coerce(name, default if isinstance(default, tuple) else value)
        return _Pattern(tuple(ANY if _is_any(member) else member for member in value))
    if isinstance(value, list):
        return tuple(dict.fromkeys(config_type.coerce(name, item) for item in value))
    return (config_type.coerce(name, value),)


def _is_any(value: object) -> bool:
    return value is ANY or (type(value) is str and value == "*")


class DeferredDeclarations(Sequence[Declaration[C]]):
    """Declarations that ``make`` returns, made once, in order, and no further than they are asked for: a server that
    starts looks at the first few of thousands. For all threads.
    """

    def __init__(self, make: Callable[[], Iterable[Declaration[C]]]) -> None:
        self._make = make
        self._made: list[Declaration[C]] = []
        self._rest: Iterator[Declaration[C]] | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Declaration[C]]:
        index = 0
        while self._has(index):
            yield self._made[index]
            index += 1

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Declaration[C]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Declaration[C]]: ...

    def __getitem__(self, index: int | slice) -> Declaration[C] | Sequence[Declaration[C]]:
        if isinstance(index, int) and index >= 0 and self._has(index):
            return self._made[index]
        return tuple(self)[index]

    def _has(self, index: int) -> bool:
        with self._lock:
            if self._rest is None:
                self._rest = iter(self._make())
            self._made.extend(islice(self._rest, max(0, index + 1 - len(self._made))))
            return index < len(self._made)


@dataclass(frozen=True)
class KernelSet(Generic[C]):
    """A named set of declarations. Immutable: ``merge``, ``tag`` and ``tagged`` give new sets."""

    name: str
    description: str
    declarations: Sequence[Declaration[C]]
    choices: Choices | None = None
    prefilter: Prefilter | None = None
    _expanded: dict[Any, tuple[C, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _rejected: dict[Any, tuple[tuple[C, tuple[Violation, ...]], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __iter__(self) -> Iterator[Declaration[C]]:
        return iter(self.declarations)

    def __add__(self, other: KernelSet[C]) -> KernelSet[C]:
        return self.merge(other)

    def expand(self, arch: ArchSpec, rules: RuleBook[C], strict: bool = False) -> tuple[C, ...]:
        """The valid configurations on ``arch``, in declaration order, then field order; none twice.

        With ``strict``, a declaration without wildcards that is invalid raises ``ConfigInvalidError``.
        """
        if strict:
            return tuple(self.iterate(arch, rules, strict=True))
        return _remembered(self._expanded, (arch, rules), lambda: tuple(self.iterate(arch, rules)))

    def iterate(self, arch: ArchSpec, rules: RuleBook[C], strict: bool = False) -> Iterator[C]:
        """``expand``, one configuration at a time: for who needs only the first few."""
        seen: set[C] = set()
        for declaration in self._declared_on(arch):
            for config in self._proposed(declaration, arch):
                if config in seen:
                    continue
                if rules.allows(config, arch):
                    seen.add(config)
                    yield config
                elif strict and not declaration.has_wildcards:
                    self._refuse(config, arch, rules)

    def find_any(self, archs: Sequence[ArchSpec], rules: RuleBook[C]) -> C | None:
        """A configuration that is valid on one of ``archs``, of the first declaration that has one; None if there is
        none. Later declarations are not looked at.
        """
        for declaration in self.declarations:
            for arch in archs:
                if declaration.applies_to(arch):
                    for config in self._proposed(declaration, arch):
                        if rules.allows(config, arch):
                            return config
        return None

    def _refuse(self, config: C, arch: ArchSpec, rules: RuleBook[C]) -> None:
        violations = rules.check(config, arch)
        first = violations[0]
        raise ConfigInvalidError(
            f"kernel set {self.name!r} declares {config.name}, which is not valid on {arch.id}: "
            f"{first.rule}: {first.reason}",
            field=first.field,
            value=first.value,
            rule=first.rule,
            fix=first.fix_text,
            violations=violations,
        )

    def rejected(self, arch: ArchSpec, rules: RuleBook[C]) -> tuple[tuple[C, tuple[Violation, ...]], ...]:
        """Every combination that the rules reject on ``arch``, with the reasons, in the order of ``expand``."""

        def judge() -> tuple[tuple[C, tuple[Violation, ...]], ...]:
            found: dict[C, tuple[Violation, ...]] = {}
            for declaration in self._declared_on(arch):
                for config in self._combinations(declaration, arch, None):
                    if config not in found:
                        found[config] = rules.check(config, arch)
            return tuple((config, violations) for config, violations in found.items() if violations)

        return _remembered(self._rejected, (arch, rules), judge)

    def merge(self, other: KernelSet[C], name: str = "") -> KernelSet[C]:
        """Both sets' declarations, ours first. Raises ``ValueError`` for sets of different operations."""
        types = {declaration.config_type for declaration in (*self.declarations, *other.declarations)}
        if len(types) > 1 or self.choices != other.choices or self.prefilter != other.prefilter:
            raise ValueError(f"kernel sets {self.name!r} and {other.name!r} expand differently and cannot be merged")
        description = "; ".join(dict.fromkeys(text for text in (self.description, other.description) if text))
        return KernelSet(
            name or f"{self.name}+{other.name}",
            description,
            (*self.declarations, *(item for item in other.declarations if item not in self.declarations)),
            self.choices,
            self.prefilter,
        )

    def tag(self, *tags: str) -> KernelSet[C]:
        """The same set with ``tags`` on each of its declarations."""
        tagged = (dataclasses.replace(item, tags=item.tags | set(tags)) for item in self.declarations)
        return dataclasses.replace(self, declarations=tuple(tagged))

    def tagged(self, tag: str) -> KernelSet[C]:
        """The declarations that carry ``tag``."""
        return dataclasses.replace(
            self, name=f"{self.name}:{tag}", declarations=tuple(item for item in self.declarations if tag in item.tags)
        )

    def _declared_on(self, arch: ArchSpec) -> Iterator[Declaration[C]]:
        return (declaration for declaration in self.declarations if declaration.applies_to(arch))

    def _proposed(self, declaration: Declaration[C], arch: ArchSpec) -> Iterator[C]:
        """Combinations for the rules to judge. Kernels that were written out are judged by the rules alone, so that
        none vanishes without a reason.
        """
        return self._combinations(declaration, arch, self.prefilter if declaration.has_wildcards else None)

    def _combinations(self, declaration: Declaration[C], arch: ArchSpec, prefilter: Prefilter | None) -> Iterator[C]:
        """The product of a declaration's axes, depth first, so that a rejected beginning is never completed."""
        known: dict[str, Any] = {}
        axes: list[str] = []
        config_type = declaration.config_type
        for item in dataclasses.fields(config_type):
            values = declaration.fields.get(item.name, (item.default,))
            if isinstance(values, tuple) and len(values) == 1:
                known[item.name] = values[0]
            else:
                axes.append(item.name)

        def descend(depth: int) -> Iterator[C]:
            if depth == len(axes):
                yield config_type(**known)
                return
            name = axes[depth]
            for value in self._axis(declaration, name, arch, known):
                known[name] = value
                if prefilter is None or prefilter(known, arch):
                    yield from descend(depth + 1)
                del known[name]

        if prefilter is None or prefilter(known, arch):
            yield from descend(0)

    def _axis(self, declaration: Declaration[C], name: str, arch: ArchSpec, known: Mapping[str, Any]) -> Iterable[Any]:
        values = declaration.fields[name]
        if isinstance(values, tuple):
            return values
        offered = None if self.choices is None else self.choices(name, arch, known)
        if offered is None:
            offered = _all_values(declaration.config_type, name)
        if offered is None:
            raise InvalidArgumentError(
                f"kernel set {self.name!r}: the operation offers no values for {name!r}",
                field=f"config.{name}",
                value="*",
                rule="declaration_wildcard",
                fix="write the values out",
            )
        # Offered twice or thrice is offered once; tuples may come as lists.
        unique = dict.fromkeys(tuple(item) if isinstance(item, list) else item for item in offered)
        return [item for item in unique if not isinstance(values, _Pattern) or values.matches(item)]


def _remembered(memory: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """The value of ``make``, made once per key. Two threads may both make it; they make the same."""
    found = memory.get(key)
    if found is None:
        if len(memory) >= REMEMBERED:
            memory.clear()
        found = memory[key] = make()
    return found


def _all_values(config_type: type[KernelConfig], name: str) -> tuple[Any, ...] | None:
    default = config_type.__dataclass_fields__[name].default
    if isinstance(default, bool):
        return (default, not default)
    if isinstance(default, Enum):
        return tuple(type(default))
    return None
