"""Plans that the library has opened, and bindings of them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from struct import Struct

from tilewright.errors import DeviceError, InternalError, TilewrightError, UnsupportedError
from tilewright.launch.library import CPU, NO_CONTEXT, UNSUPPORTED, Library
from tilewright.launch.page import LaunchPage
from tilewright.transport.tracing import launching

__all__ = ["OpenedBinding", "OpenedPlan", "falls_back", "is_lasting"]

_LASTING = frozenset(
    {"cpu_features", "cpu_pool", "cpu_team", "device_arch", "device_driver", "launch_library", "object_load"}
    | {"workspace"}
)
"""Rules of refusals that every further launch of the plan would meet."""


MAX_BINDINGS = 64
"""Bindings that a plan keeps by itself."""
MAX_AGAIN = 256
"""Addresses on a GPU that a plan remembers to have been launched on."""


class OpenedPlan:
    """A launch plan in this process. Launches need no server. Thread-safe."""

    def __init__(self, library: Library, plan: bytes | int, names: tuple[str, ...]) -> None:
        """``plan`` are the bytes of a plan, or one that the library has opened, which becomes this object's; ``names``
        are those of the operands. Raises what the library finds wrong, and ``UnsupportedError`` for a plan that needs
        more threads than this process has.
        """
        self.library = library
        self.names = names
        self.handle = plan if isinstance(plan, int) else library.open_plan(plan)
        self._finalizer = weakref.finalize(self, library.close_plan, self.handle)
        self._finalizer.atexit = False
        info = library.describe(self.handle)
        self.count = int(info.operands)
        self.on_cpu = info.device_kind == CPU
        self.flops = int(info.flops)
        words = {"tilewright.launch": "caller", "tilewright.problem": (info.name or b"").decode("utf-8", "replace")}
        name = f"launch {(info.operation or b'').decode('utf-8', 'replace')}"
        self._run = launching(library.tw_run, name, words)
        self.launch = launching(library.tw_launch, name, words)
        """``launch(binding, stream)``: the library's status."""
        self._lock = threading.Lock()
        self._bindings: OrderedDict[bytes, OpenedBinding] | None = None
        """By their addresses, for a plan that must be bound."""
        self._again: dict[tuple[int, ...], OpenedBinding | None] = {}
        """By their addresses, for a plan that need not be; ``None`` for those that were seen once."""
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

    def count_into(self, page: LaunchPage, plan: int) -> None:
        """Count launches in a session's page, under the plan's id there, if it has room."""
        if (taken := page.take(plan)) is None:
            return
        place, address = taken
        self.library.record_into(self.handle, address)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close_counted, self.library, self.handle, page, place)
        self._finalizer.atexit = False

    def run(self, addresses: bytes, stream: int | None = None) -> int:
        """Launch once; the library's status."""
        if self._bindings is None:
            status: int = self._run(self.handle, addresses, self.count, stream)
            if status != UNSUPPORTED or self.library.error().rule != "run_tables":
                return status
            self._bindings = OrderedDict()
        return self._run_bound(self._bindings, addresses, stream)

    def run_again(self, places: tuple[int, ...], stream: int) -> int:
        """``run`` on a GPU, bound from the second time on at the same addresses: that spares checks and arguments."""
        known = self._again
        launched: int
        binding = known.get(places)
        if binding is not None:
            launched = self.launch(binding.handle, stream)
            return launched
        addresses = self.pack(*places)
        if places in known:
            status, handle = self.library.bind(self.handle, addresses, self.count)
            if not status:
                binding = known[places] = OpenedBinding(self, handle)
                status = self.launch(binding.handle, stream)
            return status
        status = self.run(addresses, stream)
        if not status and self._bindings is None:
            if len(known) >= MAX_AGAIN:
                known.clear()
            known[places] = None
        return status

    def _run_bound(self, known: OrderedDict[bytes, OpenedBinding], addresses: bytes, stream: int | None) -> int:
        """The same for a plan with arguments in device memory, which only bindings have: those used last are kept."""
        with self._lock:
            binding = known.get(addresses)
            if binding is None:
                status, handle = self.library.bind(self.handle, addresses, self.count)
                if status:
                    return status
                binding = known[addresses] = OpenedBinding(self, handle)
                if len(known) > MAX_BINDINGS:
                    known.popitem(last=False)
            known.move_to_end(addresses)
            launched: int = self.launch(binding.handle, stream)
            return launched

    def bind(self, addresses: bytes) -> OpenedBinding:
        """Settle a launch. Raises what the library finds wrong."""
        status, handle = self.library.bind(self.handle, addresses, self.count)
        if status:
            raise self.error(status)
        return OpenedBinding(self, handle)

    def error(self, status: int) -> TilewrightError:
        """The error of a status, in the thread that got it."""
        found = self.library.error(self.names)
        if status == NO_CONTEXT and found.rule != "binding_context":
            found.fix = "use the GPU in this thread first, for example with torch.cuda.set_device()"
        return found


class OpenedBinding:
    """A launch that is settled but for its stream. Closed with its last reference."""

    __slots__ = ("__weakref__", "_finalizer", "handle", "launch")

    def __init__(self, plan: OpenedPlan, handle: int) -> None:
        self.handle = handle
        self.launch = plan.launch
        """``launch(handle, stream)``: the library's status."""
        self._finalizer = weakref.finalize(self, plan.library.close_binding, handle)
        self._finalizer.atexit = False


def _close_counted(library: Library, plan: int, page: LaunchPage, place: int) -> None:
    library.record_into(plan, None)
    library.close_plan(plan)
    page.give_back(place)


def is_lasting(error: TilewrightError) -> bool:
    """True if further launches of the same plan would fail alike, and the server can do them."""
    return error.rule in _LASTING


def falls_back(error: TilewrightError) -> bool:
    """True if the server may do what could not be done here, or knows better what is wrong with it."""
    return not isinstance(error, (DeviceError, InternalError))
