"""Roles, and the one that each method takes."""

from __future__ import annotations

from enum import Enum

__all__ = ["EVERYBODY", "Role", "is_audited", "role_of"]


class Role(Enum):
    """A set of methods that a principal may call."""

    DISPATCH = "dispatch"
    """Sessions, memory, plans, launches, and reading what kernels there are."""
    BUILD = "build"
    """Have kernels compiled by name, ahead of any problem. What a problem of ``DISPATCH`` needs is compiled too."""
    TUNE = "tune"
    """Register and unregister kernel configurations."""
    ADMINISTER = "administer"
    """Read what all clients together do; the other roles too."""


EVERYBODY = ("grpc.health.v1.", "grpc.reflection.")
"""Services that need no role."""
_OTHERS = {
    "tilewright.v1.Kernels/Build": Role.BUILD,
    "tilewright.v1.Kernels/Register": Role.TUNE,
    "tilewright.v1.Kernels/Unregister": Role.TUNE,
    "tilewright.v1.Kernels/Statistics": Role.ADMINISTER,
    "tilewright.v1.Memory/ListSessions": Role.ADMINISTER,
    "inference.GRPCInferenceService/ModelStatistics": Role.ADMINISTER,
}
_SETTING_UP = frozenset(
    f"inference.GRPCInferenceService/{name}"
    for name in (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    )
)
"""Calls of dispatch that make or remove what lasts beyond them, where no session's line says who has it: clients of the
Open Inference Protocol have none."""


def is_audited(method: str) -> bool:
    """True for methods whose calls stand in the audit log at their end: those of other roles than dispatch, and those
    by which clients without a session prepare models and register memory."""
    return method in _OTHERS or method in _SETTING_UP


def role_of(method: str) -> Role | None:
    """The role that ``package.Service/Method`` takes; None if it takes none."""
    if method.startswith(EVERYBODY):
        return None
    return _OTHERS.get(method, Role.DISPATCH)
