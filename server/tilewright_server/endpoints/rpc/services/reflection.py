"""The reflection service, as v1 and v1alpha: what is served, and the files that describe it."""

from __future__ import annotations

import grpc
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.transport.method_handlers import Lane, Reception, lane, parse_as, register
from tilewright_server.engine.call import Cancellation

__all__ = ["ReflectionServicer"]

V1, V1ALPHA = "grpc.reflection.v1", "grpc.reflection.v1alpha"


class ReflectionServicer:
    """As ``reflection.ReflectionServicer``, by events: its streams hold no thread while nothing is asked.

    It has a pool of descriptors of its own: messages of the Open Inference Protocol are in none that is shared, and
    those of v1 are in no package of Python's, while tools ask for the files of every service that is listed. What is
    not in it, such as details of errors, is in the shared one.
    """

    def __init__(self, server: grpc.Server, reception: Reception) -> None:
        """Serves on ``server`` under both names; clients ask for v1 first since 2023."""
        self._pool = DescriptorPool()
        self._files: set[str] = set()
        self._names: list[str] = []
        self._others = reflection.ReflectionServicer(())
        service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
        self._pool.AddSerializedFile(_as_v1(reflection_pb2.DESCRIPTOR).SerializeToString())
        self._names.append(f"{V1}.{service.name}")
        self.add(service)
        register(server, self, service, reception)
        register(server, self, service, reception, name=f"{V1}.{service.name}")

    def add(self, service: ServiceDescriptor) -> None:
        """List one more service, and have its file. To be called before the server starts."""
        self._take(service.file)
        self._names.append(service.full_name)
        self._answers = reflection.ReflectionServicer(self._names, self._pool)

    def _take(self, file: FileDescriptor) -> None:
        if file.name in self._files:
            return
        self._files.add(file.name)
        for needed in file.dependencies:
            self._take(needed)
        self._pool.AddSerializedFile(file.serialized_pb)

    @lane(Lane.REPORT)
    def server_reflection_info(self, data: bytes, cancellation: Cancellation, client: Client) -> bytes:  # noqa: ARG002
        request = parse_as(reflection_pb2.ServerReflectionRequest, data)
        (reply,) = self._answers.ServerReflectionInfo(iter((request,)), None)
        if reply.HasField("error_response"):
            (reply,) = self._others.ServerReflectionInfo(iter((request,)), None)
        answer: bytes = reply.SerializeToString()
        return answer


def _as_v1(file: FileDescriptor) -> FileDescriptorProto:
    """The file of v1alpha under the names of v1, which has the same messages."""
    found = FileDescriptorProto.FromString(file.serialized_pb)
    found.name, found.package = "grpc/reflection/v1/reflection.proto", V1
    for message in found.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(V1ALPHA, V1)
    for service in found.service:
        for method in service.method:
            method.input_type = method.input_type.replace(V1ALPHA, V1)
            method.output_type = method.output_type.replace(V1ALPHA, V1)
    return found
