"""The tests of the relay again, with AddressSanitizer and UBSan in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUNTIME = ROOT / "native" / "runtime"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fPIC",
    "-shared",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]
AGAIN = """
import sys
from pathlib import Path
import pytest
import tilewright_native
tilewright_native.LIBRARY = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", *sys.argv[2:]]))
"""


def sanitizers(compiler: str) -> list[str]:
    """Libraries of the sanitizers, which have to be loaded before all others. Skips the test where they are missing."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"{compiler} has no {name}: install g++ with libasan and libubsan")
        found.append(path)
    return found


@pytest.mark.extended
def test_the_relay_breaks_no_rule_of_memory(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    preloaded = sanitizers(compiler)
    library = tmp_path / "librelay.so"
    sources = [RUNTIME / "relay" / "relay.cpp", RUNTIME / "common" / "error.cpp"]
    subprocess.run([compiler, *FLAGS, f"-I{RUNTIME}", *map(str, sources), "-o", str(library)], check=True)
    environment = {**os.environ, "LD_PRELOAD": ":".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0"}
    tests = [str(Path(__file__).with_name(name)) for name in ("test_relay.py", "test_relay_lists.py")]
    command = [sys.executable, "-c", AGAIN, str(library), *tests]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
