"""Places of arrays in the shared memory of a session: addresses, and regions that the server knows."""

from __future__ import annotations

import os

from tilewright.session.regions import Segment
from tilewright.session.state import Core, Session
from tilewright.transport import rpc
from tilewright.transport.rpc import Flow, Rpc
from tilewright_proto.v1 import memory_pb2

__all__ = ["region_of"]


def region_of(core: Core, session: Session, segment: Segment) -> Flow[int]:
    """The server's id of a segment, registering it on first use."""
    known = segment.regions.get(session)
    if known is not None:
        return known
    request = memory_pb2.RegisterRegionRequest(session=session.token, bytes=segment.size)
    if session.control is not None:
        # The descriptor itself: no process table between us, so this works across containers.
        request.attached.SetInParent()
        reply = yield Rpc(rpc.REGISTER, request, core.timeout, local=True, fds=(segment.fd,))
    else:
        request.memfd.CopyFrom(memory_pb2.MemfdSource(pid=os.getpid(), fd=segment.fd, name=segment.name))
        reply = yield Rpc(rpc.REGISTER, request, core.timeout)
    region = int(reply.region)
    winner = segment.regions.setdefault(session, region)
    if winner != region:  # another thread was first
        core.release_region(session, region)
    return winner
