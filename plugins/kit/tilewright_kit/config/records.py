"""Configurations as users write them down: our fields, an entry of an exported catalog, or another system's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError

__all__ = ["ConfigReader", "ReadsForeignConfigs", "config_of_record"]

OPERATION = "operation"


class ConfigReader(Protocol):
    """The part of an operation that reads configurations."""

    @property
    def config_type(self) -> type[KernelConfig]: ...


@runtime_checkable
class ReadsForeignConfigs(Protocol):
    """Reads configurations in the form of another system."""

    def is_foreign(self, record: Mapping[str, Any]) -> bool:
        """Tell if a record is in that form."""
        ...

    def read_foreign(self, record: Mapping[str, Any]) -> KernelConfig:
        """The configuration that a record of that form means, valid or not. Raises ``InvalidArgumentError``."""
        ...


R = TypeVar("R", bound=ConfigReader)


def config_of_record(record: Mapping[str, Any], operations: Mapping[str, R], named: str = "") -> KernelConfig:
    """The configuration that a record means, valid or not, of the operation that is ``named``; else of the one that the
    record's key ``operation`` names, or the only one that has all of its fields.

    A record has our fields; or it is an entry of an exported catalog, of which ``operation`` and ``config`` count; or
    it is in the form of another system that an operation reads (``ReadsForeignConfigs``). Raises
    ``InvalidArgumentError`` for unknown fields and wrong types, and where the operation is needed; ``NotFoundError``
    for an operation that there is not.
    """
    fields = dict(record)
    own = fields.pop(OPERATION, "")
    if isinstance(fields.get("config"), Mapping) and own:
        fields = dict(fields["config"])
    name = named or own
    if name and (not isinstance(name, str) or name not in operations):
        raise NotFoundError(
            f"there is no operation {name!r}",
            field=OPERATION,
            value=str(name),
            rule="operation_name",
            fix=f"use one of {', '.join(operations)}",
        )
    chosen = {name: operations[name]} if name else dict(operations.items())
    offered: Iterable[object] = chosen.values()
    readers = [item for item in offered if isinstance(item, ReadsForeignConfigs)]
    if foreign := [item for item in readers if item.is_foreign(fields)]:
        return _foreign(foreign, fields, bool(name))
    if name:
        return operations[name].config_type.from_dict(fields)
    fitting = _fitting(chosen, fields)
    if len(fitting) == 1:
        return operations[fitting[0]].config_type.from_dict(fields)
    raise _undecided(fitting, operations, fields)


def _fitting(operations: Mapping[str, ConfigReader], fields: Mapping[str, Any]) -> list[str]:
    """Operations whose configurations have all fields; of a class of configurations and those that are derived from it
    the class itself, and of several that differ in the default of a field that is given, those that have that value.
    """
    types = {name: item.config_type for name, item in operations.items()}
    found = [name for name, kind in types.items() if fields.keys() <= set(kind.field_names())]
    found = [name for name in found if not any(types[other] in types[name].__mro__[1:] for other in found)]
    defaults = {name: types[name]().to_dict() for name in found}
    for field, value in fields.items():
        if len({repr(defaults[name][field]) for name in found}) > 1:
            found = [name for name in found if defaults[name][field] == value] or found
    return found


def _foreign(operations: Iterable[ReadsForeignConfigs], record: Mapping[str, Any], certain: bool) -> KernelConfig:
    """The one reading of a record in another system's form. ``certain``: the caller has named the operation."""
    found: dict[tuple[str, str], KernelConfig] = {}
    refused: list[TilewrightError] = []
    for operation in operations:
        try:
            config = operation.read_foreign(record)
        except (InvalidArgumentError, NotFoundError) as error:  # noqa: PERF203 (each may refuse)
            refused.append(error)
        else:
            found[config.operation, config.name] = config
    if len(found) == 1:
        return next(iter(found.values()))
    if not found and (certain or len(refused) == 1):
        raise refused[0]
    raise InvalidArgumentError(
        "the record has the form of another system, and "
        + (f"{', '.join(name for name, _ in found)} read it" if found else "no operation reads it"),
        field=OPERATION,
        value="",
        rule="config_operation",
        fix="name the operation" + ("" if found else ", to be told what keeps it from reading the record"),
    )


def _undecided(
    fitting: list[str], operations: Mapping[str, ConfigReader], fields: Mapping[str, Any]
) -> InvalidArgumentError:
    """No operation, or several of them, have all fields."""
    if fitting:
        return InvalidArgumentError(
            f"configurations of {', '.join(fitting)} all have these fields",
            field=OPERATION,
            value="",
            rule="config_operation",
            fix=f'name the operation, or give the configuration a field "operation": "{fitting[0]}"',
        )

    def unknown(name: str) -> list[str]:
        known = operations[name].config_type.field_names()
        return [field for field in fields if field not in known]

    closest = min(operations, key=lambda name: len(unknown(name)), default="")
    strange = unknown(closest)[0] if closest else next(iter(fields), "")
    return InvalidArgumentError(
        f"no operation's configurations have all of these fields; those of {closest or 'no operation'} come closest, "
        f"without {strange!r}",
        field=f"config.{strange}",
        value=fields.get(strange),
        rule="config_field",
        fix="name the operation to see what its fields are called",
    )
