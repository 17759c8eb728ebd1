"""The plugin that offers the CPU device."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright_kit.contract.device import DeviceProvider
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_server.devices.cpu.provider import CpuProvider

__all__ = ["tilewright_devices"]


@hookimpl
def tilewright_devices() -> Sequence[DeviceProvider]:
    return [CpuProvider()]
