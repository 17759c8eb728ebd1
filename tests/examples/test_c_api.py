"""The example in C++: links libtilewright alone, and runs from a bundle without Python, server and compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tilewright_native import library_path
from tilewright_tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ["--gemm", "64x48x32", "--conv", "2x6x8x9x7:3s1p1g1", "--attention", "1x2x33x40", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    try:
        library = library_path()
    except (FileNotFoundError, RuntimeError) as error:
        pytest.skip(f"no libtilewright: {error}")
    made = tmp_path_factory.mktemp("c_api") / "c_api"
    source, header = ROOT / "examples" / "c_api" / "main.cpp", ROOT / "native" / "runtime"
    flags = ["-std=c++17", "-Wall", "-Werror", f"-I{header}", f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler, *flags, str(source), str(library), "-o", str(made)], check=True)
    return made


def ran(program: Path, bundle: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "TILEWRIGHT_BUNDLE": str(bundle)}
    return subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.extended
def test_product_convolution_and_attention_are_right(program: Path, tmp_path: Path, kernel_cache: Path) -> None:
    bundle = tmp_path / "model.twb"
    assert main(["bundle", "build", *SHAPES, "--cache-dir", str(kernel_cache), "-o", str(bundle)]) == 0
    done = ran(program, bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        "3 plans", "gemm: right", "conv: right", "attention: right",
    ]  # fmt: skip


def test_a_missing_bundle_is_told_with_its_fix(program: Path, tmp_path: Path) -> None:
    done = ran(program, tmp_path / "nothing")
    assert done.returncode == 1
    assert "bundle_file" in done.stdout and "Fix: " in done.stdout
