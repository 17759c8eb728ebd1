"""Plans that are launched in this process, on its own memory: NumPy's arrays on the CPU, tensors of a GPU on the
streams of the library that made them. Nothing is copied, and no server is asked.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from tilewright.dispatch.bindings.binding import Launched, launch_stream, leader
from tilewright.dispatch.operands.operands import check_output
from tilewright.dispatch.operands.slots import Slot, single
from tilewright.errors import InternalError, TilewrightError, UnsupportedError, from_detail
from tilewright.gpu.driver import LEGACY_STREAM, GpuDriver
from tilewright.gpu.registry import driver_of
from tilewright.gpu.streams import current_stream, stream_reader
from tilewright.launch.library import NO_CONTEXT, load_library
from tilewright.launch.opened import OpenedPlan
from tilewright.launch.page import LaunchPage
from tilewright.session.state import Core, Session, uuid_digits
from tilewright.tensor.device_array import by_library, find_mapped
from tilewright.tensor.interop import UNKNOWN, DeviceTensor, recognise, recognise_output
from tilewright.transport import rpc
from tilewright.transport.rpc import Flow, Rpc
from tilewright.types.addresses import address_of
from tilewright.types.report import Report
from tilewright.types.spec import Spec, fresh
from tilewright_proto.v1 import dispatch_pb2, local_pb2

__all__ = ["BoundInPlace", "InPlace", "opened_plan"]

MAX_OBJECT = 1 << 30
"""Bytes of a code object, far beyond any."""
_page_lock = threading.Lock()
_forks = 0
"""Forks between this process and the one that the module was imported in. (Asking for the process's number instead is
a system call for every launch, which in a sandbox takes as long as the rest.)"""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Closing(Protocol):
    """A plan, as far as its launches look at it."""

    core: Core
    closed: bool


class InPlace:
    """One plan in this process. Thread-safe."""

    def __init__(
        self, core: Core | None, plan: OpenedPlan, inputs: Sequence[Slot], outputs: Sequence[Slot], uuid: str
    ) -> None:
        """``core`` is that of the client whose memory operands must not lie in; a plan of a bundle has none. ``uuid``
        names the GPU that the plan is for; empty: whichever is current when it is launched.
        """
        self.core = core
        self.plan = plan
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._uuid = uuid_digits(uuid)
        self._ordinals: dict[int, bool] = {}
        self.several = True
        """False if this process has one GPU only."""
        self._loaded = plan.on_cpu
        self._used: set[tuple[str, int]] = set()
        """Kind and ordinal of the GPU that it was launched on."""

    def launch(self, values: Sequence[Any], stream: int | None = None) -> tuple[Launched, Any]:
        """Launch once on operands in the plan's order, ``None`` or a ``Spec`` for an output that is to be made. Returns
        with the output (several: a dict). Raises ``UnsupportedError`` for operands that are not usable here, and what
        the library finds wrong.
        """
        if self.plan.on_cpu:
            addresses, result, _ = self.host_operands(values)
            return Launched(self._timed(lambda: self.plan.run(addresses))), result
        addresses, result, tensors = self.device_operands(values)
        plan = self.plan
        return self.on_stream(tensors, stream, lambda place: plan.run(addresses, place)), result

    def _timed(self, run: Callable[[], int]) -> int:
        begin = perf_counter_ns()
        status = run()
        took = perf_counter_ns() - begin
        if status:
            raise self.plan.error(status)
        return took

    @property
    def is_capturing(self) -> bool:
        """True if a stream that is current now is being captured: nothing may be loaded meanwhile."""
        for kind, ordinal in self._used:
            gpu = driver_of(kind)
            for library in ("torch", "cupy"):
                if library in sys.modules and gpu.is_capturing(current_stream(library, ordinal)):
                    return True
        return False

    # ---- the host ----

    def host_operands(self, values: Sequence[Any]) -> tuple[bytes, Any, list[Any]]:
        """Addresses, the result, and what must live for as long as these are used."""
        count = len(self.inputs)
        keep = [_lying(slot, value) for slot, value in zip(self.inputs, values, strict=False)]
        result: dict[str, Any] = {}
        for slot, value in zip(self.outputs, values[count:], strict=True):
            if value is None or isinstance(value, Spec):
                array = fresh(np.empty, slot.spec)
            else:
                array = _lying(slot, value)
                check_output(array, slot.name)
            result[slot.name] = array
            keep.append(array)
        return self.plan.pack(*map(address_of, keep)), single(result), keep

    # ---- GPUs ----

    def device_operands(self, values: Sequence[Any]) -> tuple[bytes, Any, list[DeviceTensor]]:
        """Addresses, the result, and the operands as they were recognised."""
        count = len(self.inputs)
        tensors: list[DeviceTensor] = []
        result: dict[str, Any] = {}
        for index, slot in enumerate((*self.inputs, *self.outputs)):
            value = values[index]
            if index == count and tensors:
                self._load(tensors)
            if index >= count and (value is None or isinstance(value, Spec)):
                value = by_library(tensors[0], slot.spec) if tensors else None
            tensor = recognise(value, slot.name) if index < count else recognise_output(value, slot.name)
            if tensor is None or tensor.location is not None or tensor.array is not None:
                raise _elsewhere(slot, value)
            if self.core and self.core.mapped and find_mapped(self.core, tensor.address) is not None:
                raise _elsewhere(slot, value)
            if tensor.spec != slot.spec:
                slot.check_tensor(tensor)
            tensors.append(tensor)
            if index >= count:
                result[slot.name] = tensor.value
        self._check_device(tensors)
        return self.plan.pack(*[tensor.address for tensor in tensors]), single(result), tensors

    def _load(self, tensors: Sequence[DeviceTensor]) -> None:
        """Load the code before the first launch: what refuses it does so before outputs are made."""
        if not self._loaded:
            self._check_device(tensors)
            with tensors[0].gpu.current(tensors[0].ordinal):
                self.plan.library.load_plan(self.plan.handle)
            self._loaded = True

    def _check_device(self, tensors: Sequence[DeviceTensor]) -> None:
        """Raise ``UnsupportedError`` unless all operands are on the GPU that the plan is for."""
        for slot, tensor in zip((*self.inputs, *self.outputs), tensors, strict=False):
            if tensor.ordinal == UNKNOWN and tensor.spec.nbytes:
                tensor.ordinal = tensor.gpu.pointer(tensor.address, slot.name).ordinal
            known = self._ordinals.get(tensor.ordinal)
            if known is None:
                gpu = tensor.gpu
                known = not self._uuid or uuid_digits(gpu.label(tensor.ordinal)) == self._uuid
                self.several = gpu.device_count() > 1
                self._ordinals[tensor.ordinal] = known
                if known:
                    self._used.add((tensor.kind, tensor.ordinal))
            if not known:
                raise _elsewhere(slot, tensor.value)

    def on_stream(self, tensors: Sequence[DeviceTensor], stream: int | None, launch: Callable[[int], int]) -> Launched:
        """Launch on a stream, by default the one that the operands' library uses now, behind what the others are ready
        on and before what comes there next.
        """
        gpu, ordinal = tensors[0].gpu, tensors[0].ordinal
        place = launch_stream(tensors) if stream is None else stream
        others = {item.stream for item in tensors if not item.library} - {place} if stream is None else ()
        for busy in others:
            gpu.order(ordinal, busy, place)
        handle = gpu.handle(place)
        status = self.in_context(gpu, ordinal, lambda: launch(handle))
        if status:
            raise self.plan.error(status)
        for busy in others:
            gpu.order(ordinal, place, busy)
        return Launched(stream=place, gpu=gpu, ordinal=ordinal)

    def run_again(self, gpu: GpuDriver, ordinal: int, places: tuple[int, ...], handle: int) -> int:
        """The status of a launch on addresses, of which some come again and again, on a stream by its handle."""
        if not self.several:
            status = self.plan.run_again(places, handle)
            if status != NO_CONTEXT:
                return status
        return self.in_context(gpu, ordinal, functools.partial(self.plan.run_again, places, handle))

    def in_context(self, gpu: GpuDriver, ordinal: int, launch: Callable[[], int]) -> int:
        """The status of a launch with its device current."""
        if not self.several or gpu.is_current(ordinal):
            status = launch()
            if status != NO_CONTEXT:
                return status
        with gpu.current(ordinal):
            return launch()


class BoundInPlace:
    """A plan with its operands, in this process. A ``Go``."""

    __slots__ = (
        "_current",
        "_default",
        "_forks",
        "_gpu",
        "_handle",
        "_last",
        "_launch",
        "_ordinal",
        "binding",
        "here",
        "keep",
        "result",
        "tensors",
    )

    _gpu: GpuDriver
    _ordinal: int
    _current: Callable[[], int]
    """The stream that is current now; 0 for the default one."""
    _default: int
    """The driver's handle of the default stream."""
    _last: Launched
    """The outcome of the last launch on a GPU. All on one stream have the same."""

    def __init__(self, here: InPlace, values: Sequence[Any]) -> None:
        """Raises as ``InPlace.launch`` does."""
        self.here = here
        self.tensors: list[DeviceTensor] = []
        plan = here.plan
        if plan.on_cpu:
            addresses, self.result, self.keep = here.host_operands(values)
            self.binding = plan.bind(addresses)
        else:
            addresses, self.result, self.tensors = here.device_operands(values)
            self.keep = list(self.tensors)
            lead = leader(self.tensors)
            self._gpu, self._ordinal = lead.gpu, lead.ordinal
            named: Callable[[], int] = functools.partial(int, lead.stream)
            self._current = stream_reader(lead.library, lead.ordinal) if lead.library else named
            self._default = self._gpu.handle(LEGACY_STREAM)
            self._last = Launched(stream=LEGACY_STREAM, gpu=self._gpu, ordinal=self._ordinal)
            with self._gpu.current(self._ordinal):
                self.binding = plan.bind(addresses)
        self._handle = self.binding.handle
        self._launch = self.binding.launch
        self._forks = _forks

    @property
    def valid(self) -> bool:
        """True unless this is a forked child and the operands are on the parent's GPU."""
        return self._forks == _forks or not self.tensors

    def __call__(self, stream: int | None = None, wait: bool = True) -> Launched:  # noqa: ARG002 - it is in order
        """Raises what the library finds wrong."""
        if not self.tensors:
            return Launched(self.run())
        return self.outcome(self.enqueue(stream))

    def outcome(self, place: int) -> Launched:
        """The outcome of a launch on a stream of the GPU."""
        last = self._last
        if last.stream != place:
            last = self._last = Launched(stream=place, gpu=self._gpu, ordinal=self._ordinal)
        return last

    def quick(self, plan: Closing, told: Callable[[], Report]) -> Callable[[], int] | None:
        """A function that launches on the current stream of the GPU, and returns the stream; 0 if the launch is to be
        made by ``enqueue``. ``told`` is its report. ``None`` for a CPU, and in processes with several GPUs.

        Small kernels follow each other as fast as the host launches them: what it looks up is looked up once.
        """
        if not self.tensors or self.here.several:
            return None
        launch, number, current, default, forks = self._launch, self._handle, self._current, self._default, self._forks
        core = plan.core

        def launched() -> int:
            if plan.closed or core.closed or forks != _forks:
                return 0
            place = current() or LEGACY_STREAM
            if launch(number, default if place == LEGACY_STREAM else place):
                return 0
            core.report = told
            return place

        return launched

    def enqueue(self, stream: int | None = None) -> int:
        """Launch on a stream of the GPU, by default the current one; returns which it was."""
        place = self._current() or LEGACY_STREAM if stream is None else stream
        handle = self._default if place == LEGACY_STREAM else place
        here = self.here
        # The host's time decides how fast small kernels follow: with one GPU nothing is asked beforehand.
        status: int = NO_CONTEXT if here.several else self._launch(self._handle, handle)
        if status == NO_CONTEXT:
            launch = functools.partial(self._launch, self._handle, handle)
            status = here.in_context(self._gpu, self._ordinal, launch)
        if status:
            raise here.plan.error(status)
        return place

    def run(self) -> int:
        """Launch on the CPU, to its end. Returns the nanoseconds that it took."""
        begin = perf_counter_ns()
        status = self._launch(self._handle, None)
        took = perf_counter_ns() - begin
        if status:
            raise self.here.plan.error(status)
        return took


def _lying(slot: Slot, value: Any) -> Any:
    """The array, which lies as planned in this process' memory."""
    if isinstance(value, np.ndarray) and slot.check(value):
        return value
    raise _elsewhere(slot, value)


def _elsewhere(slot: Slot, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{slot.name} does not lie where this process could launch on it: in its own memory, as planned",
        field=slot.name,
        value=type(value).__name__,
        rule="caller_launch_operands",
        fix='pass a NumPy array for a CPU, or a tensor of PyTorch or CuPy for a GPU, or use launch="auto"',
    )


def opened_plan(
    core: Core, session: Session, plan: int, reply: dispatch_pb2.PlanReply, names: tuple[str, ...]
) -> Flow[OpenedPlan]:
    """The plan of a reply, opened here, with code objects fetched that this process lacks. Raises what refuses it."""
    if reply.HasField("launch_refused"):
        raise from_detail(reply.launch_refused)
    if not reply.launch_plan:
        raise UnsupportedError(
            "the server gives no launch plans",
            field="launch",
            value="caller",
            rule="caller_launch_version",
            fix="use a server of the client's release, or launch in the server",
        )
    library = load_library()
    for item in reply.objects:
        if item.content:
            library.put_object(item.sha256, item.content)
        elif not library.knows(item.sha256):
            yield from _fetched(core, session, plan, item)
    opened = OpenedPlan(library, reply.launch_plan, names)
    page = yield from _launch_page(core, session)
    if page is not None:
        opened.count_into(page, plan)
    return opened


def _launch_page(core: Core, session: Session) -> Flow[LaunchPage | None]:
    """The page in which the session's launches are counted; ``None`` if there is none, which is no reason to fail."""
    if session.launch_page is None:
        found: LaunchPage | bool = False
        if session.control is not None:
            with suppress(TilewrightError, OSError, ValueError):
                request = local_pb2.OpenLaunchPageRequest(session=session.token)
                reply, fds = yield Rpc(rpc.OPEN_LAUNCH_PAGE, request, core.timeout, local=True)
                try:
                    found = LaunchPage(fds[0], reply.records) if fds else False
                finally:
                    for fd in fds:
                        os.close(fd)
        with _page_lock:  # one for each session, whoever comes first
            if session.launch_page is None:
                session.launch_page = found
    return session.launch_page or None


def _fetched(core: Core, session: Session, plan: int, item: dispatch_pb2.CodeObject) -> Flow[None]:
    library = load_library()
    request = dispatch_pb2.FetchObjectRequest(session=session.token, plan=plan, sha256=item.sha256)
    if session.control is not None:
        _, fds = yield Rpc(rpc.FETCH_OBJECT, request, core.timeout, local=True)
        try:
            for fd in fds[:1]:
                library.put_object_file(item.sha256, fd, item.bytes)
        finally:
            for fd in fds:
                os.close(fd)
        return
    content = bytearray()
    while len(content) < min(item.bytes, MAX_OBJECT):
        request.offset = len(content)
        reply = yield Rpc(rpc.FETCH_OBJECT, request, core.timeout)
        if not reply.content:
            raise InternalError("the server sent a code object that is too short", rule="code_object")
        content += reply.content
    library.put_object(item.sha256, bytes(content))
