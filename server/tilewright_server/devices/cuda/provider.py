"""Finding and opening NVIDIA GPUs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tilewright_kit.device import DeviceInfo
from tilewright_server.devices.base import WorkerSpec
from tilewright_server.devices.cuda.discovery import Discovery, find
from tilewright_server.devices.cuda.driver import INSTALL

if TYPE_CHECKING:
    from tilewright_server.devices.cuda.device import CudaDevice

__all__ = ["CudaProvider", "open_device"]

PACKAGES = ("cuda-bindings", "nvidia-cuda-nvrtc")


def open_device(info: DeviceInfo, options: Mapping[str, Any]) -> CudaDevice:  # noqa: ARG001
    """Open a GPU in this process; what a worker calls. Raises ``UnavailableError``, ``DeviceError``."""
    from tilewright_server.devices.cuda.device import CudaDevice

    return CudaDevice.open(info)


class CudaProvider:
    """Offers the machine's NVIDIA GPUs as ``cuda:0``, ``cuda:1``, ... in the driver's order.

    Each is opened in a process of its own: a kernel that faults ends the process that launched it.
    """

    kind = "cuda"

    def __init__(self) -> None:
        self._found: Discovery | None = None
        self._lock = threading.Lock()

    def search(self) -> Discovery:
        """What there is, or why there is nothing; the machine is asked once."""
        with self._lock:
            if self._found is None:
                self._found = find(self.kind)
            return self._found

    def discover(self) -> tuple[DeviceInfo, ...]:
        """None without NVIDIA's packages: a device that cannot be opened must not become the server's default."""
        return () if _missing() else self.search().devices

    def worker(self, info: DeviceInfo) -> WorkerSpec:  # noqa: ARG002
        return WorkerSpec(f"{__name__}:{open_device.__name__}")

    def open(self, info: DeviceInfo) -> CudaDevice:
        """Open it in this very process, which a faulting kernel would end."""
        return open_device(info, {})

    def diagnose(self) -> Mapping[str, str]:
        found = self.search()
        texts: dict[str, str] = {}
        if found.driver:
            texts["driver"] = f"CUDA {found.driver // 1000}.{found.driver % 1000 // 10}"
        if found.problem:
            texts["devices"] = f"{found.problem}. Fix: {found.fix}"
        missing = _missing()
        if missing:
            if found.devices:
                texts["devices"] = f"{len(found.devices)} found, none can be used. Fix: {INSTALL}"
            texts["packages"] = f"{' and '.join(missing)} not installed. Fix: {INSTALL}"
        else:
            texts["packages"] = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        for index, note in enumerate(found.notes):
            texts[f"note {index + 1}"] = note
        return texts


def _missing() -> list[str]:
    """Packages that are not installed."""
    return [name for name in PACKAGES if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
