from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "field", "value", "rule", "fix", "violations", "log_tail", "retry_after_ms", "request")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    field: str
    value: str
    rule: str
    fix: str
    violations: _containers.RepeatedCompositeFieldContainer[Violation]
    log_tail: str
    retry_after_ms: int
    request: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., rule: _Optional[str] = ..., fix: _Optional[str] = ..., violations: _Optional[_Iterable[_Union[Violation, _Mapping]]] = ..., log_tail: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., request: _Optional[str] = ...) -> None: ...

class Violation(_message.Message):
    __slots__ = ("rule", "field", "value", "reason", "fix")
    class FixEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RULE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    rule: str
    field: str
    value: str
    reason: str
    fix: _containers.ScalarMap[str, str]
    def __init__(self, rule: _Optional[str] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., reason: _Optional[str] = ..., fix: _Optional[_Mapping[str, str]] = ...) -> None: ...
