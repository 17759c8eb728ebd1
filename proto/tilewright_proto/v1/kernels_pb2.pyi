from tilewright_proto.v1 import dispatch_pb2 as _dispatch_pb2
from tilewright_proto.v1 import error_pb2 as _error_pb2
from tilewright_proto.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KernelFilter(_message.Message):
    __slots__ = ("operation", "kernel_set", "arch", "name", "session")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    KERNEL_SET_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    operation: str
    kernel_set: str
    arch: str
    name: str
    session: bytes
    def __init__(self, operation: _Optional[str] = ..., kernel_set: _Optional[str] = ..., arch: _Optional[str] = ..., name: _Optional[str] = ..., session: _Optional[bytes] = ...) -> None: ...

class KernelSummary(_message.Message):
    __slots__ = ("name", "key", "operation", "arch", "built", "registered")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    BUILT_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    operation: str
    arch: str
    built: bool
    registered: bool
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ..., operation: _Optional[str] = ..., arch: _Optional[str] = ..., built: bool = ..., registered: bool = ...) -> None: ...

class ListKernelsRequest(_message.Message):
    __slots__ = ("filter", "limit", "offset")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    filter: KernelFilter
    limit: int
    offset: int
    def __init__(self, filter: _Optional[_Union[KernelFilter, _Mapping]] = ..., limit: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ListKernelsReply(_message.Message):
    __slots__ = ("kernels", "total", "kernel_sets")
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    KERNEL_SETS_FIELD_NUMBER: _ClassVar[int]
    kernels: _containers.RepeatedCompositeFieldContainer[KernelSummary]
    total: int
    kernel_sets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kernels: _Optional[_Iterable[_Union[KernelSummary, _Mapping]]] = ..., total: _Optional[int] = ..., kernel_sets: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeKernelRequest(_message.Message):
    __slots__ = ("operation", "name", "arch", "source")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    operation: str
    name: str
    arch: str
    source: bool
    def __init__(self, operation: _Optional[str] = ..., name: _Optional[str] = ..., arch: _Optional[str] = ..., source: bool = ...) -> None: ...

class DescribeKernelReply(_message.Message):
    __slots__ = ("summary", "config_json", "source", "log")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    summary: KernelSummary
    config_json: str
    source: str
    log: str
    def __init__(self, summary: _Optional[_Union[KernelSummary, _Mapping]] = ..., config_json: _Optional[str] = ..., source: _Optional[str] = ..., log: _Optional[str] = ...) -> None: ...

class ValidateConfigRequest(_message.Message):
    __slots__ = ("operation", "arch", "config_json")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    operation: str
    arch: str
    config_json: str
    def __init__(self, operation: _Optional[str] = ..., arch: _Optional[str] = ..., config_json: _Optional[str] = ...) -> None: ...

class ValidateConfigReply(_message.Message):
    __slots__ = ("valid", "name", "violations")
    VALID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    name: str
    violations: _containers.RepeatedCompositeFieldContainer[_error_pb2.Violation]
    def __init__(self, valid: bool = ..., name: _Optional[str] = ..., violations: _Optional[_Iterable[_Union[_error_pb2.Violation, _Mapping]]] = ...) -> None: ...

class CorrectConfigRequest(_message.Message):
    __slots__ = ("operation", "arch", "config_json")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    operation: str
    arch: str
    config_json: str
    def __init__(self, operation: _Optional[str] = ..., arch: _Optional[str] = ..., config_json: _Optional[str] = ...) -> None: ...

class CorrectConfigReply(_message.Message):
    __slots__ = ("valid", "config_json", "name", "applied", "remaining")
    VALID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    config_json: str
    name: str
    applied: _containers.RepeatedCompositeFieldContainer[_error_pb2.Violation]
    remaining: _containers.RepeatedCompositeFieldContainer[_error_pb2.Violation]
    def __init__(self, valid: bool = ..., config_json: _Optional[str] = ..., name: _Optional[str] = ..., applied: _Optional[_Iterable[_Union[_error_pb2.Violation, _Mapping]]] = ..., remaining: _Optional[_Iterable[_Union[_error_pb2.Violation, _Mapping]]] = ...) -> None: ...

class RegisterKernelRequest(_message.Message):
    __slots__ = ("session", "operation", "arch", "config_json", "shared")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    operation: str
    arch: str
    config_json: str
    shared: bool
    def __init__(self, session: _Optional[bytes] = ..., operation: _Optional[str] = ..., arch: _Optional[str] = ..., config_json: _Optional[str] = ..., shared: bool = ...) -> None: ...

class RegisterKernelReply(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: KernelSummary
    def __init__(self, summary: _Optional[_Union[KernelSummary, _Mapping]] = ...) -> None: ...

class UnregisterKernelRequest(_message.Message):
    __slots__ = ("session", "operation", "name")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    operation: str
    name: str
    def __init__(self, session: _Optional[bytes] = ..., operation: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class UnregisterKernelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BuildRequest(_message.Message):
    __slots__ = ("filter", "names", "config_json", "operation", "arch", "retry_failed", "session")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    RETRY_FAILED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    filter: KernelFilter
    names: _containers.RepeatedScalarFieldContainer[str]
    config_json: str
    operation: str
    arch: str
    retry_failed: bool
    session: bytes
    def __init__(self, filter: _Optional[_Union[KernelFilter, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ..., config_json: _Optional[str] = ..., operation: _Optional[str] = ..., arch: _Optional[str] = ..., retry_failed: bool = ..., session: _Optional[bytes] = ...) -> None: ...

class BuildEvent(_message.Message):
    __slots__ = ("name", "state", "done", "total", "build_ns", "error")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[BuildEvent.State]
        QUEUED: _ClassVar[BuildEvent.State]
        BUILDING: _ClassVar[BuildEvent.State]
        BUILT: _ClassVar[BuildEvent.State]
        CACHED: _ClassVar[BuildEvent.State]
        FAILED: _ClassVar[BuildEvent.State]
    STATE_UNSPECIFIED: BuildEvent.State
    QUEUED: BuildEvent.State
    BUILDING: BuildEvent.State
    BUILT: BuildEvent.State
    CACHED: BuildEvent.State
    FAILED: BuildEvent.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BUILD_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: BuildEvent.State
    done: int
    total: int
    build_ns: int
    error: _error_pb2.ErrorDetail
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[BuildEvent.State, str]] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., build_ns: _Optional[int] = ..., error: _Optional[_Union[_error_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("operation", "inputs", "outputs", "attributes", "selection")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Attribute
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Attribute, _Mapping]] = ...) -> None: ...
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    operation: str
    inputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    outputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    attributes: _containers.MessageMap[str, _tensor_pb2.Attribute]
    selection: _dispatch_pb2.Selection
    def __init__(self, operation: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., attributes: _Optional[_Mapping[str, _tensor_pb2.Attribute]] = ..., selection: _Optional[_Union[_dispatch_pb2.Selection, _Mapping]] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("filter", "statistics")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    filter: KernelFilter
    statistics: bool
    def __init__(self, filter: _Optional[_Union[KernelFilter, _Mapping]] = ..., statistics: bool = ...) -> None: ...

class ExportReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class StatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatisticsReply(_message.Message):
    __slots__ = ("operations", "kernels", "artifact_hits", "artifact_builds", "artifact_failures", "sessions", "regions", "region_bytes", "buffers", "buffer_bytes", "queue_depth", "uptime_ns", "plugins", "bindings", "attached_connections", "devices")
    class Operation(_message.Message):
        __slots__ = ("name", "success", "failure", "plan_hits", "plan_misses", "bytes_copied", "cumulative", "caller_launches", "caller_samples", "caller_sampled_ns")
        NAME_FIELD_NUMBER: _ClassVar[int]
        SUCCESS_FIELD_NUMBER: _ClassVar[int]
        FAILURE_FIELD_NUMBER: _ClassVar[int]
        PLAN_HITS_FIELD_NUMBER: _ClassVar[int]
        PLAN_MISSES_FIELD_NUMBER: _ClassVar[int]
        BYTES_COPIED_FIELD_NUMBER: _ClassVar[int]
        CUMULATIVE_FIELD_NUMBER: _ClassVar[int]
        CALLER_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
        CALLER_SAMPLES_FIELD_NUMBER: _ClassVar[int]
        CALLER_SAMPLED_NS_FIELD_NUMBER: _ClassVar[int]
        name: str
        success: int
        failure: int
        plan_hits: int
        plan_misses: int
        bytes_copied: int
        cumulative: _dispatch_pb2.Timing
        caller_launches: int
        caller_samples: int
        caller_sampled_ns: int
        def __init__(self, name: _Optional[str] = ..., success: _Optional[int] = ..., failure: _Optional[int] = ..., plan_hits: _Optional[int] = ..., plan_misses: _Optional[int] = ..., bytes_copied: _Optional[int] = ..., cumulative: _Optional[_Union[_dispatch_pb2.Timing, _Mapping]] = ..., caller_launches: _Optional[int] = ..., caller_samples: _Optional[int] = ..., caller_sampled_ns: _Optional[int] = ...) -> None: ...
    class Kernel(_message.Message):
        __slots__ = ("name", "launches", "device_ns", "device", "caller_launches", "caller_samples", "caller_sampled_ns")
        NAME_FIELD_NUMBER: _ClassVar[int]
        LAUNCHES_FIELD_NUMBER: _ClassVar[int]
        DEVICE_NS_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        CALLER_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
        CALLER_SAMPLES_FIELD_NUMBER: _ClassVar[int]
        CALLER_SAMPLED_NS_FIELD_NUMBER: _ClassVar[int]
        name: str
        launches: int
        device_ns: int
        device: str
        caller_launches: int
        caller_samples: int
        caller_sampled_ns: int
        def __init__(self, name: _Optional[str] = ..., launches: _Optional[int] = ..., device_ns: _Optional[int] = ..., device: _Optional[str] = ..., caller_launches: _Optional[int] = ..., caller_samples: _Optional[int] = ..., caller_sampled_ns: _Optional[int] = ...) -> None: ...
    class Device(_message.Message):
        __slots__ = ("id", "host_synchronisations", "launch_synchronisations", "pool_used_bytes", "pool_held_bytes", "mappings", "modules")
        ID_FIELD_NUMBER: _ClassVar[int]
        HOST_SYNCHRONISATIONS_FIELD_NUMBER: _ClassVar[int]
        LAUNCH_SYNCHRONISATIONS_FIELD_NUMBER: _ClassVar[int]
        POOL_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
        POOL_HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
        MAPPINGS_FIELD_NUMBER: _ClassVar[int]
        MODULES_FIELD_NUMBER: _ClassVar[int]
        id: str
        host_synchronisations: int
        launch_synchronisations: int
        pool_used_bytes: int
        pool_held_bytes: int
        mappings: int
        modules: int
        def __init__(self, id: _Optional[str] = ..., host_synchronisations: _Optional[int] = ..., launch_synchronisations: _Optional[int] = ..., pool_used_bytes: _Optional[int] = ..., pool_held_bytes: _Optional[int] = ..., mappings: _Optional[int] = ..., modules: _Optional[int] = ...) -> None: ...
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_HITS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_BUILDS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[StatisticsReply.Operation]
    kernels: _containers.RepeatedCompositeFieldContainer[StatisticsReply.Kernel]
    artifact_hits: int
    artifact_builds: int
    artifact_failures: int
    sessions: int
    regions: int
    region_bytes: int
    buffers: int
    buffer_bytes: int
    queue_depth: int
    uptime_ns: int
    plugins: _containers.RepeatedCompositeFieldContainer[PluginStatus]
    bindings: int
    attached_connections: int
    devices: _containers.RepeatedCompositeFieldContainer[StatisticsReply.Device]
    def __init__(self, operations: _Optional[_Iterable[_Union[StatisticsReply.Operation, _Mapping]]] = ..., kernels: _Optional[_Iterable[_Union[StatisticsReply.Kernel, _Mapping]]] = ..., artifact_hits: _Optional[int] = ..., artifact_builds: _Optional[int] = ..., artifact_failures: _Optional[int] = ..., sessions: _Optional[int] = ..., regions: _Optional[int] = ..., region_bytes: _Optional[int] = ..., buffers: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., queue_depth: _Optional[int] = ..., uptime_ns: _Optional[int] = ..., plugins: _Optional[_Iterable[_Union[PluginStatus, _Mapping]]] = ..., bindings: _Optional[int] = ..., attached_connections: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[StatisticsReply.Device, _Mapping]]] = ...) -> None: ...

class PluginStatus(_message.Message):
    __slots__ = ("name", "version", "loaded", "reason", "operations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    loaded: bool
    reason: str
    operations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., loaded: bool = ..., reason: _Optional[str] = ..., operations: _Optional[_Iterable[str]] = ...) -> None: ...
