"""An NVIDIA GPU, opened in this process."""

from __future__ import annotations

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.cuda.discovery import describe_uuid
from tilewright_server.devices.cuda.driver.driver import Driver
from tilewright_server.devices.gpu.device import GpuDevice

__all__ = ["CudaDevice"]


class CudaDevice(GpuDevice):
    """See ``GpuDevice``."""

    @classmethod
    def open(cls, info: DeviceInfo) -> CudaDevice:
        """Retain the device's primary context. Raises ``UnavailableError``, ``DeviceError``."""
        driver = Driver.open(info.id)
        raw, check = driver.api.raw, driver.check
        wanted = str(info.attributes.get("uuid", ""))
        for ordinal in range(int(check(raw.cuDeviceGetCount()))):
            handle = check(raw.cuDeviceGet(ordinal))
            if describe_uuid(bytes(check(raw.cuDeviceGetUuid(handle)).bytes)) == wanted:
                driver.bind(check(raw.cuDevicePrimaryCtxRetain(handle), "a context"))
                driver.enter()
                return cls(info, driver, int(handle), handle)
        raise UnavailableError(
            "the device is not there any more",
            field="device",
            value=info.id,
            rule="device_driver",
            fix="look at nvidia-smi, and start the server again",
        )
