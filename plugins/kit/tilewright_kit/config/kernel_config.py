"""The base of every operation's kernel configuration."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from tilewright_kit.config.naming import KernelKey, compose_name, digest_of, has_naming, require_naming
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["KernelConfig"]

Self = TypeVar("Self", bound="KernelConfig")
_HASH = "_hash"
"""Attribute in which a configuration keeps its hash."""


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Signature plus algorithm of one kernel: a frozen dataclass whose fields are made by ``part`` and ``suffix``.

    Values are strings, booleans, integers, enumerations of these, or (nested) tuples of them.
    """

    operation: ClassVar[str] = ""
    """Name of the operation, and first word of every kernel name unless there is a ``prefix``."""
    prefix: ClassVar[str] = ""
    """First words of every kernel name; empty: the operation. Two operations never share one (``plugins.py``)."""
    mnk_fields: ClassVar[tuple[str, ...]] = ("tile", "wave", "warp_tile", "cluster")
    """Triples that stand for m, n and k of a product; other triples are exported as lists."""
    signature_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that say what the kernel computes. All others are its algorithm: every field is in exactly one."""
    kinds: ClassVar[tuple[str, ...]] = ()
    """Values of the property ``variant``, where kernels are of kinds that commands choose among (``--variants``)."""
    plan_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that only ``Operation.plan`` reads. All others must show in the generated source or its flags."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("operation"):
            raise TypeError(f"{cls.__name__} must set the class variable 'operation'")
        own = [name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)]
        # A dataclass with slots is made twice, and the second time its fields are no longer class variables.
        made = "__dataclass_fields__" in cls.__dict__
        for name in () if made else own:
            item = cls.__dict__.get(name)
            if not isinstance(item, dataclasses.Field) or not has_naming(item):
                raise TypeError(f"{cls.__name__}.{name} has no place in the name: declare it with part() or suffix()")
        inherited = () if made else tuple(item.name for item in dataclasses.fields(cls))
        for group in ("signature_fields", "plan_fields"):
            unknown = set(getattr(cls, group)) - {*own, *inherited}
            if unknown and not made:
                raise TypeError(f"{cls.__name__}.{group} names no field: {', '.join(sorted(unknown))}")
        if "__hash__" not in cls.__dict__:
            cls.__hash__ = KernelConfig._kept_hash  # type: ignore[method-assign, assignment]  # ``dataclass`` makes none

    def _kept_hash(self) -> int:
        """Hash of all fields. Candidates and what is known of them are looked up some hundred times for a problem."""
        kept: int | None = self.__dict__.get(_HASH)
        if kept is None:
            kept = self.__dict__[_HASH] = hash(tuple(getattr(self, name) for name in _fields(type(self))))
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Fields alone: another process hashes texts differently."""
        return {name: getattr(self, name) for name in _fields(type(self))}

    def _store(self, **values: object) -> None:
        """For ``__post_init__``: what follows from other fields is stored as its default, so that equal kernels have
        equal configurations.
        """
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def name(self) -> str:
        """Readable and unique: a function of all fields."""
        require_naming(type(self))
        return compose_name(self.prefix or self.operation, self)

    def key(self, arch: str) -> KernelKey:
        """The identity of this configuration on an arch (``ArchSpec.id``)."""
        return KernelKey(self.operation, self.name, arch, digest_of([self.operation, arch, self.to_dict()]))

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {name: _plain(getattr(self, name)) for name in _fields(type(self))}

    def signature(self) -> dict[str, Any]:
        """The signature for export: ``signature_fields`` as ``export_field`` writes them."""
        wanted = set(self.signature_fields)
        return dict(self.export_field(name) for name in self.field_names() if name in wanted)

    def algorithm(self) -> dict[str, Any]:
        """The algorithm for export: every field that is not in ``signature_fields``."""
        wanted = set(self.signature_fields)
        return dict(self.export_field(name) for name in self.field_names() if name not in wanted)

    def export_field(self, name: str) -> tuple[str, Any]:
        """Name and JSON value of a field in exports. ``mnk_fields`` are written ``{name}_shape`` with m, n and k."""
        value = getattr(self, name)
        known = name in self.mnk_fields and isinstance(value, tuple) and len(value) == 3
        if known and all(type(item) is int for item in value):
            return f"{name}_shape", dict(zip(("m", "n", "k"), value, strict=True))
        return name, _plain(value)

    def statistics(self) -> dict[str, str]:
        """The group that this kernel is counted in, per statistic of a registry's export.

        Here: element types and layouts are the fields so named, joined by underscores; operations may override.
        """
        names = self.field_names()
        groups = {
            "by_datatype": [name for name in names if name.startswith("dtype")],
            "by_pipeline": [name for name in names if name == "pipeline"],
            "by_scheduler": [name for name in names if name == "scheduler"],
            "by_layout": [name for name in names if name.startswith("layout")],
        }
        texts = {
            group: [str(_plain(getattr(self, name))) for name in members if isinstance(getattr(self, name), str)]
            for group, members in groups.items()
        }
        return {group: "_".join(filter(None, words)) for group, words in texts.items() if any(words)}

    def replace(self: Self, **changes: Any) -> Self:
        """``dataclasses.replace``. Rules and candidates make configurations by ten thousands."""
        known, own = _fields(type(self)), self.__dict__
        if not (changes.keys() <= known.keys() <= own.keys()):  # a mistake, or a class with slots
            return dataclasses.replace(self, **changes)
        made = object.__new__(type(self))
        made.__dict__.update({name: own[name] for name in known}, **changes)
        if finish := getattr(made, "__post_init__", None):
            finish()
        return made

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The fields in order."""
        return tuple(_fields(cls))

    @classmethod
    def coerce(cls, name: str, value: Any) -> Any:
        """``value``, given in Python or JSON form, in the type of field ``name``. Raises ``InvalidArgumentError``."""
        item = cls._field(name, value)
        return _typed(name, value, item.default, _hints(cls).get(name))

    @classmethod
    def from_dict(cls: type[Self], record: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``; missing fields keep their defaults.

        Raises ``InvalidArgumentError`` on an unknown field or a wrong type.
        """
        return cls(**{name: cls.coerce(name, value) for name, value in record.items()})

    @classmethod
    def _field(cls, name: str, value: Any) -> dataclasses.Field[Any]:
        known = _fields(cls)
        if name not in known:
            raise InvalidArgumentError(
                f"a {cls.operation} configuration has no field {name!r}",
                field=f"config.{name}",
                value=value,
                rule="config_field",
                fix=f"use one of: {', '.join(sorted(known))}",
            )
        return known[name]


_fields_of: dict[type[Any], dict[str, dataclasses.Field[Any]]] = {}


def _fields(config_type: type[KernelConfig]) -> dict[str, dataclasses.Field[Any]]:
    """By name, in order; declarations of kernels ask some ten thousand times when a plugin is imported."""
    if config_type not in _fields_of:  # not __dataclass_fields__, which has the class variables as well
        _fields_of[config_type] = {item.name: item for item in dataclasses.fields(config_type)}
    return _fields_of[config_type]


_JSON = (str, int, bool)
_hints_of: dict[type[Any], dict[str, Any]] = {}


def _hints(config_type: type[KernelConfig]) -> dict[str, Any]:
    if config_type not in _hints_of:
        try:
            _hints_of[config_type] = typing.get_type_hints(config_type)
        except NameError:  # a type that is imported for checkers only; defaults still tell most
            _hints_of[config_type] = {}
    return _hints_of[config_type]


def _plain(value: Any) -> Any:
    if type(value) in _JSON:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _typed(name: str, value: Any, like: Any, hint: Any) -> Any:
    """``value`` from JSON in the type of the field's default and annotation."""
    try:
        return _convert(value, like, hint)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"{name}: {error}",
            field=f"config.{name}",
            value=value,
            rule="config_type",
            fix=f"give a value like {_plain(like)!r}",
        ) from None


def _convert(value: Any, like: Any, hint: Any) -> Any:
    if isinstance(like, Enum):
        return type(like)(value)
    if isinstance(like, bool):
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value
    if isinstance(like, tuple):
        return _convert_tuple(value, like, hint)
    if isinstance(value, (bool, Enum)) or not isinstance(value, type(like)):
        raise ValueError(f"expected {type(like).__name__}")
    if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
        raise ValueError(f"expected one of {', '.join(map(str, typing.get_args(hint)))}")
    return value


def _convert_tuple(value: Any, like: tuple[Any, ...], hint: Any) -> tuple[Any, ...]:
    """The length is free if the annotation has an ellipsis, or if only an empty default tells of the type."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list")
    hints = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    free = len(hints) == 2 and hints[1] is Ellipsis
    if not free and like and len(value) != len(like):
        raise ValueError(f"expected {len(like)} entries")
    samples = like or (_sample(hints[0]) if hints else "",)
    inner = [hints[0] if free else hints[index] if index < len(hints) else None for index in range(len(value))]
    return tuple(
        _convert(item, samples[min(index, len(samples) - 1)], inner[index]) for index, item in enumerate(value)
    )


def _sample(hint: Any) -> Any:
    """A value of an annotated type, to tell what a member of an empty default must be."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    return hint() if hint in (int, str, bool) else ()
