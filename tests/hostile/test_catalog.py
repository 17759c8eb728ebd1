"""Calls that read all kernels run a few at a time, so that many take the memory of a few."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from hostile_servers import GEMM, Peak, bystander_lives, channel
from rpc_harness import ServerProcess, eventually

EXPORT = "/tilewright.v1.Kernels/Export"


@pytest.mark.extended  # each export takes a second or so
def test_exports_of_all_kernels_at_a_time_take_the_memory_of_a_few(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GEMM) as server, channel(server.addresses[0]) as way:
        export = way.unary_unary(EXPORT)
        export(b"", timeout=120)
        peak = Peak(server)
        calls = [export.future(b"", timeout=120) for _ in range(24)]
        assert eventually(lambda: sum(call.done() for call in calls) >= 4, 60)
        bystander_lives(server.addresses[0], statistics=True)
        for call in calls:
            call.cancel()
        assert {call.code() for call in calls} <= {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
        assert peak.grown_mib() < 150
