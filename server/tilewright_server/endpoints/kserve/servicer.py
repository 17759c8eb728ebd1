"""The service ``inference.GRPCInferenceService``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, NotFoundError
from tilewright_proto.inference import inference_pb2 as pb
from tilewright_server import __version__
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.kserve.inference import Inference
from tilewright_server.endpoints.kserve.models import VERSION, Model, Models, check_version, tensor_of, unknown_model
from tilewright_server.endpoints.kserve.owners import LoadedPlan, Owners
from tilewright_server.endpoints.kserve.regions import SharedMemory
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.method_handlers import Lane, call_of, lane, parse_as
from tilewright_server.endpoints.rpc.transport.traffic import Refusal, log_refusal
from tilewright_server.engine.call import Call, Cancellation
from tilewright_server.protocol.errors import MAX_MESSAGE, as_tilewright_error, clean
from tilewright_server.protocol.request_ids import Given, current, printable
from tilewright_server.protocol.request_ids import serve as serve_request
from tilewright_server.service import Service

__all__ = ["SERVICE", "KServeServicer"]

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
STREAM = f"{SERVICE.full_name}/ModelStreamInfer"
EXTENSIONS = (
    "model_repository",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


class KServeServicer:
    """Operations and plans as models."""

    def __init__(
        self, service: Service, ready: Callable[[], bool], log_level: str, *, open_socket: bool, fill: bool
    ) -> None:
        """``ready`` says if clients should be sent here; for the rest see ``Owners`` and ``SharedMemory``."""
        self._ready = ready
        self._log_level = log_level
        self._owners = Owners(service.sessions, open_socket=open_socket)
        self._models = Models(service.engine.operations)
        self._memory = SharedMemory(self._owners, service.engine.devices, fill=fill)
        self._inference = Inference(service, self._models, self._owners, self._memory)

    def listen(self, paths: Collection[str], ports: Collection[int]) -> None:
        """See ``Owners.listen``."""
        self._owners.listen(paths, ports)

    def close(self) -> None:
        """Give back what clients registered."""
        self._owners.close()

    # Health and descriptions

    @lane(Lane.HEALTH)
    def server_live(self, _: pb.ServerLiveRequest, __: WireCall) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @lane(Lane.HEALTH)
    def server_ready(self, _: pb.ServerReadyRequest, __: WireCall) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._ready())

    @lane(Lane.REPORT)
    def model_ready(self, request: pb.ModelReadyRequest, context: WireCall) -> pb.ModelReadyResponse:
        try:
            self._model(request.name, request.version, context)
        except NotFoundError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._ready())

    @lane(Lane.REPORT)
    def server_metadata(self, _: pb.ServerMetadataRequest, __: WireCall) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="tilewright", version=__version__, extensions=EXTENSIONS)

    @lane(Lane.REPORT)
    def model_metadata(self, request: pb.ModelMetadataRequest, context: WireCall) -> pb.ModelMetadataResponse:
        return self._model(request.name, request.version, context).metadata()

    @lane(Lane.REPORT)
    def model_config(self, request: pb.ModelConfigRequest, context: WireCall) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=self._model(request.name, request.version, context).config())

    @lane(Lane.REPORT)
    def model_statistics(self, request: pb.ModelStatisticsRequest, context: WireCall) -> pb.ModelStatisticsResponse:
        models = [self._model(request.name, request.version, context)] if request.name else self._all(context.client)
        return pb.ModelStatisticsResponse(model_stats=[item.counters.message(item.name, VERSION) for item in models])

    def _model(self, name: str, version: str, context: WireCall) -> Model:
        check_version(name, version)
        if "@" not in name:
            return self._models.get(name)
        owner = self._owners.find(context.client)
        plan = owner.plans.get(name) if owner is not None else None
        if plan is None:
            raise unknown_model(name)
        return _model_of(plan)

    def _all(self, client: Client) -> list[Model]:
        """Operations, and the plans of the caller."""
        owner = self._owners.find(client)
        if owner is None:
            return self._models.all()
        with owner.lock:
            plans = [_model_of(plan) for _, plan in sorted(owner.plans.items())]
        return self._models.all() + plans

    # Inference

    def model_infer(self, request: pb.ModelInferRequest, context: WireCall) -> pb.ModelInferResponse:
        context.call_it(request.id)
        return self._inference.infer(request, call_of(context))

    @lane(Lane.STREAM)
    def model_stream_infer(self, data: bytes, cancellation: Cancellation, client: Client) -> bytes:
        """One reply for each request; errors of a request do not end the stream."""
        message: Any = None
        try:
            message = parse_as(pb.ModelInferRequest, data)
            if message.id:
                serve_request(Given(printable(message.id)))
            reply = self._inference.infer(message, Call.within(None, cancellation, client))
            return pb.ModelStreamInferResponse(infer_response=reply).SerializeToString()
        except Exception as error:
            known = as_tilewright_error(error)
            log_refusal(STREAM, Refusal.of(known), client, current())
            failed = pb.ModelStreamInferResponse(error_message=clean(str(known), MAX_MESSAGE))
            if message is not None:
                failed.infer_response.id = message.id
            return failed.SerializeToString()

    # Repository

    @lane(Lane.REPORT)
    def repository_index(self, request: pb.RepositoryIndexRequest, context: WireCall) -> pb.RepositoryIndexResponse:
        kind = pb.RepositoryIndexResponse.ModelIndex
        ready = self._ready()
        models = [] if request.ready and not ready else self._all(context.client)
        state, reason = ("READY", "") if ready else ("UNAVAILABLE", "the server is not ready")
        return pb.RepositoryIndexResponse(
            models=[kind(name=item.name, version=VERSION, state=state, reason=reason) for item in models]
        )

    def repository_model_load(
        self, request: pb.RepositoryModelLoadRequest, context: WireCall
    ) -> pb.RepositoryModelLoadResponse:
        for name in request.parameters:
            if name.startswith("file:"):
                raise InvalidArgumentError(
                    "models are operations of the server and plans: no files come with them",
                    field=f"parameters[{name[:64]}]",
                    rule="model_files",
                    fix="leave it out",
                )
        if "@" not in request.model_name:  # operations are always there
            self._models.get(request.model_name)
            return pb.RepositoryModelLoadResponse()
        if "config" not in request.parameters:
            raise InvalidArgumentError(
                "a plan is loaded for a problem",
                field="parameters[config]",
                rule="model_config",
                fix="give its shapes as the parameter config, the JSON form of a ModelConfig",
            )
        self._inference.load(request.model_name, request.parameters["config"].string_param, call_of(context))
        return pb.RepositoryModelLoadResponse()

    def repository_model_unload(
        self, request: pb.RepositoryModelUnloadRequest, context: WireCall
    ) -> pb.RepositoryModelUnloadResponse:
        if "@" not in request.model_name:
            self._models.get(request.model_name)
            raise AccessError(
                "operations serve all clients and are not unloaded",
                field="model_name",
                value=request.model_name,
                rule="unload_operation",
                fix="unload plans that this client loaded; the setting disabled_plugins takes operations away",
            )
        self._inference.unload(request.model_name, call_of(context))
        return pb.RepositoryModelUnloadResponse()

    # Shared memory

    def system_shared_memory_register(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: WireCall
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._memory.register_system(context.client, request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_shared_memory_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: WireCall
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._memory.unregister(context.client, request.name, call_of(context).deadline, system=True)
        return pb.SystemSharedMemoryUnregisterResponse()

    @lane(Lane.REPORT)
    def system_shared_memory_status(
        self, request: pb.SystemSharedMemoryStatusRequest, context: WireCall
    ) -> pb.SystemSharedMemoryStatusResponse:
        kind = pb.SystemSharedMemoryStatusResponse.RegionStatus
        return pb.SystemSharedMemoryStatusResponse(
            regions={
                item.name: kind(name=item.name, key=item.key, offset=item.offset, byte_size=item.byte_size)
                for item in self._memory.list(context.client, request.name, system=True)
            }
        )

    def cuda_shared_memory_register(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: WireCall
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._memory.register_device(
            context.client, request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_shared_memory_unregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: WireCall
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._memory.unregister(context.client, request.name, call_of(context).deadline, system=False)
        return pb.CudaSharedMemoryUnregisterResponse()

    @lane(Lane.REPORT)
    def cuda_shared_memory_status(
        self, request: pb.CudaSharedMemoryStatusRequest, context: WireCall
    ) -> pb.CudaSharedMemoryStatusResponse:
        kind = pb.CudaSharedMemoryStatusResponse.RegionStatus
        return pb.CudaSharedMemoryStatusResponse(
            regions={
                item.name: kind(name=item.name, device_id=item.device_id, byte_size=item.byte_size)
                for item in self._memory.list(context.client, request.name, system=False)
            }
        )

    # Settings of the server, which clients read only

    @lane(Lane.REPORT)
    def trace_setting(self, request: pb.TraceSettingRequest, _: WireCall) -> pb.TraceSettingResponse:
        _read_only(request.settings)
        kind = pb.TraceSettingResponse.SettingValue
        return pb.TraceSettingResponse(settings={"trace_level": kind(value=["OFF"])})

    @lane(Lane.REPORT)
    def log_settings(self, request: pb.LogSettingsRequest, _: WireCall) -> pb.LogSettingsResponse:
        _read_only(request.settings)
        kind = pb.LogSettingsResponse.SettingValue
        levels = {"debug": 0, "info": 1, "warning": 2, "error": 3}
        least = levels[self._log_level]
        return pb.LogSettingsResponse(
            settings={
                "log_info": kind(bool_param=least <= levels["info"]),
                "log_warning": kind(bool_param=least <= levels["warning"]),
                "log_error": kind(bool_param=True),
                "log_verbose_level": kind(uint32_param=int(least == 0)),
                "log_format": kind(string_param="default"),
            }
        )


def _read_only(settings: Collection[str]) -> None:
    if settings:
        raise AccessError(
            "clients cannot change what the server logs and traces",
            field="settings",
            value=sorted(settings)[0],
            rule="settings_operator",
            fix="change the server's settings (log_level), and send it SIGHUP",
        )


def _model_of(plan: LoadedPlan) -> Model:
    inputs = tuple(tensor_of(name, desc, desc.shape) for name, desc in plan.request.inputs.items())
    return Model(
        plan.name,
        inputs,
        tuple(tensor_of(item.name, item.desc, item.desc.shape) for item in plan.outputs),
        plan.counters,
    )
