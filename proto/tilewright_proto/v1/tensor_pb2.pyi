from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FP32: _ClassVar[DType]
    FP16: _ClassVar[DType]
    BF16: _ClassVar[DType]
    FP8: _ClassVar[DType]
    BF8: _ClassVar[DType]
    INT8: _ClassVar[DType]
    INT32: _ClassVar[DType]
DTYPE_UNSPECIFIED: DType
FP32: DType
FP16: DType
BF16: DType
FP8: DType
BF8: DType
INT8: DType
INT32: DType

class TensorSpec(_message.Message):
    __slots__ = ("dtype", "shape", "strides", "packing", "packed_bytes")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    packing: str
    packed_bytes: int
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., packing: _Optional[str] = ..., packed_bytes: _Optional[int] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("inline", "region", "buffer", "return_inline", "allocate")
    INLINE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    RETURN_INLINE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    inline: bytes
    region: RegionSlice
    buffer: BufferSlice
    return_inline: ReturnInline
    allocate: AllocateBuffer
    def __init__(self, inline: _Optional[bytes] = ..., region: _Optional[_Union[RegionSlice, _Mapping]] = ..., buffer: _Optional[_Union[BufferSlice, _Mapping]] = ..., return_inline: _Optional[_Union[ReturnInline, _Mapping]] = ..., allocate: _Optional[_Union[AllocateBuffer, _Mapping]] = ...) -> None: ...

class RegionSlice(_message.Message):
    __slots__ = ("region", "offset")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    region: int
    offset: int
    def __init__(self, region: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class BufferSlice(_message.Message):
    __slots__ = ("buffer", "offset")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    buffer: int
    offset: int
    def __init__(self, buffer: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ReturnInline(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AllocateBuffer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Operand(_message.Message):
    __slots__ = ("name", "spec", "location")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: TensorSpec
    location: Location
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[TensorSpec, _Mapping]] = ..., location: _Optional[_Union[Location, _Mapping]] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("flag", "integer", "number", "text", "integers", "numbers", "texts")
    class Ints(_message.Message):
        __slots__ = ("values",)
        VALUES_FIELD_NUMBER: _ClassVar[int]
        values: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...
    class Floats(_message.Message):
        __slots__ = ("values",)
        VALUES_FIELD_NUMBER: _ClassVar[int]
        values: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...
    class Strings(_message.Message):
        __slots__ = ("values",)
        VALUES_FIELD_NUMBER: _ClassVar[int]
        values: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...
    FLAG_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INTEGERS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    flag: bool
    integer: int
    number: float
    text: str
    integers: Attribute.Ints
    numbers: Attribute.Floats
    texts: Attribute.Strings
    def __init__(self, flag: bool = ..., integer: _Optional[int] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., integers: _Optional[_Union[Attribute.Ints, _Mapping]] = ..., numbers: _Optional[_Union[Attribute.Floats, _Mapping]] = ..., texts: _Optional[_Union[Attribute.Strings, _Mapping]] = ...) -> None: ...
