"""Plans that the library has opened, and bindings of them."""

from __future__ import annotations

import weakref
from struct import Struct

from tilewright.errors import DeviceError, InternalError, TilewrightError, UnsupportedError
from tilewright.launch.library import CPU, NO_CONTEXT, Library

__all__ = ["OpenedBinding", "OpenedPlan", "falls_back", "is_lasting"]

_LASTING = frozenset({"launch_library", "cpu_team", "cpu_pool", "cpu_features", "object_load", "workspace"})
"""Rules of refusals that every further launch of the plan would meet."""


class OpenedPlan:
    """A launch plan in this process. Launches need no server. Thread-safe."""

    def __init__(self, library: Library, data: bytes, names: tuple[str, ...]) -> None:
        """``names`` are those of the operands. Raises what the library finds wrong, and ``UnsupportedError`` for a plan
        that needs more threads than this process has.
        """
        self.library = library
        self.names = names
        self.handle = library.open_plan(data)
        self._finalizer = weakref.finalize(self, library.close_plan, self.handle)
        self._finalizer.atexit = False
        info = library.describe(self.handle)
        self.count = int(info.operands)
        self.on_cpu = info.device_kind == CPU
        self.flops = int(info.flops)
        self.pack = Struct(f"={self.count}Q").pack
        """Addresses as the library takes them."""
        if self.on_cpu:
            if info.team > library.threads:
                raise UnsupportedError(
                    f"the plan is for a team of {info.team} threads, and this process has {library.threads}",
                    field="launch",
                    value=info.team,
                    rule="cpu_team",
                    fix='launch it in the server (launch="server"), or give this process more CPUs',
                )
            library.load_plan(self.handle)

    def run(self, addresses: bytes, stream: int | None = None) -> int:
        """Launch once; the library's status."""
        status: int = self.library.tw_run(self.handle, addresses, self.count, stream)
        return status

    def bind(self, addresses: bytes) -> OpenedBinding:
        """Settle a launch. Raises what the library finds wrong."""
        status, handle = self.library.bind(self.handle, addresses, self.count)
        if status:
            raise self.error(status)
        return OpenedBinding(self, handle)

    def error(self, status: int) -> TilewrightError:
        """The error of a status, in the thread that got it."""
        found = self.library.error(self.names)
        if status == NO_CONTEXT:
            found.fix = "use the GPU in this thread first, for example with torch.cuda.set_device()"
        return found


class OpenedBinding:
    """A launch that is settled but for its stream. Closed with its last reference."""

    __slots__ = ("__weakref__", "_finalizer", "handle", "launch", "plan")

    def __init__(self, plan: OpenedPlan, handle: int) -> None:
        self.plan = plan
        self.handle = handle
        self.launch = plan.library.tw_launch
        """``launch(handle, stream)``: the library's status."""
        self._finalizer = weakref.finalize(self, plan.library.close_binding, handle)
        self._finalizer.atexit = False


def is_lasting(error: TilewrightError) -> bool:
    """True if further launches of the same plan would fail alike, and the server can do them."""
    return error.rule in _LASTING


def falls_back(error: TilewrightError) -> bool:
    """True if the server may do what could not be done here, or knows better what is wrong with it."""
    return not isinstance(error, (DeviceError, InternalError))
