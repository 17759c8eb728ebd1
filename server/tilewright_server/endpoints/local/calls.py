"""Calls over the local socket: the same messages as gRPC's, with descriptors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_proto.v1 import dispatch_pb2, local_pb2, memory_pb2
from tilewright_server.endpoints.messages.regions import exported, region_reply, region_source
from tilewright_server.endpoints.rpc.services.dispatch import bind
from tilewright_server.endpoints.rpc.transport.method_handlers import parse_as
from tilewright_server.memory.errors import unknown_session
from tilewright_server.protocol.sealed_file import sealed_file
from tilewright_server.session.launch_page import RECORDS

if TYPE_CHECKING:
    from tilewright_server.service import Service
    from tilewright_server.session.session import Session

__all__ = ["Answer", "Calls"]

END_WAIT_S = 30.0
"""How long ``Unbind`` and ``UnregisterRegion`` wait for work in flight."""


class Answer(NamedTuple):
    """A reply; ``descriptor`` is closed when it has been sent."""

    value: int
    message: Any
    descriptor: int = -1


class Calls:
    """Methods that one connection may call. What it makes ends with ``owner``."""

    def __init__(self, service: Service, session: Session, owner: object) -> None:
        self._service = service
        self._session = session
        self._owner = owner
        self._methods: dict[int, tuple[Any, Callable[[Any, Sequence[int]], Answer]]] = {
            1: (memory_pb2.RegisterRegionRequest, self._register),
            2: (dispatch_pb2.BindRequest, self._bind),
            3: (dispatch_pb2.UnbindRequest, self._unbind),
            4: (memory_pb2.ExportBufferRequest, self._export),
            5: (memory_pb2.UnregisterRegionRequest, self._unregister),
            6: (dispatch_pb2.FetchObjectRequest, self._fetch_object),
            7: (local_pb2.OpenLaunchPageRequest, self._open_launch_page),
        }

    def name(self, method: int) -> str:
        """Name of a method, for traces."""
        known = self._methods.get(method)
        return known[0].__name__.removesuffix("Request") if known is not None else "unknown"

    def call(self, method: int, payload: bytes, descriptors: Sequence[int]) -> Answer:
        """Serve a call. ``descriptors`` stay the caller's to close. Raises what the method does."""
        known = self._methods.get(method)
        if known is None:
            raise InvalidArgumentError(
                "there is no such method",
                field="value",
                value=method,
                rule="local_method",
                fix=f"use 1 to {len(self._methods)}, see local.proto",
            )
        kind, serve = known
        request = parse_as(kind, payload)
        if request.session and request.session != self._session.token:
            raise unknown_session()
        if descriptors and method != 1:
            raise InvalidArgumentError(
                "a descriptor came with a call that takes none",
                field="packet",
                rule="packet_descriptors",
                fix="send descriptors with RegisterRegion only",
            )
        return serve(request, descriptors)

    def _register(self, request: memory_pb2.RegisterRegionRequest, descriptors: Sequence[int]) -> Answer:
        source = region_source(request, descriptors)
        region = self._service.register(self._session, source, request.bytes, self._owner)
        return Answer(region.id, region_reply(region))

    def _bind(self, request: dispatch_pb2.BindRequest, _: Sequence[int]) -> Answer:
        reply = bind(self._service, self._session, request, self._owner)
        return Answer(reply.binding, reply)

    def _unbind(self, request: dispatch_pb2.UnbindRequest, _: Sequence[int]) -> Answer:
        self._session.unbind(request.binding, time.monotonic() + END_WAIT_S)
        return Answer(0, dispatch_pb2.UnbindReply())

    def _export(self, request: memory_pb2.ExportBufferRequest, _: Sequence[int]) -> Answer:
        buffer, handle = self._service.export_buffer(self._session, request.buffer)
        try:
            return Answer(0, exported(buffer, handle), handle.fd)
        except BaseException:
            if handle.fd >= 0:
                os.close(handle.fd)
            raise

    def _fetch_object(self, request: dispatch_pb2.FetchObjectRequest, _: Sequence[int]) -> Answer:
        """The whole object, whatever the offset."""
        found = self._service.code_object(self._session, request.plan, request.sha256)
        descriptor = sealed_file("tw-object", found.read())
        return Answer(found.nbytes, dispatch_pb2.FetchObjectReply(bytes=found.nbytes), descriptor)

    def _open_launch_page(self, _: local_pb2.OpenLaunchPageRequest, __: Sequence[int]) -> Answer:
        page = self._service.launch_page(self._session)
        try:
            descriptor = page.descriptor()
        except OSError as error:  # the session has just ended, or there is none left
            raise unknown_session() from error
        return Answer(page.nbytes, local_pb2.OpenLaunchPageReply(records=RECORDS), descriptor)

    def _unregister(self, request: memory_pb2.UnregisterRegionRequest, _: Sequence[int]) -> Answer:
        self._session.unregister(request.region, time.monotonic() + END_WAIT_S)
        return Answer(0, memory_pb2.UnregisterRegionReply())
