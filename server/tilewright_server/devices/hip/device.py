"""An AMD GPU, opened in this process."""

from __future__ import annotations

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.gpu.device import GpuDevice
from tilewright_server.devices.gpu.launch.stream_state import Lane
from tilewright_server.devices.hip.driver.driver import Driver
from tilewright_server.devices.hip.event_probe import event_problem
from tilewright_server.devices.hip.identity import identity_of
from tilewright_server.devices.hip.signal_probe import signal_problem
from tilewright_server.devices.hip.signals import SignalPages
from tilewright_server.devices.hip.stream import HipStream

__all__ = ["HipDevice"]


class HipDevice(GpuDevice):
    """See ``GpuDevice``."""

    def __init__(self, info: DeviceInfo, driver: Driver, ordinal: int) -> None:
        super().__init__(info, driver, ordinal, ordinal)
        self._hip = driver
        self._pages = SignalPages(lambda: self._graveyard.is_quiet)

    def _client_stream(self, lane: Lane) -> HipStream:
        return HipStream(lane, self._graveyard, self._hip, self._pages)

    def close(self) -> None:
        super().close()
        if self._hip.lost is None:
            self._pages.reap()

    def signal_refusal(self) -> str:
        return signal_problem(self.ordinal)

    def event_refusal(self, shares_names: bool) -> str:
        if not shares_names:
            return "client and server do not share /dev/shm and process numbers, by which events are found"
        return event_problem(self.ordinal)

    @classmethod
    def open(cls, info: DeviceInfo) -> HipDevice:
        """Raises ``UnavailableError``, ``DeviceError``."""
        driver = Driver.open(info.arch, info.id, str(info.attributes.get("gcn_arch_name", "")))
        raw, check = driver.api.raw, driver.check
        wanted = str(info.attributes.get("uuid", ""))
        for ordinal in range(int(check(raw.hipGetDeviceCount()))):
            if check(identity_of(raw, ordinal)) == wanted:
                driver.bind(ordinal)
                driver.enter()
                return cls(info, driver, ordinal)
        raise UnavailableError(
            "the device is not there any more",
            field="device",
            value=info.id,
            rule="device_driver",
            fix="look at amd-smi, and start the server again",
        )
