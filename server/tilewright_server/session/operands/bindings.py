"""Bindings: executions whose plan and memory were looked up and checked once, kept under an id."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.devices.lifetime import is_lost
from tilewright_server.memory.pinned import Pinned
from tilewright_server.memory.regions import Region
from tilewright_server.session.operands.operand_binding import Binding

if TYPE_CHECKING:
    from tilewright_server.engine.engine import Prepared

__all__ = ["AttachedConnection", "BoundExecution", "check_in_place", "spoilt_regions"]


class BoundExecution(Pinned):
    """One execution that is launched by id. It pins what it uses; the end of any of that ends it first."""

    __slots__ = ("binding", "device_id", "entry", "objects", "on_release", "prepared", "timeout_s")

    kind = "binding"

    def __init__(self, binding: Binding, prepared: Prepared, timeout_s: float | None = None) -> None:
        super().__init__(binding.nbytes)
        self.binding = binding
        self.device_id = binding.target.device_id
        self.objects: tuple[Pinned, ...] = tuple(dict.fromkeys(binding.objects))
        self.prepared = prepared
        """Plan that devices launch which serve connections themselves."""
        self.entry = Binding(binding.target, binding.repeat)
        """For batches: the same execution, that pins this instead of all that it uses."""
        self.entry.addresses = binding.addresses
        self.entry.objects.append(self)
        self.timeout_s = timeout_s
        """How long a launch may wait for the device; None: as long as it takes."""
        self.on_release: Callable[[], None] | None = None
        """Ends it where else it is known: in the process of its device."""

    @property
    def is_lost(self) -> bool:
        """True if its plan or its memory was on a device when that was lost: it cannot be launched any more."""
        return self.prepared.lost or any(map(is_lost, self.binding.addresses))

    def release(self) -> None:
        """No launch of it is under way, and none will be. Idempotent."""
        ended, self.on_release = self.on_release, None
        if ended is not None:
            ended()


def check_in_place(binding: Binding) -> None:
    """``InvalidArgumentError`` unless the device can use every operand where it lies, as often as it likes."""
    if binding.reusable:
        return
    staged = next((item.slot.name for item in binding.staged), "")
    raise InvalidArgumentError(
        f"{staged or 'an operand'} would have to be copied for every launch: a binding takes operands in place only",
        field=f"{staged}.location" if staged else "locations",
        rule="binding_in_place",
        fix="put it into a sealed region, a device region or a resident buffer of the plan's device; or use Execute",
    )


def spoilt_regions(objects: Iterable[Pinned]) -> set[Region]:
    """Regions among ``objects``, and those that bindings among them use, whose owner took pages away that were used."""
    used = [item for each in objects for item in (each.objects if isinstance(each, BoundExecution) else (each,))]
    return {item for item in used if isinstance(item, Region) and item.is_spoilt}


class AttachedConnection(Protocol):
    """A connection of the session that a device serves by itself."""

    @property
    def device_id(self) -> str: ...

    def publish(self, bound: BoundExecution) -> None:
        """Make a binding known to the device. Raises ``ResourceExhaustedError``, ``DeviceError``."""
        ...

    def withdraw(self, bound: BoundExecution) -> None:
        """End a binding on the device; no launch of it is under way afterwards."""
        ...
