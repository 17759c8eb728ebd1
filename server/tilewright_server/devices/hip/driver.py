"""HIP's runtime, loaded when it is first needed, and what only GPUs of AMD have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.contract.plan import Geometry
from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.gpu.argument_block import HostBlock
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.launch.graph import BindingGraphs
from tilewright_server.devices.gpu.launch.stages import Stage
from tilewright_server.devices.gpu.provider import major_version
from tilewright_server.devices.hip.api import HipApi
from tilewright_server.devices.hip.errors import RESULTS
from tilewright_server.devices.hip.module import HipFunction, HipImage

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

_POINTER, _SIZE, _END = 1, 2, 3
"""Marks in a launch's ``extra``: HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END."""


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
    """See ``GpuDriver``.

    A graph's arguments are never replaced: ROCm takes new memory for them each time, which it gives back with the graph
    only, and ROCm 6.3 was seen to free those of the caller.
    """

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
        return cls(raw, arch, device_id, gcn_arch_name, runtime)

    @property
    def launch(self) -> Any:
        return self.api.raw.hipModuleLaunchKernel

    def config(self, function: HipFunction, geometry: Geometry, stream: Any) -> Any:
        return (function.handle, *geometry.grid, *geometry.block, geometry.shared_bytes, stream), function.param_bytes

    def calls(
        self, configs: Sequence[Any], block: HostBlock, roots: Sequence[int]
    ) -> tuple[tuple[tuple[Any, ...], ...], Any]:
        # The runtime takes a block of arguments as five words: a mark and its address, a mark and where its size
        # stands, and the end.
        sizes = (ctypes.c_size_t * max(1, len(roots)))(*(nbytes for _, nbytes in configs))
        word = ctypes.sizeof(ctypes.c_void_p)
        words: list[int] = []
        for place, root in enumerate(roots):
            words += (_POINTER, block.address + root, _SIZE, ctypes.addressof(sizes) + place * word, _END)
        extra = (ctypes.c_void_p * max(1, len(words)))(*words)
        first, step = ctypes.addressof(extra), 5 * word
        calls = tuple((*shape, None, first + place * step) for place, (shape, _) in enumerate(configs))
        return calls, (sizes, extra)

    def image(self, data: bytes) -> HipImage:
        return HipImage(self, data, self.arch, self.gcn_arch_name)

    def graph(self, stages: Sequence[Stage], stream: Any) -> BindingGraphs:
        return BindingGraphs(self, stages, stream)
