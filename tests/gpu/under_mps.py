"""Run tests on a GPU under a daemon of the Multi-Process Service that is theirs alone:

    python tests/gpu/under_mps.py [arguments of pytest]

Servers, their workers and all clients that the tests start join it. Its exit status is that of pytest; 1 where there is
no such daemon.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tilewright_server.devices.cuda.settings import mps_environment


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp") as folder:  # pipes are sockets: their paths are short
        place = Path(folder) / "mps"
        guard = [sys.executable, "-m", "tilewright_server.devices.cuda.mps.guard", str(place)]
        with subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            if (said := daemon.stdout.readline().strip()) != "ready":
                raise SystemExit(f"no tests were run: {said}")
            command = [sys.executable, "-m", "pytest", "-m", "gpu", *sys.argv[1:]]
            return subprocess.run(command, env=mps_environment(place / "pipe"), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
