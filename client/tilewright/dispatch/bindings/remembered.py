"""The short way of a plan with tensors in device memory that it was called with before: their places and the server's
id for them are remembered, and only that nothing was freed meanwhile is asked of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewright.dispatch.bindings.binding import Binding
from tilewright.session.state import Session
from tilewright.tensor.device_array import by_library
from tilewright.tensor.export import Exported
from tilewright.tensor.interop import DeviceTensor, recognise, recognise_output

if TYPE_CHECKING:
    from tilewright.dispatch.operands.slots import Slot

__all__ = ["Recalled", "Recalls"]

MAX_RECALLS = 256


class Recalled(NamedTuple):
    """Operands that were recognised, and the binding for them if there is one."""

    tensors: list[DeviceTensor]
    binding: Binding | None


class Recalls:
    """Device tensors of one plan and session. Thread-safe: its dictionary is only touched by operations that are
    atomic."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[tuple[int, ...], tuple[Binding, tuple[Exported, ...]]] = {}

    def remember(self, tensors: Sequence[DeviceTensor], binding: Binding) -> None:
        """Note where the tensors of a binding are, in the plan's order, if all are memory of this process."""
        exports = tuple(tensor.exported for tensor in tensors)
        if all(isinstance(item, Exported) and item.simple for item in exports):
            if len(self._known) >= MAX_RECALLS:
                self._known.clear()
            self._known[tuple(tensor.address for tensor in tensors)] = (binding, exports)

    def find(self, inputs: Sequence[Slot], outputs: Sequence[Slot], values: Sequence[Any]) -> Recalled | None:
        """Recognised operands of a call, missing outputs made; ``None`` unless all are in device memory as planned,
        which is then the long way's to mend or to refuse.
        """
        tensors: list[DeviceTensor] = []
        count = len(inputs)
        for index, slot in enumerate((*inputs, *outputs)):
            value = values[index]
            if value is None and tensors and index >= count and not slot.spec.packing:
                value = by_library(tensors[0], slot.spec)
            tensor = recognise(value, slot.name) if index < count else recognise_output(value, slot.name)
            if tensor is None or tensor.spec != slot.spec:
                return None
            tensors.append(tensor)
        return Recalled(tensors, self._binding(tensors))

    def _binding(self, tensors: Sequence[DeviceTensor]) -> Binding | None:
        known = self._known.get(tuple([tensor.address for tensor in tensors]))
        if known is None:
            return None
        binding, exports = known
        registered = self._session.exports
        for tensor, exported in zip(tensors, exports, strict=True):
            if registered.get(exported.key) is not exported:
                return None
            if exported.gpu.identity(tensor.address) != exported.identity[0][0]:
                return None
            tensor.exported, tensor.ordinal, tensor.kind = exported, exported.ordinal, exported.gpu.kind
        return binding

    def clear(self) -> None:
        self._known.clear()
