"""Descriptions of operations as messages, made of what their plugins declare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright_kit.contract.abilities import Declared
from tilewright_kit.contract.declaration import AttributeSpec, Example, OperandSpec, ValueType
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Attribute, Role
from tilewright_kit.types.tensor import TensorDesc
from tilewright_proto.v1 import operations_pb2 as pb
from tilewright_proto.v1 import tensor_pb2
from tilewright_server.endpoints.messages.tensors import DTYPE_NUMBERS, spec

__all__ = ["attribute_message", "description"]


def description(operation: Operation[Any, Any]) -> pb.OperationDescription:
    """An operation whose plugin declares nothing has a name and a version only."""
    found = pb.OperationDescription(name=operation.name, version=operation.version)
    if isinstance(operation, Declared):
        declaration = operation.declaration
        found.declared = True
        found.summary = declaration.summary
        found.inputs.extend(_operand(item) for item in declaration.of_role(Role.INPUT))
        found.outputs.extend(_operand(item) for item in declaration.of_role(Role.OUTPUT))
        found.attributes.extend(_attribute(item) for item in declaration.attributes)
        found.examples.extend(_example(item) for item in declaration.examples)
        found.notes.extend(declaration.notes)
    return found


def attribute_message(value: Attribute) -> tensor_pb2.Attribute:
    """The value in the field of its type."""
    if isinstance(value, bool):
        return tensor_pb2.Attribute(flag=value)
    if isinstance(value, int):
        return tensor_pb2.Attribute(integer=value)
    if isinstance(value, float):
        return tensor_pb2.Attribute(number=value)
    if isinstance(value, str):
        return tensor_pb2.Attribute(text=value)
    return _list_message(value)


def _list_message(values: Sequence[Any]) -> tensor_pb2.Attribute:
    if values and isinstance(values[0], str):
        return tensor_pb2.Attribute(texts=tensor_pb2.Attribute.Strings(values=values))
    if values and isinstance(values[0], float):
        return tensor_pb2.Attribute(numbers=tensor_pb2.Attribute.Floats(values=values))
    return tensor_pb2.Attribute(integers=tensor_pb2.Attribute.Ints(values=values))


def _operand(item: OperandSpec) -> pb.OperandDescription:
    return pb.OperandDescription(
        name=item.name,
        summary=item.summary,
        shapes=item.shapes,
        lowest_rank=item.ranks[0],
        highest_rank=item.ranks[1],
        dtypes=[DTYPE_NUMBERS[dtype] for dtype in item.dtypes],  # type: ignore[misc]
        optional=item.optional,
        list=item.is_list,
        constraint=item.constraint,
    )


def _attribute(item: AttributeSpec) -> pb.AttributeDescription:
    found = pb.AttributeDescription(
        name=item.name,
        summary=item.summary,
        types=[kind.value for kind in item.types],
        absent=item.absent,
        choices=item.choices,
        aliases=item.aliases,
        unit=item.unit,
        constraint=item.constraint,
    )
    if item.default is not None:
        found.default.CopyFrom(attribute_message(item.default))
    for name, bound in (("lowest", item.lowest), ("highest", item.highest)):
        if bound is not None:
            typed = float(bound) if ValueType.NUMBER in item.types else bound
            getattr(found, name).CopyFrom(attribute_message(typed))
    return found


def _example(item: Example) -> pb.OperationExample:
    request = item.request
    return pb.OperationExample(
        title=item.title,
        inputs=[_tensor(name, desc) for name, desc in request.inputs.items()],
        outputs=[_tensor(name, desc) for name, desc in request.outputs.items()],
        attributes={name: attribute_message(value) for name, value in request.attributes.items()},
    )


def _tensor(name: str, desc: TensorDesc) -> tensor_pb2.Operand:
    return tensor_pb2.Operand(name=name, spec=spec(desc))
