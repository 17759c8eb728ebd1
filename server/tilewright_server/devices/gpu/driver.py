"""A GPU's driver as a device uses it: results as typed errors, the current context of each thread, and what is its own.

Kinds of GPU derive from ``GpuDriver``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from tilewright_kit.contract.plan import Geometry, TensorMap
from tilewright_kit.types.errors import InternalError, TilewrightError
from tilewright_server.devices.contract import DeviceLostError
from tilewright_server.devices.gpu.api import Answer, GpuApi
from tilewright_server.devices.gpu.argument_block import HostBlock
from tilewright_server.devices.gpu.results import Results

__all__ = ["GpuDriver", "GpuFunction", "Graph", "Image", "MapEncoder"]


class GpuFunction(Protocol):
    """An entry point of a loaded binary."""

    @property
    def handle(self) -> Any:
        """The driver's object; its number identifies the entry while the binary is loaded."""
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


class MapEncoder(Protocol):
    """One tensor map of a program, to be encoded for one address after the other. Thread-safe."""

    def encode(self, address: int, into: int) -> None:
        """Write the map of a tensor whose operand lies at device address ``address`` to host address ``into``.

        Raises ``InvalidArgumentError`` for a tensor that is not aligned, ``DeviceError``.
        """
        ...


class Graph(Protocol):
    """The stages of a program as one launch of the driver. ``bound`` is a ``BoundLaunch`` of that program."""

    @property
    def is_usable(self) -> bool:
        """False once the driver has rejected it."""
        ...

    def launch(self, bound: Any) -> bool:
        """Launch with the arguments of ``bound``; False if there is no graph of it. Raises ``DeviceError``."""
        ...

    def prepare(self, bound: Any) -> None:
        """Make the graph of ``bound`` ahead of repeated launches. Raises ``DeviceLostError``."""
        ...

    def drop(self, bound: Any) -> None:
        """Release what is kept for ``bound``, which is not launched again."""
        ...

    def close(self) -> None:
        """Destroy everything; what is under way ends first. Idempotent."""
        ...


class GpuDriver(ABC):
    """The driver's functions (``api``) for one device. ``check`` unpacks an answer: None, the one value, or a tuple."""

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

    @property
    @abstractmethod
    def launch(self) -> Any:
        """The driver's own function, called with what ``calls`` gives."""

    @abstractmethod
    def config(self, function: Any, geometry: Geometry, stream: Any) -> Any:
        """Launch configuration on a stream, for ``calls``."""

    @abstractmethod
    def calls(
        self, configs: Sequence[Any], block: HostBlock, roots: Sequence[int]
    ) -> tuple[tuple[tuple[Any, ...], ...], Any]:
        """The arguments of ``launch`` for each stage, whose root lies at an offset in ``block``, and what must live as
        long as they are used. The driver copies the arguments of kernels at every launch."""

    @abstractmethod
    def image(self, data: bytes) -> Image:
        """Load a binary. Raises ``ValueError``, ``DeviceError`` if it is none for this device, and its other errors."""

    @abstractmethod
    def graph(self, stages: Sequence[Any], stream: Any) -> Graph:
        """The graph on a stream of a program of several ``Stage``s."""

    def encoder(self, tensor_map: TensorMap) -> MapEncoder:
        """Raises ``InternalError`` for a map that the device cannot use; that is every one where it has none."""
        raise InternalError(
            "this device has no tensor maps",
            field="plan.args",
            value=tensor_map,
            rule="tensor_map",
            fix="report it as a fault of the operation's plugin",
        )

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
