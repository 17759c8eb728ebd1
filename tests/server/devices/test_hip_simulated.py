"""The simulated HIP runtime, driven by hip-python; then the conformance suite against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_hip import ARCHS, HERE, environment, library, marks  # noqa: F401

pytestmark = marks


def run(folder: Path, case: str, arch: str = "gfx942", **more: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(HERE / "hip_driving.py"), case]
    env = {**os.environ, **environment(folder, arch, **more)}
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120)


def answer(folder: Path, case: str, arch: str = "gfx942", **more: Any) -> Any:
    done = run(folder, case, arch, **more)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.extended
def test_every_arch_compiles_loads_launches_and_copies(library: Path) -> None:  # noqa: F811
    found = answer(library, "chips", ",".join(ARCHS))
    assert [chip["arch"] for chip in found] == list(ARCHS)
    for chip in found:
        assert chip["launch"] == "hipSuccess"
        assert chip["error"] < 1e-6, chip
        assert (chip["threads"], chip["lds"]) == (256, 1024)
        assert 0 < chip["registers"] <= 512
        assert chip["wave"] == (32 if chip["arch"].startswith("gfx1") else 64)
        assert chip["wrong"] == "hipErrorNoBinaryForGpu"
        assert chip["missing"] == "hipErrorNotFound"
        assert chip["broken"] == "hipErrorInvalidImage"


@pytest.mark.extended
def test_captured_launches_run_with_their_graph(library: Path) -> None:  # noqa: F811
    found = answer(library, "graph")
    assert found["capturing"] == "hipErrorStreamCaptureUnsupported"
    assert found["before"] == 0
    assert found["error"] < 1e-6
    assert found["again"] == "hipSuccess"
    assert answer(library, "graph", TW_SIM_FAULT_GRAPH="2")["again"] == "hipErrorOutOfMemory"


def test_streams_are_in_order_and_the_default_one_waits(library: Path) -> None:  # noqa: F811
    found = answer(library, "streams")
    assert found["waiting"] == ["hipErrorNotReady", "hipErrorNotReady"]
    assert set(found["after"]) == {2}
    assert found["held"] == "hipSuccess"


def test_memory_and_events_are_shared_between_processes(library: Path) -> None:  # noqa: F811
    found = answer(library, "shared")
    assert found["before"] == "hipErrorNotReady"
    assert (found["offset"], found["size"]) == (4096, 1 << 20)
    assert found["seen"] == [7]
    assert set(found["answer"]) == {9}
    assert found["own"] == "hipErrorInvalidContext"
    assert found["unknown"] == "hipErrorInvalidValue"


def test_mapped_memory_goes_by_descriptor(library: Path) -> None:  # noqa: F811
    assert answer(library, "mapped", emulator=False) == {"seen": [5], "legacy": "hipErrorInvalidValue", "answer": [6]}


def test_compiler_says_what_is_wrong(library: Path) -> None:  # noqa: F811
    found = answer(library, "sources", emulator=False)
    assert found["result"] == "HIPRTC_ERROR_COMPILATION"
    assert "use of undeclared identifier 'missing'" in found["log"]
    assert found["code"] == "HIPRTC_ERROR_INVALID_PROGRAM"
    assert found["fine"] == 0


def test_memory_runs_out_when_asked_to(library: Path) -> None:  # noqa: F811
    plenty = answer(library, "memory", emulator=False)
    assert plenty["found"] == ["hipSuccess"] * 3
    assert plenty["too_much"] == "hipErrorOutOfMemory"
    assert plenty["used"] == 3 * 4096
    scarce = answer(library, "memory", emulator=False, TW_SIM_FAULT_MEMORY="2")
    assert scarce["found"] == ["hipSuccess", "hipErrorOutOfMemory", "hipErrorOutOfMemory"]


def test_images_are_bad_when_asked_to(library: Path) -> None:  # noqa: F811
    assert answer(library, "image", emulator=False)["load"] == "hipSuccess"
    assert answer(library, "image", emulator=False, TW_SIM_FAULT_IMAGE="1")["load"] == "hipErrorInvalidImage"


@pytest.mark.parametrize(("fault", "result"), [("LAUNCH", "hipErrorLaunchFailure"), ("LOST", "hipErrorUnknown")])
@pytest.mark.extended
def test_faults_stay(fault: str, result: str, library: Path) -> None:  # noqa: F811
    found = answer(library, "launches", **{f"TW_SIM_FAULT_{fault}": "2"})
    assert found["launch"] == ["hipSuccess", "hipSuccess", result]
    assert found["wait"] == ["hipSuccess", result, result]
    assert found["later"] == found["event"] == result


@pytest.mark.extended
def test_stray_access_is_an_illegal_address(library: Path) -> None:  # noqa: F811
    done = run(library, "stray")
    found = json.loads(done.stdout)
    assert found == {"launch": "hipSuccess", "wait": "hipErrorIllegalAddress", "later": "hipErrorIllegalAddress"}
    assert "OutOfBounds" in done.stderr


def test_stray_access_ends_the_process_when_asked_to(library: Path) -> None:  # noqa: F811
    done = run(library, "stray", TW_SIM_FAULT_ABORT="1")
    assert done.returncode == -signal.SIGABRT
    assert "OutOfBounds" in done.stderr


def test_launches_need_an_emulator(library: Path) -> None:  # noqa: F811
    found = answer(library, "launches", emulator=False)
    assert found["launch"] == ["hipErrorNotSupported"] * 3
    assert found["later"] == "hipSuccess"


def test_driver_has_the_version_that_it_is_given(library: Path) -> None:  # noqa: F811
    old = answer(library, "versions", emulator=False, TW_SIM_DRIVER="50200000")
    assert old == {"driver": 50200000, "count": "hipSuccess"}
    assert answer(library, "versions", emulator=False, HIP_VISIBLE_DEVICES="")["count"] == "hipErrorNoDevice"


ASK = """
import json, sys
from tilewright_server.devices.hip import discovery
discovery._LIBRARIES = (sys.argv[1],)
from tilewright_server.devices.hip.provider import HipProvider
found = HipProvider().search()
seen = {info.id: info.arch.name for info in found.devices}
print(json.dumps([seen, found.problem, found.fix, [*found.notes, *map(str, found.left_out.values())]]))
"""


def found_by_the_server(folder: Path, arch: str = "gfx942", **more: str) -> tuple[dict[str, str], str, str, list[str]]:
    """Devices and their archs, the problem, what to do, and notes."""
    env = {**os.environ, **environment(folder, arch, emulator=False, **more)}
    argv = [sys.executable, "-c", ASK, str(folder / "libamdhip64.so")]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    devices, problem, fix, notes = json.loads(done.stdout)
    return devices, problem, fix, notes


def test_the_server_finds_every_arch(library: Path) -> None:  # noqa: F811
    devices, problem, _, notes = found_by_the_server(library, ",".join(ARCHS))
    assert devices == {f"hip:{place}": arch for place, arch in enumerate(ARCHS)}
    assert (problem, notes) == ("", [])


def test_the_server_leaves_out_what_it_has_no_kernels_for(library: Path) -> None:  # noqa: F811
    devices, problem, _, notes = found_by_the_server(library, "gfx1201,gfx906")
    assert (devices, problem) == ({"hip:0": "gfx1201"}, "")
    (note,) = notes
    assert "gfx906" in note
    assert "docs/adding-an-arch.md" in note


@pytest.mark.extended
def test_the_server_says_that_a_runtime_is_too_old_and_devices_are_hidden(library: Path) -> None:  # noqa: F811
    devices, problem, fix, _ = found_by_the_server(library, TW_SIM_DRIVER="50700000")
    assert devices == {}
    assert "ROCm 5.7" in problem
    assert "ROCm 6.3" in fix
    devices, problem, fix, _ = found_by_the_server(library, HIP_VISIBLE_DEVICES="")
    assert devices == {}
    assert "hipErrorNoDevice" in problem
    assert fix


USE = """
import json, sys
from pathlib import Path
from tilewright_server.devices.hip import discovery
discovery._LIBRARIES = (sys.argv[1],)
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.hip.provider import HipProvider, open_device
from hip_driving import compiled

def tried(do):
    try:
        do()
    except TilewrightError as error:
        return [type(error).__name__, error.rule]
    return []

path = Path(sys.argv[2])
path.write_bytes(compiled(sys.argv[3]))
device = open_device(HipProvider().discover()[0], {})
print(json.dumps([tried(lambda: device.allocate_shared(8 << 20)), tried(lambda: device.load(path))]))
"""


@pytest.mark.parametrize(
    ("arch", "variables", "allocation", "load"),
    [
        ("gfx942", {}, [], []),
        ("gfx942", {"TW_SIM_FAULT_MEMORY": "1"}, ["ResourceExhaustedError", "device_memory"], []),
        ("gfx942", {"TW_SIM_FAULT_IMAGE": "1"}, [], ["DeviceError", "module_load"]),
        ("gfx950", {}, [], ["DeviceError", "module_load"]),
    ],
    ids=["fine", "no memory", "bad image", "another arch"],
)
@pytest.mark.extended
def test_faults_become_typed_errors(
    arch: str,
    variables: dict[str, str],
    allocation: list[str],
    load: list[str],
    library: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    env = {**os.environ, **environment(library, emulator=False, **variables), "PYTHONPATH": str(HERE)}
    argv = [sys.executable, "-c", USE, str(library / "libamdhip64.so"), str(tmp_path / "kernel.co"), arch]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [allocation, load]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "least"),
    [
        ("test_conformance.py", 28),
        ("test_gpu*.py", 51),
        ("test_hip.py", 3),
        ("test_hip_signals.py", 8),
        ("test_hip_stages.py", 1),
    ],
)
@pytest.mark.extended
def test_suite_passes_with_a_simulated_runtime(suite: str, least: int, library: Path) -> None:  # noqa: F811
    passes(suite, least, library)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["60300000", "70200000"])
@pytest.mark.extended
def test_conformance_holds_on_runtimes_that_misbehave(driver: str, library: Path) -> None:  # noqa: F811
    """As those of ROCm 6.3 and 7.2 do: see faults.h."""
    passes("test_conformance.py", 28, library, TW_SIM_DRIVER=driver)


FAULTS = (
    "record33", "wait_blocks", "query_done", "open_creates", "current", "pool_first", "equal_pids", "drains",
    "values_signal", "values_pass", "values_block",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.exhaustive
def test_conformance_holds_with_each_fault_alone(fault: str, library: Path) -> None:  # noqa: F811
    passes("test_conformance.py", 28, library, TW_SIM_QUIRKS=fault)


def passes(suite: str, least: int, library: Path, **more: str) -> None:  # noqa: F811
    """Run a suite in a process that sees simulated devices."""
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-n", "0"]
    env = {**os.environ, **environment(library, "gfx942,gfx942", **more)}
    argv = [sys.executable, "-m", "pytest", *options, *map(str, sorted(HERE.glob(suite)))]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    passed = done.stdout.rpartition(" passed")[0].rpartition("\n")[2].split()[-1]
    assert int(passed) >= least, done.stdout[-2000:]
