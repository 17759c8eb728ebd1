"""Client of the Tilewright service: tensor operations on memory that both processes see.

    >>> import tilewright as tw
    >>> with tw.connect() as client:  # doctest: +SKIP
    ...     a = client.asarray(a_private)          # into shared memory, once
    ...     c = client.gemm(a, b, activation="gelu")
    ...     plan = client.plan_gemm(a, b)          # no planning in later calls
    ...     plan(a, b, out=c)

``tilewright.aio`` has the same for asyncio. Importing this starts no thread and opens no file or socket.
"""

# ruff: noqa: E402
from tilewright.session.settings import ask_for_fork_support

ask_for_fork_support()  # before the first import of gRPC

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
from tilewright.operations.epilogue import ACTIVATIONS
from tilewright.operations.kernels import BuildEvent, Correction, Kernel, KernelDetails, Validation
from tilewright.session.tls import Tls
from tilewright.sync.bundle import Bundle, BundlePlan, BundleProblem, load_bundle
from tilewright.sync.client import Buffer, Client, connect
from tilewright.sync.kv_cache import KVCache
from tilewright.sync.launch import Launch
from tilewright.sync.pipeline import Pipeline
from tilewright.sync.plan import Bound, Plan, Stream
from tilewright.tensor.device_array import DeviceArray
from tilewright.tensor.resident import PackedTensor, ResidentTensor
from tilewright.types.dtypes import DTYPES
from tilewright.types.report import Report, Timing
from tilewright.types.spec import Spec

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
    "load_bundle",
]
