"""Mutated bundles and launch plans, opened by a libtilewright that is built with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tilewright_tools.cli import main

NATIVE = Path(__file__).resolve().parents[2] / "native"
FLAGS = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SHAPES = ["--gemm", "64x48x32", "--conv", "2x6x8x9x7:3s1p1g1", "--attention", "1x2x33x40", "--dtype", "fp32"]


def compiler_with_sanitizers(folder: Path) -> str:
    """A C++ compiler whose sanitizers link and run."""
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        command = [str(found), *FLAGS, str(folder / "probe.cpp"), "-o", str(folder / "probe")]
        if found and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip("no C++ compiler with AddressSanitizer: install g++ with libasan and libubsan")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "count", [pytest.param(1500, marks=pytest.mark.extended), pytest.param(100_000, marks=pytest.mark.exhaustive)]
)
def test_mutated_bundles_and_plans_break_no_rule_of_memory(tmp_path: Path, kernel_cache: Path, count: int) -> None:
    bundle, driver = tmp_path / "model.twb", tmp_path / "fuzz"
    assert main(["bundle", "build", *SHAPES, "--cache-dir", str(kernel_cache), "-o", str(bundle)]) == 0
    sources = [*sorted((NATIVE / "runtime").rglob("*.cpp")), NATIVE / "include" / "tilewright" / "cpu" / "runtime.cpp"]
    includes = [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'runtime'}"]
    command = [compiler_with_sanitizers(tmp_path), *FLAGS, *includes, str(Path(__file__).parent / "fuzz_bundles.cpp")]
    subprocess.run([*command, *map(str, sources), "-ldl", "-lpthread", "-o", str(driver)], check=True)
    environment = {"PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run(
        [str(driver), str(bundle), str(count), "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "opened" in done.stdout and "refused" in done.stdout
