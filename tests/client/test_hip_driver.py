"""The client's view of HIP's runtime, against the simulated one, in this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_calls import DriverCalls

import tilewright as tw
from tilewright.gpu import hip
from tilewright.gpu.driver import LEGACY_STREAM
from tilewright.gpu.hip import HipDriver
from tilewright.gpu.hip_api import SIGNATURES, format_uuid
from tilewright.session.state import uuid_digits

SOURCE = Path(__file__).parents[1] / "server" / "devices" / "hip_simulated" / "libamdhip64.c"
TAG = f"d{os.getpid() % 10**6}"
PART = 2 << 20
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("hip") / "libamdhip64.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lpthread", "-lrt"], check=True)
    yield path
    for left in Path("/dev/shm").glob(f"tw{TAG}-*"):
        left.unlink(missing_ok=True)


class Runtime(DriverCalls):
    """What a framework would do in this process."""

    def allocate(self, nbytes: int) -> int:
        return self.made("hipMalloc", ctypes.c_size_t(nbytes))

    def free(self, address: int) -> None:
        self.call("hipFree", ctypes.c_uint64(address))

    def stream(self) -> int:
        return self.made("hipStreamCreateWithFlags", 1)

    def mapped(self, nbytes: int) -> int:
        size, zero = ctypes.c_size_t(nbytes), ctypes.c_uint64()
        handle = self.made("hipMemCreate", size, (ctypes.c_int * 32)(1, 1, 1, 0), zero)
        address = self.made("hipMemAddressReserve", size, zero, zero, zero)
        self.call("hipMemMap", ctypes.c_uint64(address), size, zero, ctypes.c_uint64(handle), zero)
        self.call("hipMemSetAccess", ctypes.c_uint64(address), size, (ctypes.c_int * 3)(1, 0, 3), ctypes.c_size_t(1))
        return address


@pytest.fixture
def runtime(library: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setenv("TW_SIM_TAG", TAG)
    monkeypatch.setenv("TW_SIM_DEVICES", "2")
    monkeypatch.setattr(hip, "LIBRARIES", (str(library),))
    monkeypatch.setattr(hip, "_loaded", None)
    return Runtime(library)


def test_devices_are_called_as_every_process_calls_them(runtime: Runtime) -> None:
    driver = hip.driver()
    assert driver.device_count() == 2
    assert [driver.label(ordinal) for ordinal in range(2)] == ["GPU-a1b2c3d401020300", "GPU-a1b2c3d401020301"]
    assert uuid_digits(driver.label(0)) == "a1b2c3d401020300"
    assert uuid_digits(format_uuid(b"\xff" * 16, "0000:63:00.0")) == uuid_digits("PCI-00000000:63:00.0")


def test_addresses_are_known_by_their_allocation(runtime: Runtime) -> None:
    driver, base = hip.driver(), runtime.allocate(8192)
    found = driver.pointer(base + 4100)
    assert (found.ordinal, found.base, found.size) == (0, base, 8192)
    assert (found.legacy, found.pool, found.descriptors) == (True, 0, False)
    assert driver.identity(base + 1) == found.identity[0] != 0
    runtime.free(base)
    assert driver.identity(base) == 0
    again = runtime.allocate(8192)
    assert driver.identity(again) != found.identity[0]
    runtime.free(again)


def test_mapped_memory_has_descriptors(runtime: Runtime) -> None:
    driver, base = hip.driver(), runtime.mapped(PART)
    found = driver.pointer(base + 5)
    assert (found.base, found.size, found.legacy, found.descriptors) == (base, PART, False, True)
    fd = driver.export_mapped(0, base)
    os.close(fd)
    with pytest.raises(tw.DeviceError, match="hipErrorInvalidValue"):
        driver.export_mapped(0, runtime.allocate(4096))


def test_memory_that_cannot_be_shared_is_refused(runtime: Runtime) -> None:
    driver = hip.driver()
    with pytest.raises(tw.InvalidArgumentError, match="no memory of a device") as caught:
        driver.pointer(id(driver), "a")
    assert (caught.value.rule, caught.value.field) == ("device_memory_kind", "a")
    stream = runtime.stream()
    pooled = runtime.made("hipMallocAsync", ctypes.c_size_t(4096), ctypes.c_uint64(stream))
    with pytest.raises(tw.UnsupportedError, match="not made to be shared") as refused:
        driver.export_legacy(0, driver.pointer(pooled).base)
    assert refused.value.rule == "device_memory_shareable"
    assert "hipMalloc" in refused.value.fix
    with pytest.raises(tw.UnsupportedError):
        driver.export_pool(0, 1, pooled)


def test_copies_and_events_are_in_the_order_of_streams(runtime: Runtime) -> None:
    driver, base, stream = hip.driver(), runtime.allocate(4096), runtime.stream()
    source, target = ctypes.create_string_buffer(b"x" * 16, 16), ctypes.create_string_buffer(16)
    driver.write(0, base, ctypes.addressof(source), 16, stream)
    driver.order(0, stream, LEGACY_STREAM)
    driver.read(0, ctypes.addressof(target), base, 16, LEGACY_STREAM)
    assert target.raw == source.raw
    event = driver.new_event(0)
    assert len(driver.export_event(0, event)) == 64
    driver.record(0, event, stream)
    driver.wait(0, LEGACY_STREAM, event)
    driver.finish(0, event)
    assert driver.finished(0, event)
    driver.synchronize(0, LEGACY_STREAM)
    assert driver.idle(0, LEGACY_STREAM)
    assert driver.idle(0, stream)
    driver.destroy_event(0, event)
    runtime.free(base)


def test_streams_that_are_captured_are_refused_and_go_on(runtime: Runtime) -> None:
    driver, stream = hip.driver(), runtime.stream()
    handle = ctypes.c_uint64(stream)
    runtime.call("hipStreamBeginCapture", handle, 2)
    for refused in (lambda: driver.idle(0, stream), lambda: driver.synchronize(0, stream)):
        with pytest.raises(tw.UnsupportedError, match="HIP graph") as caught:
            refused()
        assert caught.value.rule == "stream_capture"
    runtime.call("hipStreamEndCapture", handle, ctypes.byref(ctypes.c_uint64()))
    assert driver.idle(0, stream)


def test_another_device_is_current_for_a_call_only(runtime: Runtime) -> None:
    driver, ordinal = hip.driver(), ctypes.c_int(-1)
    with driver.current(1):
        runtime.call("hipGetDevice", ctypes.byref(ordinal))
        assert ordinal.value == 1
    runtime.call("hipGetDevice", ctypes.byref(ordinal))
    assert ordinal.value == 0


def test_results_are_named(runtime: Runtime) -> None:
    driver = hip.driver()
    with pytest.raises(tw.DeviceError, match="hipErrorInvalidDevice") as caught, driver.current(7):
        pass
    assert (caught.value.rule, caught.value.value) == ("hip_driver", "hipErrorInvalidDevice")


def test_no_runtime_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "LIBRARIES", ("libnothing.so",))
    monkeypatch.setattr(hip, "_loaded", None)
    with pytest.raises(tw.UnavailableError, match=r"libnothing\.so") as caught:
        hip.driver()
    assert (caught.value.rule, caught.value.field) == ("hip_driver", "driver")


def test_a_runtime_without_a_function_is_too_old() -> None:
    class Old:
        def __getattr__(self, name: str) -> Any:
            if name == "hipInit":
                return ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])(lambda flags: 0)
            raise AttributeError(name)

    with pytest.raises(tw.UnsupportedError, match="has no hipGetDevice") as caught:
        HipDriver(Old()).device_count()
    assert caught.value.rule == "hip_driver_version"
