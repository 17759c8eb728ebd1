"""Finding and opening AMD GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilewright_kit.contract.device import DeviceInfo
from tilewright_server.devices.contract import WorkerSpec
from tilewright_server.devices.gpu.provider import GpuProvider
from tilewright_server.devices.hip.discovery import Discovery, find, version_text
from tilewright_server.devices.hip.driver.driver import INSTALL, PACKAGE, PACKAGE_MAJOR
from tilewright_server.devices.hip.driver.settings import show_only, visible_entry

if TYPE_CHECKING:
    from tilewright_server.devices.hip.device import HipDevice

__all__ = ["HipProvider", "open_device"]

_VISIBLE = "visible"


def _order(ordinal: int) -> str:
    """How launches of this device are tied to streams of clients, and why not in a better way."""
    # Imported here: a server without AMD GPUs probes none.
    from tilewright_server.devices.hip.event_probe import event_problem
    from tilewright_server.devices.hip.signal_probe import signal_problem

    by_signals = signal_problem(ordinal)
    if not by_signals:
        return "streams of clients are tied by numbers in shared memory (signals), which passed the probe"
    by_events = event_problem(ordinal)
    if not by_events:
        return (
            "streams of clients are tied by interprocess events, which passed the probe, where they share /dev/shm and "
            f"process numbers, else waited for by the host; not by signals: {by_signals}"
        )
    return f"streams of clients are waited for by the host; not by signals: {by_signals}; not by events: {by_events}"


def open_device(info: DeviceInfo, options: Mapping[str, Any]) -> HipDevice:
    """Open a GPU in this process; what a worker calls. ``options`` may name the one that the runtime is to see as its
    first (``visible``): it imports pools of other processes there only. Raises ``UnavailableError``, ``DeviceError``.
    """
    from tilewright_server.devices.hip.device import HipDevice

    if visible := str(options.get(_VISIBLE, "")):
        show_only(visible)
    return HipDevice.open(info)


class HipProvider(GpuProvider):
    """Offers AMD's GPUs as ``hip:0``, ``hip:1``, ..."""

    kind = "hip"
    packages: Mapping[str, int] = {PACKAGE: PACKAGE_MAJOR}
    install = INSTALL
    factory = f"{__name__}:{open_device.__name__}"

    def find(self) -> Discovery:
        return find(self.kind)

    def worker(self, info: DeviceInfo) -> WorkerSpec:
        return WorkerSpec(self.factory, {_VISIBLE: visible_entry(int(info.attributes["ordinal"]))})

    def open(self, info: DeviceInfo) -> HipDevice:
        return open_device(info, {})

    def diagnose(self) -> Mapping[str, str]:
        texts = dict(super().diagnose())
        if devices := self.discover():
            texts["order"] = _order(int(devices[0].attributes["ordinal"]))
        return texts

    def driver_text(self, driver: int) -> str:
        return version_text(driver)
