"""Requests as keys of what was planned for them."""

from __future__ import annotations

from tilewright_kit.contract.problem import OperationRequest
from tilewright_server.engine.planning.plan_cache_entry import OPERAND_BYTES
from tilewright_server.engine.types import Selection

__all__ = ["names_kernel", "request_bytes", "request_key"]


def request_key(request: OperationRequest, selection: Selection) -> tuple[object, ...]:
    """A hashable stand-in for a request, made without parsing it.

    Attributes enter by their text: 1, 1.0 and True are equal to Python, but not to an operation, nor are 0.0 and -0.0.
    The build policy does not enter: it decides when a plan is ready, not which.
    """
    return (
        request.operation,
        tuple(request.inputs.items()),
        tuple(request.outputs.items()),
        repr(request.attributes) if request.attributes else "",
        selection.strategy,
        selection.kernel,
        selection.config,
        selection.device,
    )


def names_kernel(key: tuple[object, ...]) -> object:
    """The kernel that the request of a key names."""
    return key[5]


def request_bytes(request: OperationRequest) -> int:
    """About how much memory it takes to remember a request."""
    return OPERAND_BYTES * (1 + len(request.inputs) + len(request.outputs)) + len(repr(request.attributes))
