"""Executions that the server has settled under an id, and launching them over the local socket."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.errors import InvalidArgumentError, TilewrightError, is_unfinished
from tilewright.gpu.driver import GpuDriver
from tilewright.gpu.streams import current_stream
from tilewright.session.state import Core, Session
from tilewright.tensor.interop import DeviceTensor, busy_streams
from tilewright.transport import messages, rpc
from tilewright.transport.launch_connections import Lane, StreamLane
from tilewright.transport.rpc import Flow, Rpc, Work
from tilewright_proto.v1 import dispatch_pb2

if TYPE_CHECKING:
    from tilewright.dispatch.operands.slots import Loaded

__all__ = ["Binding", "Go", "Launched", "bind", "can_bind", "launch_stream", "launcher", "leader", "watched"]


class Binding:
    """An id of the server for a plan and places. Released when the last reference goes."""

    __slots__ = ("__weakref__", "_epoch", "_finalizer", "attach", "device", "id", "session")

    def __init__(self, core: Core, session: Session, reply: dispatch_pb2.BindReply, epoch: int | None) -> None:
        """``epoch`` is the session's when its memory was exported; ``None`` if it has none that is."""
        self.session = session
        self._epoch = epoch
        self.id = reply.binding
        self.device = reply.device
        self.attach = reply.attach
        """True if launches are asynchronous, over a connection that is attached to the device."""
        self._finalizer = weakref.finalize(self, core.release_binding, session, reply.binding)
        self._finalizer.atexit = False

    @property
    def valid(self) -> bool:
        """True if its memory has not been given back since, as far as this client knows."""
        return self._epoch is None or self._epoch == self.session.epoch


class Launched:
    """Outcome of a launch: over, queued by the server on a stream (``lane``), or by this process (``gpu``)."""

    __slots__ = ("device_ns", "gpu", "lane", "mark", "ordinal", "over", "stream")

    def __init__(
        self,
        device_ns: int = 0,
        lane: StreamLane | None = None,
        mark: int = 0,
        stream: int = 0,
        *,
        gpu: GpuDriver | None = None,
        ordinal: int = 0,
    ) -> None:
        self.device_ns = device_ns
        self.gpu = gpu
        """Driver of a launch that this process made."""
        self.ordinal = ordinal
        self.over = lane is None and gpu is None
        """True if it was over already when it was queued."""
        self.lane = lane
        self.mark = mark
        """The lane's tie knows the launch by it."""
        self.stream = stream


class Go(Protocol):
    """Launches a binding on a stream, the current one unless it is named. ``wait``: the stream waits for its end."""

    def __call__(self, stream: int | None = None, wait: bool = True) -> Launched: ...


def can_bind(loaded: Loaded) -> bool:
    """True if all operands lie where the device uses them in place, and there is a socket to launch over."""
    cargo = loaded.cargo
    return (
        loaded.session.lanes is not None
        and cargo.in_place
        and not (cargo.staged_bytes or cargo.replies or cargo.copies)
    )


def bind(core: Core, loaded: Loaded, timeout: float | None) -> Flow[Binding | None]:
    """Settle an execution; ``None`` if the server would have to copy an operand (of the host, for a GPU) every time.
    Raises what ``Execute`` would for operands that cannot be meant.
    """
    session = loaded.session
    epoch = session.epoch if loaded.cargo.tensors else None
    # The fields of a BindRequest have the numbers of an ExecuteRequest's: session, execution, milliseconds.
    limit = min(max(1, round(timeout * 1000)), 0xFFFFFFFF) if timeout else 0
    request = messages.execute_request(messages.session_field(session.token), [loaded.chunk], limit)
    try:
        reply = yield Rpc(rpc.BIND, request, timeout)
    except InvalidArgumentError as error:
        if error.rule != "binding_in_place":
            raise
        loaded.cargo.in_place = False
        return None
    except TilewrightError as error:
        core.note(error)
        raise
    return Binding(core, session, reply, epoch)


def watched(core: Core, go: Callable[[], Launched], keep: object) -> Flow[Launched]:
    """Launch. Who is interrupted meanwhile, or gets no answer, leaves the server at work on the arrays in ``keep``."""
    try:
        launched: Launched = yield Work(go, effect=True)
        return launched
    except TilewrightError as error:
        core.note(error)
        if is_unfinished(error):
            core.quarantine(keep)
        raise
    except BaseException:
        core.quarantine(keep)
        raise


def launch_stream(tensors: Sequence[DeviceTensor]) -> int:
    """The stream to launch on if none is named."""
    return _stream_of(leader(tensors))


def leader(tensors: Sequence[DeviceTensor]) -> DeviceTensor:
    """Operand whose stream counts: the output. One that the server made goes where the inputs are."""
    last = tensors[-1]
    if last.array is not None and last.array is last.value:
        last = next((tensor for tensor in reversed(tensors) if tensor.library), last)
    return last


def _stream_of(tensor: DeviceTensor) -> int:
    return current_stream(tensor.library, tensor.ordinal) if tensor.library else tensor.stream


def launcher(binding: Binding, tensors: Sequence[DeviceTensor], *, fresh: bool = False) -> Go:
    """Launcher of a binding. ``fresh``: the tensors were given for this launch, so whatever streams they are ready on
    are waited for, and wait for it, unless a stream is named.
    """
    lanes: Any = binding.session.lanes
    number = binding.id
    if not tensors:
        device = binding.device if binding.attach else ""
        return lambda stream=None, wait=True: Launched(lanes.of_thread(device).run(number))  # noqa: ARG005
    gpu = tensors[0].gpu
    if not binding.attach:

        def complete(stream: int | None = None, wait: bool = True) -> Launched:  # noqa: ARG001 - it is over
            streams = busy_streams(tensors) if stream is None else {(gpu, tensors[0].ordinal, stream)}
            for one, ordinal, busy in streams:
                one.synchronize(ordinal, busy)
            lane: Lane = lanes.of_thread()
            return Launched(lane.run(number))

        return complete

    device, ordinal, first, of_stream = binding.device, tensors[0].ordinal, leader(tensors), lanes.of_stream
    mapped = [tensor.array for tensor in tensors if tensor.array is not None]
    foreign = [tensor for tensor in tensors if fresh and not tensor.library]
    others = {tensor.stream for tensor in tensors} if fresh else set()

    def queue(stream: int | None = None, wait: bool = True) -> Launched:
        place, around = (_stream_of(first), others) if stream is None else (stream, ())
        for busy in around:
            gpu.order(ordinal, busy, place)
        for array in mapped:
            array.move_to(place)
        lane = of_stream(device, gpu, ordinal, place)
        mark = lane.launch(number)
        launched = Launched(0, lane, mark, place)
        if wait:
            launched.over = lane.tie.follow(mark, place)
            for busy in around:
                if busy != place:
                    lane.tie.follow(mark, busy)
            if foreign:
                lane.retain(foreign, place)
        return launched

    return queue
