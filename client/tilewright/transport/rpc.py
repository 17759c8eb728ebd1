"""Requests of the client to the network, as values.

A *flow* is a generator that yields steps (``Rpc``, ``Work`` and others), receives their replies (or has their error
thrown into it) and returns a result. All logic is flows; the blocking and the asyncio client differ only in how they
drive one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from tilewright.transport import frames
from tilewright_proto.v1 import dispatch_pb2, kernels_pb2, local_pb2, memory_pb2

__all__ = [
    "EXECUTE_STREAM",
    "MISSED",
    "OPEN_SESSION",
    "Flow",
    "Method",
    "Renew",
    "Rpc",
    "Settled",
    "Step",
    "Wait",
    "Work",
]

T = TypeVar("T")


class Method(NamedTuple):
    """A unary call (or, if ``streams``, one with a stream of replies), and how its reply is parsed."""

    path: str
    parse: Callable[[bytes], Any]
    streams: bool = False
    number: int = 0
    """Kind of the same call over the local socket."""
    effect: bool = False
    """True if it shows whether the call was made twice, other than by what ends with the session."""


class Rpc(NamedTuple):
    """One call to make. ``on_event`` sees every message of a streamed reply; the flow receives their list."""

    method: Method
    request: Message | bytes
    timeout: float | None = None
    on_event: Callable[[Any], object] | None = None
    local: bool = False
    """True if to call over the local socket, which must be there."""
    fds: tuple[int, ...] = ()
    """Descriptors that travel along, over the local socket."""


class Work(NamedTuple):
    """Something to do that may wait a while, but not for gRPC: the flow receives what it returns."""

    function: Callable[[], Any]
    effect: bool = False
    """As a method's."""


class Settled(NamedTuple):
    """A call of which all but the work of the server is done: its flow is left to be driven."""

    flow: Callable[[], Flow[Any]]


class Wait(NamedTuple):
    """Time to let pass."""

    seconds: float


class Renew(NamedTuple):
    """Take the client's session as it is now; if it is over, open another, for ``seconds`` at the most."""

    seconds: float


MISSED: Any = object()
"""Stands for a result that could not be had in a short way."""

Step = Rpc | Work | Wait | Renew
Flow = Generator[Step, Any, T]

_D, _M, _K = "/tilewright.v1.Dispatch/", "/tilewright.v1.Memory/", "/tilewright.v1.Kernels/"

RUN = Method(_D + "Run", dispatch_pb2.RunReply.FromString, effect=True)
PLAN = Method(_D + "Plan", dispatch_pb2.PlanReply.FromString)
FETCH_OBJECT = Method(_D + "FetchObject", dispatch_pb2.FetchObjectReply.FromString, number=frames.FETCH_OBJECT)
OPEN_LAUNCH_PAGE = Method("", local_pb2.OpenLaunchPageReply.FromString, number=frames.OPEN_LAUNCH_PAGE)
"""Over the local socket only."""
RELEASE_PLAN = Method(_D + "ReleasePlan", dispatch_pb2.ReleasePlanReply.FromString)
EXECUTE = Method(_D + "Execute", dispatch_pb2.ExecuteReply.FromString, effect=True)
EXECUTE_STREAM = _D + "ExecuteStream"
OPEN_SESSION = _M + "OpenSession"
BIND = Method(_D + "Bind", dispatch_pb2.BindReply.FromString, number=frames.BIND)
UNBIND = Method(_D + "Unbind", dispatch_pb2.UnbindReply.FromString)
REGISTER = Method(_M + "RegisterRegion", memory_pb2.RegisterRegionReply.FromString, number=frames.REGISTER_REGION)
UNREGISTER = Method(_M + "UnregisterRegion", memory_pb2.UnregisterRegionReply.FromString)
STATUS = Method(_M + "Status", memory_pb2.StatusReply.FromString)
CREATE_BUFFER = Method(_M + "CreateBuffer", memory_pb2.CreateBufferReply.FromString)
WRITE_BUFFER = Method(_M + "WriteBuffer", memory_pb2.WriteBufferReply.FromString)
READ_BUFFER = Method(_M + "ReadBuffer", memory_pb2.ReadBufferReply.FromString)
EXPORT_BUFFER = Method(_M + "ExportBuffer", memory_pb2.ExportBufferReply.FromString, number=frames.EXPORT_BUFFER)
FREE_BUFFER = Method(_M + "FreeBuffer", memory_pb2.FreeBufferReply.FromString)
LIST = Method(_K + "List", kernels_pb2.ListKernelsReply.FromString)
DESCRIBE = Method(_K + "Describe", kernels_pb2.DescribeKernelReply.FromString)
VALIDATE = Method(_K + "Validate", kernels_pb2.ValidateConfigReply.FromString)
CORRECT = Method(_K + "Correct", kernels_pb2.CorrectConfigReply.FromString)
BUILD = Method(_K + "Build", kernels_pb2.BuildEvent.FromString, streams=True)
EXPLAIN = Method(_K + "Explain", kernels_pb2.ExplainReply.FromString)
EXPORT = Method(_K + "Export", kernels_pb2.ExportReply.FromString)
REGISTER_KERNEL = Method(_K + "Register", kernels_pb2.RegisterKernelReply.FromString)
UNREGISTER_KERNEL = Method(_K + "Unregister", kernels_pb2.UnregisterKernelReply.FromString)
STATISTICS = Method(_K + "Statistics", kernels_pb2.StatisticsReply.FromString)
