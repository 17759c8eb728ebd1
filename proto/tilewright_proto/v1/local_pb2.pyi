from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenLaunchPageRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class OpenLaunchPageReply(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    def __init__(self, records: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("server_version", "packet_bytes", "launches", "traces", "requests")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PACKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    packet_bytes: int
    launches: int
    traces: bool
    requests: bool
    def __init__(self, server_version: _Optional[str] = ..., packet_bytes: _Optional[int] = ..., launches: _Optional[int] = ..., traces: bool = ..., requests: bool = ...) -> None: ...
