"""Configurations in the dictionaries of Composable Kernel's dispatcher: nested ones, and its JSON objects.

Booleans are booleans: a text is not read as one, for there every text was true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig, Triple
from tilewright_grouped_conv.kernel_sets.defaults import direction_of
from tilewright_grouped_conv.rules.cuda import deduced_blocks
from tilewright_grouped_conv.vocabulary import Specialization, same_order
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Reduction, Switch

__all__ = ["is_foreign", "read_foreign"]

_REQUIRED = ("tile_config", "trait_config", "variant", "ndim_spatial", "arch", "layout")
_GROUPS = {"tile": "tile", "wave": "wave", "warp_tile": "warp_tile"}
"""Groups of keys of a tile configuration, and our fields. The generator's options call waves ``warp``."""
_FLAGS = ("pad_m", "pad_n", "pad_k", "split_image", "explicit_gemm", "two_stage", "streamk_persistent")
_COUNTS = ("num_wave_groups", "num_groups_to_merge", "split_k")
_WORDS = ("pipeline", "epilogue", "scheduler")
_TEXTS = {"wave": "wave", "warp": "warp_tile"}
_EXTENTS = re.compile(r"\d{1,5}x\d{1,5}x\d{1,5}")
_SHAPE_DEFAULTS: dict[str, Triple] = {"tile": (1, 128, 128), "wave": (2, 2, 1), "warp_tile": (32, 32, 16)}


def is_foreign(record: Mapping[str, Any]) -> bool:
    """Tell if a record is in one of these forms: it has sections, which no configuration of ours has."""
    return any(key in record for key in ("algorithm", "signature", "tile_config", "trait_config"))


def read_foreign(record: Mapping[str, Any]) -> ConvConfig:
    """The configuration that a record means, valid or not. Fields that the record leaves out have
    Composable Kernel's defaults.

    Raises ``InvalidArgumentError`` for missing keys, unknown words and wrong types.
    """
    if "algorithm" in record or "signature" in record:
        record = _nested(record)
    for key in _REQUIRED:
        if key not in record:
            _refuse(f"the key {key!r} is missing", key, None, "foreign_keys", f"give {', '.join(_REQUIRED)}")
    tiles, traits = _section(record, "tile_config"), _section(record, "trait_config")
    direction = direction_of(str(_one(record["variant"])))
    ndim = _integer(record["ndim_spatial"], "ndim_spatial")
    fields: dict[str, Any] = {
        "dtype_in": str(_one(record.get("dtype", "fp16"))),
        "ndim": ndim,
        "layout": same_order(str(_one(record["layout"])), ndim) if 1 <= ndim <= 3 else str(_one(record["layout"])),
    }
    for group, field in _GROUPS.items():
        fields[field] = [
            _integer(tiles.get(f"{group}_{letter}", size), f"tile_config.{group}_{letter}")
            for letter, size in zip("mnk", _SHAPE_DEFAULTS[field], strict=True)
        ]
    defaults = {"pipeline": "compv4", "epilogue": "cshuffle", "scheduler": "intrawave"}
    fields |= {name: str(_one(traits.get(name, defaults[name]))) for name in _WORDS}
    fields |= {name: _flag(traits[name], f"trait_config.{name}") for name in _FLAGS if name in traits}
    fields |= {name: _integer(traits[name], f"trait_config.{name}") for name in _COUNTS if name in traits}
    fields["vector_sizes"] = [
        _integer(traits.get(f"vector_size_{letter}", size), f"trait_config.vector_size_{letter}")
        for letter, size in zip("abc", (4, 8, 8), strict=True)
    ]
    fields["specialization"] = str(_one(traits.get("specialization", Specialization.DEFAULT.value)))
    fields["streamk"] = str(_one(traits.get("streamk_reduction", Reduction.NONE.value))).lower()
    if "double_smem_buffer" in traits:
        on = _flag(traits["double_smem_buffer"], "trait_config.double_smem_buffer")
        # There, false is the default of every pipeline and means "as the pipeline has it".
        fields["double_smem_buffer"] = (Switch.ON if on else Switch.AUTO).value
    config = CONFIGS[direction].from_dict(fields)
    blocks = _integer(traits.get("block_per_cu", 0), "trait_config.block_per_cu")
    return config.replace(block_per_cu=0 if blocks == deduced_blocks(config) else blocks)


def _nested(record: Mapping[str, Any]) -> dict[str, Any]:
    """The nested form of a JSON object."""
    signature, algorithm = dict(_section(record, "signature")), dict(_section(record, "algorithm"))
    for key, field in _TEXTS.items():
        text = str(algorithm.pop(key, "x".join(map(str, _SHAPE_DEFAULTS[field]))))
        if not _EXTENTS.fullmatch(text):
            _refuse(f"{text!r} is not three sizes", f"algorithm.{key}", text, "foreign_sizes", "write it as 2x2x1")
        algorithm |= {f"{field}_{letter}": int(size) for letter, size in zip("mnk", text.split("x"), strict=True)}
    sizes = algorithm.pop("vector_sizes", [4, 8, 8])
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 3:
        _refuse("vector sizes are three", "algorithm.vector_sizes", sizes, "foreign_sizes", "give one for A, B and C")
    algorithm |= {f"vector_size_{letter}": size for letter, size in zip("abc", sizes, strict=True)}
    algorithm.setdefault("pipeline", "compv3")
    tiles = {f"{group}_{letter}" for group in _GROUPS for letter in "mnk"}
    top = {key: record[key] for key in ("arch",) if key in record}
    return {
        **signature,
        **top,
        "tile_config": {key: value for key, value in algorithm.items() if key in tiles},
        "trait_config": {key: value for key, value in algorithm.items() if key not in tiles},
    }


def _section(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key, {})
    if not isinstance(value, Mapping):
        _refuse(f"{key} is no object", key, str(value), "foreign_section", "give an object of keys and values")
    return value


def _one(value: Any) -> Any:
    """A value, or the only one of a list."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _integer(value: Any, field: str) -> int:
    single = _one(value)
    if type(single) is not int:
        _refuse(f"{field} is not one integer", field, str(value), "foreign_integer", "give an integer")
    return int(single)


def _flag(value: Any, field: str) -> bool:
    single = _one(value)
    if type(single) is not bool:
        _refuse(f"{field} is neither true nor false", field, str(value), "foreign_boolean", "give true or false")
    return bool(single)


def _refuse(reason: str, field: str, value: Any, rule: str, fix: str) -> NoReturn:
    raise InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)
