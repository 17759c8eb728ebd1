"""HIP's runtime, loaded when it is first needed, and what only GPUs of AMD have."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.provider import major_version
from tilewright_server.devices.hip.driver.api import HipApi
from tilewright_server.devices.hip.driver.errors import RESULTS
from tilewright_server.devices.hip.driver.functions import REQUIRED, Without, lacking
from tilewright_server.devices.hip.driver.module import HipImage

__all__ = [
    "CONTAINER_FIX", "DRIVER_FIX", "INSTALL", "MIN_DRIVER", "PACKAGE", "PACKAGE_MAJOR", "Driver", "load_api",
    "version_text",
]  # fmt: skip

MIN_DRIVER = 60_300_000
"""ROCm 6.3: the first whose runtime loads what the compilers make (version 6 of the code object)."""

PACKAGE = "hip-python"
PACKAGE_MAJOR = 10
"""Earlier ones hold the interpreter's lock while they wait."""
DRIVER_FIX = "install ROCm 6.3 or later: its runtime (libamdhip64.so) and the amdgpu kernel driver"
CONTAINER_FIX = "start the container with the GPUs (docker run --device /dev/kfd --device /dev/dri)"
INSTALL = "pip install 'tilewright[hip]'"


def version_text(driver: int) -> str:
    """The runtime's version in words."""
    return f"ROCm {driver // 10_000_000}.{driver // 100_000 % 100}"


def load_api() -> Any:
    """``hip.hip`` of hip-python. Raises ``UnavailableError`` where the package is missing or too old."""
    try:
        found = version(PACKAGE)
        from hip import hip
    except (ImportError, PackageNotFoundError) as error:
        raise UnavailableError(
            f"the package {PACKAGE} is not installed", rule="device_driver", value=type(error).__name__, fix=INSTALL
        ) from error
    if major_version(found) < PACKAGE_MAJOR:
        raise UnavailableError(
            f"the package {PACKAGE} is too old", rule="device_driver", value=found, fix=f"{INSTALL} --upgrade"
        )
    return hip


class Driver(GpuDriver):
    """See ``GpuDriver``."""

    api: HipApi
    kind = "hip"
    ipc_kind = "hip_ipc"
    pool_kind = "hip_pool"
    imports_pools_first_only = True  # hipMemPoolImportFromShareableHandle uses the first device, whichever is current

    def __init__(
        self, raw: Any, arch: ArchSpec, device_id: str = "", gcn_arch_name: str = "", runtime: int = 0
    ) -> None:
        """``raw`` is ``hip.hip``; ``gcn_arch_name`` is what the device calls itself, with its features."""
        super().__init__(HipApi(raw, runtime or MIN_DRIVER), RESULTS, device_id)
        self.arch = arch
        self.gcn_arch_name = gcn_arch_name or arch.toolchain.gpu_arch

    @classmethod
    def open(cls, arch: ArchSpec, device_id: str = "", gcn_arch_name: str = "") -> Driver:
        """Load and initialise it. Raises ``UnavailableError`` (no package, no runtime, too old a runtime)."""
        raw = load_api()
        try:
            first = cls(raw, arch, device_id)
            first.check(raw.hipInit(0))
            runtime = int(first.check(raw.hipRuntimeGetVersion()))
        except RuntimeError as error:  # the package found no libamdhip64.so, or not all of it
            raise UnavailableError(
                "ROCm's runtime (libamdhip64.so) cannot be loaded",
                rule="device_driver",
                value=type(error).__name__,  # its text has paths
                fix=f"{DRIVER_FIX}; in a container, its image must have the runtime",
            ) from error
        if runtime < MIN_DRIVER:
            raise UnavailableError(
                f"the runtime is that of {version_text(runtime)}", rule="device_driver", value=runtime, fix=DRIVER_FIX
            )
        absent = lacking()
        if needed := [name for name in absent if name in REQUIRED]:
            raise UnavailableError(
                f"the runtime has no {', '.join(needed)}", rule="device_driver", value=runtime, fix=DRIVER_FIX
            )
        return cls(Without(raw, absent) if absent else raw, arch, device_id, gcn_arch_name, runtime)

    def result(self, code: int) -> Any:
        try:
            return self.api.raw.hipError_t(code)
        except ValueError:  # of a later runtime
            return self.api.raw.hipError_t.hipErrorUnknown

    def image(self, data: bytes) -> HipImage:
        return HipImage(self, data, self.arch, self.gcn_arch_name)
