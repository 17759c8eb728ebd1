"""Requests by chance: right in structure, wrong in everything else, and cheap to make."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hostile import METHODS, SIGNED, TEXTS, UNSIGNED

__all__ = ["METHODS", "Known", "random_request"]

DEPTH = 5
KIND = FieldDescriptor
REALS = (0.0, -1.0, float("nan"), float("inf"), 1e308)


class Known(NamedTuple):
    """Ids that exist, so that requests get past the first check."""

    token: bytes
    region: int
    plan: int
    buffer: int


def random_request(path: str, known: Known, rng: random.Random) -> bytes:
    """The bytes of a request to a method."""
    message = message_factory.GetMessageClass(METHODS[path].input_type)()
    _fill(message, known, rng, 0)
    return message.SerializeToString()


def _fill(message: Message, known: Known, rng: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        target = getattr(message, field.name)
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            value = inner.fields_by_name["value"]
            for _ in range(rng.randrange(2)):
                if value.message_type is not None:
                    _fill(target[rng.choice(TEXTS)], known, rng, depth + 1)
                else:
                    target[rng.choice(TEXTS)] = _scalar(value, known, rng)
        elif field.is_repeated:
            for _ in range(rng.randrange(3)):
                if inner is None:
                    target.append(_scalar(field, known, rng))
                elif depth < DEPTH:
                    _fill(target.add(), known, rng, depth + 1)
        elif inner is not None:
            target.SetInParent()
            if depth < DEPTH:
                _fill(target, known, rng, depth + 1)
        else:
            setattr(message, field.name, _scalar(field, known, rng))


def _scalar(field: FieldDescriptor, known: Known, rng: random.Random) -> Any:
    name = field.name
    if name == "session":
        return rng.choice((known.token, known.token, known.token, b"", rng.randbytes(16)))
    if name in ("region", "plan", "buffer") and rng.random() < 0.7:
        return getattr(known, name)
    if name == "repeat":
        return rng.choice((0, 1, 3, 2**32 - 1))
    if field.cpp_type in (KIND.CPPTYPE_INT32, KIND.CPPTYPE_ENUM):
        return rng.choice([number for number in SIGNED if -(2**31) <= number < 2**31])
    if field.cpp_type == KIND.CPPTYPE_INT64:
        return rng.choice(SIGNED)
    if field.cpp_type == KIND.CPPTYPE_UINT32:
        return rng.choice([number for number in UNSIGNED if number < 2**32])
    if field.cpp_type == KIND.CPPTYPE_UINT64:
        return rng.choice(UNSIGNED)
    if field.cpp_type in (KIND.CPPTYPE_DOUBLE, KIND.CPPTYPE_FLOAT):
        return rng.choice(REALS)
    if field.cpp_type == KIND.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.type == KIND.TYPE_BYTES:
        return rng.choice((b"", bytes(64), rng.randbytes(63), bytes(4096)))
    return rng.choice(TEXTS)
