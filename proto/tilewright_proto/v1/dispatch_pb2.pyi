from tilewright_proto.v1 import error_pb2 as _error_pb2
from tilewright_proto.v1 import operations_pb2 as _operations_pb2
from tilewright_proto.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BuildPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUILD_WAIT: _ClassVar[BuildPolicy]
    BUILD_FALLBACK: _ClassVar[BuildPolicy]

class Placement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_SERVER: _ClassVar[Placement]
    PLACEMENT_CALLER: _ClassVar[Placement]
BUILD_WAIT: BuildPolicy
BUILD_FALLBACK: BuildPolicy
PLACEMENT_SERVER: Placement
PLACEMENT_CALLER: Placement

class Selection(_message.Message):
    __slots__ = ("strategy", "kernel", "build", "device", "config_json")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    kernel: str
    build: BuildPolicy
    device: str
    config_json: str
    def __init__(self, strategy: _Optional[str] = ..., kernel: _Optional[str] = ..., build: _Optional[_Union[BuildPolicy, str]] = ..., device: _Optional[str] = ..., config_json: _Optional[str] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("session", "operation", "inputs", "outputs", "attributes", "selection")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Attribute
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Attribute, _Mapping]] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    operation: str
    inputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    outputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    attributes: _containers.MessageMap[str, _tensor_pb2.Attribute]
    selection: Selection
    def __init__(self, session: _Optional[bytes] = ..., operation: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., attributes: _Optional[_Mapping[str, _tensor_pb2.Attribute]] = ..., selection: _Optional[_Union[Selection, _Mapping]] = ...) -> None: ...

class OutputTensor(_message.Message):
    __slots__ = ("name", "spec", "inline", "buffer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: _tensor_pb2.TensorSpec
    inline: bytes
    buffer: int
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[_tensor_pb2.TensorSpec, _Mapping]] = ..., inline: _Optional[bytes] = ..., buffer: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_ns", "plan_ns", "build_ns", "copy_in_ns", "device_ns", "copy_out_ns", "total_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PLAN_NS_FIELD_NUMBER: _ClassVar[int]
    BUILD_NS_FIELD_NUMBER: _ClassVar[int]
    COPY_IN_NS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NS_FIELD_NUMBER: _ClassVar[int]
    COPY_OUT_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    plan_ns: int
    build_ns: int
    copy_in_ns: int
    device_ns: int
    copy_out_ns: int
    total_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., plan_ns: _Optional[int] = ..., build_ns: _Optional[int] = ..., copy_in_ns: _Optional[int] = ..., device_ns: _Optional[int] = ..., copy_out_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("kernels", "timing", "bytes_copied", "plan_cached", "notes", "device")
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    BYTES_COPIED_FIELD_NUMBER: _ClassVar[int]
    PLAN_CACHED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    kernels: _containers.RepeatedScalarFieldContainer[str]
    timing: Timing
    bytes_copied: int
    plan_cached: bool
    notes: _containers.RepeatedScalarFieldContainer[str]
    device: str
    def __init__(self, kernels: _Optional[_Iterable[str]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., bytes_copied: _Optional[int] = ..., plan_cached: bool = ..., notes: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ...) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("outputs", "report")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[OutputTensor]
    report: Report
    def __init__(self, outputs: _Optional[_Iterable[_Union[OutputTensor, _Mapping]]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("session", "operation", "inputs", "outputs", "attributes", "selection", "placement", "known_objects")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Attribute
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Attribute, _Mapping]] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    operation: str
    inputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    outputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    attributes: _containers.MessageMap[str, _tensor_pb2.Attribute]
    selection: Selection
    placement: Placement
    known_objects: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session: _Optional[bytes] = ..., operation: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., attributes: _Optional[_Mapping[str, _tensor_pb2.Attribute]] = ..., selection: _Optional[_Union[Selection, _Mapping]] = ..., placement: _Optional[_Union[Placement, str]] = ..., known_objects: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CodeObject(_message.Message):
    __slots__ = ("sha256", "bytes", "content")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    bytes: int
    content: bytes
    def __init__(self, sha256: _Optional[bytes] = ..., bytes: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class PlanReply(_message.Message):
    __slots__ = ("plan", "inputs", "outputs", "report", "workspace_bytes", "flops", "json", "launch_plan", "objects", "launch_refused", "fallback")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_PLAN_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_REFUSED_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    plan: int
    inputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    outputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    report: Report
    workspace_bytes: int
    flops: int
    json: str
    launch_plan: bytes
    objects: _containers.RepeatedCompositeFieldContainer[CodeObject]
    launch_refused: _error_pb2.ErrorDetail
    fallback: bool
    def __init__(self, plan: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., workspace_bytes: _Optional[int] = ..., flops: _Optional[int] = ..., json: _Optional[str] = ..., launch_plan: _Optional[bytes] = ..., objects: _Optional[_Iterable[_Union[CodeObject, _Mapping]]] = ..., launch_refused: _Optional[_Union[_error_pb2.ErrorDetail, _Mapping]] = ..., fallback: bool = ...) -> None: ...

class ReleasePlanRequest(_message.Message):
    __slots__ = ("session", "plan")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    plan: int
    def __init__(self, session: _Optional[bytes] = ..., plan: _Optional[int] = ...) -> None: ...

class ReleasePlanReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchObjectRequest(_message.Message):
    __slots__ = ("session", "plan", "sha256", "offset")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    plan: int
    sha256: bytes
    offset: int
    def __init__(self, session: _Optional[bytes] = ..., plan: _Optional[int] = ..., sha256: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchObjectReply(_message.Message):
    __slots__ = ("content", "bytes")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    bytes: int
    def __init__(self, content: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class Execution(_message.Message):
    __slots__ = ("plan", "locations", "repeat", "binding")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    plan: int
    locations: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Location]
    repeat: int
    binding: int
    def __init__(self, plan: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[_tensor_pb2.Location, _Mapping]]] = ..., repeat: _Optional[int] = ..., binding: _Optional[int] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("session", "executions", "timeout_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    executions: _containers.RepeatedCompositeFieldContainer[Execution]
    timeout_ms: int
    def __init__(self, session: _Optional[bytes] = ..., executions: _Optional[_Iterable[_Union[Execution, _Mapping]]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ExecutionResult(_message.Message):
    __slots__ = ("error", "outputs", "device_ns", "bytes_copied")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_COPIED_FIELD_NUMBER: _ClassVar[int]
    error: _error_pb2.ErrorDetail
    outputs: _containers.RepeatedCompositeFieldContainer[OutputTensor]
    device_ns: int
    bytes_copied: int
    def __init__(self, error: _Optional[_Union[_error_pb2.ErrorDetail, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[OutputTensor, _Mapping]]] = ..., device_ns: _Optional[int] = ..., bytes_copied: _Optional[int] = ...) -> None: ...

class ExecuteReply(_message.Message):
    __slots__ = ("results", "queue_ns")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ExecutionResult]
    queue_ns: int
    def __init__(self, results: _Optional[_Iterable[_Union[ExecutionResult, _Mapping]]] = ..., queue_ns: _Optional[int] = ...) -> None: ...

class BindRequest(_message.Message):
    __slots__ = ("session", "execution", "timeout_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    execution: Execution
    timeout_ms: int
    def __init__(self, session: _Optional[bytes] = ..., execution: _Optional[_Union[Execution, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class BindReply(_message.Message):
    __slots__ = ("binding", "device", "attach")
    BINDING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    binding: int
    device: str
    attach: bool
    def __init__(self, binding: _Optional[int] = ..., device: _Optional[str] = ..., attach: bool = ...) -> None: ...

class UnbindRequest(_message.Message):
    __slots__ = ("session", "binding")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    binding: int
    def __init__(self, session: _Optional[bytes] = ..., binding: _Optional[int] = ...) -> None: ...

class UnbindReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
