"""The service ``tilewright.v1.Dispatch``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tilewright_kit.contract.problem import Role
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError
from tilewright_proto.v1 import dispatch_pb2 as pb
from tilewright_proto.v1 import operations_pb2
from tilewright_proto.v1.operations_pb2 import DescribeOperationReply as DescribeReply
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.messages import tensors as convert
from tilewright_server.endpoints.messages.operations import description
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.method_handlers import Lane, call_of, lane, parse_as, raw
from tilewright_server.endpoints.rpc.transport.tracing import Parts
from tilewright_server.engine.call import Call, Cancellation
from tilewright_server.engine.types import Outcome
from tilewright_server.protocol.errors import as_tilewright_error, to_detail
from tilewright_server.service import Batch, Finished, Result, Service
from tilewright_server.session.operands.operand_binding import Target
from tilewright_server.session.session import Session

__all__ = ["DispatchServicer", "bind"]

TOKEN_FIELD = b"\x0a\x10"
"""How a request of a session begins: field 1, sixteen bytes."""
MEMO_BYTES = 16 * 1024
"""Larger requests are not remembered."""
MAX_EXECUTIONS = 4096
INLINE_OBJECTS = 512 << 10
"""Bytes of code objects that a reply to ``Plan`` brings along."""
OBJECT_PART = 1 << 20
"""Bytes of a code object that one reply brings: who fetches more asks again, at the pace at which it reads."""
RESOLVE_ATTEMPTS = 3


class DispatchServicer:
    """Runs operations. ``execute`` and ``execute_stream`` are the hot path: see ``_batch``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def run(self, request: pb.RunRequest, context: WireCall) -> pb.RunReply:
        call = call_of(context)
        result = self._service.run(
            request.session,
            convert.operation_request(request),
            convert.locations(request),
            convert.selection(request.selection),
            call,
        )
        if context.traced:
            context.parts = _parts(call, [result.outcome])
        return pb.RunReply(
            outputs=[convert.output(item) for item in result.outputs], report=convert.report(result, call)
        )

    def plan(self, request: pb.PlanRequest, context: WireCall) -> pb.PlanReply:
        call = call_of(context)
        plan_id, target = self._service.plan(
            request.session,
            convert.operation_request(request),
            convert.selection(request.selection),
            call,
            convert.locations(request),
        )
        if context.traced:
            context.parts = _parts(call, ())
        prepared = target.prepared
        reply = pb.PlanReply(
            plan=plan_id,
            inputs=convert.operands(item for item in prepared.operands if item.role is Role.INPUT),
            outputs=convert.operands(item for item in prepared.operands if item.role is Role.OUTPUT),
            report=convert.plan_report(prepared, call),
            workspace_bytes=prepared.workspace_bytes,
            flops=prepared.plan.flops,
            json=json.dumps(prepared.plan.to_dict(), default=str),
            fallback=prepared.is_fallback,
        )
        if request.placement == pb.PLACEMENT_CALLER:
            self._add_launch_plan(reply, self._service.sessions.get(request.session), target, request.known_objects)
        return reply

    def _add_launch_plan(self, reply: pb.PlanReply, session: Session, target: Target, known: Sequence[bytes]) -> None:
        """The launch plan, with the code objects that are small and not ``known``; or why there is none."""
        try:
            found = self._service.launch_plan(session, target)
        except TilewrightError as error:
            reply.launch_refused.CopyFrom(to_detail(error))
            return
        reply.launch_plan = found.data
        room = INLINE_OBJECTS
        has = frozenset(known)
        for item in found.objects:
            content = item.read() if item.nbytes <= room and item.sha256 not in has else b""
            room -= len(content)
            reply.objects.add(sha256=item.sha256, bytes=item.nbytes, content=content)

    def fetch_object(self, request: pb.FetchObjectRequest, _: WireCall) -> pb.FetchObjectReply:
        session = self._service.sessions.get(request.session)
        found = self._service.code_object(session, request.plan, request.sha256)
        if not 0 <= request.offset <= found.nbytes:
            raise InvalidArgumentError(
                f"the code object has {found.nbytes} bytes",
                field="offset",
                value=request.offset,
                rule="code_object_range",
                fix="give an offset within it",
            )
        return pb.FetchObjectReply(content=found.read(request.offset, OBJECT_PART), bytes=found.nbytes)

    def release_plan(self, request: pb.ReleasePlanRequest, _: WireCall) -> pb.ReleasePlanReply:
        self._service.sessions.get(request.session).release_plan(request.plan)
        return pb.ReleasePlanReply()

    @lane(Lane.CATALOG)
    def describe_operation(self, request: operations_pb2.DescribeOperationRequest, _: WireCall) -> DescribeReply:
        catalogs = self._service.engine.catalogs
        names = [request.operation] if request.operation else sorted(catalogs.operations)
        return DescribeReply(operations=[description(catalogs.operation(name)) for name in names])

    def bind(self, request: pb.BindRequest, _: WireCall) -> pb.BindReply:
        return bind(self._service, self._service.sessions.get(request.session), request)

    def unbind(self, request: pb.UnbindRequest, context: WireCall) -> pb.UnbindReply:
        self._service.sessions.get(request.session).unbind(request.binding, call_of(context).deadline)
        return pb.UnbindReply()

    @raw
    def execute(self, data: bytes, context: WireCall) -> bytes:
        call = call_of(context)
        for attempt in range(RESOLVE_ATTEMPTS):
            batch = self._batch(data)
            try:
                results = self._service.execute(batch, call)
                if context.traced:
                    context.parts = _parts(call, results)
                return _reply(results)
            except NotFoundError:
                # An object ended after it was looked up: look again, which finds out which executions that concerns.
                if attempt == RESOLVE_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    @lane(Lane.STREAM)
    def execute_stream(self, data: bytes, cancellation: Cancellation, client: Client) -> bytes:
        """As ``execute``, but what concerns the whole request becomes the error of each of its executions."""
        count = 1
        for _ in range(RESOLVE_ATTEMPTS):
            try:
                batch = self._batch(data)
                count = len(batch.entries)
                call = Call.within(batch.timeout_ms / 1000 if batch.timeout_ms else None, cancellation, client)
                return _reply(self._service.execute(batch, call))
            except Exception as error:  # noqa: PERF203 - at most three times
                failure = error
                if not isinstance(error, NotFoundError):
                    break
        detail = to_detail(as_tilewright_error(failure))
        return pb.ExecuteReply(results=[pb.ExecutionResult(error=detail)] * count).SerializeToString()

    def _batch(self, data: bytes) -> Batch:
        """The executions that a request asks for.

        Programs that prepare a plan send the same bytes again and again. A request that its session has sent before is
        not even parsed: what it resolved to is kept until any object or plan of the session ends. The token is part of
        the bytes, so no session finds another's.
        """
        if data[:2] == TOKEN_FIELD:
            session = self._service.sessions.find(data[2:18])
            if session is not None:
                known: Batch | None = session.memo.get(data)
                if known is not None:
                    return known
        return self._resolve(data)

    def _resolve(self, data: bytes) -> Batch:
        request = parse_as(pb.ExecuteRequest, data)
        session = self._service.sessions.get(request.session)
        executions = request.executions
        if len(executions) > MAX_EXECUTIONS:
            raise InvalidArgumentError(
                f"a request has at most {MAX_EXECUTIONS} executions",
                field="executions",
                value=len(executions),
                rule="execution_count",
                fix="send several requests",
            )
        epoch = session.epoch
        batch = self._service.resolve(session, [convert.execution(item) for item in executions])
        batch.timeout_ms = request.timeout_ms
        if batch.reusable and len(data) <= MEMO_BYTES:
            session.remember(data, batch, batch.nbytes, epoch)
        return batch


def bind(service: Service, session: Session, request: pb.BindRequest, owner: object = None) -> pb.BindReply:
    """The call ``Bind``, of gRPC and of the local socket."""
    execution = convert.execution(request.execution)
    if isinstance(execution, int):
        raise InvalidArgumentError(
            "a binding cannot be made of a binding",
            field="execution.binding",
            value=execution,
            rule="execution",
            fix="give the plan and the locations",
        )
    timeout_s = request.timeout_ms / 1000 if request.timeout_ms else None
    bound = service.bind(session, execution, timeout_s, owner)
    attach = bound.prepared.program is not None and service.attachments.connected(bound.device_id) is not None
    return pb.BindReply(binding=bound.id, device=bound.device_id, attach=attach)


def _parts(call: Call, results: Iterable[object]) -> Parts:
    """Parts of a call's time: of all executions together."""
    outcomes = [item.outcome if isinstance(item, Finished) else item for item in results]
    done = [item for item in outcomes if isinstance(item, Outcome)]
    return (
        ("plan", call.plan_ns),
        ("build", call.build_ns),
        ("queue", max((item.queue_ns for item in done), default=0)),
        ("device", sum(item.device_ns for item in done)),
    )


def _reply(results: Sequence[Result]) -> bytes:
    reply = pb.ExecuteReply()
    add = reply.results.add
    queue_ns = 0
    for result in results:
        if type(result) is Outcome:
            add(device_ns=result.device_ns)
            queue_ns = max(queue_ns, result.queue_ns)
        elif isinstance(result, Finished):
            outputs = [convert.output(item) for item in result.outputs]
            add(device_ns=result.outcome.device_ns, bytes_copied=result.bytes_copied, outputs=outputs)
            queue_ns = max(queue_ns, result.outcome.queue_ns)
        else:
            add(error=to_detail(as_tilewright_error(result)))  # type: ignore[arg-type]
    reply.queue_ns = queue_ns
    return reply.SerializeToString()
