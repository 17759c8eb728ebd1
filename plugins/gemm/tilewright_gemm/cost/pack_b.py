"""The time that a packed format is chosen by: that of the products to come."""

from __future__ import annotations

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.problem.problem import PackBProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.cpu import blocked
from tilewright_kit.types.arithmetic import padded

__all__ = ["predict_pack_b"]


def predict_pack_b(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """The time of the products to come, for it is they that a format is chosen for; packing itself costs about the same
    in all formats.
    """
    if device.arch.kind != "cpu":
        return _gpu(problem, config, device)
    seconds, parts = blocked(problem.m, problem.n, problem.k, config, device, (4, 4))
    return Prediction(seconds, parts)


def _gpu(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """The time of the products to come, for it is they that a format is chosen for: rows that a warp tile computes for
    nothing count, and so does what narrow ones read more often from the LDS.
    """
    rates = device.arch.throughput
    peak = rates.peak_flops(config.a, units=device.units) or 1e14
    m, n, _ = config.warp_tile
    work = 2.0 * padded(max(problem.m, 1), m) * padded(max(problem.n, 1), n) * problem.k
    compute = work / peak * (1.0 + 4.0 / n)
    read = problem.k * problem.n * problem.dtype_b.bytes / float(rates.memory_bytes_per_second or 10**12)
    return Prediction(max(compute + read, 1e-9), {"compute": compute, "memory": read})
