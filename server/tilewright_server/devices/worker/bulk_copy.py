"""Copies between the server and the memory of a device in a worker, through the shared staging area."""

from __future__ import annotations

from contextlib import ExitStack

from tilewright_server.devices.errors import check_copy
from tilewright_server.devices.worker.exchange.channel import COPY, Op
from tilewright_server.devices.worker.exchange.shared_area import SLOT_BYTES
from tilewright_server.devices.worker.process import WorkerProcess
from tilewright_server.protocol.frames import HEADER

__all__ = ["copy"]

_HALF = SLOT_BYTES // 2


def copy(op: Op, life: WorkerProcess, number: int, size: int, offset: int, data: memoryview) -> None:
    """Copy ``data`` to (``Op.WRITE``) or from (``Op.READ``) a buffer of ``size`` bytes, from ``offset`` on.

    Raises ``InvalidArgumentError`` for a range outside the buffer, ``DeviceLostError``, and what the device raises.
    """
    check_copy(offset, data.nbytes, size)
    if life.lost:
        raise life.stale("the buffer")
    plain = data.cast("B") if data.ndim != 1 or data.format != "B" else data
    move = _at_once if len(plain) <= _HALF else _in_parts
    try:
        move(op, life, number, offset, plain)
    except ValueError as error:  # the area was closed under the copy
        if not life.lost:
            raise
        raise life.gone() from error


def _at_once(op: Op, life: WorkerProcess, number: int, offset: int, data: memoryview) -> None:
    """Through the connection's slot, at once."""
    nbytes = len(data)
    if not nbytes:
        return
    channel = life.take()
    try:
        room = life.area.slot(channel.slot, 0, nbytes)
        try:
            if op is Op.WRITE:
                room[:] = data
            life.ask(channel, HEADER.pack(op, 0, 0, 0, number) + COPY.pack(offset, 0, nbytes))
            if op is Op.READ:
                data[:] = room
        finally:
            life.area.take_back(room)
    finally:
        life.give_back(channel)


def _in_parts(op: Op, life: WorkerProcess, number: int, offset: int, data: memoryview) -> None:
    """In halves of the slot: while the worker copies one, the other is filled or emptied."""
    with life.channel() as channel, ExitStack() as rooms:
        under_way: tuple[memoryview, memoryview] | None = None
        for index, at in enumerate(range(0, len(data), _HALF)):
            part = data[at : at + _HALF]
            start = index % 2 * _HALF
            room = life.area.slot(channel.slot, start, len(part))
            rooms.callback(life.area.take_back, room)
            if op is Op.WRITE:
                room[:] = part
            if under_way is not None:
                life.reply(channel)
            channel.send(op, value=number, payload=COPY.pack(offset + at, start, len(part)))
            if op is Op.READ and under_way is not None:
                under_way[0][:] = under_way[1]
            under_way = (part, room)
        if under_way is not None:
            life.reply(channel)
            if op is Op.READ:
                under_way[0][:] = under_way[1]
