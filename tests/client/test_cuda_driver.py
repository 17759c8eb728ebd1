"""The driver's functions, called through the C interface of a driver in host memory."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_cuda import UUIDS, FakeCuda

import tilewright as tw
from tilewright.gpu import cuda
from tilewright.session.state import uuid_digits


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    yield FakeCuda()


def test_a_pointer_is_told_with_its_allocation(fake: FakeCuda) -> None:
    base = fake.allocate(4096)
    found = fake.driver().pointer(base + 256)
    assert (found.base, found.size, found.ordinal, found.legacy, found.pool) == (base, 4096, 0, True, 0)
    before = found.identity
    fake.replace(base)
    assert fake.driver().pointer(base).identity != before


@pytest.mark.parametrize(
    ("kind", "pool", "descriptors"), [("pool", 77, True), ("private", 77, False), ("mapped", 0, True)]
)
def test_memory_of_other_kinds_is_told_apart(fake: FakeCuda, kind: str, pool: int, descriptors: bool) -> None:
    base = fake.allocate(4096, kind)
    found = fake.driver().pointer(base)
    assert (found.legacy, found.pool, found.descriptors, found.base) == (False, pool, descriptors, base)


@pytest.mark.parametrize("kind", ["managed", "none"])
def test_memory_that_cannot_be_shared_is_refused_by_name(fake: FakeCuda, kind: str) -> None:
    address = fake.allocate(64, kind) if kind == "managed" else 0xDEAD0000
    with pytest.raises(tw.InvalidArgumentError) as caught:
        fake.driver().pointer(address, "a")
    assert (caught.value.field, caught.value.rule) == ("a", "device_memory_kind")
    assert caught.value.fix


def test_a_context_is_used_for_the_length_of_a_call_and_never_made(fake: FakeCuda) -> None:
    driver, base = fake.driver(), fake.allocate(64)
    assert driver.export_legacy(0, base)[-8:] == base.to_bytes(8, "little")
    assert fake.current == [0]
    driver.export_legacy(0, base)
    assert len(fake.calls("retain")) == 1
    idle = FakeCuda(active=False)
    with pytest.raises(tw.UnavailableError) as caught:
        idle.driver().new_event(0)
    assert caught.value.rule == "cuda_context"
    assert not idle.calls("retain")


def test_a_context_that_is_current_already_is_left_alone(fake: FakeCuda) -> None:
    fake.current = [0x1000]
    driver = fake.driver()
    with driver.current(0):
        assert fake.current == [0x1000]
    fake.fail["cuEventCreate"] = 2
    fake.current = [0]
    with pytest.raises(tw.ResourceExhaustedError):
        driver.new_event(0)
    assert fake.current == [0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, tw.ResourceExhaustedError),
        (801, tw.UnsupportedError),
        (3, tw.UnavailableError),
        (700, tw.DeviceError),
        (1, tw.DeviceError),
    ],
)
def test_errors_of_the_driver_are_typed(fake: FakeCuda, code: int, kind: type[tw.TilewrightError]) -> None:
    base = fake.allocate(64)
    fake.fail["cuIpcGetMemHandle"] = code
    with pytest.raises(kind, match="cuIpcGetMemHandle failed: it was asked to fail") as caught:
        fake.driver().export_legacy(0, base)
    assert caught.value.value == "CUDA_ERROR_FAKE"


def test_events_go_both_ways(fake: FakeCuda) -> None:
    driver = fake.driver()
    event = driver.new_event(0)
    assert driver.export_event(0, event)[:1] == b"E"
    theirs = driver.open_event(0, b"C0" + bytes(62))
    driver.record(0, event, 7)
    driver.wait(0, 7, theirs)
    assert fake.log[-2:] == [("record", event, 7), ("wait", 7, theirs)]
    assert not driver.finished(0, theirs)
    assert not driver.idle(0, 7)
    fake.busy = False
    assert driver.finished(0, theirs)
    assert driver.idle(0, 7)
    fake.unfinished.add(theirs)
    assert not driver.finished(0, theirs)
    driver.order(0, 7, 7)
    count = len(fake.events)
    driver.order(0, 7, 8)
    assert [entry[0] for entry in fake.log[-2:]] == ["record", "wait"]
    assert len(fake.events) == count


@pytest.mark.parametrize("name", ["cuEventQuery", "cuEventSynchronize", "cuStreamQuery"])
def test_what_needs_no_context_gets_one_if_the_driver_wants_it(fake: FakeCuda, name: str) -> None:
    driver = fake.driver()
    event, fake.busy = driver.new_event(0), False
    fake.fail[name] = cuda.INVALID_CONTEXT
    ask = {
        "cuEventQuery": lambda: driver.finished(0, event),
        "cuEventSynchronize": lambda: driver.finish(0, event),
        "cuStreamQuery": lambda: driver.idle(0, 4096),
    }[name]
    assert ask() in (True, None)
    assert fake.current == [0]
    fake.fail[name] = 999
    if name == "cuStreamQuery":
        assert driver.idle(0, 4096) is False
    else:
        with pytest.raises(tw.DeviceError):
            ask()


def test_default_streams_are_those_of_the_right_context(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, seen = fake.driver(), []
    monkeypatch.setattr(FakeCuda, "_cuStreamQuery", lambda self, stream: seen.append(self.current[-1]) or 0)
    fake.current.append(0x1001)  # of another device
    assert driver.idle(0, cuda.LEGACY_STREAM)
    assert seen == [0x1000]
    assert fake.current == [0, 0x1001]


def test_a_function_that_the_driver_has_not_is_a_typed_error() -> None:
    class Old:
        pass

    with pytest.raises(tw.UnsupportedError) as caught:
        cuda.Driver(Old())
    assert caught.value.rule == "cuda_driver_version"


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libno-such-driver.so.1")
    monkeypatch.setattr(cuda, "_loaded", None)
    with pytest.raises(tw.UnavailableError, match="no CUDA driver") as caught:
        cuda.driver()
    assert caught.value.fix


def test_importing_the_client_loads_no_driver_and_no_library_of_arrays() -> None:
    code = (
        "import sys, tilewright\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda' not in maps\n"
        "assert not {'torch', 'cupy', 'cuda', 'jax', 'numba'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_uuids_are_compared_by_their_digits() -> None:
    assert cuda.format_uuid(UUIDS[0]) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert uuid_digits(cuda.format_uuid(UUIDS[0])) == UUIDS[0].hex()


def test_streams_that_are_captured_are_refused_and_not_spoiled(fake: FakeCuda) -> None:
    driver = fake.driver()
    fake.captured = {4096}
    for use in (
        lambda: driver.idle(0, 4096),
        lambda: driver.order(0, 4096, 7),
        lambda: driver.order(0, 7, 4096),
        lambda: driver.synchronize(0, 4096),
        lambda: driver.read(0, 0, 0, 8, 4096),
        lambda: driver.write(0, 0, 0, 8, 4096),
        lambda: driver.idle(0, cuda.LEGACY_STREAM),  # which would wait for it
    ):
        with pytest.raises(tw.UnsupportedError) as caught:
            use()
        assert (caught.value.field, caught.value.rule) == ("stream", "stream_capture")
        assert caught.value.fix
    assert not fake.calls("spoiled") + fake.calls("record") + fake.calls("synchronize")
    assert not driver.idle(0, 7)
    fake.captured.clear()
    assert not driver.idle(0, 4096)
