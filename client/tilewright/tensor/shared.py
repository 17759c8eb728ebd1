"""Arrays in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright.session.state import Core
from tilewright.tensor.segments import region_of
from tilewright.transport.rpc import Flow
from tilewright.types.addresses import address_of
from tilewright.types.dtypes import DTypeLike, element_type
from tilewright.types.spec import Array, as_array, checked_sizes

__all__ = ["asarray", "empty", "zeros"]


def empty(core: Core, shape: int | Sequence[int], dtype: DTypeLike = "fp32") -> Flow[Array]:
    """An uninitialised array, C-contiguous, in memory that the server uses in place. So does it use every view of it.

    The memory is given back when the array and all of its views are gone. Over a connection without shared memory
    (TCP) it is an ordinary array. ``dtype`` is a name (``"bf16"``) or a NumPy dtype. Raises ``InvalidArgumentError``,
    ``ResourceExhaustedError``.

        >>> x = client.empty((1024, 1024), "bf16")  # doctest: +SKIP
    """
    sizes = _shape(shape)
    kind = element_type(dtype)
    session = core.require()
    if not session.shared_memory:
        return np.empty(sizes, kind)
    array = core.pool.empty(sizes, kind)
    if array.size:
        place = core.pool.find(address_of(array), array.nbytes)
        if place is not None:
            yield from region_of(core, session, place[0])
    return array


def zeros(core: Core, shape: int | Sequence[int], dtype: DTypeLike = "fp32") -> Flow[Array]:
    """Like ``empty``, filled with zeros."""
    array = yield from empty(core, shape, dtype)
    array.fill(0)
    return array


def asarray(core: Core, value: Any, dtype: DTypeLike | None = None) -> Flow[Array]:
    """``value`` in shared memory: itself if it is there and of that element type, else a C-contiguous copy."""
    kind = element_type(dtype) if dtype is not None else None
    source = np.asarray(value)
    if kind is None:
        source = as_array(source, "value")
    elif source.dtype.kind not in "fiubV":
        raise InvalidArgumentError(
            f"{source.dtype} cannot be converted to {kind.name}", field="value", value=source.dtype, rule="array_like"
        )
    target = kind or source.dtype
    if source.dtype == target and source.size and core.pool.find(address_of(source), 1) is not None:
        return source
    array = yield from empty(core, source.shape, target)
    array[...] = source
    return array


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return checked_sizes((shape,) if isinstance(shape, (int, np.integer)) else shape, "shape")
