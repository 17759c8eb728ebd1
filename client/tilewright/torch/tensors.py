"""Tensors of PyTorch as operands of the client, and its results as tensors, without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewright.types.dtypes import DTYPES

__all__ = ["channels_last", "define", "dtype_word", "empty_image", "operand", "operands", "tensor", "tensors"]

_WORDS = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "bf8", torch.int8: "int8", torch.int32: "int32",
}  # fmt: skip
_BITS = {1: torch.int8, 2: torch.int16}
_OWN = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
"""Element types that PyTorch does not give to NumPy."""
_EXPONENTS = torch.float8_e8m0fnu
"""Factors that are powers of two; to the client they are bytes."""
_BY_NAME = {DTYPES[word]: kind for kind, word in _WORDS.items()}


def define(
    name: str,
    schema: str,
    function: Any,
    fake: Any,
    mutates: Sequence[str] = (),
    kept: int | Sequence[str] | None = 0,
) -> Any:
    """A custom operation ``tilewright::name``, with its implementation and its shapes. Under autocast its tensors are
    cast, but for the last ``kept`` that the schema names, or those of these names; ``None``: none is.
    """
    made = torch.library.custom_op(f"tilewright::{name}", function, mutates_args=tuple(mutates), schema=schema)
    made.register_fake(fake)
    for device in ("CPU", "CUDA"):  # without the checks of every call that results are fresh: tests make them
        _library.impl(name, function, device)
    if kept is not None:
        operation = getattr(torch.ops.tilewright, name).default
        arguments = operation._schema.arguments
        if isinstance(kept, int):
            tensors = [item.name for item in arguments if "Tensor" in str(item.type)]
            kept = tensors[len(tensors) - kept :]
        stay = {index for index, item in enumerate(arguments) if item.name in kept}
        for device in ("CPU", "CUDA"):
            _library.impl(name, _autocast(operation, device, stay), f"Autocast{device}", with_keyset=True)
    return made


_library = torch.library.Library("tilewright", "FRAGMENT")


def _autocast(operation: Any, device: str, stay: set[int]) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def cast(value: Any, dtype: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [cast(item, dtype) for item in value]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1:
            return value.to(dtype)
        return value

    def kernel(_: Any, *args: Any, **words: Any) -> Any:
        dtype = torch.get_autocast_dtype(device.lower())
        with torch._C._ExcludeDispatchKeyGuard(keys):
            given = [value if index in stay else cast(value, dtype) for index, value in enumerate(args)]
            return operation(*given, **words)

    return kernel


def operand(value: Any) -> Any:
    """Return what the client takes: a NumPy view of a tensor on the host, else the tensor itself."""
    if value is None:
        return None
    if value.requires_grad:
        value = value.detach()
    if value.is_neg():
        value = value.resolve_neg()
    if not value.is_cpu:
        return value
    if value.dtype is _EXPONENTS:
        return value.view(torch.uint8).numpy()
    if value.dtype in _OWN:
        return value.view(_BITS[value.itemsize]).numpy().view(DTYPES[_WORDS[value.dtype]])
    return value.numpy()


def operands(values: Sequence[Any]) -> list[Any]:
    return [operand(value) for value in values]


def tensor(value: Any) -> Any:
    """The tensor over a result's memory."""
    if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, np.ndarray):
        return torch.from_dlpack(value)
    kind = _BY_NAME[value.dtype]
    if kind in _OWN:
        return torch.from_numpy(value.view(f"i{value.itemsize}")).view(kind)
    return torch.from_numpy(value)


def tensors(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tensor(value) for value in values)


def dtype_word(dtype: Any) -> str | None:
    """The client's word for an element type; raises ``TypeError`` for one that it has none for."""
    if dtype is None:
        return None
    if dtype not in _WORDS:
        raise TypeError(f"{dtype} is not an element type of Tilewright")
    return _WORDS[dtype]


def channels_last(x: Any) -> bool:
    """True if the channels of an image ``[N, C, *spatial]`` are adjacent, and its pixels are not."""
    return bool(x.shape[1] > 1 and x.stride(1) == 1 and x.stride(-1) != 1)


def empty_image(x: Any, channels: Any, spatial: Sequence[Any], like: Any = None) -> Any:
    """An image of ``x``'s batch that lies as ``like``, or as ``x``."""
    last = channels_last(x if like is None else like)
    if not last:
        return x.new_empty((x.shape[0], channels, *spatial))
    found = x.new_empty((x.shape[0], *spatial, channels))
    return found.movedim(-1, 1)
