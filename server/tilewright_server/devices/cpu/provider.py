"""Finding and opening the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import DeviceError, TilewrightError
from tilewright_server.devices.contract import DeviceHost, WorkerSpec
from tilewright_server.devices.cpu.device import CpuDevice
from tilewright_server.devices.cpu.isolated import CPU_FACTORY, CPU_UUID
from tilewright_server.devices.cpu.runtime import Runtime, runtime_unit
from tilewright_server.devices.cpu.topology import choose_arch, find_topology

__all__ = ["CpuProvider"]

RUNTIME_VERSION = "1"


@dataclass
class CpuProvider:
    """Offers the machine's CPU as ``cpu:0``. Options: ``arch`` (a level by id), ``threads``, and ``isolated`` to run
    kernels in a process of their own, which then has no part in the server's memory."""

    host: DeviceHost | None = None
    kind: str = "cpu"

    def hosted(self, host: DeviceHost) -> CpuProvider:
        return CpuProvider(host)

    def discover(self) -> tuple[DeviceInfo, ...]:
        options = self.host.options.get(self.kind, {}) if self.host is not None else {}
        topology = find_topology(int(options.get("threads", 0)))
        arch = choose_arch(str(options.get("arch", "")))
        isolated = bool(options.get("isolated", False))
        return (
            DeviceInfo(
                id="cpu:0",
                kind=self.kind,
                name=topology.model,
                arch=arch,
                units=len(topology.cpus),
                memory_bytes=topology.memory_bytes,
                attributes={"cpus": topology.cpus, "isolated": isolated, "uuid": CPU_UUID if isolated else ""},
            ),
        )

    def worker(self, info: DeviceInfo) -> WorkerSpec | None:
        """Raises what building the runtime raises."""
        if not info.attributes.get("isolated"):
            return None
        return WorkerSpec(CPU_FACTORY, {"runtime": str(self._runtime(info))})

    def open(self, info: DeviceInfo) -> CpuDevice:
        """Build or find the runtime, start the threads.

        Raises ``ToolchainMissingError``, ``BuildFailedError``, ``DeviceError``.
        """
        return CpuDevice(info, Runtime(self._runtime(info)).open(info.attributes["cpus"]))

    def _runtime(self, info: DeviceInfo) -> Path:
        if self.host is None:
            raise DeviceError(
                "the CPU device needs a server's build cache to be opened",
                rule="device_host",
                fix="open it through a DeviceRegistry",
            )
        return self.host.build(runtime_unit(RUNTIME_VERSION), info.arch)

    def diagnose(self) -> Mapping[str, str]:
        try:
            (info,) = self.discover()
        except TilewrightError as error:
            return {"cpu": f"not usable: {error}"}
        return {
            "cpu": info.name,
            "arch": info.arch.id,
            "threads": f"{info.units} (CPUs {', '.join(map(str, info.attributes['cpus']))})",
            "memory": f"{info.memory_bytes / 2**30:.1f} GiB",
        }
