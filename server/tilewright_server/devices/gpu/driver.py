"""A GPU's driver as a device uses it: results as typed errors, the current context of each thread, and what is its own.

Kinds of GPU derive from ``GpuDriver``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Protocol

from tilewright_kit.contract.plan import Geometry
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.contract import DeviceLostError
from tilewright_server.devices.gpu.api import Answer, GpuApi
from tilewright_server.devices.gpu.results import Results

__all__ = ["GpuDriver", "GpuFunction", "Image"]


class GpuFunction(Protocol):
    """An entry point of a loaded binary."""

    @property
    def handle(self) -> Any:
        """The driver's object; its number identifies the entry while the binary is loaded."""
        ...

    @property
    def param_bytes(self) -> int:
        """Size of its one parameter; 0 if it takes none."""
        ...

    def admit(self, geometry: Geometry, args_bytes: int) -> None:
        """Make a launch of that geometry legal. Raises ``DeviceError`` if the arguments are too few or too many, or
        the device cannot launch it so."""
        ...


class Image(Protocol):
    """A binary that the driver has loaded."""

    def function(self, symbol: str) -> GpuFunction | None:
        """None if it has no such entry. Raises ``DeviceError``."""
        ...

    def unload(self) -> None: ...


class GpuDriver(ABC):
    """The driver's functions (``api``) for one device. ``check`` unpacks an answer: None, the one value, or a tuple."""

    kind = ""
    """Kind of its devices."""
    ipc_kind = ""
    """``MemoryHandle.kind`` of the handles that any process can be sent."""
    pool_kind = ""
    """And of a pointer into a pool of another process."""
    imports_pools_first_only = False
    """True if pools of other processes can be imported on the first device of a process only."""

    def __init__(self, api: GpuApi, results: Results, device_id: str = "") -> None:
        self.api = api
        self.results = results
        self.device_id = device_id
        self.lost: DeviceLostError | None = None
        """The first sticky error, after which nothing works."""
        self._context: Any = None
        self._thread = threading.local()

    # What kinds of GPU bring

    @abstractmethod
    def result(self, code: int) -> Any:
        """The driver's result of that number."""

    @abstractmethod
    def image(self, data: bytes) -> Image:
        """Load a binary. Raises ``ValueError``, ``DeviceError`` if it is none for this device, and its other errors."""

    def release(self, context: Any) -> None:  # noqa: B027  (of some kinds nothing is retained)
        """Let go of what was bound."""

    # Contexts

    def bind(self, context: Any) -> None:
        """From now on ``enter`` makes ``context`` the current one."""
        self._context = context

    def enter(self) -> None:
        """Make the context current in this thread. Costs nothing the second time. Raises the sticky error, if any."""
        if self.lost is not None:
            raise self._again()
        if getattr(self._thread, "entered", None) is not self._context:
            self.check(self.api.make_current(self._context))
            self._thread.entered = self._context

    # Answers

    def check(self, answer: Answer, doing: str = "") -> Any:
        """The values of an answer. Raises its error: ``DeviceError``, ``ResourceExhaustedError``,
        ``UnavailableError``, and ``DeviceLostError`` from the first sticky one on."""
        if answer[0]:
            raise self.error(answer[0], doing)
        if len(answer) == 2:
            return answer[1]
        return answer[1:] or None

    def error(self, result: Any, doing: str = "") -> TilewrightError:
        """The typed error for a result that is none of success; remembers sticky ones."""
        results = self.results
        error = results.error_of(result.name, self.device_id, doing)
        if result.name == results.unknown and self._is_broken():
            error = results.lost_error(result.name, self.device_id)
        if isinstance(error, DeviceLostError) and self.lost is None:
            self.lost = error
        return error

    def quietly(self, answer: Answer) -> bool:
        """For giving things back: True if that worked. A sticky error is noted, not raised."""
        if answer[0]:
            self.error(answer[0])
        return not answer[0]

    def is_busy(self, answer: Answer) -> bool:
        """True if a query was answered that something is under way still."""
        return bool(answer[0]) and answer[0].name == self.results.busy

    def _is_broken(self) -> bool:
        """True if a call that nothing is wrong with fails as well."""
        if self._context is None:
            return False
        result, event = self.api.new_event(timing=True)
        if not result:
            self.api.end_event(event)
        return bool(result)

    def _again(self) -> DeviceLostError:
        assert self.lost is not None
        return DeviceLostError(self.lost.reason, device=self.device_id)
