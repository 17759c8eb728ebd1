"""What several tests of the client need."""

import contextlib
import gc
import threading

import numpy as np
import psutil

import tilewright as tw
from tilewright.session.regions import Pool
from tilewright.transport import rpc as steps
from tilewright_proto.v1 import memory_pb2

RNG = np.random.default_rng(7)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def close(result: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(result.astype(np.float32), wanted, rtol=tolerance, atol=tolerance)


def used_bytes(pool: Pool) -> int:
    """Bytes of a pool's arrays that are alive."""
    pool.trim()
    return sum(segment.free_list.used for segment in pool._segments.values())


def objects(client: tw.Client) -> tuple[int, int, int]:
    """Regions, buffers and plans that the session owns, after pending releases were sent."""
    gc.collect()
    request = memory_pb2.StatusRequest(session=client.session.token)

    def ask():
        return (yield steps.Rpc(steps.STATUS, request))

    client._drive(ask)
    threading.Event().wait(0.05)
    reply = client._drive(ask)
    return len(reply.regions), len(reply.buffers), len(reply.plans)


def device_workers(pid: int) -> list[psutil.Process]:
    """Processes of devices that the servers below a process run; others may end meanwhile."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("devices.worker" in word for word in child.cmdline()):
                found.append(child)
    return found
