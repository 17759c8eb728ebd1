"""Names that clients sent are not kept when they have gone."""

from __future__ import annotations

from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc
from hostile_servers import WAIT_S, Peak, bystander_lives, channel
from rpc_harness import ServerProcess

NAMES = 128
NAME_BYTES = 512 << 10


def test_names_of_services_that_were_watched_are_not_kept(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, channel(server.addresses[0]) as way:
        watch = health_pb2_grpc.HealthStub(way).Watch
        peak = Peak(server)
        for number in range(NAMES):
            stream = watch(health_pb2.HealthCheckRequest(service=f"{number:06}" + "x" * NAME_BYTES), timeout=WAIT_S)
            assert next(stream).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            stream.cancel()
        assert peak.grown_mib() < NAMES * NAME_BYTES / 4 / (1 << 20)
        known = watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert next(known).status == health_pb2.HealthCheckResponse.SERVING
        known.cancel()
        bystander_lives(server.addresses[0])
