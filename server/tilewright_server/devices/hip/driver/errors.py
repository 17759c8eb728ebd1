"""The names of HIP's results, by what they mean."""

from __future__ import annotations

from tilewright_server.devices.gpu.results import Results

__all__ = ["LOST", "RESULTS", "UNUSABLE"]

LOST = frozenset(
    f"hipError{name}"
    for name in (
        "Deinitialized",
        "ECCNotCorrectable",
        "IllegalAddress",
        "LaunchFailure",
        "LaunchTimeOut",
        "PriorLaunchFailure",
        "ContextIsDestroyed",
        "Assert",
    )
)
"""Results after which only a new process can use the device again. Most faults of kernels end the process at once, in
the runtime below HIP: then its end says the same."""

UNUSABLE = frozenset(
    f"hipError{name}"
    for name in (
        "NotInitialized",
        "InsufficientDriver",
        "NoDevice",
        "InvalidDevice",
        "OperatingSystem",
        "SharedObjectInitFailed",
        "SharedObjectSymbolNotFound",
    )
)
"""Results that say that the device cannot be opened now."""

_STALE = (
    "InvalidValue",
    "InvalidHandle",
    "InvalidDevicePointer",
    "InvalidResourceType",
    "NotFound",
    "FileNotFound",
    "AlreadyMapped",
    "NotMapped",
    "OperatingSystem",
)

RESULTS = Results(
    lost=LOST,
    unusable=UNUSABLE,
    full="hipErrorOutOfMemory",
    busy="hipErrorNotReady",
    unknown="hipErrorUnknown",
    missing="hipErrorNotFound",
    reasons={
        "hipErrorIllegalAddress": "a kernel used an address that is not mapped",
        "hipErrorLaunchTimeOut": "a kernel ran longer than the driver allows",
        "hipErrorLaunchFailure": "a kernel faulted",
        "hipErrorPriorLaunchFailure": "a kernel faulted before",
        "hipErrorAssert": "a kernel ended itself",
        "hipErrorECCNotCorrectable": "the device's memory had an error that cannot be corrected",
    },
    imports={
        **{f"hipError{name}": "stale" for name in _STALE},
        "hipErrorInvalidContext": "own",
        "hipErrorMapFailed": "mapping",
        "hipErrorPeerAccessUnsupported": "device",
        "hipErrorInvalidDevice": "device",
        "hipErrorNotSupported": "unsupported",
    },
    rule="hip_driver",
    look="amd-smi",
)
