"""The device inside a worker, and everything that was made on it, by id."""

from __future__ import annotations

import base64
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tilewright_kit.contract.device import Buffer, Device, Launch, Module
from tilewright_kit.types.errors import NotFoundError, UnsupportedError
from tilewright_server.devices.argument_layout import DeviceProgram
from tilewright_server.devices.contract import (
    CountingDevice,
    DeviceLostError,
    GranularDevice,
    LaunchStream,
    Program,
    ProgramDevice,
    SharingDevice,
    StreamDevice,
    TiedDevice,
)
from tilewright_server.devices.errors import not_a_buffer, unloaded
from tilewright_server.devices.tracing import PacketTimes
from tilewright_server.devices.worker.clients import Client, Clients, Peer
from tilewright_server.devices.worker.exchange.serialise import geometry_from, handle_from, handle_record, stages_from
from tilewright_server.devices.worker.exchange.shared_area import Area
from tilewright_server.devices.worker.launches import LaunchLoop, SynchronousStream
from tilewright_server.devices.worker.namespaces import shares_names

__all__ = ["Hosted", "Reply"]

Reply = tuple[dict[str, Any], Sequence[int]]
"""Answer to a call, and descriptors for it, which are closed when they are sent."""
_NOTHING: Reply = ({}, ())


@dataclass(slots=True)
class _Connection:
    """A client's."""

    loop: LaunchLoop
    client: Client
    place: int
    needs: dict[int, int] = field(default_factory=dict)
    """Bytes of workspace by binding, of those that need any."""
    workspace: Buffer | None = None


class _Noted:
    """A program that says when it runs, for connections whose launches are waited for."""

    def __init__(self, program: Program, number: int, places: memoryview, place: int) -> None:
        self.weight = program.weight
        self._run = program.run
        self._number = number
        self._places = places
        self._place = 2 * place

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        self._places[self._place] = self._number
        times = self._run(addresses, workspace, repeat)
        self._places[self._place] = 0
        return times


class Hosted:
    """Methods ``do_...`` are what a server may call, with the arguments of the message and its descriptors."""

    def __init__(
        self,
        device: Device,
        area: Area,
        ended: Callable[[int], None],
        lost: Callable[[DeviceLostError], None],
        traced: Callable[[int, bytes, PacketTimes], None],
    ) -> None:
        """``ended`` is told of client connections that are over, ``lost`` of the end of the device, ``traced`` of
        packets of a connection that its client wants traced."""
        self.device = device
        self.programs: dict[int, Program] = {}
        self.buffers: dict[int, Buffer] = {}
        self.clients = Clients()
        self._area = area
        self._places = area.places()
        self._ended = ended
        self._lost = lost
        self._traced = traced
        self._modules: dict[int, Module] = {}
        self._functions: dict[int, int] = {}
        self._streams: dict[int, LaunchStream] = {}
        self._connections: dict[int, _Connection] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """Abilities of the device."""
        device = self.device
        return {
            "lanes": device.lanes if isinstance(device, ProgramDevice) else 1,
            "uuid": device.uuid if isinstance(device, SharingDevice) else "",
            "shared_granule": device.shared_granule if isinstance(device, GranularDevice) else 1,
        }

    def call(self, method: str, arguments: dict[str, Any], fds: list[int]) -> Reply:
        """Raises what the device raises."""
        do: Callable[..., Reply] | None = getattr(self, f"do_{method}", None)
        if do is None:
            raise ValueError(f"a device's process has no method {method}")
        return do(fds=fds, **arguments) if method in _WITH_DESCRIPTORS else do(**arguments)

    # Memory

    def do_allocate(self, nbytes: int) -> Reply:
        return self._keep(self.device.allocate(nbytes))

    def do_allocate_shared(self, nbytes: int) -> Reply:
        return self._keep(self._sharing().allocate_shared(nbytes))

    def do_free(self, buffer: int) -> Reply:
        self.device.free(self._take(buffer))
        return _NOTHING

    def do_import(self, fds: list[int], **handle: Any) -> Reply:
        return self._keep(self._sharing().import_memory(handle_from(handle, fds)))

    def do_release(self, buffer: int) -> Reply:
        self._sharing().release_memory(self._take(buffer))
        return _NOTHING

    def do_export(self, buffer: int) -> Reply:
        handle = self._sharing().export_memory(self.buffer(buffer))
        return handle_record(handle), handle.descriptors

    def buffer(self, number: int) -> Buffer:
        """Raises ``DeviceError`` for one that was freed."""
        buffer = self.buffers.get(number)
        if buffer is None:
            raise not_a_buffer()
        return buffer

    def _keep(self, buffer: Buffer) -> Reply:
        number = next(self._ids)
        self.buffers[number] = buffer
        return {"buffer": number, "address": buffer.address, "nbytes": buffer.nbytes}, ()

    def _take(self, number: int) -> Buffer:
        with self._lock:
            buffer = self.buffer(number)
            del self.buffers[number]
            return buffer

    def _sharing(self) -> SharingDevice:
        if not isinstance(self.device, SharingDevice):
            raise UnsupportedError(
                "this device cannot map memory of other processes",
                field="device",
                value=self.device.info.id,
                rule="memory_sharing",
                fix="use shared memory of the host, or resident buffers",
            )
        return self.device

    # Code

    def do_load(self, binary: str) -> Reply:
        module = self.device.load(Path(binary))
        number = next(self._ids)
        self._modules[number] = module
        return {"module": number}, ()

    def do_function(self, module: int, symbol: str) -> Reply:
        handle = self._modules[module].function(symbol)
        number = next(self._ids)
        self._functions[number] = handle
        return {"function": number}, ()

    def do_unload(self, module: int, functions: Sequence[int]) -> Reply:
        loaded = self._modules.pop(module, None)
        for number in functions:
            self._functions.pop(number, None)
        if loaded is not None:
            loaded.unload()
        return _NOTHING

    def do_program(self, stages: Sequence[Any], operands: Sequence[str], counter_bytes: int) -> Reply:
        made = [
            type(stage)(self._function(stage.function), stage.args, stage.geometry) for stage in stages_from(stages)
        ]
        if isinstance(self.device, ProgramDevice):
            program = self.device.program(made, operands, counter_bytes=counter_bytes)
        else:
            program = DeviceProgram(self.device, made, operands, counter_bytes=counter_bytes)
        number = next(self._ids)
        self.programs[number] = program
        return {"program": number, "weight": program.weight}, ()

    def drop(self, number: int) -> None:
        """Nobody uses that program any more."""
        program = self.programs.pop(number, None)
        close = getattr(program, "close", None)  # those that hold memory of the device have one
        if close is not None:
            close()

    def do_run(self, launches: Sequence[Any], stream: int) -> Reply:
        made = [
            Launch(self._function(function), memoryview(base64.b64decode(args)), geometry_from(geometry))
            for function, args, geometry in launches
        ]
        return {"times": self.device.run(made, stream)}, ()

    def _function(self, number: int) -> int:
        handle = self._functions.get(number)
        if handle is None:
            raise unloaded()
        return handle

    # Streams of the server's own

    def do_open_stream(self) -> Reply:
        number = next(self._ids)
        stream = self._streams[number] = self._stream()
        return {"stream": number, "gives_back_later": stream.gives_back_later}, ()

    def do_open_event(self, stream: int, slot: int, handle: str) -> Reply:
        opened = self._streams[stream].open_event(slot, base64.b64decode(handle))
        return {"handle": base64.b64encode(opened).decode()}, ()

    def do_launch(
        self, stream: int, program: int, addresses: Sequence[int], flags: int, slot: int, workspace: int
    ) -> Reply:
        launch = self._streams[stream].launch
        return {"device_ns": launch(self.programs[program], tuple(addresses), flags, slot, workspace)}, ()

    def do_synchronize(self, stream: int) -> Reply:
        self._streams[stream].synchronize()
        return _NOTHING

    def do_close_stream(self, stream: int) -> Reply:
        opened = self._streams.pop(stream, None)
        if opened is not None:
            opened.close()
        return _NOTHING

    def _stream(self) -> LaunchStream:
        return self.device.open_stream() if isinstance(self.device, StreamDevice) else SynchronousStream()

    # Connections of clients

    def do_attach(self, fds: list[int], connection: int) -> Reply:
        with ExitStack() as undo:
            accepted = socket.socket(fileno=fds.pop(0))
            undo.callback(accepted.close)
            accepted.setblocking(True)
            peer = Peer(accepted)
            undo.callback(peer.close)
            stream = self._stream()
            undo.callback(stream.close)
            client = self.clients.begin(stream, peer)
            undo.callback(self.clients.end, client)
            place = self._area.take_place()
            undo.callback(self._area.give_place_back, place)
            note = None if isinstance(stream, SynchronousStream) else self._places[2 * place : 2 * place + 2]
            traced = partial(self._traced, connection)
            loop = LaunchLoop(accepted, stream, note=note, lost=self._lost, traced=traced, **self._refusals(accepted))
            self._connections[connection] = _Connection(loop, client, place)
            undo.callback(self._connections.pop, connection)
            threading.Thread(target=self._serve, args=(connection,), name=f"client {connection}", daemon=True).start()
            undo.pop_all()  # it is the thread's now
        return _NOTHING

    def _refusals(self, connection: socket.socket) -> dict[str, Callable[[], str]]:
        """Why a client's stream cannot be tied by events or signals, asked when it wants them."""
        device = self.device
        found: dict[str, Callable[[], str]] = {}
        if isinstance(device, TiedDevice):
            found["events"] = partial(device.event_refusal, shares_names(connection))
            found["signals"] = device.signal_refusal
        return found

    def _serve(self, number: int) -> None:
        connection = self._connections[number]
        with ExitStack() as end:  # all of it, whatever goes wrong
            end.callback(self._ended, number)
            end.callback(self._free_workspace, connection)
            end.callback(self._area.give_place_back, connection.place)
            end.callback(self._connections.pop, number)
            end.callback(self.clients.end, connection.client)
            connection.loop.serve()

    def _free_workspace(self, connection: _Connection) -> None:
        """Nothing of the connection needs it any more."""
        with connection.loop.lock:
            have, connection.workspace, connection.loop.workspace = connection.workspace, None, 0
        try:
            if have is not None:
                self.device.free(have)
        except DeviceLostError as error:
            self._lost(error)

    def do_bind(
        self, connection: int, binding: int, program: int, addresses: Sequence[int], workspace_bytes: int
    ) -> Reply:
        known = self._connections.get(connection)
        if known is None:
            raise NotFoundError(
                "the connection has ended", field="connection", rule="connection_id", fix="open another connection"
            )
        made = self.programs[program]
        if known.loop.is_synchronous:
            made = _Noted(made, program, self._places, known.place)
        with known.loop.lock:
            known.loop.require_open()
            if workspace_bytes:
                self._grow(known, workspace_bytes)
                known.needs[binding] = workspace_bytes
            known.loop.bind(binding, made, addresses, program)
        return _NOTHING

    def _grow(self, connection: _Connection, nbytes: int) -> None:
        """One workspace for all of a connection's launches, since they run one after the other. How large it may become
        is the server's business. Lock held."""
        have = connection.workspace
        if nbytes <= (have.nbytes if have is not None else 0):
            return
        fresh = self.device.allocate(nbytes)
        connection.loop.settle()
        connection.workspace, connection.loop.workspace = fresh, fresh.address
        if have is not None:
            self.device.free(have)

    def do_unbind(self, connection: int, binding: int) -> Reply:
        known = self._connections.get(connection)
        if known is not None:
            with known.loop.lock:
                known.loop.unbind(binding)
                if known.needs.pop(binding, 0) and not known.needs:
                    self._free_workspace(known)
        return _NOTHING

    def poll_traces(self) -> None:
        """Tell of traced packets that have ended."""
        for known in tuple(self._connections.values()):
            known.loop.poll_traces()

    def do_counters(self) -> Reply:
        device = self.device
        return {"counters": dict(device.counters()) if isinstance(device, CountingDevice) else {}}, ()

    def do_detach(self, connection: int) -> Reply:
        known = self._connections.get(connection)
        if known is not None:
            known.loop.hang_up()
        return _NOTHING

    def do_close(self) -> Reply:
        self.device.close()
        return _NOTHING


_WITH_DESCRIPTORS = frozenset({"import", "attach"})
