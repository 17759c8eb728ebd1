"""Finding and opening GPUs: what does not depend on who made them."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version

from tilewright_kit.contract.device import Device, DeviceInfo
from tilewright_server.devices.contract import Absence, WorkerSpec
from tilewright_server.devices.gpu.discovery import Discovery

__all__ = ["GpuProvider", "major_version"]


class GpuProvider(ABC):
    """Offers the machine's GPUs of one kind in their driver's order.

    Each is opened in a process of its own: a kernel that faults ends the process that launched it.
    """

    kind = ""
    packages: Mapping[str, int] = {}
    """Without them no device can be opened. The least major version of each; 0 for any."""
    install = ""
    """How to get them."""
    factory = ""
    """Function that a worker calls to open a device: see ``WorkerSpec``."""

    def __init__(self) -> None:
        self._found: Discovery | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def find(self) -> Discovery:
        """Ask the machine."""

    @abstractmethod
    def open(self, info: DeviceInfo) -> Device:
        """Open it in this very process, which a faulting kernel would end."""

    @abstractmethod
    def driver_text(self, driver: int) -> str:
        """The driver's version in words."""

    def search(self) -> Discovery:
        """Devices that exist, or the reason why there are none; the machine is asked once."""
        with self._lock:
            if self._found is None:
                self._found = self.find()
            return self._found

    def discover(self) -> tuple[DeviceInfo, ...]:
        """None without the packages: a device that cannot be opened must not become the server's default."""
        return () if self._missing else self.search().devices

    def worker(self, info: DeviceInfo) -> WorkerSpec:  # noqa: ARG002
        return WorkerSpec(self.factory)

    def absence(self, device: str) -> Absence | None:
        """Why that device is not there; what ``discover`` found out, and no more."""
        if self._missing:  # then nothing was searched for
            return Absence(" and ".join(self._missing), self._install_fix)
        found = self.search()
        if device in found.left_out:
            return found.left_out[device]
        if found.devices:
            return None
        return next(iter(found.left_out.values()), Absence(found.problem, found.fix))

    def diagnose(self) -> Mapping[str, str]:
        found = self.search()
        texts: dict[str, str] = {}
        if found.driver:
            texts["driver"] = self.driver_text(found.driver)
        if found.problem:
            texts["devices"] = f"{found.problem}. Fix: {found.fix}"
        if self._missing:
            if found.devices:
                texts["devices"] = f"{len(found.devices)} found, none can be used. Fix: {self._install_fix}"
            texts["packages"] = f"{' and '.join(self._missing)}. Fix: {self._install_fix}"
        else:
            texts["packages"] = ", ".join(f"{name} {version(name)}" for name in self.packages)
        left_out = [f"{name}: {why.reason}. Fix: {why.fix}" for name, why in found.left_out.items()]
        for index, note in enumerate([*left_out, *found.notes]):
            texts[f"note {index + 1}"] = note
        return texts

    @property
    def _install_fix(self) -> str:
        absent = any(not _installed(name) for name in self.packages)
        return self.install if absent else f"{self.install} --upgrade"

    @cached_property
    def _missing(self) -> list[str]:
        """Faults of the packages: as it was when devices were first searched for, which is not done again."""
        absent = [name for name in self.packages if not _installed(name)]
        texts = [f"{' and '.join(absent)} not installed"] if absent else []
        for name, least in self.packages.items():
            if name not in absent and major_version(version(name)) < least:
                texts.append(f"{name} {version(name)} is too old, {least} is the first that can be used")
        return texts


def major_version(text: str) -> int:
    """The first number of a package's version; 0 if it does not begin with one."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
