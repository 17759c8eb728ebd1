"""The short way of a plan: executions that were settled with the server once are launched over the local socket, by an
id. Those on tensors in device memory take it from the first time on, in the order of their streams; those on arrays in
shared memory once they have been repeated.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright.dispatch.bindings.binding import Binding, Launched, bind, can_bind, launcher, watched
from tilewright.dispatch.bindings.remembered import Recalls
from tilewright.errors import NotFoundError, UnavailableError
from tilewright.session.state import Core, Session
from tilewright.tensor.interop import DeviceTensor
from tilewright.transport.launch_connections import NoLaneError
from tilewright.transport.rpc import Flow
from tilewright.types.report import Report, Timing

if TYPE_CHECKING:
    from tilewright.dispatch.operands.slots import Loaded

__all__ = ["ShortWay", "launch_report"]

MAX_BINDINGS = 256
"""Remembered of one plan."""
REPEATS = 3
"""Executions on shared memory that were asked for so often are asked for again."""


class ShortWay:
    """Bindings and counts of one plan in one session. Thread-safe: its containers are only touched by operations
    that are atomic."""

    def __init__(self, core: Core, session: Session, report: Report) -> None:
        self._core = core
        self._report = report
        self._bindings: OrderedDict[bytes, Binding] = OrderedDict()
        """By the serialised form of what they stand for."""
        self._counts: dict[bytes, int] = {}
        self._refused = session.lanes is None
        """True if executions on shared memory cannot be bound: the plan's device does not use it in place."""
        self.recalls = Recalls(session)

    def often(self, loaded: Loaded) -> bool:
        """True if an execution on shared memory has been asked for often enough to be worth a binding."""
        chunk = loaded.chunk
        if self._refused or not can_bind(loaded):
            return False
        if chunk in self._bindings:
            return True
        if len(self._counts) > 4 * MAX_BINDINGS:
            self._counts.clear()
        count = self._counts[chunk] = self._counts.get(chunk, 0) + 1
        return count > REPEATS

    def launch(
        self, loaded: Loaded, timeout: float | None, slots: int, stream: int | None = None, wait: bool = True
    ) -> Flow[Launched | None]:
        """Run an execution by its binding. On tensors in device memory it need not be done yet. None if it can only
        be sent as a request. ``slots`` is the number of the plan's operands; ``stream`` and ``wait`` as ``Go`` has
        them.
        """
        binding = self._bindings.get(loaded.chunk)
        tensors = loaded.cargo.tensors
        if binding is None:
            binding = (yield from bind(self._core, loaded, timeout)) if can_bind(loaded) else None
            if binding is None:
                self._refused = self._refused or not tensors
                return None
            self._bindings[loaded.chunk] = binding
            if len(self._bindings) > MAX_BINDINGS:
                self._bindings.popitem(last=False)
        if len(tensors) == slots:
            self.recalls.remember(tensors, binding)
        return (yield from self.queue(binding, tensors, loaded.cargo, stream, wait))

    def queue(
        self,
        binding: Binding,
        tensors: Sequence[DeviceTensor],
        keep: Any,
        stream: int | None = None,
        wait: bool = True,
    ) -> Flow[Launched | None]:
        """Launch a binding for operands that were given for this call; None if there is no connection for it."""
        go = launcher(binding, tensors, fresh=True)
        try:
            launched: Launched = yield from watched(self._core, functools.partial(go, stream, wait), keep)
        except NoLaneError:
            return None
        except (NotFoundError, UnavailableError):
            # It went with its memory, or with the device: the next call finds and binds everything again.
            self.clear()
            raise
        self._core.report = functools.partial(launch_report, self._report, launched.device_ns)
        if not wait and launched.lane is not None:  # nothing says when it is over
            self._core.quarantine(keep)
        return launched

    def clear(self) -> None:
        self._bindings.clear()
        self._counts.clear()
        self.recalls.clear()


def launch_report(planned: Report, device_ns: int, placement: str = "server") -> Report:
    """Report of a launch of a plan, whose own report is ``planned``."""
    return Report(
        kernels=planned.kernels,
        device=planned.device,
        timing=Timing(device_ns=device_ns),
        plan_cached=True,
        placement=placement,
    )
