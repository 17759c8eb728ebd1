"""Kernels of the server: what there is, whether a configuration is valid, building, statistics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.dispatch.operands.request import config_text
from tilewright.errors import InvalidArgumentError, TilewrightError, Violation, from_detail, violation
from tilewright.session.state import Core, check_timeout
from tilewright.transport import rpc
from tilewright.transport.rpc import Flow, Rpc
from tilewright.types.arguments import flag
from tilewright.types.report import plain
from tilewright_proto.v1 import kernels_pb2

__all__ = ["BuildEvent", "Correction", "Kernel", "KernelDetails", "Validation"]


@dataclass(frozen=True)
class Kernel:
    """One kernel of the catalog."""

    name: str
    key: str
    operation: str
    arch: str
    built: bool
    registered: bool = False
    """Declared by a caller, not by the operation."""


@dataclass(frozen=True)
class KernelDetails:
    """A kernel with its configuration and, if asked for, its generated source and the compiler's output."""

    kernel: Kernel
    config: dict[str, Any]
    source: str
    log: str


@dataclass(frozen=True)
class Validation:
    """True if a configuration is valid, and every rule that it breaks."""

    valid: bool
    name: str
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class Correction:
    """A configuration after all fixes that could be applied."""

    valid: bool
    config: dict[str, Any]
    name: str
    applied: tuple[Violation, ...]
    remaining: tuple[Violation, ...]


@dataclass(frozen=True)
class BuildEvent:
    """Progress of one kernel: ``state`` is queued, building, built, cached or failed."""

    name: str
    state: str
    done: int
    total: int
    seconds: float
    error: TilewrightError | None


def list_kernels(
    core: Core,
    operation: str = "",
    *,
    kernel_set: str = "",
    arch: str = "",
    name: str = "",
    limit: int = 0,
    offset: int = 0,
) -> Flow[list[Kernel]]:
    """Kernels that match: all arguments narrow the choice; ``name`` is a shell-style pattern. ``limit`` 0 means all."""
    _check_count("limit", limit)
    _check_count("offset", offset)
    found: list[Kernel] = []
    while True:
        request = kernels_pb2.ListKernelsRequest(
            filter=_filter(core, operation, kernel_set, arch, name),
            limit=limit - len(found) if limit else 0,
            offset=offset + len(found),
        )
        reply = yield Rpc(rpc.LIST, request, core.timeout)
        found += [_kernel(item) for item in reply.kernels]
        if not reply.kernels or offset + len(found) >= reply.total or (limit and len(found) >= limit):
            return found


def kernel_sets(core: Core, operation: str = "") -> Flow[list[str]]:
    """Names of the kernel sets of an operation, or of all."""
    request = kernels_pb2.ListKernelsRequest(filter=_filter(core, operation, "", "", ""), limit=1)
    reply = yield Rpc(rpc.LIST, request, core.timeout)
    return list(reply.kernel_sets)


def describe(
    core: Core, name: str, *, operation: str = "", arch: str = "", source: bool = False
) -> Flow[KernelDetails]:
    """One kernel by name. Raises ``NotFoundError``."""
    request = kernels_pb2.DescribeKernelRequest(operation=operation, name=name, arch=arch, source=source)
    reply = yield Rpc(rpc.DESCRIBE, request, core.timeout)
    return KernelDetails(_kernel(reply.summary), _loads(reply.config_json), reply.source, reply.log)


def validate(core: Core, operation: str, config: Mapping[str, Any], *, arch: str = "") -> Flow[Validation]:
    """Check a kernel configuration, given as plain values, against the rules of its operation on an arch."""
    request = kernels_pb2.ValidateConfigRequest(operation=operation, arch=arch, config_json=config_text(config))
    reply = yield Rpc(rpc.VALIDATE, request, core.timeout)
    return Validation(reply.valid, reply.name, tuple(violation(item) for item in reply.violations))


def correct(core: Core, operation: str, config: Mapping[str, Any], *, arch: str = "") -> Flow[Correction]:
    """Apply the fixes of broken rules until the configuration is valid or none helps."""
    request = kernels_pb2.CorrectConfigRequest(operation=operation, arch=arch, config_json=config_text(config))
    reply = yield Rpc(rpc.CORRECT, request, core.timeout)
    return Correction(
        reply.valid,
        _loads(reply.config_json),
        reply.name,
        tuple(violation(item) for item in reply.applied),
        tuple(violation(item) for item in reply.remaining),
    )


def register(
    core: Core, config: Mapping[str, Any], operation: str = "", *, arch: str = "", shared: bool = False
) -> Flow[Kernel]:
    """Make a valid configuration a kernel: its name then works wherever the name of a kernel is taken, and lists, sets
    (``registered``) and exports have it.

    ``config`` are a kernel's fields, as ``describe(name).config`` has them, an entry of ``export()``, or a record in
    Composable Kernel's form. ``operation`` may be left out where the fields tell it. The kernel is this session's, and
    ends with it; with ``shared`` it is kept beside the cache for all of the user's servers and clients, until it is
    unregistered. Raises ``ConfigInvalidError`` with all rules that it breaks on ``arch`` (the default device's), and
    ``InvalidArgumentError``.
    """
    request = kernels_pb2.RegisterKernelRequest(
        session=core.require().token,
        operation=operation,
        arch=arch,
        config_json=config_text(config),
        shared=flag("shared", shared),
    )
    reply = yield Rpc(rpc.REGISTER_KERNEL, request, core.timeout)
    return _kernel(reply.summary)


def unregister(core: Core, name: str, operation: str = "") -> Flow[None]:
    """Forget a registered kernel: this session's own, or else a shared one. Raises ``NotFoundError``."""
    request = kernels_pb2.UnregisterKernelRequest(session=core.require().token, operation=operation, name=name)
    yield Rpc(rpc.UNREGISTER_KERNEL, request, core.timeout)


def build(
    core: Core,
    names: Sequence[str] = (),
    *,
    operation: str = "",
    kernel_set: str = "",
    arch: str = "",
    pattern: str = "",
    config: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    progress: Callable[[BuildEvent], object] | None = None,
    timeout: float | None = None,
) -> Flow[list[BuildEvent]]:
    """Build kernels by name, by filter or from one configuration. Returns the last event of each; a failed build is
    an event with its error.

    ``progress`` is called with every event as it comes. ``retry_failed`` forgets cached failures first. Without
    ``timeout`` it waits for all.
    """
    request = kernels_pb2.BuildRequest(
        session=core.require().token,
        # An empty filter would mean everything; none means what is named.
        filter=_filter(core, operation, kernel_set, arch, pattern) if kernel_set or pattern else None,
        names=names,
        config_json=config_text(config),
        operation=operation,
        arch=arch,
        retry_failed=retry_failed,
    )

    def on_event(message: kernels_pb2.BuildEvent) -> None:
        if progress is not None:
            progress(_event(message))

    messages = yield Rpc(rpc.BUILD, request, check_timeout(timeout), on_event)
    last = {message.name: _event(message) for message in messages}
    return list(last.values())


def export(
    core: Core, operation: str = "", *, kernel_set: str = "", arch: str = "", name: str = "", statistics: bool = False
) -> Flow[dict[str, Any]]:
    """The catalog as JSON-able data."""
    request = kernels_pb2.ExportRequest(filter=_filter(core, operation, kernel_set, arch, name), statistics=statistics)
    reply = yield Rpc(rpc.EXPORT, request, core.timeout)
    return _loads(reply.json)


def statistics(core: Core) -> Flow[dict[str, Any]]:
    """Counters of the server since it started: operations, kernels, artifacts, sessions, regions, buffers, queue,
    plugins, and how open GPUs are used (memory, modules, and how often anybody waited for them).
    """
    reply = yield Rpc(rpc.STATISTICS, kernels_pb2.StatisticsRequest(), core.timeout)
    found: dict[str, Any] = plain(reply)
    return found


def _filter(core: Core, operation: str, kernel_set: str, arch: str, name: str) -> kernels_pb2.KernelFilter:
    session = core.require().token
    return kernels_pb2.KernelFilter(operation=operation, kernel_set=kernel_set, arch=arch, name=name, session=session)


def _check_count(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise InvalidArgumentError(
            f"{field} is a count", field=field, value=value, rule="count_range", fix="give an int, 0 to 2**31 - 1"
        )


def _kernel(item: kernels_pb2.KernelSummary) -> Kernel:
    return Kernel(item.name, item.key, item.operation, item.arch, item.built, item.registered)


def _event(item: kernels_pb2.BuildEvent) -> BuildEvent:
    state = kernels_pb2.BuildEvent.State.Name(item.state).lower()
    error = from_detail(item.error) if item.HasField("error") else None
    return BuildEvent(item.name, state, item.done, item.total, item.build_ns / 1e9, error)


def _loads(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
