"""A server in this process that says it has a GPU: what is asked of it is written down, nothing is computed."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import fake_server
import grpc
from fake_cuda import UUIDS
from local_peer import Fault, LocalPeer

from tilewright.gpu import cuda
from tilewright.transport import frames as packets
from tilewright_proto.v1 import dispatch_pb2 as D
from tilewright_proto.v1 import dispatch_pb2_grpc, kernels_pb2_grpc, memory_pb2_grpc
from tilewright_proto.v1 import memory_pb2 as M


class DeviceServer(fake_server.Servicer):
    def __init__(self, folder: Path, local: bool) -> None:
        super().__init__()
        self.peer = LocalPeer(folder / "s.local") if local else None
        self.registered: list[M.RegisterRegionRequest] = []
        self.unregistered: list[int] = []
        self.bound: list[D.BindRequest] = []
        self.unbound: list[int] = []
        self.planned: list[D.PlanRequest] = []
        self.executed: list[D.ExecuteRequest] = []
        self.attach = True
        self.exportable: set[int] = set()
        if self.peer is not None:
            self.peer.calls[packets.REGISTER_REGION] = self.call_register
            self.peer.calls[packets.EXPORT_BUFFER] = self.call_export

    def OpenSession(self, request: Any, context: Any) -> Iterator[M.SessionEvent]:
        for event in super().OpenSession(request, context):
            event.opened.local_socket = self.peer.path if self.peer is not None else ""
            uuid = cuda.format_uuid(UUIDS[0])
            event.opened.devices.add(id="cuda:0", kind="cuda", name="fake", uuid=uuid, arch="sm_90a")
            event.opened.devices.add(id="cpu:0", kind="cpu", name="cpu", arch="x86_64")
            yield event

    # ---- memory ----

    def call_register(self, payload: bytes, fds: list[int]) -> tuple[int, bytes, int]:
        request = M.RegisterRegionRequest.FromString(payload)
        session = self.session(request.session)
        self.registered.append(request)
        region = next(session.ids)
        if request.WhichOneof("source") == "attached":
            session.regions[region] = mmap.mmap(fds[0], request.bytes)
        elif request.WhichOneof("source") != "cuda_ipc" and len(fds) != max(1, len(request.device_fd.part_bytes)):
            raise Fault("invalid_argument", "region_descriptor")
        return region, M.RegisterRegionReply(region=region, zero_copy=True, device="cuda:0").SerializeToString(), -1

    def RegisterRegion(self, request: M.RegisterRegionRequest, context: Any) -> M.RegisterRegionReply:
        if request.WhichOneof("source") == "memfd":
            return super().RegisterRegion(request, context)
        return M.RegisterRegionReply.FromString(self.call_register(request.SerializeToString(), [])[1])

    def UnregisterRegion(self, request: M.UnregisterRegionRequest, context: Any) -> M.UnregisterRegionReply:
        self.unregistered.append(request.region)
        return M.UnregisterRegionReply()

    def CreateBuffer(self, request: M.CreateBufferRequest, context: Any) -> M.CreateBufferReply:
        reply = super().CreateBuffer(request, context)
        if request.exportable:
            self.exportable.add(reply.buffer)
        return reply

    def call_export(self, payload: bytes, fds: list[int]) -> tuple[int, bytes, int]:
        request = M.ExportBufferRequest.FromString(payload)
        size = len(self.session(request.session).buffers[request.buffer])
        assert request.buffer in self.exportable
        reply = M.ExportBufferReply(kind=M.ExportBufferReply.CUDA_IPC, handle=b"S" * 64, offset=512, bytes=size)
        return 0, reply.SerializeToString(), -1

    # ---- dispatch ----

    def Plan(self, request: D.PlanRequest, context: Any) -> D.PlanReply:
        self.planned.append(D.PlanRequest.FromString(request.SerializeToString()))
        reply = super().Plan(request, context)
        reply.report.device = request.selection.device or "cuda:0"
        return reply

    def Bind(self, request: D.BindRequest, context: Any) -> D.BindReply:
        self.bound.append(request)
        return D.BindReply(binding=9000 + len(self.bound), device="cuda:0", attach=self.attach)

    def Unbind(self, request: D.UnbindRequest, context: Any) -> D.UnbindReply:
        self.unbound.append(request.binding)
        return D.UnbindReply()

    def Execute(self, request: D.ExecuteRequest, context: Any) -> D.ExecuteReply:
        self.executed.append(request)
        return D.ExecuteReply(results=[D.ExecutionResult(device_ns=5) for _ in request.executions])

    # ---- life ----

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, local: bool = True) -> Iterator[tuple[DeviceServer, str]]:
        made = cls(folder, local)
        server = grpc.server(futures.ThreadPoolExecutor(8), interceptors=[fake_server.Errors()])
        dispatch_pb2_grpc.add_DispatchServicer_to_server(made, server)
        memory_pb2_grpc.add_MemoryServicer_to_server(made, server)
        kernels_pb2_grpc.add_KernelsServicer_to_server(made, server)
        server.add_insecure_port(f"unix:{folder}/s")
        server.start()
        try:
            yield made, f"unix:{folder}/s"
        finally:
            if made.peer is not None:
                made.peer.close()
            server.stop(0).wait()
