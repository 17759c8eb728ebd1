"""One server, many clients, one GPU: order without waiting, faults that stay where they are, memory that is shared."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_cases import matrix, poisoned, relative, truth
from gpu_server import CudaServer, eventually

import tilewright


def test_results_wait_for_the_producer_and_the_consumer_for_results(torch: Any, client: tilewright.Client) -> None:
    # The producer is held up on the GPU: a product that did not wait for it would read the poison.
    a = torch.full((1024, 1024), float("nan"), dtype=torch.bfloat16, device="cuda")
    b, out = matrix(torch, 1024, 1024, "bf16", transposed=True), poisoned(torch, 1024, 1024, "bf16")
    fresh = matrix(torch, 1024, 1024, "bf16")
    bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
    bound.launch()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(stream):
            a.fill_(float("nan"))
            torch.cuda._sleep(20_000_000)
            a.copy_(fresh)
            bound.launch(stream=stream.cuda_stream)
            copied = out.clone()  # on the same stream: waits on the GPU, not on the host
            a.fill_(float("nan"))
        stream.synchronize()
        assert relative(torch, copied, truth(torch, fresh, b)) < 4e-3


def test_a_launch_returns_before_the_kernel_ends(torch: Any, client: tilewright.Client) -> None:
    a, b = matrix(torch, 4096, 4096, "bf16"), matrix(torch, 4096, 4096, "bf16", transposed=True)
    out = poisoned(torch, 4096, 4096, "bf16")
    bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
    bound.launch()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # a fifth of a second, at least
    bound.launch()
    assert not torch.cuda.current_stream().query(), "what was launched before has not ended"
    torch.cuda.synchronize()
    assert relative(torch, out, truth(torch, a, b)) < 4e-3


def test_many_launches_in_a_pipeline_arrive_all_and_in_order(torch: Any, client: tilewright.Client) -> None:
    # Each product reads what the one before wrote.
    size, count = 64, 500
    rotation = torch.linalg.qr(torch.randn(size, size, device="cuda"))[0].contiguous()
    x, y = torch.randn(size, size, device="cuda"), torch.empty(size, size, device="cuda")
    want = x.double()
    plan = client.plan_gemm(x, rotation, out=y)
    there, back = plan.bind(x, rotation, out=y), plan.bind(y, rotation, out=x)
    with client.pipeline() as pipeline:
        for index in range(count):
            pipeline.launch(there if index % 2 == 0 else back)
    torch.cuda.synchronize()
    for _ in range(count):
        want = want @ rotation.double()
    assert relative(torch, x if count % 2 == 0 else y, want) < 1e-3


def test_eight_processes_share_one_copy_of_everything(torch: Any, gpu_memory_of: Callable[[int], int]) -> None:
    program = """
import sys, torch, tilewright
a = torch.randn(512, 512, device="cuda", dtype=torch.float16)
out = torch.empty_like(a)
with tilewright.connect(sys.argv[1]) as client:
    bound = client.plan_gemm(a, a, out=out).bind(a, a, out=out)
    for _ in range(100):
        bound.launch()
    torch.cuda.synchronize()
    error = float((out.float() - a.float() @ a.float()).norm() / (a.float() @ a.float()).norm())
    print(error < 2e-3, flush=True)
    sys.stdin.readline()
"""
    with CudaServer() as server:
        used, counted = [], []
        running: list[subprocess.Popen[bytes]] = []
        for count in (1, 8):
            while len(running) < count:
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-c", program, server.target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                    )
                )
            for process in running:
                if getattr(process, "seen", None) is None:
                    assert process.stdout is not None
                    assert process.stdout.readline().strip() == b"True"
                    process.seen = True  # type: ignore[attr-defined]
            used.append(sum(gpu_memory_of(pid) for pid in server.workers()))
            with tilewright.connect(server.target) as client:
                counted += client.kernels.statistics()["devices"]
        for process in running:
            process.communicate(b"\n", timeout=60)
        assert used[0] > 0
        # Modules, workspace and pool are the server's: seven more clients cost mappings, not memory.
        assert used[1] - used[0] <= 32 << 20
        assert counted[0]["modules"] == counted[1]["modules"]
        assert all(int(device.get("launch_synchronisations", 0)) == 0 for device in counted)


def test_a_dead_client_leaves_nothing(torch: Any, server: CudaServer, client: tilewright.Client) -> None:
    program = """
import os, sys, torch, tilewright
client = tilewright.connect(sys.argv[1])
a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
client.gemm(a, a, out=torch.empty_like(a))
torch.cuda.synchronize()
os.kill(os.getpid(), 9)
"""
    before = client.kernels.statistics()
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", program, server.target], timeout=120, check=False).returncode == -9
    assert eventually(lambda: client.kernels.statistics()["sessions"] == before["sessions"], 3.0)
    assert eventually(lambda: client.kernels.statistics()["regions"] == before["regions"], 3.0)
    a, b = matrix(torch, 64, 64, "bf16"), matrix(torch, 64, 64, "bf16")
    out = poisoned(torch, 64, 64, "bf16")
    client.gemm(a, b, out=out)
    torch.cuda.synchronize()
    assert relative(torch, out, truth(torch, a, b)) < 4e-3


def test_freed_memory_is_refused_or_gone_but_kills_nobody(torch: Any, client: tilewright.Client) -> None:
    class Freed:
        """Claims memory that is none any more."""

        __cuda_array_interface__: dict[str, Any]

    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    claim = Freed()
    claim.__cuda_array_interface__ = {
        "shape": (1024, 1024), "typestr": "<f4", "data": (block.data_ptr(), False), "version": 3, "stream": 1,
    }  # fmt: skip
    del block
    torch.cuda.empty_cache()
    with pytest.raises(tilewright.TilewrightError):
        client.gemm(claim, claim)
    a = torch.eye(64, device="cuda")
    np.testing.assert_allclose(client.gemm(a, a, out=torch.empty_like(a)).cpu().numpy(), np.eye(64), atol=1e-6)


def test_too_much_memory_is_a_typed_refusal(torch: Any) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with CudaServer(("--buffer-bytes", str(4 * total))) as server, tilewright.connect(server.target) as client:
        with pytest.raises(tilewright.ResourceExhaustedError):
            client.buffer(2 * total)
        small = np.eye(8, dtype=np.float32)
        np.testing.assert_allclose(client.gemm(small, small), small)


def test_overlapping_outputs_are_refused(torch: Any, client: tilewright.Client) -> None:
    whole = torch.randn(128, 64, device="cuda")
    a, b, out = whole[:64], torch.randn(64, 64, device="cuda"), whole[32:96]
    with pytest.raises(tilewright.InvalidArgumentError):
        client.gemm(a, b, out=out)


def test_the_workers_death_is_not_the_servers(torch: Any) -> None:
    with CudaServer() as server, tilewright.connect(server.target) as client:
        a = torch.eye(128, device="cuda")
        out = torch.zeros_like(a)
        client.gemm(a, a, out=out)
        torch.cuda.synchronize()
        assert torch.equal(out, a)
        (worker,) = server.workers()
        subprocess.run(["kill", "-9", str(worker)], check=True)
        refused = 0
        for _ in range(100):
            out.zero_()
            try:
                client.gemm(a, a, out=out)
            except tilewright.UnavailableError:
                refused += 1
                time.sleep(0.05)
                continue
            except tilewright.TilewrightError:
                refused += 1
                time.sleep(0.05)
                continue
            torch.cuda.synchronize()
            if torch.equal(out, a):
                break
        else:
            pytest.fail("the device did not come back")
        assert server.workers() != [worker]
        # NumPy clients of the same server's CPU never noticed.
        np.testing.assert_allclose(
            client.gemm(np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32), device="cpu:0"), np.eye(4)
        )
