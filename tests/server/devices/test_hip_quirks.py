"""The service on runtimes that misbehave as ROCm's do: order is kept without interprocess events."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hip_service import Gpu, OnGpu, check, operands, serving
from simulated_hip import TAG, build, environment, library, marks  # noqa: F401

import tilewright as tw
from tilewright.gpu import hip
from tilewright.transport.ties import EventTie, HostTie, SignalTie, Tie
from tilewright_server.devices.worker.namespaces import shares_names

pytestmark = [*marks, pytest.mark.slow]
HOLD_S = 0.3

PROBLEMS = [
    ("record33", "record 33 of an interprocess event fails"),
    ("wait_blocks", "a wait for a pending interprocess event blocks the caller"),
    ("query_done", "reports success while its stream is busy"),
    ("drains", ""),
]


@pytest.mark.parametrize(("quirk", "problem"), PROBLEMS)
@pytest.mark.some(2)
@pytest.mark.extended
def test_the_probe_finds_events_that_keep_no_order(library: Path, quirk: str, problem: str) -> None:  # noqa: F811
    env = {**os.environ, **environment(library, emulator=False, TW_SIM_QUIRKS=quirk)}
    argv = [sys.executable, "-m", "tilewright_server.devices.hip.event_probe", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=100)
    found = json.loads(done.stdout)["problem"]
    assert problem in found if problem else found == ""


SIGNAL_PROBLEMS = [
    ("", ""),
    ("values_signal", "a wait for a number fails (hipErrorInvalidValue)"),
    ("values_pass", "a stream does not wait for a number"),
    ("values_block", "a wait for a number blocks the caller"),
]


@pytest.mark.parametrize(("quirk", "problem"), SIGNAL_PROBLEMS)
@pytest.mark.extended
def test_the_probe_finds_signals_that_keep_no_order(library: Path, quirk: str, problem: str) -> None:  # noqa: F811
    env = {**os.environ, **environment(library, emulator=False, TW_SIM_QUIRKS=quirk)}
    argv = [sys.executable, "-m", "tilewright_server.devices.hip.signal_probe", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=100)
    assert json.loads(done.stdout)["problem"] == problem


TRIED = """
import os
from tilewright.gpu import hip
from tilewright.gpu.signals import signal_problem
hip.LIBRARIES = (os.environ["TW_SIMULATED_HIP"],)
driver = hip.driver()
print(signal_problem(driver, 0))
"""


@pytest.mark.extended
def test_runtimes_without_the_functions_of_signals_are_told_by_name(tmp_path: Path) -> None:
    folder = build(tmp_path, "-DWITHOUT_VALUES")
    env = {**os.environ, **environment(folder, emulator=False)}
    for argv in (["-m", "tilewright_server.devices.hip.signal_probe", "0"], ["-c", TRIED]):
        done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, timeout=100)
        assert "hipStreamW" in done.stdout, (argv, done.stdout, done.stderr)


OLDER = "wait_blocks,query_done,open_creates,current,pool_first,drains"
"""Faults of ROCm 6.3 and 6.4."""
NEWER = "record33,open_creates,current,pool_first,drains"
"""And of ROCm 7.0 to 7.2."""
MODES = {
    "ROCm 7.2": ({"TW_SIM_DRIVER": "70200000"}, SignalTie),
    "ROCm 6.3 without signals": ({"TW_SIM_DRIVER": "60300000", "TW_SIM_QUIRKS": f"{OLDER},values_signal"}, HostTie),
    "ROCm 6.3": ({"TW_SIM_DRIVER": "60300000"}, SignalTie),
    "ROCm 7.2 without signals": ({"TW_SIM_DRIVER": "70200000", "TW_SIM_QUIRKS": f"{NEWER},values_signal"}, HostTie),
    "no fault": ({"TW_SIM_QUIRKS": ""}, SignalTie),
    **{
        f"{fault} alone": ({"TW_SIM_QUIRKS": f"{fault},values_signal"}, tie)
        for fault, tie in (
            ("record33", HostTie),
            ("wait_blocks", HostTie),
            ("query_done", HostTie),
            ("open_creates", EventTie),
            ("drains", EventTie),
        )
    },
    **{f"{fault} alone": ({"TW_SIM_QUIRKS": fault}, SignalTie) for fault in ("current", "pool_first")},
    **{f"{fault} alone": ({"TW_SIM_QUIRKS": fault}, EventTie) for fault in ("values_pass", "values_block")},
}
"""Variables of runtimes that misbehave, and the tie that is chosen there."""
ALWAYS = 2
"""How many modes ``make test`` has."""


@contextmanager
def misbehaving(
    library: Path,  # noqa: F811
    folder: Path,
    cache: Path,
    more: dict[str, str],
) -> Iterator[str]:
    """The address of a server on such a runtime, which this process uses, too."""
    tag = f"q{TAG[1:]}"  # names of its own: this process may have loaded the runtime for other tests
    variables = {**environment(library, **more), "TW_SIM_TAG": tag}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            if name.startswith("TW_SIM_"):
                patch.setenv(name, value)
        patch.setattr(hip, "LIBRARIES", (str(library / "libamdhip64.so"),))
        patch.setattr(hip, "_loaded", None)
        with serving(folder, cache, variables) as address:
            yield address
    for left in Path("/dev/shm").glob(f"tw{tag}-*"):
        left.unlink(missing_ok=True)


@pytest.fixture(
    scope="module",
    params=[pytest.param(mode, marks=[pytest.mark.extended][: place >= ALWAYS]) for place, mode in enumerate(MODES)],
)
def client(
    request: pytest.FixtureRequest,
    library: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
    kernel_cache: Path,
) -> Iterator[tw.Client]:
    with (
        misbehaving(library, tmp_path_factory.mktemp("quirks"), kernel_cache, MODES[request.param][0]) as address,
        tw.connect(address) as opened,
    ):
        yield opened


@pytest.fixture
def tie(request: pytest.FixtureRequest) -> type[Tie]:
    """The tie that is chosen in the client's mode."""
    return MODES[request.node.callspec.params["client"]][1]


@pytest.fixture
def gpu(client: tw.Client, library: Path) -> Gpu:  # noqa: F811
    found = Gpu(library / "libamdhip64.so")
    found.use(0)
    return found


def test_launches_come_after_the_stream_and_before_what_follows(client: tw.Client, gpu: Gpu, tie: type[Tie]) -> None:
    """The first behind a stream that is busy."""
    stream = gpu.stream()
    a, b = operands(np.float16)
    given = [OnGpu(gpu, array, stream=stream) for array in (a, b, np.zeros((64, 48), np.float16))]
    bound = client.plan_gemm(*given[:2]).bind(*given[:2], out=given[2])
    release, released = gpu.hold(stream), []

    def let_go() -> None:
        released.append(time.monotonic())
        release()

    timer = threading.Timer(HOLD_S, let_go)
    timer.start()
    launch = bound.launch(stream=stream)
    assert released or tie is not HostTie
    assert launch.synchronize() is given[2]
    assert time.monotonic() >= released[0]
    timer.join()
    check(given[2].numpy(), a, b)
    for _ in range(8):
        launch = bound.launch(stream=stream)
    launch.synchronize()
    assert gpu.idle(stream)
    check(given[2].numpy(), a, b)
    assert client.session.lanes is not None
    assert type(client.session.lanes.of_stream("hip:0", hip.driver(), 0, stream).tie) is tie


def test_pipelines_keep_their_order(client: tw.Client, gpu: Gpu) -> None:
    stream = gpu.stream()
    turn = np.eye(32, dtype=np.float32)[np.roll(np.arange(32), 1)]
    x = OnGpu(gpu, np.eye(32, dtype=np.float32), stream=stream)
    y, by = OnGpu(gpu, np.zeros((32, 32), np.float32), stream=stream), OnGpu(gpu, turn, stream=stream)
    plan = client.plan_gemm(x, by)
    there, back = plan.bind(x, by, out=y), plan.bind(y, by, out=x)
    with client.pipeline(stream=stream) as pipeline:
        for _ in range(4):
            pipeline.launch(there)
            pipeline.launch(back)
    gpu.call("hipStreamSynchronize", ctypes.c_uint64(stream))
    assert (x.numpy() == np.linalg.matrix_power(turn, 8)).all()


@pytest.mark.extended
def test_memory_is_refused_where_process_numbers_are_equal_and_the_cause_is_named(
    library: Path,  # noqa: F811
    tmp_path: Path,
    kernel_cache: Path,
) -> None:
    a, b = operands(np.float16)
    with (
        misbehaving(library, tmp_path, kernel_cache, {"TW_SIM_QUIRKS": "equal_pids"}) as address,
        tw.connect(address) as client,
    ):
        there = Gpu(library / "libamdhip64.so")
        there.use(0)
        with pytest.raises(tw.TilewrightError) as caught:
            client.gemm(OnGpu(there, a), OnGpu(there, b))
        assert caught.value.rule == "memory_own_process"
        assert "namespace" in caught.value.fix
        with pytest.raises(tw.UnsupportedError) as caught:  # the other way: the server's memory in this process
            client.device_empty((64, 48), "fp16", device="hip:0")
        assert caught.value.rule == "memory_own_process"
        assert (caught.value.field, caught.value.value) == ("process", str(os.getpid()))
        assert "namespace" in caught.value.fix
        check(client.gemm(a, b), a, b)


DEEP = """
import os, sys
from tilewright.gpu import hip
from tilewright_server.devices.hip import discovery
from tilewright_tools.cli import main
from tilewright_tools.cli.machine import self_test
discovery._LIBRARIES = hip.LIBRARIES = (os.environ["TW_SIMULATED_HIP"],)
examples = list(self_test._examples())[:1]
self_test._examples = lambda: iter(examples)
sys.argv[0] = "tilewright"
sys.exit(main())
"""


@pytest.mark.extended
def test_the_self_test_of_a_device_passes_and_says_how_streams_are_tied(
    library: Path,  # noqa: F811
    tmp_path: Path,
    kernel_cache: Path,
) -> None:
    more = {"TW_SIM_DRIVER": "70200000"}
    report = tmp_path / "report.json"
    with misbehaving(library, tmp_path, kernel_cache, more) as address:
        argv = [sys.executable, "-c", DEEP, "doctor", "--deep", "--device", "hip:0", "--target", address]
        env = {**os.environ, **environment(library, **more), "TW_SIM_TAG": f"q{TAG[1:]}"}
        ran = subprocess.run([*argv, "--report", str(report)], capture_output=True, text=True, env=env, timeout=280)
    found = json.loads(report.read_text())
    assert ran.returncode == 0, (found, ran.stderr)
    states = {item["topic"]: item["state"] for item in found["tests"]}
    assert {"memory", "order", "refusals", "lost client"} <= states.keys()
    assert set(states.values()) == {"ok"}, found["tests"]
    assert any("signals" in item["detail"] for item in found["machine"]), found["machine"]


CONNECT = "import socket, sys; c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1]); c.recv(1)"


@pytest.mark.parametrize(("prefix", "shares"), [("", True), ("mount -t tmpfs none /dev/shm && ", False)])
def test_a_peer_with_another_shared_memory_is_recognised(tmp_path: Path, prefix: str, shares: bool) -> None:
    enter = ["unshare", "-Urm"] if prefix else []
    if prefix and (not shutil.which("unshare") or subprocess.run([*enter, "sh", "-c", prefix + "true"]).returncode):
        pytest.skip("mount namespaces are not permitted here")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = f"{prefix}exec '{sys.executable}' -c '{CONNECT}' '{tmp_path}/s'"
        with subprocess.Popen([*enter, "sh", "-c", command]) as process:
            connection, _ = listener.accept()
            with connection:
                assert shares_names(connection) is shares
            process.wait(20)
