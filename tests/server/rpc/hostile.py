"""Requests that are right in structure and wrong in everything else, and what may be answered to them."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from rpc_harness import Client, detail_of

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in (dp, mp, kp)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
CODES = {
    "invalid_argument",
    "config_invalid",
    "unsupported",
    "not_found",
    "permission_denied",
    "resource_exhausted",
    "deadline_exceeded",
    "cancelled",
    "unavailable",
}
"""What a hostile request may get: anything but an internal error."""

SIGNED = [0, 1, -1, 2, 8, 63, 64, 2**31 - 1, -(2**31), 2**48, 2**62, 2**63 - 1, -(2**63)]
UNSIGNED = [0, 1, 2, 8, 63, 64, 4096, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1]
TEXTS = ["", "copy", "gemm", "x", "y", "a", "b", "out", "d[0]", "cpu:0"]
TEXTS += ["a" * 300, "\0", "\n", "é", "../../etc/passwd", "%s%n"]
KIND = FieldDescriptor


class Known:
    """Ids and tokens that exist, so that hostile requests get past the first check."""

    token = b""
    region = 0
    plan = 0
    buffer = 0
    binding = 0


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name == "session":
        return st.sampled_from(["token"] * 8 + ["", "none", "long"])
    if field.name in ("region", "plan", "buffer", "binding") and field.type == KIND.TYPE_FIXED64:
        return st.sampled_from(["known"] * 4 + UNSIGNED)  # type: ignore[operator]
    if field.name == "repeat":
        return st.sampled_from([0, 1, 3, 2**32 - 1])
    if field.cpp_type in (KIND.CPPTYPE_INT32, KIND.CPPTYPE_ENUM):
        return st.sampled_from([number for number in SIGNED if -(2**31) <= number < 2**31])
    if field.cpp_type == KIND.CPPTYPE_INT64:
        return st.sampled_from(SIGNED)
    if field.cpp_type == KIND.CPPTYPE_UINT32:
        return st.sampled_from([number for number in UNSIGNED if number < 2**32])
    if field.cpp_type == KIND.CPPTYPE_UINT64:
        return st.sampled_from(UNSIGNED)
    if field.cpp_type == KIND.CPPTYPE_DOUBLE:
        return st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e308])
    if field.cpp_type == KIND.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == KIND.TYPE_BYTES:
        return st.sampled_from([b"", b"\0" * 64, b"x" * 63, bytes(4096)])
    return st.sampled_from(TEXTS)


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return st.deferred(lambda: messages(field.message_type, depth + 1))
    return scalars(field)


def messages(descriptor: Any, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """A tree of fields; each may be missing. Deep parts are left out."""
    if depth > 5:
        return st.just({})
    optional = {}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            optional[field.name] = st.dictionaries(st.sampled_from(TEXTS), values(value, depth), max_size=2)
        elif field.is_repeated:
            optional[field.name] = st.lists(values(field, depth), max_size=3)
        else:
            optional[field.name] = values(field, depth)
    return st.fixed_dictionaries({}, optional=optional)


def fill(message: Message, tree: dict[str, Any]) -> Message:
    """Build the message; where a tree sets several members of a oneof, the last wins."""
    for name, value in tree.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        target = getattr(message, name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key, item in value.items():
                if isinstance(item, dict):
                    fill(target[key], item)
                else:
                    target[key] = item
        elif field.is_repeated:
            for item in value:
                if field.message_type is not None:
                    fill(target.add(), item)
                else:
                    target.append(_resolved(name, item))
        elif field.message_type is not None:
            target.SetInParent()
            fill(target, value)
        else:
            setattr(message, name, _resolved(name, value))
    return message


def _resolved(name: str, value: Any) -> Any:
    if name == "session":
        return {"token": Known.token, "": b"", "none": b"0" * 16, "long": b"0" * 1000}[value]
    return getattr(Known, name) if value == "known" else value


def request_of(path: str, tree: dict[str, Any]) -> bytes:
    """The bytes of the method's request."""
    kind = message_factory.GetMessageClass(METHODS[path].input_type)
    return fill(kind(), tree).SerializeToString()


def send(client: Client, path: str, requests: list[bytes]) -> list[bytes]:
    """Raw bytes to a method; returns the raw replies. Errors must be typed and not internal."""
    method = METHODS[path]
    channel = client.channel
    timeout = 5.0
    try:
        if method.client_streaming:
            return list(channel.stream_stream(path)(iter(requests), timeout=timeout))
        if method.server_streaming:
            stream = channel.unary_stream(path)(requests[0], timeout=timeout)
            if method.name == "OpenSession":
                first = next(stream)
                stream.cancel()
                return [first]
            return list(stream)
        return [channel.unary_unary(path)(requests[0], timeout=timeout)]
    except grpc.RpcError as error:
        detail = detail_of(error)
        assert detail.code in CODES, detail
        assert detail.message
        assert not any(path in detail.message for path in ("/proc", "/dev/shm", "/tmp")), detail
        return []


def check_results(replies: list[bytes]) -> None:
    for reply in replies:
        for result in dp.ExecuteReply.FromString(reply).results:
            assert not result.HasField("error") or result.error.code in CODES, result.error
