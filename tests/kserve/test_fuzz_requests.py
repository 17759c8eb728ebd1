"""Malformed requests of the Open Inference Protocol get typed errors and leave nothing behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import grpc
import pytest
from fuzz_requests import SERVICE, TYPED, A, infer, send
from rpc_harness import ServerProcess

from tilewright_proto.inference import inference_pb2 as pb

GEMM = [sys.executable, str(Path(__file__).parents[1] / "server" / "app" / "operation_server.py"), "gemm"]
SEED = 20261128


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "count", [pytest.param(1500, marks=pytest.mark.extended), pytest.param(200_000, marks=pytest.mark.exhaustive)]
)
def test_malformed_requests_get_typed_errors_and_leave_nothing_behind(tmp_path: Path, count: int) -> None:
    with ServerProcess(tmp_path, GEMM, cpu_threads=1, log_level="warning") as server:
        begun, before = time.monotonic(), server.rss_mib()
        ends = send(server.addresses[0], count, SEED)
        print(dict(ends), f"in {time.monotonic() - begun:.0f} s; {before:.0f} to {server.rss_mib():.0f} MiB")  # noqa: T201
        assert sum(ends.values()) == count
        assert set(ends) <= TYPED, f"{ends}: {server.log()[-4000:]}"
        assert ends["OK"] and ends["INVALID_ARGUMENT"], "both right and wrong requests were among them"
        with grpc.insecure_channel(server.addresses[0]) as channel:
            data = channel.unary_unary(SERVICE + "ModelInfer")(infer().SerializeToString(), timeout=120)
            assert pb.ModelInferResponse.FromString(data).raw_output_contents == [(A @ A).tobytes()]
        assert server.regions() == (0, 0)
        assert server.stop() == 0, server.log()
        assert "internal error" not in server.log()
        assert "Traceback" not in server.log()
