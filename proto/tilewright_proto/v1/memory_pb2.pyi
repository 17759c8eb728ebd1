from tilewright_proto.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("client_name",)
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    def __init__(self, client_name: _Optional[str] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("opened", "closing")
    class Opened(_message.Message):
        __slots__ = ("session", "server_version", "inline_limit", "shared_memory", "device", "message_limit", "operations")
        SESSION_FIELD_NUMBER: _ClassVar[int]
        SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
        INLINE_LIMIT_FIELD_NUMBER: _ClassVar[int]
        SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_LIMIT_FIELD_NUMBER: _ClassVar[int]
        OPERATIONS_FIELD_NUMBER: _ClassVar[int]
        session: bytes
        server_version: str
        inline_limit: int
        shared_memory: bool
        device: str
        message_limit: int
        operations: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, session: _Optional[bytes] = ..., server_version: _Optional[str] = ..., inline_limit: _Optional[int] = ..., shared_memory: bool = ..., device: _Optional[str] = ..., message_limit: _Optional[int] = ..., operations: _Optional[_Iterable[str]] = ...) -> None: ...
    class Closing(_message.Message):
        __slots__ = ("reason",)
        REASON_FIELD_NUMBER: _ClassVar[int]
        reason: str
        def __init__(self, reason: _Optional[str] = ...) -> None: ...
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    opened: SessionEvent.Opened
    closing: SessionEvent.Closing
    def __init__(self, opened: _Optional[_Union[SessionEvent.Opened, _Mapping]] = ..., closing: _Optional[_Union[SessionEvent.Closing, _Mapping]] = ...) -> None: ...

class MemfdSource(_message.Message):
    __slots__ = ("pid", "fd", "name")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    name: str
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class PosixSource(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("session", "memfd", "posix", "bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MEMFD_FIELD_NUMBER: _ClassVar[int]
    POSIX_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    memfd: MemfdSource
    posix: PosixSource
    bytes: int
    def __init__(self, session: _Optional[bytes] = ..., memfd: _Optional[_Union[MemfdSource, _Mapping]] = ..., posix: _Optional[_Union[PosixSource, _Mapping]] = ..., bytes: _Optional[int] = ...) -> None: ...

class RegisterRegionReply(_message.Message):
    __slots__ = ("region", "zero_copy")
    REGION_FIELD_NUMBER: _ClassVar[int]
    ZERO_COPY_FIELD_NUMBER: _ClassVar[int]
    region: int
    zero_copy: bool
    def __init__(self, region: _Optional[int] = ..., zero_copy: bool = ...) -> None: ...

class UnregisterRegionRequest(_message.Message):
    __slots__ = ("session", "region")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    region: int
    def __init__(self, session: _Optional[bytes] = ..., region: _Optional[int] = ...) -> None: ...

class UnregisterRegionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("regions", "buffers", "plans")
    class Region(_message.Message):
        __slots__ = ("region", "bytes", "zero_copy", "in_use")
        REGION_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        ZERO_COPY_FIELD_NUMBER: _ClassVar[int]
        IN_USE_FIELD_NUMBER: _ClassVar[int]
        region: int
        bytes: int
        zero_copy: bool
        in_use: int
        def __init__(self, region: _Optional[int] = ..., bytes: _Optional[int] = ..., zero_copy: bool = ..., in_use: _Optional[int] = ...) -> None: ...
    class Buffer(_message.Message):
        __slots__ = ("buffer", "bytes", "device", "in_use")
        BUFFER_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        IN_USE_FIELD_NUMBER: _ClassVar[int]
        buffer: int
        bytes: int
        device: str
        in_use: int
        def __init__(self, buffer: _Optional[int] = ..., bytes: _Optional[int] = ..., device: _Optional[str] = ..., in_use: _Optional[int] = ...) -> None: ...
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[StatusReply.Region]
    buffers: _containers.RepeatedCompositeFieldContainer[StatusReply.Buffer]
    plans: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, regions: _Optional[_Iterable[_Union[StatusReply.Region, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[StatusReply.Buffer, _Mapping]]] = ..., plans: _Optional[_Iterable[int]] = ...) -> None: ...

class CreateBufferRequest(_message.Message):
    __slots__ = ("session", "bytes", "device")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    bytes: int
    device: str
    def __init__(self, session: _Optional[bytes] = ..., bytes: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class CreateBufferReply(_message.Message):
    __slots__ = ("buffer",)
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    buffer: int
    def __init__(self, buffer: _Optional[int] = ...) -> None: ...

class WriteBufferRequest(_message.Message):
    __slots__ = ("session", "buffer", "offset", "data", "region", "bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    buffer: int
    offset: int
    data: bytes
    region: _tensor_pb2.RegionSlice
    bytes: int
    def __init__(self, session: _Optional[bytes] = ..., buffer: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., region: _Optional[_Union[_tensor_pb2.RegionSlice, _Mapping]] = ..., bytes: _Optional[int] = ...) -> None: ...

class WriteBufferReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadBufferRequest(_message.Message):
    __slots__ = ("session", "buffer", "offset", "bytes", "region")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    buffer: int
    offset: int
    bytes: int
    region: _tensor_pb2.RegionSlice
    def __init__(self, session: _Optional[bytes] = ..., buffer: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., region: _Optional[_Union[_tensor_pb2.RegionSlice, _Mapping]] = ...) -> None: ...

class ReadBufferReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FreeBufferRequest(_message.Message):
    __slots__ = ("session", "buffer")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    buffer: int
    def __init__(self, session: _Optional[bytes] = ..., buffer: _Optional[int] = ...) -> None: ...

class FreeBufferReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
