"""Triton's ``perf_analyzer``, a client in C++, against the server as it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from rpc_harness import ServerProcess

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "perf-analyzer"
PROGRAM = TOOLS / "perf_analyzer"
ENVIRONMENT = {**os.environ, "LD_LIBRARY_PATH": str(TOOLS)}


def missing() -> str:
    """The reason why it cannot run; empty if it can."""
    if not PROGRAM.exists():
        return "perf_analyzer is not there: python scripts/get_perf_analyzer.py"
    found = subprocess.run(["ldd", str(PROGRAM)], capture_output=True, text=True, env=ENVIRONMENT, check=False).stdout
    absent = [line.split()[0] for line in found.splitlines() if "not found" in line]
    return f"perf_analyzer needs {', '.join(absent)}" if absent else ""


pytestmark = [pytest.mark.extended, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.mark.parametrize("memory", ["none", "system"])
def test_perf_analyzer_measures_products(memory: str, server: ServerProcess, tcp: str) -> None:
    command = [str(PROGRAM), "-m", "tilewright.gemm", "-u", tcp, "-i", "grpc", "--shape", "a:32,48"]
    command += ["--shape", "b:48,16", "--shared-memory", memory, "--output-shared-memory-size", "4096"]
    command += ["--request-count", "40"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Throughput:" in done.stdout and "Failed" not in done.stdout, done.stdout
    assert server.alive
