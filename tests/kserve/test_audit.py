"""The audit log of calls by the Open Inference Protocol: who did what, with which result."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc_harness import ServerProcess, eventually

from tilewright_proto.inference import inference_pb2 as pb
from tilewright_server.endpoints.rpc.access.roles import Role, is_audited, role_of

SERVICE = "inference.GRPCInferenceService"
CONFIG = json.dumps({"input": [{"name": name, "data_type": "TYPE_FP32", "dims": [4, 4]} for name in "ab"]})
PLAN = "tilewright.gemm@audited"


@pytest.fixture
def key() -> Iterator[str]:
    path = Path(f"/dev/shm/kserve_audit_{os.getpid()}")
    path.write_bytes(bytes(64))
    yield f"/{path.name}"
    path.unlink(missing_ok=True)


def test_models_and_shared_memory_stand_in_the_audit_log_with_their_end(server: ServerProcess, key: str) -> None:
    load = pb.RepositoryModelLoadRequest(model_name=PLAN)
    load.parameters["config"].string_param = CONFIG
    region = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=64)
    calls: list[tuple[Any, str | None]] = [  # each with the result that its line has; None: there is to be none
        (load, "OK"),
        (pb.RepositoryModelLoadRequest(model_name="tilewright.gemm@other"), "INVALID_ARGUMENT"),
        (pb.RepositoryIndexRequest(), None),
        (pb.ServerLiveRequest(), None),
        (pb.RepositoryModelUnloadRequest(model_name=PLAN), "OK"),
        (pb.RepositoryModelUnloadRequest(model_name=PLAN), "NOT_FOUND"),
        (region, "OK"),
        (pb.SystemSharedMemoryRegisterRequest(name="s", key="/", byte_size=64), "INVALID_ARGUMENT"),
        (pb.SystemSharedMemoryStatusRequest(), None),
        (pb.SystemSharedMemoryUnregisterRequest(name="r"), "OK"),
        (pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=bytes(64), byte_size=64), "NOT_FOUND"),
        (pb.CudaSharedMemoryUnregisterRequest(), "OK"),
        (pb.ModelStatisticsRequest(), "OK"),
    ]
    ends = []
    with grpc.insecure_channel(server.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as channel:
        for index, (request, _) in enumerate(calls):
            name = type(request).__name__.removesuffix("Request")
            call = channel.unary_unary(f"/{SERVICE}/{name}", type(request).SerializeToString)
            try:
                call(request, metadata=[("x-request-id", f"audit-{index}")], timeout=60)
                ends.append("OK")
            except grpc.RpcError as error:
                ends.append(error.code().name)
    assert ends == [end or "OK" for _, end in calls]

    def lines() -> list[dict[str, Any]]:
        text = server.log_path.with_name("audit.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return [item for item in found if item["request"].startswith("audit-")]

    assert eventually(lambda: any(item["request"] == f"audit-{len(calls) - 1}" for item in lines()))
    written = lines()
    assert [(item["request"], item["message"], item["result"]) for item in written] == [
        (f"audit-{index}", f"{SERVICE}/{type(request).__name__.removesuffix('Request')}", end)
        for index, (request, end) in enumerate(calls)
        if end is not None
    ]
    assert {item["principal"] for item in written} == {f"uid:{os.geteuid()}"}
    assert all(item["process"].startswith(f"pid:{os.getpid()}@") for item in written)


def test_loading_a_plan_takes_the_role_that_making_one_takes() -> None:
    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        assert role_of(f"{SERVICE}/{name}") is role_of("tilewright.v1.Dispatch/Plan") is Role.DISPATCH
    assert not is_audited(f"{SERVICE}/ModelInfer")
