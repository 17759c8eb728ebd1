"""Factors of a cache in fp8: what new rows are divided by, and what they are multiplied by when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.dispatch.operands.request import spec_of
from tilewright.errors import InvalidArgumentError
from tilewright.operations.attention.kv_pages import CacheState
from tilewright.operations.epilogue import scale_operand
from tilewright.session.state import Core
from tilewright.tensor import resident
from tilewright.tensor.resident import ResidentTensor
from tilewright.transport.rpc import Flow
from tilewright.types.dtypes import DTYPES
from tilewright.types.spec import Spec

__all__ = ["checked_factors", "divisors", "factors", "keep_factors"]

_FP8 = np.dtype(DTYPES["fp8"])
_FP32 = np.dtype(np.float32)


def checked_factors(heads: int, kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of a new cache as arrays: one number, or one for each head. Raises ``InvalidArgumentError``."""
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        if kind != _FP8:
            raise InvalidArgumentError(
                f"{name} is for a cache of fp8, and this one is {kind}",
                field=name,
                value=value,
                rule="scale_dtype",
                fix=f"leave {name} out, or make the cache with dtype='fp8'",
            )
        plain = scale_operand(value, name)
        array = plain if isinstance(plain, np.ndarray) else np.asarray(plain)
        numbers = array.astype(np.float32) if array.dtype.kind in "fiu" else np.zeros((0, 0), np.float32)
        if numbers.shape not in ((), (heads,)) or not (np.isfinite(numbers) & (numbers > 0)).all():
            raise InvalidArgumentError(
                f"{name} is a factor above 0 for all heads, or one for each of the {heads}",
                field=name,
                value=value,
                rule="descale_shape",
                fix=f"give a number, or {heads} of them",
            )
        found[name] = numbers
    return found


def keep_factors(core: Core, state: CacheState, found: Mapping[str, Any], device: str | None) -> Flow[None]:
    """Keep them beside the pages, where kernels read them at every step."""
    for name, numbers in found.items():
        buffer = state.buffers[name] = yield from resident.create(core, numbers.nbytes, device)
        yield from resident.write(buffer, numbers)
        state.factors[name] = ResidentTensor(buffer, Spec(numbers.shape, _FP32))


def factors(state: CacheState, given: Mapping[str, Any]) -> dict[str, Any]:
    """Operands: the factors that were given, or else those of the cache."""
    found = {name: scale_operand(value, name) for name, value in given.items() if value is not None}
    return {**state.factors, **found}


def divisors(state: CacheState, k: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for rows ``k`` that are appended, if they are to be rounded: those of the cache's own type are stored as
    they come.
    """
    return {} if spec_of(k, "k").dtype == state.k.spec.dtype else factors(state, given)
