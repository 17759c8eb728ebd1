"""Malformed requests of the Open Inference Protocol: right ones whose bytes, fields or lengths were changed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from tilewright_proto.inference import inference_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
A = np.arange(16, dtype=np.float32).reshape(4, 4)
TYPED = frozenset(
    {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "FAILED_PRECONDITION"}
    | {"OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "CANCELLED"}
)
"""Ends that say whose mistake it was; the others are faults of the server."""
NUMBERS = (0, 1, -1, 2**31, 2**63 - 1, -(2**63), 4, 16)
WORDS = ("", "a", "b", "FP32", "UINT8", "tilewright.gemm", "x" * 300, "/dev/shm/../x", "a\0b", "é", "-1")


def infer() -> pb.ModelInferRequest:
    """A product of two matrices of four rows."""
    request = pb.ModelInferRequest(model_name="tilewright.gemm", raw_input_contents=[A.tobytes(), A.tobytes()])
    for name in ("a", "b"):
        request.inputs.add(name=name, datatype="FP32", shape=[4, 4])
    return request


def _right() -> list[tuple[str, Any]]:
    """Methods, and requests of theirs that are in order."""
    shared = infer()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    shared.inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
    del shared.raw_input_contents[0]
    return [
        *[("ModelInfer", infer())] * 4,
        ("ModelInfer", shared),
        ("ModelMetadata", pb.ModelMetadataRequest(name="tilewright.gemm", version="1")),
        ("ModelConfig", pb.ModelConfigRequest(name="tilewright.gemm", version="1")),
        ("ModelReady", pb.ModelReadyRequest(name="tilewright.gemm")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="tilewright.gemm")),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="tilewright.gemm@x")),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/nothing", byte_size=64)),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="r")),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="r")),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=bytes(64), byte_size=64)),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="g")),
    ]


def _change_field(message: Any, rng: random.Random) -> None:
    """Give one field of a message, or of one within it, another value."""
    field = rng.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.type == field.TYPE_MESSAGE:
        if field.message_type.GetOptions().map_entry:
            kind = rng.choice(("int64_param", "string_param", "bool_param"))
            given: Any = {"int64_param": rng.choice(NUMBERS), "string_param": rng.choice(WORDS), "bool_param": True}
            name = rng.choice(("shared_memory_region", "shared_memory_offset", "alpha", "activation", *WORDS))
            setattr(value[name.replace("\0", "")], kind, given[kind])
        elif hasattr(value, "add"):
            _change_field(rng.choice(value) if value else value.add(), rng)
        else:
            _change_field(value, rng)
        return
    new: Any = rng.choice(NUMBERS)
    if field.type == field.TYPE_STRING:
        new = rng.choice(WORDS)
    elif field.type == field.TYPE_BYTES:
        new = rng.randbytes(rng.choice((0, 1, 63, 64, 65, 1000)))
    elif field.type == field.TYPE_BOOL:
        new = rng.random() < 0.5
    elif field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        new = rng.choice((float("nan"), float("inf"), 0.5))
    elif field.type in (field.TYPE_UINT32, field.TYPE_UINT64):
        new = abs(new) % 2**32
    elif field.type in (field.TYPE_INT32, field.TYPE_ENUM):
        new = new % 4
    if not hasattr(value, "append"):
        setattr(message, field.name, new)
    elif value and rng.random() < 0.6:
        value[rng.randrange(len(value))] = new
    else:
        value.append(new)


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        way = rng.randrange(4)
        if way == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del out[at : at + rng.randint(1, 8)]
        elif way == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            del out[at:]
    return bytes(out)


def malformed(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """``count`` methods and requests, the same ones for each ``seed``."""
    rng = random.Random(seed)
    right = _right()
    for _ in range(count):
        method, request = rng.choice(right)
        changed = type(request)()
        changed.CopyFrom(request)
        for _ in range(rng.randrange(4)):
            _change_field(changed, rng)
        data = changed.SerializeToString()
        yield method, _change_bytes(data, rng) if rng.random() < 0.5 else data


def send(address: str, count: int, seed: int) -> Counter[str]:
    """Send malformed requests one after the other; returns how many ended in which way."""
    ends: Counter[str] = Counter()
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        for method, data in malformed(count, seed):
            try:
                channel.unary_unary(SERVICE + method)(data, timeout=120)
                ends["OK"] += 1
            except grpc.RpcError as error:  # noqa: PERF203
                ends[error.code().name] += 1
    return ends
