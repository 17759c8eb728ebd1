"""What a plan costs on a GPU."""

from __future__ import annotations

from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.problem import FmhaProblem
from tilewright_kit.device import DeviceInfo
from tilewright_kit.operation import Prediction

__all__ = ["predict_gpu"]


def predict_gpu(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the whole plan, and what they are made of."""
    throughput = device.arch.throughput
    peak = throughput.peak_flops(config.q.value, units=device.units) or 1e12
    compute = problem.flops / peak
    memory = problem.bytes_moved / (throughput.memory_bytes_per_second or 1e12)
    return Prediction(max(compute, memory, 1e-9), {"compute": compute, "memory": memory})
