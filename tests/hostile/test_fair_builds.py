"""One client has a whole set of kernels built; another one, who needs one, does not wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
from hostile_servers import GEMM
from rpc_harness import Client, ServerProcess, eventually

from tilewright_proto.v1 import kernels_pb2 as kp

WAIT_S = 120.0
BUILT = kp.BuildEvent.BUILT


def names(client: Client, pattern: str) -> list[str]:
    narrow = kp.KernelFilter(operation="gemm", name=pattern)
    return [item.name for item in client.kernels.List(kp.ListKernelsRequest(filter=narrow), timeout=WAIT_S).kernels]


def builds(client: Client) -> int:
    return int(client.kernels.Statistics(kp.StatisticsRequest(), timeout=WAIT_S).artifact_builds)


def test_a_kernel_of_another_client_is_next_and_what_nobody_waits_for_is_not_built(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, GEMM, build_workers=1) as server,
        Client(server.addresses[0]) as author,
        Client(server.addresses[0]) as other,
    ):
        many, one = names(author, "gemm_fp32_rcr_*")[:40], names(author, "gemm_fp32_ccr_*")[0]
        wanted = kp.BuildRequest(operation="gemm", names=many, session=author.token)
        call = author.kernels.Build(wanted, timeout=WAIT_S)
        done: list[str] = []

        def read() -> None:
            try:
                done.extend(event.name for event in call if event.state == BUILT)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.CANCELLED

        reader = threading.Thread(target=read)
        reader.start()
        assert eventually(lambda: bool(done), WAIT_S)
        before = len(done)
        request = kp.BuildRequest(operation="gemm", names=[one], session=other.token)
        assert [event.state for event in other.kernels.Build(request, timeout=WAIT_S)][-1] == BUILT
        assert len(done) - before <= 3, "the one under way, and what began while the messages travelled"
        call.cancel()
        reader.join(WAIT_S)
        left = builds(other)
        request = kp.BuildRequest(operation="gemm", names=names(author, "gemm_fp32_crr_*")[:2], session=other.token)
        assert [event.state for event in other.kernels.Build(request, timeout=WAIT_S)][-1] == BUILT
        assert builds(other) <= left + 3, "two of the other's, and the one that was under way"
