"""PyTorch's tensors in the host's memory, as NumPy arrays over the same memory. PyTorch is not imported."""

from __future__ import annotations

import sys
from typing import Any

from tilewright.types.spec import Array, torch_bits

__all__ = ["HostViews"]


class HostViews:
    """The views of one call's arguments, and the tensors that they are of: results are given back as these."""

    __slots__ = ("_of_view", "_tensors", "_torch")

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._tensors: Any = getattr(self._torch, "Tensor", ())
        self._of_view: dict[int, tuple[Array, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._of_view)

    def view(self, value: Any) -> Any:
        """A view of a tensor on the host that can have one; of tensors in lists, tuples and dicts too. Everything else
        as it is."""
        if self._torch is None:
            return value
        kind = type(value)
        if kind is list or kind is tuple:
            return kind(map(self.view, value))
        if kind is dict:
            return {name: self.view(item) for name, item in value.items()}
        if not isinstance(value, self._tensors) or not self._is_plain(value):
            return value
        try:
            array = value.numpy() if (bits := torch_bits(value)) is None else bits
        except (TypeError, RuntimeError):  # a type that NumPy lacks: refused by its name, later
            return value
        self._of_view[id(array)] = array, value
        return array

    def _is_plain(self, tensor: Any) -> bool:
        if tensor.device.type != "cpu" or tensor.layout is not self._torch.strided:
            return False
        return not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj() or tensor.is_quantized)

    def tensor(self, result: Any) -> Any:
        """The tensor that a result is a view of, or the result; in lists, tuples and dicts too."""
        if not self._of_view:
            return result
        if type(result) in (list, tuple):
            return type(result)(map(self.tensor, result))
        if type(result) is dict:
            return {name: self.tensor(item) for name, item in result.items()}
        found = self._of_view.get(id(result))
        return result if found is None else found[1]
