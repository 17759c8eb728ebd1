"""Contract between the server and devices beyond the kit's protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tilewright_arch import ArchSpec
from tilewright_kit.contract.device import Buffer, DeviceInfo, DeviceProvider
from tilewright_kit.contract.plan import Geometry, PackedArgs
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import TilewrightError, UnavailableError
from tilewright_server.devices.tracing import TracedSink

__all__ = [
    "IPC_KINDS",
    "MAX_PARTS",
    "POOL_KINDS",
    "RECORD",
    "REPLY",
    "TIME",
    "WAIT",
    "Absence",
    "ConnectedDevice",
    "CountingDevice",
    "DeviceHost",
    "DeviceLostError",
    "ExplainingProvider",
    "GranularDevice",
    "HostedProvider",
    "IsolatedProvider",
    "LastingStream",
    "LaunchStream",
    "LockingDevice",
    "MemoryHandle",
    "MonitoredDevice",
    "Program",
    "ProgramDevice",
    "ProgramStage",
    "ServedPacket",
    "ServingStream",
    "SharingDevice",
    "SignalStream",
    "StreamDevice",
    "TiedDevice",
    "WorkerSpec",
    "shares_host_memory",
    "uses_host_memory",
]

WAIT, RECORD, REPLY, TIME = 1, 2, 4, 8
"""Flags of a launch: wait for the slot's producer event first; record the slot's completion event after it; answer it;
run it to its end and answer with its device time."""

MAX_PARTS = 128
"""Parts of memory that is mapped from several allocations; each comes with a descriptor."""


class DeviceLostError(UnavailableError):
    """The device cannot be used any more by the process that opened it, with everything that was made on it.

    Devices raise it for faults after which the driver refuses everything (a kernel that read wild addresses, a GPU that
    fell off the bus). A worker process that hears of it ends, and a new one opens the device again at its next use.
    """

    def __init__(self, reason: str, *, device: str = "", retry_after_s: float | None = 0.5) -> None:
        """``retry_after_s`` is ``None`` for what was in the device's memory, which does not come back."""
        super().__init__(
            reason,
            field="device",
            value=device,
            rule="device_lost",
            fix="make it again, and fill it: the device is opened anew, and what was in its memory is gone"
            if retry_after_s is None
            else "send it again: the device is opened anew; what was in its memory must be made again",
            retry_after_s=retry_after_s,
        )


@dataclass(frozen=True, slots=True)
class DeviceHost:
    """Parts of the server that a provider may use."""

    build: Callable[[SourceUnit, ArchSpec], Path]
    """Build a unit through the artifact cache (or find it there); the binary stays until the process ends."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings by kind of device."""


@runtime_checkable
class HostedProvider(Protocol):
    """A provider that needs the server's build cache or settings."""

    def hosted(self, host: DeviceHost) -> DeviceProvider:
        """A provider like this one that uses ``host``."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a worker process makes a device."""

    factory: str
    """``package.module:function``; called in the worker as ``function(info, options)``, it returns the open device."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function; anything that JSON can say."""


@runtime_checkable
class IsolatedProvider(Protocol):
    """A provider whose devices are opened in a process of their own, because faults of kernels end that process."""

    def worker(self, info: DeviceInfo) -> WorkerSpec | None:
        """How to open ``info`` in a worker; None to open it in the server's own process. Raises as ``open`` does."""
        ...


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a device is not there, and how to get it. Clients are told: it names no file but the system's own."""

    reason: str
    fix: str


@runtime_checkable
class ExplainingProvider(Protocol):
    """A provider that knows why it does not offer a device."""

    def absence(self, device: str) -> Absence | None:
        """Why ``discover`` did not find the device of that id; None if this kind works and there is just no such one.

        Called after ``discover``, while a request waits: must not search again.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProgramStage:
    """One stage of a plan with its entry point resolved."""

    function: int
    args: PackedArgs
    geometry: Geometry


class Program(Protocol):
    """Stages that are run again and again with other addresses. Thread-safe."""

    weight: int
    """How many of the device's lanes one run occupies: of a CPU, threads."""

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        """Run all stages in order, ``repeat`` times, and return when they are complete.

        ``addresses`` are those of the operands, in the order given when the program was made. Returns the device time
        of each stage in nanoseconds, summed over the repeats. Raises ``DeviceError``.
        """
        ...


@runtime_checkable
class ProgramDevice(Protocol):
    """A device with a faster way to run the same stages than one ``Device.run`` after the other."""

    lanes: int
    """Sum of the weights that may run at a time."""

    def program(self, stages: Sequence[ProgramStage], operands: Sequence[str], *, counter_bytes: int = 0) -> Program:
        """``counter_bytes`` is the size of the operand ``COUNTERS``: the program brings that memory itself, zeroed, and
        another piece of it for every run that may be under way at the same time. Raises ``KeyError`` for an operand
        that is not listed."""
        ...


# Memory and streams that are shared with other processes

IPC_KINDS = ("cuda_ipc", "hip_ipc")
POOL_KINDS = ("cuda_pool", "hip_pool")
"""Values of ``MemoryHandle.kind`` for pools, by kind of GPU."""


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Device memory, named so that another process can map it."""

    kind: str
    """``cuda_ipc`` or ``hip_ipc`` (``data`` is the driver's handle of 64 bytes), ``cuda_pool`` or ``hip_pool`` (``fd``
    is the pool, ``data`` the pointer that was exported from it, 64 bytes), or ``fd`` (a shareable allocation; on a CPU
    a memory file)."""
    data: bytes
    nbytes: int
    """Bytes of the part that is meant, from ``offset``."""
    fd: int = -1
    """An open descriptor, which stays its holder's to close; -1 where the kind has none."""
    offset: int = 0
    """Offset of that part in the allocation that the handle stands for, in bytes."""
    fds: tuple[int, ...] = ()
    """Descriptors of ``fd`` memory that lies in several allocations, in order; ``fd`` is the first of them."""
    part_bytes: tuple[int, ...] = ()
    """How much of each of them there is, from its beginning, one behind the other; ``offset`` counts from the first."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that go with it."""
        return self.fds or ((self.fd,) if self.fd >= 0 else ())


@runtime_checkable
class SharingDevice(Protocol):
    """A device that can map memory of other processes."""

    uuid: str
    """Identifies the physical device to every process of the machine."""

    def allocate_shared(self, nbytes: int) -> Buffer:
        """Like ``Device.allocate``, for memory that may be exported; it may take more than was asked for."""
        ...

    def import_memory(self, handle: MemoryHandle) -> Buffer:
        """Map it: ``Buffer.address`` is the mapped base plus ``handle.offset``, ``Buffer.nbytes`` is ``handle.nbytes``.

        The handle's descriptor is not kept. Raises ``InvalidArgumentError`` for a handle that cannot be meant,
        ``UnsupportedError`` for a kind that this device has not, ``DeviceError`` with the driver's cause.
        """
        ...

    def release_memory(self, buffer: Buffer) -> None:
        """Unmap what ``import_memory`` gave; nothing may run on it any more."""
        ...

    def export_memory(self, buffer: Buffer) -> MemoryHandle:
        """Name a buffer of ``allocate_shared`` for another process, which may use it for as long as the buffer lives.

        A descriptor in the handle is a fresh one: the caller closes it. Raises ``UnsupportedError``, ``DeviceError``.
        """
        ...


@runtime_checkable
class GranularDevice(Protocol):
    """A ``SharingDevice`` whose memory for other processes comes in whole blocks."""

    shared_granule: int
    """Bytes of a block of ``allocate_shared``."""


class LaunchStream(Protocol):
    """Launches in order, without waiting for them. One call at a time, but from any thread."""

    gives_back_later: bool
    """True if resources of launches (memory, mappings, kernels) may be given back to the device while they are under
    way: it does so when they have ended. Then ``close`` does not wait, nor anybody for a client that never comes."""

    def open_event(self, slot: int, handle: bytes) -> bytes:
        """Open the client's producer event of ``slot``; returns the handle of the slot's completion event.

        An empty ``handle`` opens no producer event. Raises ``InvalidArgumentError``, ``DeviceError``.
        """
        ...

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        """Launch all stages of a program of the same device behind what was launched before.

        ``flags`` are ``WAIT``, ``RECORD`` and ``TIME``; others mean nothing here. Returns 0 before the kernels end;
        with ``TIME`` it returns their device time in nanoseconds, when they are complete. ``addresses`` of one binding
        are the same tuple every time, so that what was prepared for them can be found by it. Launches on one stream
        may share counters and ``workspace``, the address of as many bytes as the plan asks for. Raises
        ``InvalidArgumentError`` for a slot that was not opened, ``DeviceError``, ``DeviceLostError``.
        """
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched. Raises ``DeviceError``, ``DeviceLostError``."""
        ...

    def close(self) -> None:
        """Give everything back when the last launch has ended; waits for it unless ``gives_back_later``. Idempotent."""
        ...


@runtime_checkable
class LastingStream(Protocol):
    """A ``LaunchStream`` whose launches may be under way after its end."""

    @property
    def is_busy(self) -> bool:
        """True if some are; may be asked after ``close`` too, from any thread. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class ServedPacket:
    """A packet of a client, or the frame of one launch, that its stream did not answer."""

    data: bytes
    is_launch: bool = False
    error: TilewrightError | None = None
    """Why the launch failed; None if it was not made, for want of what ``ServingStream.prepare`` prepares."""


@runtime_checkable
class ServingStream(Protocol):
    """A ``LaunchStream`` that serves the packets of a connection by itself, and launches without the interpreter."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Keeps launches of packets out, but for what is waited for. A thread may take it twice."""
        ...

    def note_in(self, words: memoryview) -> None:
        """Let each launch of a packet write the number that it was prepared with, and the time (monotonic,
        nanoseconds), into these two words of 64 bits."""
        ...

    def prepare(
        self,
        binding: int,
        program: Program,
        addresses: Sequence[int],
        workspace: int,
        flags: int,
        slot: int,
        noted: int,
    ) -> None:
        """Let packets launch a program as ``binding`` with such flags. Raises as ``launch`` does. ``lock`` is held."""
        ...

    def tie(self, flags: int, slot: int, sequence: int) -> None:
        """Do what ``flags`` say of a launch that failed: others keep their order with the client's. See ``launch``."""
        ...

    def forget(self, binding: int) -> None:
        """Launch it no more."""
        ...

    def forget_all(self) -> None: ...

    def serve(self, connection: int, skip: bool) -> ServedPacket | None:
        """Launch, and answer, what comes over a connection, until something comes that is not prepared or is no launch;
        None at the end of the connection. The next call begins with that launch again, unless ``skip`` says that it
        was answered; one that failed is to be skipped. Raises ``DeviceLostError``.
        """
        ...


@runtime_checkable
class SignalStream(Protocol):
    """A ``ServingStream`` that can be tied to a client's stream by numbers in memory that both see."""

    def open_signals(self) -> int:
        """Descriptor of a sealed memory file of one page, which the caller closes: from now on ``WAIT`` and ``RECORD``
        mean its numbers (``docs/protocol.md``). Raises ``InvalidArgumentError`` the second time, ``DeviceError``."""
        ...

    def let_go(self) -> None:
        """The client is dead: nothing waits for its numbers any more."""
        ...


@runtime_checkable
class StreamDevice(Protocol):
    """A device whose launches need not be waited for."""

    def open_stream(self) -> LaunchStream: ...


@runtime_checkable
class TiedDevice(Protocol):
    """A device whose launches are tied to streams of other processes only by what keeps order there. Both methods say
    why something does not, or nothing; they may take seconds the first time."""

    def event_refusal(self, shares_names: bool) -> str:
        """``shares_names``: the client sees the process numbers and the shared memory of this process."""
        ...

    def signal_refusal(self) -> str: ...


@runtime_checkable
class LockingDevice(Protocol):
    """A device that copies faster from memory of the host that it has locked."""

    def lock_host(self, memory: memoryview) -> None:
        """Lock ``memory`` until the device is closed; slower copies are the answer to a failure, not an error."""
        ...


@runtime_checkable
class MonitoredDevice(Protocol):
    """A device that must be asked whether it still works, since launches that nobody waits for may have faulted."""

    def check(self) -> None:
        """Raise ``DeviceLostError`` if it does not. Costs microseconds."""
        ...


@runtime_checkable
class CountingDevice(Protocol):
    """A device that can say how it is used."""

    def counters(self) -> Mapping[str, int]:
        """Fields of ``StatisticsReply.Device`` by name; none if the device is lost just now. Raises ``DeviceError``."""
        ...


@runtime_checkable
class ConnectedDevice(Protocol):
    """A device that serves launches of client connections by itself (``worker.frames`` has the format)."""

    def attach(self, fd: int, connection: int, ended: Callable[[], None], traced: TracedSink | None = None) -> None:
        """Serve the launches that come over the SOCK_SEQPACKET socket ``fd``, which is duplicated.

        ``connection`` is a number of the caller's choice that no other connection has. ``ended`` is called once, from
        any thread, when the client has gone or the device is lost: its bindings are forgotten, and what they use may
        be given back; ``traced`` of packets that the client wants traced. Raises ``DeviceError``, ``UnavailableError``.
        """
        ...

    def bind(
        self, connection: int, binding: int, program: Program, addresses: Sequence[int], workspace_bytes: int
    ) -> None:
        """Let the connection launch ``program`` on these addresses, under the id ``binding`` of the caller's choice.

        The caller keeps the memory and the program's kernels there until ``unbind`` or the connection's end.
        Workspace is the connection's own: as large as the largest binding needs, until none needs any. Raises
        ``NotFoundError`` for a connection that has ended, ``DeviceError``, ``DeviceLostError``.
        """
        ...

    def unbind(self, connection: int, binding: int) -> None:
        """Forget a binding; when this returns, what it uses may be given back. No error if it is gone already."""
        ...

    def detach(self, connection: int) -> None:
        """End the connection from this side. No error if it has ended already."""
        ...


def uses_host_memory(device: DeviceInfo) -> bool:
    """True if memory of the device is the host's, be it in another process."""
    return device.kind == "cpu"


def shares_host_memory(device: DeviceInfo) -> bool:
    """True if addresses of the device are those of this very process."""
    return uses_host_memory(device) and not getattr(device, "attributes", {}).get("isolated", False)
