"""What tests of GPUs need to know of each kind: its devices, kernels, names of handles and the client of its memory."""

from __future__ import annotations

from dataclasses import dataclass

import cuda_cases
import hip_device_cases

from tilewright_kit.contract.source import SourceUnit
from tilewright_server.devices.cuda.provider import CudaProvider
from tilewright_server.devices.gpu.provider import GpuProvider
from tilewright_server.devices.hip.provider import HipProvider

__all__ = ["GPUS", "Gpu"]


@dataclass(frozen=True)
class Gpu:
    kind: str
    provider: GpuProvider
    """It asks the machine once."""
    unit: SourceUnit
    simulated: str
    """Path of a library that stands for the driver; empty on a real GPU."""
    fault: str
    """The driver's name for a wild address."""

    @property
    def handles(self) -> tuple[str, str, str]:
        """Kinds of handle: of an allocation, of a pool, and descriptors."""
        return f"{self.kind}_ipc", f"{self.kind}_pool", "fd"


GPUS = {
    gpu.kind: gpu
    for gpu in (
        Gpu("cuda", CudaProvider(), cuda_cases.UNIT, cuda_cases.SIMULATED, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        Gpu("hip", HipProvider(), hip_device_cases.UNIT, hip_device_cases.SIMULATED, "hipErrorIllegalAddress"),
    )
}
