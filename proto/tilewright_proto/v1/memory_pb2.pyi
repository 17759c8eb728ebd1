from tilewright_proto.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
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

class DeviceSummary(_message.Message):
    __slots__ = ("id", "kind", "name", "uuid", "arch")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    name: str
    uuid: str
    arch: str
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., uuid: _Optional[str] = ..., arch: _Optional[str] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("opened", "closing", "choices")
    class Opened(_message.Message):
        __slots__ = ("session", "server_version", "inline_limit", "shared_memory", "device", "message_limit", "operations", "local_socket", "devices", "mps_pipe_directory")
        SESSION_FIELD_NUMBER: _ClassVar[int]
        SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
        INLINE_LIMIT_FIELD_NUMBER: _ClassVar[int]
        SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_LIMIT_FIELD_NUMBER: _ClassVar[int]
        OPERATIONS_FIELD_NUMBER: _ClassVar[int]
        LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
        DEVICES_FIELD_NUMBER: _ClassVar[int]
        MPS_PIPE_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
        session: bytes
        server_version: str
        inline_limit: int
        shared_memory: bool
        device: str
        message_limit: int
        operations: _containers.RepeatedScalarFieldContainer[str]
        local_socket: str
        devices: _containers.RepeatedCompositeFieldContainer[DeviceSummary]
        mps_pipe_directory: str
        def __init__(self, session: _Optional[bytes] = ..., server_version: _Optional[str] = ..., inline_limit: _Optional[int] = ..., shared_memory: bool = ..., device: _Optional[str] = ..., message_limit: _Optional[int] = ..., operations: _Optional[_Iterable[str]] = ..., local_socket: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceSummary, _Mapping]]] = ..., mps_pipe_directory: _Optional[str] = ...) -> None: ...
    class Closing(_message.Message):
        __slots__ = ("reason",)
        REASON_FIELD_NUMBER: _ClassVar[int]
        reason: str
        def __init__(self, reason: _Optional[str] = ...) -> None: ...
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    opened: SessionEvent.Opened
    closing: SessionEvent.Closing
    choices: int
    def __init__(self, opened: _Optional[_Union[SessionEvent.Opened, _Mapping]] = ..., closing: _Optional[_Union[SessionEvent.Closing, _Mapping]] = ..., choices: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("name", "unlink")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNLINK_FIELD_NUMBER: _ClassVar[int]
    name: str
    unlink: bool
    def __init__(self, name: _Optional[str] = ..., unlink: bool = ...) -> None: ...

class AttachedFileSource(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GpuIpcSource(_message.Message):
    __slots__ = ("handle", "offset", "device_uuid", "pid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    device_uuid: str
    pid: int
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., device_uuid: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class GpuPoolSource(_message.Message):
    __slots__ = ("pointer", "offset", "device_uuid")
    POINTER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    pointer: bytes
    offset: int
    device_uuid: str
    def __init__(self, pointer: _Optional[bytes] = ..., offset: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class DeviceFdSource(_message.Message):
    __slots__ = ("offset", "device_uuid", "part_bytes")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    device_uuid: str
    part_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offset: _Optional[int] = ..., device_uuid: _Optional[str] = ..., part_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("session", "memfd", "posix", "attached", "cuda_ipc", "cuda_pool", "device_fd", "hip_ipc", "hip_pool", "bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MEMFD_FIELD_NUMBER: _ClassVar[int]
    POSIX_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    CUDA_POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FD_FIELD_NUMBER: _ClassVar[int]
    HIP_IPC_FIELD_NUMBER: _ClassVar[int]
    HIP_POOL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    memfd: MemfdSource
    posix: PosixSource
    attached: AttachedFileSource
    cuda_ipc: GpuIpcSource
    cuda_pool: GpuPoolSource
    device_fd: DeviceFdSource
    hip_ipc: GpuIpcSource
    hip_pool: GpuPoolSource
    bytes: int
    def __init__(self, session: _Optional[bytes] = ..., memfd: _Optional[_Union[MemfdSource, _Mapping]] = ..., posix: _Optional[_Union[PosixSource, _Mapping]] = ..., attached: _Optional[_Union[AttachedFileSource, _Mapping]] = ..., cuda_ipc: _Optional[_Union[GpuIpcSource, _Mapping]] = ..., cuda_pool: _Optional[_Union[GpuPoolSource, _Mapping]] = ..., device_fd: _Optional[_Union[DeviceFdSource, _Mapping]] = ..., hip_ipc: _Optional[_Union[GpuIpcSource, _Mapping]] = ..., hip_pool: _Optional[_Union[GpuPoolSource, _Mapping]] = ..., bytes: _Optional[int] = ...) -> None: ...

class RegisterRegionReply(_message.Message):
    __slots__ = ("region", "zero_copy", "device")
    REGION_FIELD_NUMBER: _ClassVar[int]
    ZERO_COPY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    region: int
    zero_copy: bool
    device: str
    def __init__(self, region: _Optional[int] = ..., zero_copy: bool = ..., device: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("regions", "buffers", "plans", "bindings")
    class Region(_message.Message):
        __slots__ = ("region", "bytes", "zero_copy", "in_use", "device")
        REGION_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        ZERO_COPY_FIELD_NUMBER: _ClassVar[int]
        IN_USE_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        region: int
        bytes: int
        zero_copy: bool
        in_use: int
        device: str
        def __init__(self, region: _Optional[int] = ..., bytes: _Optional[int] = ..., zero_copy: bool = ..., in_use: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...
    class Buffer(_message.Message):
        __slots__ = ("buffer", "bytes", "device", "in_use", "exported")
        BUFFER_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        IN_USE_FIELD_NUMBER: _ClassVar[int]
        EXPORTED_FIELD_NUMBER: _ClassVar[int]
        buffer: int
        bytes: int
        device: str
        in_use: int
        exported: bool
        def __init__(self, buffer: _Optional[int] = ..., bytes: _Optional[int] = ..., device: _Optional[str] = ..., in_use: _Optional[int] = ..., exported: bool = ...) -> None: ...
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[StatusReply.Region]
    buffers: _containers.RepeatedCompositeFieldContainer[StatusReply.Buffer]
    plans: _containers.RepeatedScalarFieldContainer[int]
    bindings: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, regions: _Optional[_Iterable[_Union[StatusReply.Region, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[StatusReply.Buffer, _Mapping]]] = ..., plans: _Optional[_Iterable[int]] = ..., bindings: _Optional[_Iterable[int]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("principal", "process", "client_name", "priority", "age_ns", "regions", "region_bytes", "buffers", "buffer_bytes", "plans", "bindings", "attached_connections", "calls_waiting", "calls_running", "own")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    CALLS_WAITING_FIELD_NUMBER: _ClassVar[int]
    CALLS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    principal: str
    process: str
    client_name: str
    priority: str
    age_ns: int
    regions: int
    region_bytes: int
    buffers: int
    buffer_bytes: int
    plans: int
    bindings: int
    attached_connections: int
    calls_waiting: int
    calls_running: int
    own: bool
    def __init__(self, principal: _Optional[str] = ..., process: _Optional[str] = ..., client_name: _Optional[str] = ..., priority: _Optional[str] = ..., age_ns: _Optional[int] = ..., regions: _Optional[int] = ..., region_bytes: _Optional[int] = ..., buffers: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., plans: _Optional[int] = ..., bindings: _Optional[int] = ..., attached_connections: _Optional[int] = ..., calls_waiting: _Optional[int] = ..., calls_running: _Optional[int] = ..., own: bool = ...) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("sessions", "total")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    total: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class CreateBufferRequest(_message.Message):
    __slots__ = ("session", "bytes", "device", "exportable")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EXPORTABLE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    bytes: int
    device: str
    exportable: bool
    def __init__(self, session: _Optional[bytes] = ..., bytes: _Optional[int] = ..., device: _Optional[str] = ..., exportable: bool = ...) -> None: ...

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

class ExportBufferRequest(_message.Message):
    __slots__ = ("session", "buffer")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    buffer: int
    def __init__(self, session: _Optional[bytes] = ..., buffer: _Optional[int] = ...) -> None: ...

class ExportBufferReply(_message.Message):
    __slots__ = ("kind", "handle", "offset", "bytes", "device", "device_uuid")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ExportBufferReply.Kind]
        CUDA_IPC: _ClassVar[ExportBufferReply.Kind]
        FILE_DESCRIPTOR: _ClassVar[ExportBufferReply.Kind]
        HIP_IPC: _ClassVar[ExportBufferReply.Kind]
    KIND_UNSPECIFIED: ExportBufferReply.Kind
    CUDA_IPC: ExportBufferReply.Kind
    FILE_DESCRIPTOR: ExportBufferReply.Kind
    HIP_IPC: ExportBufferReply.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    kind: ExportBufferReply.Kind
    handle: bytes
    offset: int
    bytes: int
    device: str
    device_uuid: str
    def __init__(self, kind: _Optional[_Union[ExportBufferReply.Kind, str]] = ..., handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., device: _Optional[str] = ..., device_uuid: _Optional[str] = ...) -> None: ...
