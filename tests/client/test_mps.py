"""Clients join the Multi-Process Service of the server's GPUs where they can, and say once where they cannot."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.session import mps, settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as a daemon's is."""
    monkeypatch.setenv(settings.MPS_VARIABLE, "")
    monkeypatch.delenv(settings.MPS_VARIABLE)
    monkeypatch.setattr(mps, "_said", False)
    monkeypatch.setattr(mps, "_set", "")
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "control"))
        yield tmp_path


def test_cuda_that_was_not_started_will_join(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_cuda_has_started", lambda: False)
    for _ in range(2):
        mps.join(str(folder))
        assert settings.mps_pipe() == str(folder)
    again = folder / "again"  # a server that was started anew
    again.mkdir()
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(again / "control"))
        mps.join(str(again))
    assert settings.mps_pipe() == str(again)


def test_cuda_that_was_started_is_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_cuda_has_started", lambda: True)
    with pytest.warns(RuntimeWarning, match=r"0\.3 ms") as found:
        mps.join(str(folder))
    assert f"{settings.MPS_VARIABLE}={folder}" in str(found[0].message)
    mps.join(str(folder))
    assert settings.mps_pipe() == ""


def test_the_users_own_choice_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_cuda_has_started", lambda: False)
    monkeypatch.setenv(settings.MPS_VARIABLE, "/somewhere/else")
    with pytest.warns(RuntimeWarning):
        mps.join(str(folder))
    assert settings.mps_pipe() == "/somewhere/else"


def test_folders_that_are_no_daemons_are_left_alone(tmp_path: Path, folder: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("", str(other), str(tmp_path / "missing")):
            mps.join(name)
            assert settings.mps_pipe() == ""


def test_asking_loads_no_driver() -> None:
    script = (
        "from tilewright.session import mps; assert not mps._cuda_has_started();"
        "assert 'libcuda.so.1' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_started_driver_is_found_under_the_name_of_its_version(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang) is installed")
    source = tmp_path / "driver.c"
    source.write_text("int cuDeviceGetCount(int* count) { return *count = 1, 0; }")
    library = tmp_path / "libcuda.so.580.159.04"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)], check=True
    )
    (tmp_path / "libcuda.so.1").symlink_to(library.name)
    script = (
        "import ctypes; ctypes.CDLL('libcuda.so.1');from tilewright.session import mps; assert mps._cuda_has_started()"
    )
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=env)
