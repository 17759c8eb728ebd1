"""The service ``tilewright.v1.Kernels``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.types.errors import AccessError, InvalidArgumentError, NotFoundError, TilewrightError
from tilewright_proto.v1 import kernels_pb2 as pb
from tilewright_server.devices.contract import CountingDevice
from tilewright_server.endpoints.messages import tensors as convert
from tilewright_server.endpoints.messages.kernels import build_event, statistics, summary
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.method_handlers import Lane, Send, call_of, events, lane
from tilewright_server.protocol.errors import to_violation
from tilewright_server.protocol.json_text import parsed
from tilewright_server.service import Service

__all__ = ["KernelsServicer"]

PAGE = 1000
MAX_CONFIG_BYTES = 64 * 1024
MAX_BUILDS = 10_000


class KernelsServicer:
    """Kernels: their list, validity of configurations, builds, and reasons of the selection."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine

    @lane(Lane.CATALOG)
    def list(self, request: pb.ListKernelsRequest, _: WireCall) -> pb.ListKernelsReply:
        narrow = request.filter
        kernels, total = self._engine.kernels.list(
            *_filter(narrow), offset=request.offset, limit=min(request.limit or PAGE, PAGE)
        )
        return pb.ListKernelsReply(
            kernels=[summary(kernel) for kernel in kernels],
            total=total,
            kernel_sets=self._engine.kernels.kernel_sets(narrow.operation),
        )

    @lane(Lane.CATALOG)
    def describe(self, request: pb.DescribeKernelRequest, _: WireCall) -> pb.DescribeKernelReply:
        detail = self._engine.kernels.detail(request.operation, request.name, request.arch)
        return pb.DescribeKernelReply(
            summary=summary(detail.kernel),
            config_json=json.dumps(detail.kernel.config.to_dict(), default=str),
            source=detail.source if request.source else "",
            log=detail.log,
        )

    def validate(self, request: pb.ValidateConfigRequest, context: WireCall) -> pb.ValidateConfigReply:
        record = _config(request.config_json)
        with self._engine.computing.turn(call_of(context)):
            config, violations = self._engine.validate(request.operation, record, request.arch)
        return pb.ValidateConfigReply(
            valid=not violations, name=config.name, violations=[to_violation(item) for item in violations]
        )

    def correct(self, request: pb.CorrectConfigRequest, context: WireCall) -> pb.CorrectConfigReply:
        record = _config(request.config_json)
        with self._engine.computing.turn(call_of(context)):
            correction = self._engine.correct(request.operation, record, request.arch)
        return pb.CorrectConfigReply(
            valid=correction.is_valid,
            config_json=json.dumps(correction.config.to_dict(), default=str),
            name=correction.config.name,
            applied=[to_violation(item) for item in correction.applied],
            remaining=[to_violation(item) for item in correction.remaining],
        )

    def register(self, request: pb.RegisterKernelRequest, context: WireCall) -> pb.RegisterKernelReply:
        session = self._service.sessions.get(request.session)
        if request.shared and not session.local:
            raise _not_shared_over_tcp()
        token = b"" if request.shared else session.token
        owner = context.client.principal, context.client.process
        if token and self._engine.registered.opened(token, owner):
            session.on_close(partial(self._engine.registered.forget, token))
        record = _config(request.config_json)
        with self._engine.computing.turn(call_of(context)):
            config = self._engine.register(request.operation, record, request.arch, token, owner)
        arch = self._engine.kernels.arch(request.arch)
        return pb.RegisterKernelReply(summary=summary(self._engine.kernels.describe(config, arch)))

    def unregister(self, request: pb.UnregisterKernelRequest, _: WireCall) -> pb.UnregisterKernelReply:
        session = self._service.sessions.get(request.session)
        self._engine.unregister(request.operation, request.name, session.token, shared=session.local)
        return pb.UnregisterKernelReply()

    @lane(Lane.BUILD)
    @events
    def build(self, request: pb.BuildRequest, context: WireCall, send: Send) -> None:
        """Events as they come. A slow reader does not hold up the compilers."""
        call = call_of(context)
        with self._engine.computing.turn(call) as pause:
            configs = self._wanted(request, pause)
        arch = self._engine.kernels.arch(request.arch or request.filter.arch)
        self._engine.build(
            configs, arch, lambda event: send(build_event(event)), call, retry_failed=request.retry_failed
        )
        send(None)

    @lane(Lane.CATALOG)
    def explain(self, request: pb.ExplainRequest, context: WireCall) -> pb.ExplainReply:
        explanation = self._engine.explain(
            convert.operation_request(request), convert.selection(request.selection), call_of(context)
        )
        return pb.ExplainReply(json=json.dumps(explanation, default=str))

    @lane(Lane.CATALOG)
    def export(self, request: pb.ExportRequest, _: WireCall) -> pb.ExportReply:
        document = dict(self._engine.kernels.export(*_filter(request.filter)))
        if not request.statistics:
            document.pop("statistics", None)
        return pb.ExportReply(json=_dumped(document))

    @lane(Lane.REPORT)
    def statistics(self, _: pb.StatisticsRequest, context: WireCall) -> pb.StatisticsReply:  # noqa: ARG002
        engine = self._engine
        self._service.collect_launches()
        counters: dict[str, Mapping[str, int]] = {}
        for name, device in engine.devices.opened().items():
            with suppress(TilewrightError):  # lost just now
                counters[name] = device.counters() if isinstance(device, CountingDevice) else {}
        return statistics(engine.statistics.snapshot(), self._service.sessions.usage(), engine.plugins, counters)

    def _wanted(self, request: pb.BuildRequest, pause: Callable[[], None]) -> Sequence[KernelConfig]:
        """The configurations that a request names, one way or several."""
        operation = request.operation or request.filter.operation
        arch = request.arch or request.filter.arch
        kernels = self._engine.kernels
        _check_count(len(request.names))
        wanted = []
        for name in request.names:
            pause()
            wanted.append(kernels.find(operation, name, arch, pause=pause))
        if request.config_json:
            wanted.append(self._engine.validate(operation, _config(request.config_json), arch)[0])
        if request.HasField("filter"):
            _, kernel_set, _, pattern, session = _filter(request.filter)
            wanted += kernels.select(operation, kernel_set, arch, pattern, session, pause=pause)
        if not wanted:
            raise _nothing_to_build(request)
        _check_count(len(wanted))
        return list(dict.fromkeys(wanted))


def _dumped(document: Mapping[str, Any]) -> str:
    """JSON of a document with long lists, item by item: other threads run between two, not within one."""
    encode = json.JSONEncoder(default=str).encode
    parts = []
    for name, value in document.items():
        many = isinstance(value, (list, tuple))
        text = "[" + ", ".join(encode(item) for item in value) + "]" if many else encode(value)
        parts.append(f"{encode(name)}: {text}")
    return "{" + ", ".join(parts) + "}"


def _check_count(kernels: int) -> None:
    if kernels > MAX_BUILDS:
        raise InvalidArgumentError(
            f"{kernels} kernels are too many for one request",
            field="filter",
            value=kernels,
            rule="build_count",
            fix=f"ask for {MAX_BUILDS} at most, by a narrower filter or in several requests",
        )


def _nothing_to_build(request: pb.BuildRequest) -> InvalidArgumentError | NotFoundError:
    if request.HasField("filter"):
        return NotFoundError("no kernel matches", field="filter", rule="build_filter", fix="list the kernels")
    return InvalidArgumentError(
        "the request names no kernel", field="names", rule="build_names", fix="set names, config_json or filter"
    )


def _not_shared_over_tcp() -> AccessError:
    return AccessError(
        "kernels cannot be shared over TCP: the caller cannot be told from any other process",
        field="shared",
        value=True,
        rule="registered_transport",
        fix="connect over the server's Unix socket, or register the kernel for this session",
    )


def _filter(message: pb.KernelFilter) -> tuple[str, str, str, str, bytes]:
    return message.operation, message.kernel_set, message.arch, message.name, message.session


def _config(text: str) -> Mapping[str, Any]:
    problem = f"it has more than {MAX_CONFIG_BYTES} bytes" if len(text) > MAX_CONFIG_BYTES else ""
    try:
        record = {} if problem else parsed(text)
    except (ValueError, RecursionError) as error:
        record, problem = {}, str(error)
    if not problem and not isinstance(record, dict):
        problem = "it is not an object"
    if problem:
        raise InvalidArgumentError(
            f"the configuration is not a JSON object: {problem}",
            field="config_json",
            value=text,
            rule="config_json",
            fix='send an object of fields and values, for example {"pipeline": "compv4"}',
        )
    return dict(record)
