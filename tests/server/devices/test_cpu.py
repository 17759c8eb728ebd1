from __future__ import annotations

import threading
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import (
    DeadlineError,
    DeviceError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from tilewright_server.devices.contract import DeviceHost
from tilewright_server.devices.cpu.provider import CpuProvider
from tilewright_server.devices.cpu.topology import choose_arch, find_topology
from tilewright_server.devices.registry import DeviceRegistry

CPUS = frozenset(range(8))


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def siblings(cores: int) -> dict[str, str]:
    """Two hardware threads a core: CPU c and CPU c + cores."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % cores},{cpu % cores + cores}\n"
        for cpu in range(2 * cores)
    }


def test_one_thread_for_each_core(tmp_path: Path) -> None:
    assert find_topology(root=machine(tmp_path, siblings(4)), allowed=CPUS).cpus == (0, 1, 2, 3)


def test_affinity_is_respected(tmp_path: Path) -> None:
    assert find_topology(root=machine(tmp_path, siblings(4)), allowed=frozenset({1, 5, 6})).cpus == (1, 6)


def test_more_threads_fill_the_cores_twice(tmp_path: Path) -> None:
    root = machine(tmp_path, siblings(4))
    assert find_topology(3, root=root, allowed=CPUS).cpus == (0, 1, 2)
    assert find_topology(5, root=root, allowed=CPUS).cpus == (0, 1, 2, 3, 4)
    with pytest.raises(InvalidArgumentError, match="8 CPUs"):
        find_topology(9, root=root, allowed=CPUS)


@pytest.mark.parametrize(("limit", "count"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_cgroup_pays_for_so_many(limit: str, count: int, tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": limit})
    assert len(find_topology(root=root, allowed=CPUS).cpus) == count


def test_old_cgroups_count_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/box\n2:memory:/box\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1048576",
    }
    topology = find_topology(root=machine(tmp_path, files), allowed=CPUS)
    assert (len(topology.cpus), topology.memory_bytes) == (3, 1 << 20)


def test_lower_level_can_be_chosen_and_a_higher_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tilewright_arch.load("x86-64-v3")
    monkeypatch.setattr("tilewright_server.devices.cpu.topology.detect_cpu", lambda: own)
    assert choose_arch("").id == "x86-64-v3"
    assert choose_arch("x86-64-v2").id == "x86-64-v2"
    for name in ("x86-64-v4", "gfx942", "nonsense"):
        with pytest.raises(UnsupportedError) as caught:
            choose_arch(name)
        assert caught.value.field == "cpu_arch"


# The registry


class Provider:
    """Counts what is asked of it."""

    def __init__(self, kind: str, count: int = 1, error: Exception | None = None) -> None:
        self.kind, self.count, self.error = kind, count, error
        self.opened: list[str] = []

    def discover(self) -> tuple[DeviceInfo, ...]:
        if self.error is not None:
            raise self.error
        arch = tilewright_arch.load("x86-64-v2")
        return tuple(DeviceInfo(f"{self.kind}:{place}", self.kind, "fake", arch, 1, 1) for place in range(self.count))

    def open(self, info: DeviceInfo) -> FakeDevice:
        self.opened.append(info.id)
        return FakeDevice(info)

    def diagnose(self) -> dict[str, str]:
        return {}


class FakeDevice:
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def registry(*providers: Provider, default: str = "") -> DeviceRegistry:
    host = DeviceHost(lambda unit, arch: Path())
    return DeviceRegistry({item.kind: item for item in providers}, host, default)  # type: ignore[misc]


def test_finding_opens_nothing_and_using_opens_once() -> None:
    provider = Provider("cpu", 2)
    devices = registry(provider)
    assert [info.id for info in devices.infos()] == ["cpu:0", "cpu:1"]
    assert provider.opened == []
    assert devices.get("cpu:1") is devices.get("cpu:1")
    assert provider.opened == ["cpu:1"]


def test_gpu_is_the_default_where_there_is_one() -> None:
    assert registry(Provider("cpu"), Provider("cuda")).default == "cuda:0"
    assert registry(Provider("cpu"), Provider("cuda"), default="cpu:0").default == "cpu:0"
    assert registry(Provider("cpu")).default == "cpu:0"


def test_unknown_device_is_answered_with_what_there_is() -> None:
    with pytest.raises(NotFoundError) as caught:
        registry(Provider("cpu", 2)).get("cpu:7")
    assert "cpu:1" in caught.value.fix
    with pytest.raises(NotFoundError, match="no device"):
        registry().get()


@pytest.mark.parametrize("error", [UnsupportedError("too old"), RuntimeError("driver")])
def test_kind_that_cannot_be_searched_for_does_not_hide_the_others(error: Exception) -> None:
    devices = registry(Provider("cuda", error=error), Provider("cpu"))
    assert [info.id for info in devices.infos()] == ["cpu:0"]
    assert set(devices.failures) == {"cuda"}


def test_closing_closes_all_and_opens_no_more() -> None:
    devices = registry(Provider("cpu", 2))
    opened = devices.get("cpu:0")
    devices.close()
    devices.close()
    assert opened.closed == 1  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError):
        devices.get("cpu:1")


class SlowProvider(Provider):
    """Opens when it is told to."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.go = threading.Event()
        self.made: list[FakeDevice] = []

    def open(self, info: DeviceInfo) -> FakeDevice:
        assert self.go.wait(10)
        self.made.append(super().open(info))
        return self.made[-1]


def test_a_device_that_opens_slowly_does_not_hold_up_who_cannot_wait() -> None:
    provider = SlowProvider()
    devices = registry(provider)
    for _ in range(2):
        with pytest.raises(DeadlineError):
            devices.get(timeout=0.05)
    provider.go.set()
    assert devices.get(timeout=10) is provider.made[0]
    assert len(provider.made) == 1


def test_a_device_that_opens_while_the_server_ends_is_closed_again() -> None:
    provider = SlowProvider()
    devices = registry(provider)
    with pytest.raises(DeadlineError):
        devices.get(timeout=0.05)
    devices.close()
    opening = devices._opening["cpu:0"]
    provider.go.set()
    with pytest.raises(UnavailableError):
        opening.result(10)
    assert provider.made[0].closed == 1


def test_an_error_of_opening_is_tried_again() -> None:
    provider = SlowProvider()
    devices = registry(provider)
    provider.go.set()
    provider.opened = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        devices.get()
    provider.opened = []
    assert devices.get().info.id == "cpu:0"


def test_cpu_needs_a_host_to_be_opened_but_not_to_be_found() -> None:
    provider = CpuProvider()
    (info,) = provider.discover()
    assert info.units >= 1
    assert provider.diagnose()["arch"] == info.arch.id
    with pytest.raises(DeviceError):
        provider.open(info)
