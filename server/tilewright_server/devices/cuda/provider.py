"""Finding and opening NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilewright_kit.contract.device import DeviceInfo
from tilewright_server.devices.cuda.discovery import Discovery, find
from tilewright_server.devices.cuda.driver.driver import INSTALL
from tilewright_server.devices.cuda.mps.daemon import describe
from tilewright_server.devices.gpu.provider import GpuProvider

if TYPE_CHECKING:
    from tilewright_server.devices.cuda.device import CudaDevice

__all__ = ["CudaProvider", "open_device"]


def open_device(info: DeviceInfo, options: Mapping[str, Any]) -> CudaDevice:  # noqa: ARG001
    """Open a GPU in this process; what a worker calls. Raises ``UnavailableError``, ``DeviceError``."""
    from tilewright_server.devices.cuda.device import CudaDevice

    return CudaDevice.open(info)


class CudaProvider(GpuProvider):
    """Offers NVIDIA's GPUs as ``cuda:0``, ``cuda:1``, ..."""

    kind = "cuda"
    packages: Mapping[str, int] = {"cuda-bindings": 0, "nvidia-cuda-nvrtc": 0}
    install = INSTALL
    factory = f"{__name__}:{open_device.__name__}"

    def find(self) -> Discovery:
        return find(self.kind)

    def open(self, info: DeviceInfo) -> CudaDevice:
        return open_device(info, {})

    def diagnose(self) -> Mapping[str, str]:
        texts = dict(super().diagnose())
        if self.search().devices:
            texts["mps"] = describe()
        return texts

    def driver_text(self, driver: int) -> str:
        return f"CUDA {driver // 1000}.{driver % 1000 // 10}"
