"""A small honest server of the protocol, in NumPy: for the client's own tests, which need a server that starts at
once and fails on demand.

Run as ``python fake_server.py unix:PATH``; it prints ``ready``. Operations: ``gemm`` (a, b, bias, c, d, alpha, relu),
``gemm_pack_b``, and ``fail``, which fails with the error code of its attribute ``code`` (``ends_call``: as the whole
call, not as one execution of it), ``sleep`` (attribute ``seconds``), ``refuse``, whose calls are refused the first
``times`` times with ``pushback_ms`` in gRPC's metadata and the rule ``rule`` (``quota``).
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np

from tilewright_proto.v1 import dispatch_pb2 as D
from tilewright_proto.v1 import dispatch_pb2_grpc, error_pb2, kernels_pb2, kernels_pb2_grpc, memory_pb2_grpc
from tilewright_proto.v1 import memory_pb2 as M
from tilewright_proto.v1 import tensor_pb2 as T

INLINE_LIMIT = 1 << 20
MESSAGE_LIMIT = 16 << 20
DTYPES = {
    T.FP32: np.float32,
    T.FP16: np.float16,
    T.BF16: ml_dtypes.bfloat16,
    T.FP8: ml_dtypes.float8_e4m3fn,
    T.BF8: ml_dtypes.float8_e5m2,
    T.INT8: np.int8,
    T.INT32: np.int32,
}
NAMES = {name.lower(): number for name, number in T.DType.items()}
STATUS = {
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "resource_exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unsupported": grpc.StatusCode.UNIMPLEMENTED,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "cancelled": grpc.StatusCode.CANCELLED,
}


class Fault(Exception):
    def __init__(self, code: str, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.detail = error_pb2.ErrorDetail(code=code, message=message, **detail)


class Session:
    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.regions: dict[int, mmap.mmap] = {}
        self.buffers: dict[int, bytearray] = {}
        self.plans: dict[int, D.PlanRequest] = {}


def strided(memory: Any, offset: int, spec: T.TensorSpec) -> np.ndarray:
    dtype = np.dtype(DTYPES[spec.dtype])
    shape = tuple(spec.shape)
    strides = [n * dtype.itemsize for n in spec.strides] or None
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, memory, offset, strides)


class Servicer(dispatch_pb2_grpc.DispatchServicer, memory_pb2_grpc.MemoryServicer, kernels_pb2_grpc.KernelsServicer):
    def __init__(self) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.counts: dict[str, int] = {}
        self.refused: dict[tuple[bytes, int], list[float]] = {}

    def session(self, token: bytes) -> Session:
        if token not in self.sessions:
            raise Fault("not_found", "there is no such session", field="session", rule="session_token")
        return self.sessions[token]

    # ---- memory ----

    def OpenSession(self, request: M.OpenSessionRequest, context: Any) -> Iterator[M.SessionEvent]:
        token, over = secrets.token_bytes(16), threading.Event()
        self.sessions[token] = Session()
        context.add_callback(over.set)
        local = context.peer().startswith("unix:")
        yield M.SessionEvent(
            opened=M.SessionEvent.Opened(
                session=token,
                server_version="fake",
                inline_limit=INLINE_LIMIT,
                shared_memory=local,
                device="cpu:0",
                message_limit=MESSAGE_LIMIT,
                operations=["gemm", "gemm_pack_b", "fail", "sleep", "refuse"],
            )
        )
        if request.client_name == "to be told":
            yield M.SessionEvent(choices=3)
        over.wait()
        self.sessions.pop(token, None)

    def RegisterRegion(self, request: M.RegisterRegionRequest, context: Any) -> M.RegisterRegionReply:
        session = self.session(request.session)
        path = f"/proc/{request.memfd.pid}/fd/{request.memfd.fd}"
        if str(Path(path).readlink()) != f"/memfd:{request.memfd.name} (deleted)":
            raise Fault("not_found", "no memory file of that name is there")
        fd = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, request.bytes)
        finally:
            os.close(fd)
        region = next(session.ids)
        session.regions[region] = memory
        return M.RegisterRegionReply(region=region, zero_copy=True)

    def UnregisterRegion(self, request: M.UnregisterRegionRequest, context: Any) -> M.UnregisterRegionReply:
        del self.session(request.session).regions[request.region]
        return M.UnregisterRegionReply()

    def Status(self, request: M.StatusRequest, context: Any) -> M.StatusReply:
        session = self.session(request.session)
        return M.StatusReply(
            regions=[M.StatusReply.Region(region=key, bytes=len(item)) for key, item in session.regions.items()],
            buffers=[M.StatusReply.Buffer(buffer=key, bytes=len(item)) for key, item in session.buffers.items()],
            plans=list(session.plans),
        )

    def CreateBuffer(self, request: M.CreateBufferRequest, context: Any) -> M.CreateBufferReply:
        session = self.session(request.session)
        buffer = next(session.ids)
        session.buffers[buffer] = bytearray(request.bytes)
        return M.CreateBufferReply(buffer=buffer)

    def WriteBuffer(self, request: M.WriteBufferRequest, context: Any) -> M.WriteBufferReply:
        buffer = self.session(request.session).buffers[request.buffer]
        buffer[request.offset : request.offset + len(request.data)] = request.data
        return M.WriteBufferReply()

    def ReadBuffer(self, request: M.ReadBufferRequest, context: Any) -> M.ReadBufferReply:
        buffer = self.session(request.session).buffers[request.buffer]
        return M.ReadBufferReply(data=bytes(buffer[request.offset : request.offset + request.bytes]))

    def FreeBuffer(self, request: M.FreeBufferRequest, context: Any) -> M.FreeBufferReply:
        del self.session(request.session).buffers[request.buffer]
        return M.FreeBufferReply()

    # ---- dispatch ----

    def infer(
        self, operation: str, inputs: dict[str, T.TensorSpec], outputs: list[T.Operand], words: Any
    ) -> list[T.Operand]:
        given = {item.name: item for item in outputs}
        if operation == "gemm_pack_b":
            b = inputs["b"]
            count = b.shape[0] * b.shape[1] * np.dtype(DTYPES[b.dtype]).itemsize
            spec = T.TensorSpec(dtype=b.dtype, shape=b.shape, packing="fake-format", packed_bytes=count)
            return [T.Operand(name="out", spec=spec)]
        if operation not in ("gemm", "fail", "sleep", "refuse"):
            raise Fault("not_found", f"there is no operation {operation!r}", field="operation", value=operation)
        if operation != "gemm":
            return [T.Operand(name="out", spec=T.TensorSpec(dtype=T.FP32, shape=[1]))]
        found = []
        for name in [name for name in inputs if name == "a" or name.startswith("a[")]:
            group = name[1:]
            a, b = inputs[name], inputs["b" + group]
            if a.shape[-1] != b.shape[-2]:
                raise Fault(
                    "invalid_argument",
                    f"a has {a.shape[-1]} columns but b has {b.shape[-2]} rows",
                    field="b.shape",
                    value=str(list(b.shape)),
                    rule="k_mismatch",
                    fix="transpose one of them",
                )
            if "out" + group in given and given["out" + group].spec.shape:
                found.append(given["out" + group])
                continue
            batch = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
            dtype = {T.FP8: T.FP16, T.BF8: T.FP16, T.INT8: T.INT32}.get(a.dtype, a.dtype)
            if "out_dtype" in words:
                dtype = NAMES[words["out_dtype"].text]
            shape = [*batch, a.shape[-2], b.shape[-1]]
            found.append(T.Operand(name="out" + group, spec=T.TensorSpec(dtype=dtype, shape=shape)))
        return found

    def compute(self, operation: str, values: dict[str, np.ndarray], words: Any) -> dict[str, np.ndarray]:
        self.counts[operation] = self.counts.get(operation, 0) + 1
        if operation == "fail":
            code = words["code"].text
            raise Fault(
                code, "asked to fail", field="code", value=code, rule="on_demand", fix="do not", retry_after_ms=250
            )
        if operation == "refuse":
            return {"out": np.ones(1, np.float32)}
        if operation == "sleep":
            time.sleep(words["seconds"].number)
            return {"out": np.ones(1, np.float32)}
        if operation == "gemm_pack_b":
            return {"out": np.ascontiguousarray(values["b"])}
        results = {}
        for name in [name for name in values if name == "a" or name.startswith("a[")]:
            group = name[1:]
            wide = np.int64 if values[name].dtype == np.int8 else np.float64
            x = values[name].astype(wide) @ values["b" + group].astype(wide)
            x = x * (words["alpha"].number if "alpha" in words else 1)
            for scale, axis in (("scale_a", -1), ("scale_b", -2)):
                if scale + group in values:
                    factor = values[scale + group].astype(np.float64)
                    x = x * (np.expand_dims(factor, axis) if factor.ndim else factor)
            if "bias" + group in values:
                x = x + values["bias" + group].astype(wide)
            binary = words["binary"].text if "binary" in words else "Add"
            for other in sorted(key for key in values if key.startswith("d" + group + "[") or key == "c" + group):
                y = values[other].astype(wide)
                x = x * y if "Multiply" in binary else x + y
            if "unary" in words and words["unary"].text == "Relu":
                x = np.maximum(x, 0)
            results["out" + group] = x
        return results

    def place(self, session: Session | None, spec: T.TensorSpec, location: T.Location) -> np.ndarray:
        where = location.WhichOneof("place")
        if where == "inline":
            if len(location.inline) > INLINE_LIMIT:
                raise Fault("invalid_argument", "too large to be inline", rule="inline_limit")
            return strided(bytearray(location.inline), 0, spec)
        if where == "region":
            if session is None or location.region.region not in session.regions:
                raise Fault("not_found", "there is no such region", field="region", rule="region_id")
            return strided(session.regions[location.region.region], location.region.offset, spec)
        if where == "buffer":
            return strided(session.buffers[location.buffer.buffer], location.buffer.offset, spec)
        raise Fault("invalid_argument", "an operand has no location")

    def perform(
        self, session: Session | None, operation: str, inputs: Any, outputs: Any, words: Any
    ) -> list[D.OutputTensor]:
        values = {item.name: self.place(session, item.spec, item.location) for item in inputs}
        results = self.compute(operation, values, words)
        replies = []
        for item in outputs:
            where = item.location.WhichOneof("place")
            dtype = DTYPES[item.spec.dtype]
            if where == "return_inline":
                data = results[item.name].astype(dtype).tobytes()
                replies.append(D.OutputTensor(name=item.name, spec=item.spec, inline=data))
            elif where == "allocate":
                buffer = next(session.ids)
                spec, itemsize = item.spec, np.dtype(dtype).itemsize
                last = sum((n - 1) * step for n, step in zip(spec.shape, spec.strides, strict=False))
                count = (last + 1) * itemsize if spec.strides else results[item.name].size * itemsize
                session.buffers[buffer] = bytearray(count)
                strided(session.buffers[buffer], 0, spec)[...] = results[item.name].astype(dtype)
                replies.append(D.OutputTensor(name=item.name, spec=item.spec, buffer=buffer))
            else:
                self.place(session, item.spec, item.location)[...] = results[item.name].astype(dtype)
        return replies

    def Run(self, request: D.RunRequest, context: Any) -> D.RunReply:
        session = self.session(request.session) if request.session else None
        self.infer(
            request.operation, {item.name: item.spec for item in request.inputs}, request.outputs, request.attributes
        )
        outputs = self.perform(session, request.operation, request.inputs, request.outputs, request.attributes)
        return D.RunReply(
            outputs=outputs, report=D.Report(kernels=["numpy"], device="cpu:0", timing=D.Timing(device_ns=1))
        )

    def Plan(self, request: D.PlanRequest, context: Any) -> D.PlanReply:
        session = self.session(request.session)
        inputs = {item.name: item.spec for item in request.inputs}
        outputs = self.infer(request.operation, inputs, request.outputs, request.attributes)
        del request.outputs[:]
        request.outputs.extend(outputs)
        plan = next(session.ids) | 1 << 63
        session.plans[plan] = request
        self.counts["plan"] = self.counts.get("plan", 0) + 1
        return D.PlanReply(
            plan=plan,
            inputs=request.inputs,
            outputs=outputs,
            report=D.Report(kernels=["numpy"], device="cpu:0"),
            flops=2,
            json='{"stages": []}',
        )

    def ReleasePlan(self, request: D.ReleasePlanRequest, context: Any) -> D.ReleasePlanReply:
        del self.session(request.session).plans[request.plan]
        return D.ReleasePlanReply()

    def Execute(self, request: D.ExecuteRequest, context: Any) -> D.ExecuteReply:
        session = self.session(request.session)
        for item in request.executions:
            plan = session.plans.get(item.plan)
            if plan is not None and plan.operation == "refuse":
                self.refuse((request.session, item.plan), plan, context)
        results = [self.execution(session, item) for item in request.executions]
        if sum(len(output.inline) for result in results for output in result.outputs) > MESSAGE_LIMIT - (64 << 10):
            fault = Fault("invalid_argument", "the outputs do not fit into one reply", rule="reply_limit")
            results = [D.ExecutionResult(error=fault.detail) for _ in results]
        return D.ExecuteReply(results=results)

    def refuse(self, number: tuple[bytes, int], plan: D.PlanRequest, context: Any) -> None:
        """Refuse the first calls, and note the shortest time between two."""
        times, now = self.refused.setdefault(number, []), time.monotonic()
        times.append(now)
        gaps = [round((b - a) * 1000) for a, b in itertools.pairwise(times)]
        self.counts["earliest"] = min(gaps, default=0)
        if len(times) <= plan.attributes["times"].number:
            self.counts["refused"] = self.counts.get("refused", 0) + 1
            context.set_trailing_metadata([("grpc-retry-pushback-ms", str(int(plan.attributes["pushback_ms"].number)))])
            rule = plan.attributes["rule"].text or "quota"
            raise Fault("resource_exhausted", "too many", rule=rule, retry_after_ms=1)

    def execution(self, session: Session, item: D.Execution) -> D.ExecutionResult:
        try:
            plan = session.plans.get(item.plan)
            if plan is None:
                raise Fault("not_found", "there is no such plan", field="plan", rule="plan_id")
            count = len(plan.inputs)
            named = [
                T.Operand(name=operand.name, spec=operand.spec, location=location)
                for operand, location in zip([*plan.inputs, *plan.outputs], item.locations, strict=True)
            ]
            outputs = self.perform(session, plan.operation, named[:count], named[count:], plan.attributes)
            return D.ExecutionResult(outputs=outputs, device_ns=1)
        except Fault as fault:
            if plan is not None and plan.attributes["ends_call"].flag:
                raise
            return D.ExecutionResult(error=fault.detail)

    def ExecuteStream(self, requests: Iterator[D.ExecuteRequest], context: Any) -> Iterator[D.ExecuteReply]:
        for request in requests:
            self.counts["stream_messages"] = self.counts.get("stream_messages", 0) + 1
            yield self.Execute(request, context)

    # ---- kernels ----

    def List(self, request: kernels_pb2.ListKernelsRequest, context: Any) -> kernels_pb2.ListKernelsReply:
        names = [f"k{index}" for index in range(5)]
        page = names[request.offset : request.offset + min(request.limit or 2, 2)]
        kernels = [kernels_pb2.KernelSummary(name=name, operation="gemm") for name in page]
        return kernels_pb2.ListKernelsReply(kernels=kernels, total=5, kernel_sets=["default"])

    def Build(self, request: kernels_pb2.BuildRequest, context: Any) -> Iterator[kernels_pb2.BuildEvent]:
        kind = kernels_pb2.BuildEvent
        for index, name in enumerate(request.names):
            yield kind(name=name, state=kind.BUILDING, done=index, total=len(request.names))
            yield kind(name=name, state=kind.BUILT, done=index + 1, total=len(request.names), build_ns=10**9)

    def Explain(self, request: kernels_pb2.ExplainRequest, context: Any) -> kernels_pb2.ExplainReply:
        return kernels_pb2.ExplainReply(json='{"strategy": "heuristic"}')

    def Statistics(self, request: Any, context: Any) -> kernels_pb2.StatisticsReply:
        kind = kernels_pb2.StatisticsReply.Operation
        return kernels_pb2.StatisticsReply(
            operations=[kind(name=name, success=count) for name, count in self.counts.items()],
            sessions=len(self.sessions),
        )


class Errors(grpc.ServerInterceptor):
    """Turns a ``Fault`` into a status with its detail."""

    def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None or handler.request_streaming or handler.response_streaming:
            return handler

        def behaviour(request: Any, context: Any) -> Any:
            try:
                return handler.unary_unary(request, context)
            except Fault as fault:
                if not any(word.text for word in getattr(request, "attributes", {}).values() if word.text == "bare"):
                    detail = ("tilewright-error-bin", fault.detail.SerializeToString())
                    context.set_trailing_metadata([*(context.trailing_metadata() or ()), detail])
                context.abort(STATUS.get(fault.detail.code, grpc.StatusCode.INTERNAL), str(fault))

        return grpc.unary_unary_rpc_method_handler(behaviour, handler.request_deserializer, handler.response_serializer)


def main(address: str) -> None:
    options = [("grpc.max_receive_message_length", MESSAGE_LIMIT), ("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(48), interceptors=[Errors()], options=options)
    servicer = Servicer()
    dispatch_pb2_grpc.add_DispatchServicer_to_server(servicer, server)
    memory_pb2_grpc.add_MemoryServicer_to_server(servicer, server)
    kernels_pb2_grpc.add_KernelsServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    server.start()
    sys.stdout.write(f"ready {port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv[1])
