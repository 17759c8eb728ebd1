"""Client of the Tilewright service: tensor operations on memory that both processes see.

    >>> import tilewright as tw
    >>> with tw.connect() as client:  # doctest: +SKIP
    ...     a = client.asarray(a_private)          # into shared memory, once
    ...     c = client.gemm(a, b, activation="gelu")
    ...     plan = client.plan_gemm(a, b)          # no planning in later calls
    ...     plan(a, b, out=c)

``tilewright.aio`` has the same for asyncio. Importing this starts no thread and opens no file or socket; names are
imported when they are first used, and NumPy and gRPC with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewright.session.settings import ask_for_fork_support

if TYPE_CHECKING:
    from tilewright import aio
    from tilewright.errors import (
        AccessError,
        BuildFailedError,
        CancelledError,
        ConfigInvalidError,
        DeadlineError,
        DeviceError,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        ResourceExhaustedError,
        TilewrightError,
        ToolchainMissingError,
        UnavailableError,
        UnknownOutcomeError,
        UnsupportedError,
        Violation,
    )
    from tilewright.operations.epilogue import ACTIVATIONS, join_gate_up
    from tilewright.operations.int4 import (
        Int4Weights,
        int4_from_awq,
        int4_from_gptq,
        pack_int4,
        quantize_int4,
        unpack_int4,
    )
    from tilewright.operations.kernels import BuildEvent, Correction, Kernel, KernelDetails, Validation
    from tilewright.session.tls import Tls
    from tilewright.sync.bundle import Bundle, BundlePlan, BundleProblem, load_bundle
    from tilewright.sync.client import Buffer, Client, connect
    from tilewright.sync.kv_cache import KVCache
    from tilewright.sync.launch_handle import Launch
    from tilewright.sync.pipeline import Pipeline
    from tilewright.sync.plan import Bound, Plan, Stream
    from tilewright.tensor.device_array import DeviceArray
    from tilewright.tensor.resident import PackedTensor, ResidentTensor
    from tilewright.transport.request_ids import request_id
    from tilewright.transport.tracing import trace_launches
    from tilewright.types.dtypes import DTYPES
    from tilewright.types.narrow import pack_narrow, unpack_narrow
    from tilewright.types.report import Report, Timing
    from tilewright.types.spec import Spec

ask_for_fork_support()  # before the first import of gRPC

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "AccessError",
    "Bound",
    "Buffer",
    "BuildEvent",
    "BuildFailedError",
    "Bundle",
    "BundlePlan",
    "BundleProblem",
    "CancelledError",
    "Client",
    "ConfigInvalidError",
    "Correction",
    "DeadlineError",
    "DeviceArray",
    "DeviceError",
    "Int4Weights",
    "InternalError",
    "InvalidArgumentError",
    "KVCache",
    "Kernel",
    "KernelDetails",
    "Launch",
    "NotFoundError",
    "PackedTensor",
    "Pipeline",
    "Plan",
    "Report",
    "ResidentTensor",
    "ResourceExhaustedError",
    "Spec",
    "Stream",
    "TilewrightError",
    "Timing",
    "Tls",
    "ToolchainMissingError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UnsupportedError",
    "Validation",
    "Violation",
    "aio",
    "connect",
    "int4_from_awq",
    "int4_from_gptq",
    "join_gate_up",
    "load_bundle",
    "pack_int4",
    "pack_narrow",
    "quantize_int4",
    "request_id",
    "trace_launches",
    "unpack_int4",
    "unpack_narrow",
]

# As the imports for type checkers above.
_PLACES = {
    name: f"tilewright.{module}"
    for module, names in {
        "errors": "AccessError BuildFailedError CancelledError ConfigInvalidError DeadlineError DeviceError "
        "InternalError InvalidArgumentError NotFoundError ResourceExhaustedError TilewrightError ToolchainMissingError "
        "UnavailableError UnknownOutcomeError UnsupportedError Violation",
        "operations.epilogue": "ACTIVATIONS join_gate_up",
        "operations.int4": "Int4Weights int4_from_awq int4_from_gptq pack_int4 quantize_int4 unpack_int4",
        "operations.kernels": "BuildEvent Correction Kernel KernelDetails Validation",
        "session.tls": "Tls",
        "sync.bundle": "Bundle BundlePlan BundleProblem load_bundle",
        "sync.client": "Buffer Client connect",
        "sync.kv_cache": "KVCache",
        "sync.launch_handle": "Launch",
        "sync.pipeline": "Pipeline",
        "sync.plan": "Bound Plan Stream",
        "tensor.device_array": "DeviceArray",
        "tensor.resident": "PackedTensor ResidentTensor",
        "transport.request_ids": "request_id",
        "transport.tracing": "trace_launches",
        "types.dtypes": "DTYPES",
        "types.narrow": "pack_narrow unpack_narrow",
        "types.report": "Report Timing",
        "types.spec": "Spec",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name == "aio":
        return import_module("tilewright.aio")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
