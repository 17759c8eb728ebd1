from tilewright_proto.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeOperationRequest(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: str
    def __init__(self, operation: _Optional[str] = ...) -> None: ...

class DescribeOperationReply(_message.Message):
    __slots__ = ("operations",)
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[OperationDescription]
    def __init__(self, operations: _Optional[_Iterable[_Union[OperationDescription, _Mapping]]] = ...) -> None: ...

class OperationDescription(_message.Message):
    __slots__ = ("name", "version", "summary", "inputs", "outputs", "attributes", "examples", "notes", "declared")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    summary: str
    inputs: _containers.RepeatedCompositeFieldContainer[OperandDescription]
    outputs: _containers.RepeatedCompositeFieldContainer[OperandDescription]
    attributes: _containers.RepeatedCompositeFieldContainer[AttributeDescription]
    examples: _containers.RepeatedCompositeFieldContainer[OperationExample]
    notes: _containers.RepeatedScalarFieldContainer[str]
    declared: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., summary: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[OperandDescription, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[OperandDescription, _Mapping]]] = ..., attributes: _Optional[_Iterable[_Union[AttributeDescription, _Mapping]]] = ..., examples: _Optional[_Iterable[_Union[OperationExample, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., declared: bool = ...) -> None: ...

class OperandDescription(_message.Message):
    __slots__ = ("name", "summary", "shapes", "lowest_rank", "highest_rank", "dtypes", "optional", "list", "constraint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    LOWEST_RANK_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_RANK_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    shapes: _containers.RepeatedScalarFieldContainer[str]
    lowest_rank: int
    highest_rank: int
    dtypes: _containers.RepeatedScalarFieldContainer[_tensor_pb2.DType]
    optional: bool
    list: bool
    constraint: str
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., shapes: _Optional[_Iterable[str]] = ..., lowest_rank: _Optional[int] = ..., highest_rank: _Optional[int] = ..., dtypes: _Optional[_Iterable[_Union[_tensor_pb2.DType, str]]] = ..., optional: bool = ..., list: bool = ..., constraint: _Optional[str] = ...) -> None: ...

class AttributeDescription(_message.Message):
    __slots__ = ("name", "summary", "types", "default", "absent", "lowest", "highest", "choices", "aliases", "unit", "constraint")
    class AliasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    LOWEST_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    types: _containers.RepeatedScalarFieldContainer[str]
    default: _tensor_pb2.Attribute
    absent: str
    lowest: _tensor_pb2.Attribute
    highest: _tensor_pb2.Attribute
    choices: _containers.RepeatedScalarFieldContainer[str]
    aliases: _containers.ScalarMap[str, str]
    unit: str
    constraint: str
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., types: _Optional[_Iterable[str]] = ..., default: _Optional[_Union[_tensor_pb2.Attribute, _Mapping]] = ..., absent: _Optional[str] = ..., lowest: _Optional[_Union[_tensor_pb2.Attribute, _Mapping]] = ..., highest: _Optional[_Union[_tensor_pb2.Attribute, _Mapping]] = ..., choices: _Optional[_Iterable[str]] = ..., aliases: _Optional[_Mapping[str, str]] = ..., unit: _Optional[str] = ..., constraint: _Optional[str] = ...) -> None: ...

class OperationExample(_message.Message):
    __slots__ = ("title", "inputs", "outputs", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Attribute
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Attribute, _Mapping]] = ...) -> None: ...
    TITLE_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    title: str
    inputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    outputs: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Operand]
    attributes: _containers.MessageMap[str, _tensor_pb2.Attribute]
    def __init__(self, title: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_tensor_pb2.Operand, _Mapping]]] = ..., attributes: _Optional[_Mapping[str, _tensor_pb2.Attribute]] = ...) -> None: ...
