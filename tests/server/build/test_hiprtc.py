"""hiprtc in helper processes: hip-python as it is, over a libhiprtc for tests that lets clang compile."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.code_object import read_code_object
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.workers.process import Limits

SOURCE = Path(__file__).parents[1] / "devices" / "hip_simulated" / "libhiprtc.c"
PLAIN = """
extern "C" __global__ void answer(const float* x, float* out, int n) {
  for (int i = threadIdx.x; i < n; i += 256) out[i] = x[i] + 42;
}
"""
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("hip") is None, reason="hip-python is not installed: pip install 'tilewright[hip]'"
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
    pytest.mark.skipif(
        not any(shutil.which(f"clang++{version}") for version in ("-22", "-21", "-20", "-19", "")),
        reason="no clang++ of version 19 or later",
    ),
]


def unit(text: str = PLAIN, **changes: object) -> SourceUnit:
    fixed = {"name": "answer", "language": "hip", "text": text, "entries": {"main": "answer"}, "plugin_version": "1"}
    return SourceUnit(**{**fixed, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def arch() -> ArchSpec:
    return tilewright_arch.load("gfx942")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library under the name that hip-python asks for."""
    folder = tmp_path_factory.mktemp("hiprtc")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(folder / "libhiprtc.so"), str(SOURCE)], check=True)
    return folder


@pytest.fixture
def toolchain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HipToolchain]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.delenv("ROCM_PATH", raising=False)
    toolchain = HipToolchain([include_dir()])
    yield toolchain
    toolchain.close()


def test_hiprtc_comes_before_every_other_compiler(toolchain: HipToolchain, folder: Path) -> None:
    assert toolchain.identity().startswith("hiprtc 7.15 [")
    assert toolchain.describe().startswith(str(folder))


def test_result_is_a_code_object_and_the_log_tells_its_resources(
    toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path
) -> None:
    compiled = toolchain.compile(unit(), tmp_path, arch)
    code = read_code_object(compiled.binary.read_bytes())
    assert (code.target, code.kernel("answer").kernarg_bytes) == ("gfx942", 20)
    assert "resources of answer: " in compiled.log
    assert "-nogpuinc" not in toolchain.flags(unit(), arch)


def test_refusal_carries_the_log_and_no_paths(toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path) -> None:
    text = '#include "tilewright/core/integers.hpp"\n#error planted\n'
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(unit(text), tmp_path, arch)
    assert caught.value.rule == "compiler_failed"
    assert "planted" in caught.value.log_tail
    assert str(include_dir()) not in caught.value.log_tail + str(caught.value)


def test_scratch_fails_the_build(toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path) -> None:
    text = """
extern "C" __global__ void answer(const int* x, int* out, int n) {
  int a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * n];
  for (int i = 0; i < n; i++) a[x[i] & 63] += a[x[i + 1] & 63];
  for (int i = 0; i < 64; i++) out[i] = a[i];
}
"""
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(unit(text), tmp_path, arch)
    assert caught.value.rule == "kernel_spills"
    assert int(caught.value.value) >= 256


def test_crash_of_the_compiler_is_told_from_a_refusal(toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path) -> None:
    toolchain.identity()
    helper = toolchain._helpers._idle[0]
    endless = """
template <int a, int b> struct F { static constexpr int v = F<a - 1, b>::v + F<a - 1, b + (1 << a)>::v; };
template <int b> struct F<0, b> { static constexpr int v = b & 1; };
extern "C" __global__ void answer(int* out) { *out = F<24, 0>::v; }
"""
    threading.Timer(0.5, os.kill, (helper._process.pid, signal.SIGSEGV)).start()
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(unit(endless), tmp_path, arch)
    assert (caught.value.rule, caught.value.value) == ("compiler_killed", f"signal {signal.SIGSEGV.value}")
    assert toolchain.compile(unit(), tmp_path, arch).binary.is_file()


def test_compiler_that_hangs_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arch: ArchSpec, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("TW_SIM_CLANG", "sleep 60; true")
    toolchain = HipToolchain([], compiler="hiprtc", limits=Limits(timeout_s=3.0))
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(unit(), tmp_path, arch)
    assert caught.value.rule == "compiler_hung"
    toolchain.close()


def test_library_that_is_missing_is_a_missing_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    toolchain = HipToolchain([], compiler="hiprtc")
    with pytest.raises(ToolchainMissingError) as caught:
        toolchain.identity()
    assert "libhiprtc" in caught.value.log_tail
    toolchain.close()
