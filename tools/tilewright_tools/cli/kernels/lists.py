"""Lists of values of fields that `tilewright kernels generate` combines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright_arch import ArchSpec
    from tilewright_kit.config.kernel_config import KernelConfig
    from tilewright_kit.contract.operation import Operation

__all__ = ["first_dtype", "read_lists", "swept"]

_TRIPLES = {"tile": "tile", "warp": "wave", "warp_tile": "warp_tile"}
_SECTIONS = ("tile_config", "trait_config", "multi_d_config")


def read_lists(text: str) -> dict[str, list[Any]]:
    """Field to values, from a file or a text; sections are joined, single values become lists."""
    from tilewright_kit.types.errors import InvalidArgumentError
    from tilewright_tools.cli.problems.config_file import read_json

    record = read_json(text)
    if not isinstance(record, dict):
        raise InvalidArgumentError(
            "the configuration must be a JSON object",
            field="config",
            rule="json",
            fix="give a JSON object of fields and values",
        )
    flat: dict[str, Any] = {key: value for key, value in record.items() if key not in _SECTIONS}
    for section in _SECTIONS:
        flat |= record.get(section, {})
    return {key: _listed(key, value) for key, value in flat.items()}


def _listed(key: str, value: Any) -> list[Any]:
    """Values of a field: a list, a single one, ``{"values": [...]}``, or ``{"min": 64, "max": 256, "step": 64}``.

    Raises ``InvalidArgumentError``.
    """
    from tilewright_kit.types.errors import InvalidArgumentError

    if not isinstance(value, dict):
        return value if isinstance(value, list) else [value]
    if isinstance(value.get("values"), list):
        return list(value["values"])
    match [value.get(name) for name in ("min", "max", "step")]:
        case [int(first), int(last), int(step)] if step > 0:
            return list(range(first, last + 1, step))
    raise InvalidArgumentError(
        f"{key} is no list of values",
        field=f"config.{key}",
        value=value,
        rule="generate_lists",
        fix='give a list, {"values": [64, 128]} or {"min": 64, "max": 256, "step": 64}',
    )


def swept(
    operation: Operation[Any, Any], arch: ArchSpec, lists: Mapping[str, list[Any]], datatype: str, layout: str
) -> Iterable[KernelConfig]:
    """Every valid combination of lists in the generator's form: `tile_m`, `warp_n`, `warp_tile_k`, `pipeline`, ...;
    and of fields of a configuration, so that a whole one stands for itself. Raises ``InvalidArgumentError``.
    """
    from tilewright_kit.contract.abilities import NamesFields
    from tilewright_kit.kernel_sets.declare import KernelSet, declare
    from tilewright_kit.types.errors import InvalidArgumentError

    fields: dict[str, Any] = {}
    names = operation.field_names if isinstance(operation, NamesFields) else {}
    rest = {names.get(name, name): values for name, values in lists.items()}
    for prefix, field in _TRIPLES.items():
        axes = [rest.pop(f"{prefix}_{axis}", None) for axis in "mnk"]
        if any(axis is not None for axis in axes):
            default = getattr(operation.config_type(), field)
            if len(default) != len(axes):
                raise InvalidArgumentError(
                    f"kernels of {operation.name} have no {prefix}_m, {prefix}_n and {prefix}_k alone",
                    field=f"config.{prefix}_m",
                    value=axes[0],
                    rule="generate_lists",
                    fix=f"give whole values of {field}, as `tilewright kernels show NAME --config` prints one",
                )
            filled = [axis or [default[index]] for index, axis in enumerate(axes)]
            fields[field] = [tuple(combination) for combination in itertools.product(*filled)]
    fields |= {name: _values(operation.config_type, name, given) for name, given in rest.items()}
    if datatype:
        fields[first_dtype(operation.config_type)] = datatype
    if layout:
        fields["layout"] = layout
    declaration = declare(operation.config_type, **fields)
    return KernelSet("swept", "from the command line", (declaration,)).iterate(arch, operation.rules)


def _values(config_type: type[KernelConfig], name: str, given: list[Any]) -> list[Any]:
    """Values of a field; a list that is one value of it, such as a tile, is that alone."""
    from tilewright_kit.types.errors import TilewrightError

    with suppress(TilewrightError, ValueError, KeyError):
        config_type.coerce(name, given)
        return [given]
    return given


def first_dtype(config_type: type[KernelConfig]) -> str:
    """The field of the first input's element type."""
    return next((name for name in config_type.field_names() if name.startswith("dtype")), "")
