"""Configurations as Composable Kernel's dispatcher exports them: entries of its registry's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import tilewright_arch
from tilewright_arch import ArchError
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import UNARY_ALIASES, Binary, Switch, Unary
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["is_foreign", "read_foreign"]

_LETTERS = {"row_major": "r", "col_major": "c", "packed_external": "c"}
"""Packed operands are those that were packed ahead of time, in columns."""
_SHAPES = {"tile_shape": "tile", "wave_shape": "wave", "warp_tile_shape": "warp_tile", "cluster_shape": "cluster"}
_BESIDE = ("name", "identifier", "gfx_arch", "signature", "algorithm")


def is_foreign(record: Mapping[str, Any]) -> bool:
    """Tell if a record is in that form: it has sections, which no configuration of ours has."""
    return "signature" in record and "algorithm" in record


def read_foreign(record: Mapping[str, Any]) -> GemmConfig:
    """The configuration that a record means, valid or not.

    There a workgroup's threads are always counted and ``double_buffer`` is a flag whose false means "as the pipeline
    has it"; here both are left to the pipeline where they say no more. Raises ``InvalidArgumentError`` for missing
    sections, unknown words and keys, and wrong types.
    """
    for key in record:
        if key not in _BESIDE:
            _refuse(f"an entry of a registry has no key {key!r}", key, record[key], "foreign_keys", "leave it out")
    fields: dict[str, Any] = {}
    part: Any
    for section in ("signature", "algorithm"):
        part = record.get(section)
        if not isinstance(part, Mapping):
            _refuse(f"{section} is no object", section, str(part), "foreign_section", "give it as an object")
        fields |= {_SHAPES.get(str(key), str(key)): _shape(f"{section}.{key}", value) for key, value in part.items()}
    if "dtype_a" not in fields:
        _refuse("the signature has no element type of A", "signature.dtype_a", None, "foreign_keys", "give dtype_a")
    if "layout" not in fields:
        words = [str(fields.pop(f"layout_{letter}", "row_major")) for letter in "abc"]
        fields["layout"] = "".join(_LETTERS.get(word, word) for word in words)
        if "packed_external" in words:
            fields["preshuffle"] = True
    step = str(fields.pop("elementwise_op", Binary.NONE.value))
    step = UNARY_ALIASES.get(step, step)
    fields["unary" if step in {item.value for item in Unary} and step != Binary.NONE.value else "binary"] = step
    if isinstance(fields.get("double_buffer"), bool):
        fields["double_buffer"] = (Switch.ON if fields["double_buffer"] else Switch.AUTO).value
    config = GemmConfig.from_dict(fields)
    if config.block_size and config.block_size == config.waves * _wave_size(str(record.get("gfx_arch", ""))):
        return config.replace(block_size=0)
    return config


def _shape(field: str, value: Any) -> Any:
    """Sizes along m, n and k as three numbers; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    if value.keys() != {"m", "n", "k"}:
        _refuse(f"{field} has not m, n and k", field, str(dict(value)), "foreign_sizes", "give m, n and k")
    return [value[letter] for letter in "mnk"]


def _wave_size(arch: str) -> int:
    """Threads of a wave; that of CDNA for an arch that is not known, or not told."""
    try:
        found = tilewright_arch.load(arch).wave_size if arch else 0
    except ArchError:
        found = 0
    return found or 64


def _refuse(reason: str, field: str, value: Any, rule: str, fix: str) -> NoReturn:
    raise InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)
