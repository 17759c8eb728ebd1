"""Time until a pod's server is ready with a warm bundle, as its probe sees it.

    python bench/clients/ready.py [--starts 8] [--gemm decode]

Makes a bundle and its kernels in a cache, as an image has them, then starts servers with both: from `exec` until
`/readyz` answers 200, asked every 10 ms. Beside it the same without a bundle, in turns. Times are of the clock, and of
the processors (all threads of the server until then), which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from protocol_cost import cpu_of

PORT = 19465
TILEWRIGHT = (sys.executable, "-m", "tilewright_tools.cli")
LIMIT_S = 120.0


def is_ready() -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=5) as reply:
        return bool(reply.status == 200)
    return False


def start(folder: Path, *flags: str) -> tuple[float, float]:
    """Seconds of the clock and of processors until a server is ready."""
    listen = ("--listen", f"unix:{folder}/s.sock", "--http-listen", str(PORT), "--cache-dir", str(folder / "cache"))
    flags = (*flags, "--log-level", "warning")
    begin = time.monotonic()
    process = subprocess.Popen((*TILEWRIGHT, "serve", *listen, *flags), stdout=subprocess.DEVNULL, stderr=2)
    try:
        while not is_ready():
            if process.poll() is not None or time.monotonic() - begin > LIMIT_S:
                raise SystemExit("the server did not become ready")
            time.sleep(0.01)
        return time.monotonic() - begin, cpu_of(process.pid)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--gemm", default="decode", help="problems of the bundle, as `tilewright bundle build` takes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = folder / "warm.twb"
        words = ("bundle", "build", "--gemm", given.gemm, "--dtype", "fp32", "--cache-dir", str(folder / "cache"))
        subprocess.run((*TILEWRIGHT, *words, "--output", str(bundle)), check=True)
        ways = {"without a bundle": (), "with a warm bundle": ("--bundle", str(bundle))}
        for flags in ways.values():  # what only the first start does
            start(folder, *flags)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(given.starts):
            for way, flags in ways.items():
                found[way].append(start(folder, *flags))
    for way, starts in found.items():
        clock, processors = zip(*starts, strict=True)
        print(
            f"{way:20} ready after {min(clock):.2f} s at the least, {statistics.median(clock):.2f} in the middle, "
            f"{max(clock):.2f} at most; processor time {min(processors):.2f} s at the least"
        )


if __name__ == "__main__":
    main()
