"""The base of every operation's kernel configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar

from tilewright_kit.errors import InvalidArgumentError
from tilewright_kit.naming import KernelKey, compose_name, digest_of, require_naming

__all__ = ["KernelConfig"]

Self = TypeVar("Self", bound="KernelConfig")


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Signature plus algorithm of one kernel. Subclasses are frozen dataclasses whose fields are made by ``part`` and ``suffix``.

    Values are strings, booleans, integers, enumerations of these, or (nested) tuples of them.
    """

    operation: ClassVar[str] = ""
    """Name of the operation, and first word of every kernel name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("operation"):
            raise TypeError(f"{cls.__name__} must set the class variable 'operation'")

    @property
    def name(self) -> str:
        """Readable and unique: a function of all fields."""
        require_naming(type(self))
        return compose_name(self.operation, self)

    def key(self, arch: str) -> KernelKey:
        """The identity of this configuration on an arch (``ArchSpec.id``)."""
        return KernelKey(self.operation, self.name, arch, digest_of([self.operation, arch, self.to_dict()]))

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def replace(self: Self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls: type[Self], record: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``; missing fields keep their defaults. Raises ``InvalidArgumentError`` on an unknown field or a wrong type."""
        known = {item.name: item for item in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in record.items():
            if name not in known:
                raise InvalidArgumentError(
                    f"a {cls.operation} configuration has no field {name!r}",
                    field=f"config.{name}",
                    value=value,
                    rule="config_field",
                    fix=f"use one of: {', '.join(sorted(known))}",
                )
            values[name] = _typed(name, value, known[name].default)
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _typed(name: str, value: Any, like: Any) -> Any:
    """``value`` from JSON in the type of the field's default."""
    try:
        if isinstance(like, Enum):
            return type(like)(value)
        if isinstance(like, bool):
            if not isinstance(value, bool):
                raise ValueError("expected true or false")
            return value
        if isinstance(like, tuple):
            if isinstance(value, str):
                raise ValueError("expected a list")
            samples = like or ("",)
            return tuple(_typed(name, item, samples[min(index, len(samples) - 1)]) for index, item in enumerate(value))
        if isinstance(value, bool) or not isinstance(value, type(like)):
            raise ValueError(f"expected {type(like).__name__}")
        return value
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"{name}: {error}",
            field=f"config.{name}",
            value=value,
            rule="config_type",
            fix=f"give a value like {_plain(like)!r}",
        ) from None
